"""Two machines with 8 GPUs of 80 GB each: Qwen3-32B on word problems; one of them generates with four SGLang servers, one trains.

    rondo check examples/full_size/qwen3_32b.py --nodes 2 --devices 8 --device-gib 80 --memory-gib 1500 --set model.path=FOLDER

A copy of the model is cut over the eight devices of the machine that trains, `dp_replicate` 1 x `dp_shard` 8; with 16 devices to
train on, two copies would be `MeshConfig(dp_replicate=2)`, whose gradients alone cross between the machines. `rondo train` starts
runs of one machine only: what runs of this today is the check. Data and reward are those of `qwen3_8b_text.py`.
"""

from __future__ import annotations

from qwen3_8b_text import config as smaller

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import MeshConfig, SGLangConfig, full_size

SERVERS = SGLangConfig(python=".venv-sglang/bin/python", num_servers=4, tensor_parallel=2, weights="tensor")

config = RunConfig(
    **dict(smaller)
    | {
        "name": "qwen3_32b",
        "role_groups": fully_async(rollout_replicas=1, rollout_devices=8, actor_processes=8, actor_devices=1),
        "model": ModelConfig(path="Qwen/Qwen3-32B"),
        "rollout": smaller.rollout.model_copy(update={"sglang": SERVERS, "max_new_tokens": 4096}),
        "train": full_size(
            32.8e9, ranks=8, mesh=MeshConfig(dp_replicate=1, dp_shard=8), lr=1e-6, warmup_steps=10, save_every=50
        ),
    }
)
