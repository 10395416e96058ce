"""What trains a model, whatever the objective.

backend        shard, accumulate, step, state, publish: a model under an objective
objective      the policy loss as one of them; sft: answers of demonstrations as another
from rows      supervised (steps over rows with answers), warm_up (before reinforcement, and as a job)
from pairs     preference (DPO), reward_model
what to trust  mismatch (engine against trainer), parity, determinism
around it      hooks (of the user's), compute_turns (processes that share cores), room (a disk that is full)
"""
