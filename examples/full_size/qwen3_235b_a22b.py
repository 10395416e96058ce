"""Sixteen machines with 8 GPUs of 80 GB each: Qwen3-235B-A22B on word problems, its routes replayed; eight generate, eight train.

    rondo check examples/full_size/qwen3_235b_a22b.py --nodes 16 --devices 8 --device-gib 80 --memory-gib 2000 \\
        --set model.path=FOLDER

One copy of the model is cut over the 64 devices that train. The 128 experts of a layer are shared out over the eight devices of a
machine (`ep` 8), and each device's 16 are cut once more over the eight machines: tokens travel within a machine, gathered weights
and summed gradients between them. An engine needs a whole machine: 470 GB of bfloat16 weights are 59 GB on each of eight devices,
which leaves about 16 GB of each for its cache. A server over two machines (`tensor_parallel` 16) has room for longer samples;
rondo starts none of those: start it by hand, and name it in `sglang.urls`. Of the host memory of a machine that trains, 880 GiB
are weights on their way to engines, 220 the moments and 330 a checkpoint while it is written: snapshots, 660 more, find no room
in 2,000, so that a trainer that dies goes on from its last checkpoint. Data and reward are those of `qwen3_8b_text.py`. `rondo
train` starts runs of one machine only: what runs of this today is the check.
"""

from __future__ import annotations

from qwen3_8b_text import config as dense
from qwen3_30b_a3b import TRAIN

from rondo.comm.bus.config import BusConfig
from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import SGLangConfig, full_size

PARAMETERS = 235.1e9
SERVERS = SGLangConfig(python=".venv-sglang/bin/python", tensor_parallel=8, weights="tensor")

config = RunConfig(
    **dict(dense)
    | {
        "name": "qwen3_235b_a22b",
        "role_groups": fully_async(rollout_replicas=8, rollout_devices=8, actor_processes=64, actor_devices=1),
        "model": ModelConfig(path="Qwen/Qwen3-235B-A22B"),
        "rollout": dense.rollout.model_copy(
            update={"sglang": SERVERS, "prompts_per_step": 128, "max_new_tokens": 8192, "num_slots": 64}
        ),
        "train": full_size(PARAMETERS, ranks=64, **TRAIN | {"hot_snapshot": False, "save_every": 10}),
        # Of each replica: two steps of 16 prompt groups, a sample of which takes 6.7 MB.
        "bus": BusConfig(ring_bytes=2 << 30),
    }
)
