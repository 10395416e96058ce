"""One machine with 8 GPUs of 80 GB: DeepEyes with code, adapters of Qwen3-VL-30B-A3B whose programs work on the picture and draw.

    rondo check examples/full_size/deepeyes_code_qwen3_vl_30b_a3b_lora.py --devices 8 --device-gib 80 --memory-gib 1000 \\
        --set model.path=FOLDER

As `deepeyes_qwen3_vl_30b_a3b_lora.py`, with "python_with_media" in the place of the zoom: what the policy wrote runs in the
sandbox beside the picture, and what it prints and the pictures that it saves are its next turn. Data are those of
`open_r1_qwen3_vl_4b.py`.
"""

from __future__ import annotations

from typing import Any

from deepeyes_qwen3_vl_30b_a3b_lora import config as zooms
from deepeyes_qwen3_vl_30b_a3b_lora import looked
from open_r1_qwen3_vl_4b import config as pictures

from rondo.launch.config import RunConfig
from rondo.roles.config import EnvironmentConfig, SandboxConfig


def worked(response: str, label: str, *, prompt: Any, turns: list[dict[str, str]]) -> dict[str, float]:
    return looked(response, {"ground_truth": label}, prompt=prompt, turns=turns)


config = RunConfig(
    **dict(zooms)
    | {
        "name": "deepeyes_code_qwen3_vl_30b_a3b_lora",
        "data": pictures.data,
        "reward": zooms.reward.model_copy(update={"function": f"{__file__}:worked"}),
        "rollout": zooms.rollout.model_copy(
            update={"environment": EnvironmentConfig(tools=("python_with_media",), num_workers=8)}
        ),
        "sandbox": SandboxConfig(output_bytes=8 << 20),
    }
)
