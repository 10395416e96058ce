"""What trains a model, whatever the objective.

backend        shard, accumulate, step, state
sft, warm_up   before reinforcement: demonstrations, and the step's first compilation
what to trust  mismatch (engine against trainer), parity, determinism
around it      compute_turns (processes that share cores), room (a disk that is full)
"""
