"""Two GPUs of 80 GB: adapters of Qwen3-8B on word problems, one device to generate with SGLang and one to train.

    rondo check examples/full_size/qwen3_8b_lora.py --devices 2 --device-gib 80 --memory-gib 250 --set model.path=FOLDER

The base lies in bfloat16 beside adapters of rank 32 on all products of its layers, which alone have gradients and moments: a
quarter of the devices of `qwen3_8b_text.py`, whose data, reward and lengths these are. The server gets adapters alone.
"""

from __future__ import annotations

from qwen3_8b_text import config as whole

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.roles.config import LoraConfig, full_size

config = RunConfig(
    **dict(whole)
    | {
        "name": "qwen3_8b_lora",
        "role_groups": fully_async(rollout_devices=1, actor_devices=1),
        "train": full_size(
            8.2e9,
            ranks=1,
            lora=LoraConfig(rank=32, alpha=64),
            lr=1e-5,
            warmup_steps=10,
            save_every=50,
        ),
    }
)
