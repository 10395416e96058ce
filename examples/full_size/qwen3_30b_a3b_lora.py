"""One machine with 8 GPUs of 80 GB: adapters of Qwen3-30B-A3B on word problems, four devices to generate and four to train.

    rondo check examples/full_size/qwen3_30b_a3b_lora.py --devices 8 --device-gib 80 --memory-gib 1000 --set model.path=FOLDER

The base lies in bfloat16 over the four devices that train, 32 of a layer's 128 experts on each (`ep` 4), and gets no gradients;
adapters of rank 32 are on the products of attention, and experts keep their weights. Half of the machines of `qwen3_30b_a3b.py`,
whose data, reward, lengths and replayed routes these are. The servers get adapters alone.
"""

from __future__ import annotations

from qwen3_30b_a3b import config as routed

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import LoraConfig
from rondo.roles.config import MeshConfig, TrainConfig

LORA = LoraConfig(rank=32, alpha=64)
ADAPTERS = {
    "lora": LORA,
    "lr": 1e-5,
    "freeze": (),
    "offload_optimizer": False,
}


def on_one_machine(whole: RunConfig, name: str, *, publish: str = "adapter") -> RunConfig:
    """The run of two machines, with adapters, on half of their devices."""
    lora = LORA.model_copy(update={"publish": publish})
    servers = whole.rollout.sglang.model_copy(update={"num_servers": 2})
    changes = {
        "name": name,
        "role_groups": fully_async(rollout_replicas=1, rollout_devices=4, actor_processes=4, actor_devices=1),
        "rollout": whole.rollout.model_copy(update={"sglang": servers}),
        "train": TrainConfig(**dict(whole.train) | ADAPTERS | {"mesh": MeshConfig(ep=4), "lora": lora}),
    }
    return RunConfig(**dict(whole) | changes)


config = on_one_machine(routed, "qwen3_30b_a3b_lora")
