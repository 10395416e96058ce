"""What each process does.

roles          actor (with trainer), forward (actor_fwd, reference), advantages, sft_role, rollout/
algorithms     algorithms (a record each), losses, advantage_functions, gap (engine against trainer), sft, warm_up
data           datasets, sources, cursor, prompts; media_rows, media (image, audio, video)
streams        which role reads and writes which columns
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "JobConfig": "rondo.roles.config",
    "DataConfig": "rondo.roles.config",
    "RewardConfig": "rondo.roles.config",
    "AlgorithmConfig": "rondo.roles.config",
    "RolloutConfig": "rondo.roles.config",
    "EndpointConfig": "rondo.roles.config",
    "TrainConfig": "rondo.roles.config",
    "EvalConfig": "rondo.roles.config",
    "SftConfig": "rondo.roles.config",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
