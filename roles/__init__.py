"""What each process does.

roles          rollout, actor, critic, forward (actor_fwd, reference), teacher, genrm, scorer, advantages; supervised (rows)
shared         job (what the roles of one process share), streams (which role reads and writes which columns), resumed (samples
               that a checkpoint holds), config/ (settings)
samples        sampling/ over engines/, rewards/ and data/; serve/ is HTTP over any engine
training       training/ (a model) with algorithms/ (a loss)
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = dict.fromkeys(
    (
        "JobConfig", "DataConfig", "RewardConfig", "AlgorithmConfig", "RolloutConfig", "EndpointConfig", "TrainConfig",
        "CriticConfig", "EvalConfig", "SftConfig", "DpoConfig", "RewardModelConfig",
    ),
    "rondo.roles.config",
)  # fmt: skip
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
