"""Four machines with 8 GPUs of 80 GB each: adapters of Qwen3-235B-A22B on word problems; two generate, two train.

    rondo check examples/full_size/qwen3_235b_a22b_lora.py --nodes 4 --devices 8 --device-gib 80 --memory-gib 2000 \\
        --set model.path=FOLDER

The base lies in bfloat16 over the 16 devices that train, experts over the eight of a machine (`ep` 8), and gets no gradients;
adapters of rank 32 are on the products of attention. A quarter of the machines of `qwen3_235b_a22b.py`, whose data, reward,
lengths and replayed routes these are; snapshots and checkpoints hold adapters alone, and find room. `rondo train` starts runs of
one machine only: what runs of this today is the check.
"""

from __future__ import annotations

from qwen3_30b_a3b_lora import ADAPTERS
from qwen3_235b_a22b import config as whole

from rondo.comm.bus.config import BusConfig
from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.roles.config import TrainConfig

config = RunConfig(
    **dict(whole)
    | {
        "name": "qwen3_235b_a22b_lora",
        "role_groups": fully_async(rollout_replicas=2, rollout_devices=8, actor_processes=16, actor_devices=1),
        "train": TrainConfig(**dict(whole.train) | ADAPTERS | {"hot_snapshot": True, "save_every": 50}),
        # Of each replica: two steps of 64 prompt groups, a sample of which takes 6.7 MB.
        "bus": BusConfig(ring_bytes=7 << 30),
    }
)
