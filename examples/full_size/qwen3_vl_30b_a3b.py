"""Two machines with 8 GPUs of 80 GB each: Qwen3-VL-30B-A3B on questions about a picture; one of them generates, one trains.

    rondo check examples/full_size/qwen3_vl_30b_a3b.py --nodes 2 --devices 8 --device-gib 80 --memory-gib 2000 \\
        --set model.path=FOLDER

As `qwen3_30b_a3b.py`, with experts over the eight devices that train and routes replayed; data, reward and lengths are those of
`qwen3_vl_8b.py`. The vision tower stays as it is. `rondo train` starts runs of one machine only.
"""

from __future__ import annotations

from qwen3_30b_a3b import SERVERS
from qwen3_30b_a3b import TRAIN as ROUTED
from qwen3_vl_8b import TRAIN
from qwen3_vl_8b import config as dense

from rondo.comm.bus.config import BusConfig
from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import full_size

PARAMETERS = 31.1e9

config = RunConfig(
    **dict(dense)
    | {
        "name": "qwen3_vl_30b_a3b",
        "role_groups": fully_async(rollout_replicas=1, rollout_devices=8, actor_processes=8, actor_devices=1),
        "model": ModelConfig(path="Qwen/Qwen3-VL-30B-A3B-Instruct"),
        "rollout": dense.rollout.model_copy(update={"sglang": SERVERS}),
        "train": full_size(PARAMETERS, ranks=8, **TRAIN | ROUTED),
        # Two steps of 64 prompt groups: 26 MB of a picture, and 0.8 MB a sample.
        "bus": BusConfig(ring_bytes=5 << 30),
    }
)
