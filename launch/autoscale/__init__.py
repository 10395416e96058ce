"""A run that changes the number of its rollout replicas by itself.

decide     when, and to how many: a pure fold over samples
watch      from what a run tells to samples, and from decisions to requests
replay     the same decisions again, from a run's events
"""
