"""What trains a model, whatever the objective.

backend        shard, accumulate, step, state, publish: a model under an objective
objective      the policy loss as one of them; sft, warm_up: demonstrations as another, before reinforcement
what to trust  mismatch (engine against trainer), parity, determinism
around it      compute_turns (processes that share cores), room (a disk that is full)
"""
