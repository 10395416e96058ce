"""A run that changes the number of its rollout replicas by itself.

decide     when, and to how many: a pure fold over samples
replay     the same decisions again, from a run's events
"""
