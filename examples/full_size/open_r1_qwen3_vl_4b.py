"""One machine with 8 GPUs of 80 GB: Qwen3-VL-4B on pictures with questions of mathematics, four devices generate, four train.

    rondo check examples/full_size/open_r1_qwen3_vl_4b.py --devices 8 --device-gib 80 --memory-gib 1000 --set model.path=FOLDER

The rows of `lmms-lab/multimodal-open-r1-8k-verified` have an `image`, a `problem` and a `solution`, whose <answer> is the label;
`openr1mm` compares it as mathematics or as text.
"""

from __future__ import annotations

from dapo_math_qwen3_4b import config as text

from rondo.comm.bus.config import BusConfig
from rondo.launch.config import RunConfig
from rondo.models.config import ModelConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.config import DataConfig, EvalConfig, RewardConfig, full_size

THINK = (
    "First think about the question between <think> and </think>, then give nothing but the final answer between <answer> and "
    "</answer>."
)

config = RunConfig(
    **dict(text)
    | {
        "name": "open_r1_qwen3_vl_4b",
        "model": ModelConfig(path="Qwen/Qwen3-VL-4B-Instruct"),
        "data": DataConfig(
            path="hub:lmms-lab/multimodal-open-r1-8k-verified/train",
            prompt="problem",
            label="solution",
            media_columns={"image": "image"},
            system=THINK,
            apply_chat_template=True,
            held_out=256,
        ),
        # A picture of 1,024 tokens is 25 MB once processed; a ring holds the groups of two steps that one replica makes.
        "media": MediaConfig(image_max_tokens=1024, num_workers=4, max_group_bytes=26 << 20),
        "evaluation": EvalConfig(num_prompts=256),
        "reward": RewardConfig(function="openr1mm", num_workers=4),
        "rollout": text.rollout.model_copy(update={"max_prompt_tokens": 2048, "max_new_tokens": 1024, "num_slots": 64}),
        "train": full_size(
            4.4e9, ranks=4, lr=1e-6, warmup_steps=10, freeze=("vision",), max_log_prob_gap=0.1, save_every=50
        ),
        "bus": BusConfig(ring_bytes=1 << 30),
    }
)
