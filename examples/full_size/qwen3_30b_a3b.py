"""Two machines with 8 GPUs of 80 GB each: Qwen3-30B-A3B on word problems with its routes replayed (R3); one of them generates.

    rondo check examples/full_size/qwen3_30b_a3b.py --nodes 2 --devices 8 --device-gib 80 --memory-gib 2000 \\
        --set model.path=FOLDER

The machine that trains holds one copy of the model; each of its eight devices has 16 of a layer's 128 experts (`ep` 8), and
tokens travel within the machine. Four SGLang servers of two devices each tell which experts every token went to, 384 bytes a
token. Data and reward are those of `qwen3_8b_text.py`. `rondo train` starts runs of one machine only: what runs of this today is
the check.
"""

from __future__ import annotations

from qwen3_8b_text import config as dense

from rondo.comm.bus.config import BusConfig
from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import MeshConfig, SGLangConfig, full_size

PARAMETERS = 30.5e9
TRAIN = {"mesh": MeshConfig(ep=8), "router_replay": "r3", "lr": 1e-6, "warmup_steps": 10, "save_every": 50}
SERVERS = SGLangConfig(python=".venv-sglang/bin/python", num_servers=4, tensor_parallel=2, weights="tensor")

config = RunConfig(
    **dict(dense)
    | {
        "name": "qwen3_30b_a3b",
        "role_groups": fully_async(rollout_replicas=1, rollout_devices=8, actor_processes=8, actor_devices=1),
        "model": ModelConfig(path="Qwen/Qwen3-30B-A3B"),
        "rollout": dense.rollout.model_copy(update={"sglang": SERVERS, "max_new_tokens": 4096}),
        "train": full_size(PARAMETERS, ranks=8, **TRAIN),
        # Two steps of 64 prompt groups, a sample of which takes 1.8 MB.
        "bus": BusConfig(ring_bytes=2 << 30),
    }
)
