"""Two machines with 8 GPUs of 80 GB each: Qwen3-Omni-30B-A3B's thinker on questions about a picture and its sound; one generates.

    rondo check examples/full_size/avqa_qwen3_omni_30b.py --nodes 2 --devices 8 --device-gib 80 --memory-gib 2000 \\
        --set model.path=FOLDER

The rows of `harryhsing/AVQA-R1-6K` lie in its archive: unpack `AVQA_R1.tar.gz` where the run starts. `problem`, `options` and
`path` become a question with four choices, a picture and a sound; `multiple_choice` compares the letter in <answer>. Devices,
training and routes are those of `qwen3_omni_30b.py`; `rondo train` starts runs of one machine only, such as
`avqa_qwen3_omni_30b_lora.py`.
"""

from __future__ import annotations

from open_r1_qwen3_vl_4b import THINK
from qwen3_omni_30b import config as omni

from rondo.launch.config import RunConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.config import DataConfig, EvalConfig, RewardConfig

LETTER = f"{THINK} The answer is the letter of the right option alone, such as <answer>A</answer>."


def rows(path: str) -> DataConfig:
    return DataConfig(
        path=path,
        transform="rondo.roles.data.choices:avqa",
        media_columns={"image": "image", "audio": "audio"},
        system=LETTER,
        apply_chat_template=True,
    )


config = RunConfig(
    **dict(omni)
    | {
        "name": "avqa_qwen3_omni_30b",
        "data": rows("AVQA_R1/train/omni_rl_format_train.json"),
        # A picture of 1,024 tokens is 25 MB once processed, and 10 s of sound half of one.
        "media": MediaConfig(image_max_tokens=1024, num_workers=4, max_group_bytes=27 << 20),
        "evaluation": EvalConfig(num_prompts=256, data=rows("AVQA_R1/valid/omni_rl_format_valid.json")),
        "reward": RewardConfig(function="multiple_choice", num_workers=4),
        "rollout": omni.rollout.model_copy(update={"max_prompt_tokens": 2048}),
    }
)
