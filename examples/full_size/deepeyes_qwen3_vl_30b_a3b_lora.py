"""One machine with 8 GPUs of 80 GB: DeepEyes, adapters of Qwen3-VL-30B-A3B that learn to look closer at a picture.

    rondo check examples/full_size/deepeyes_qwen3_vl_30b_a3b_lora.py --devices 8 --device-gib 80 --memory-gib 1000 \\
        --set model.path=FOLDER

`data.path` is `data_0.1.2_visual_toolbox_v2.parquet` of `ChenShawn/DeepEyes-Datasets-47k`, whose system message tells of the
tool. A sample has up to five looks. The reward is that of DeepEyes, 2.0 at most: 0.8 for a right answer, 1.2 more behind a look,
0.2 off for another form. Answers are compared as text or as mathematics, where DeepEyes asks a judge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen3_vl_30b_a3b_lora import config as seen

from rondo.comm.bus.config import BusConfig
from rondo.launch.config import RunConfig
from rondo.models.media.config import MediaConfig
from rondo.roles.config import DataConfig, EnvironmentConfig, EvalConfig, RewardConfig
from rondo.roles.rewards.hub import openr1mm
from rondo.roles.sampling.media_tools import Media, with_media

if TYPE_CHECKING:
    from PIL.Image import Image


@with_media
def image_zoom_in_tool(media: Media, bbox_2d: list[float], label: str = "") -> Image:
    """Zooms in on a region of the picture.

    Args:
        bbox_2d: left, top, right and bottom of the region, in pixels of the picture
        label: what is there
    """
    picture = media.picture()
    left, top, right, bottom = bbox_2d
    box = max(0, int(left)), max(0, int(top)), min(picture.width, int(right)), min(picture.height, int(bottom))
    if box[2] - box[0] < 28 or box[3] - box[1] < 28:
        raise ValueError(f"a region must have 28 pixels or more on a side, of {picture.size}, got {bbox_2d}")
    return picture.crop(box)


def looked(response: str, label: dict[str, str], *, prompt: Any, turns: list[dict[str, str]]) -> dict[str, float]:
    """Of the last turn; each one must think first, and the last one have one <answer>."""
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    right = openr1mm(response, label["ground_truth"], prompt=prompt, metadata={})
    in_form = (
        all("</think>" in each for each in said) and response.count("<answer>") == response.count("</answer>") == 1
    )
    return {"accuracy": right, "format": in_form - 1.0, "tool": right * (len(said) > 1)}


config = RunConfig(
    **dict(seen)
    | {
        "name": "deepeyes_qwen3_vl_30b_a3b_lora",
        "data": DataConfig(
            path="data_0.1.2_visual_toolbox_v2.parquet",
            label="reward_model",
            metadata="extra_info",
            media_columns={"image": "images"},
            apply_chat_template=True,
            held_out=256,
        ),
        # A picture of 1,024 tokens is 25 MB once processed, and so may be what a sample looks at, in five turns.
        "media": MediaConfig(image_max_tokens=1024, num_workers=8, max_group_bytes=26 << 20, max_turn_bytes=26 << 20),
        "evaluation": EvalConfig(num_prompts=256),
        "reward": RewardConfig(
            function=looked, components={"accuracy": 0.8, "format": 0.2, "tool": 1.2}, num_workers=4
        ),
        "rollout": seen.rollout.model_copy(
            update={
                "prompts_per_step": 32,
                "max_prompt_tokens": 2048,
                "max_new_tokens": 4096,
                "max_turns": 6,
                "environment": EnvironmentConfig(tools=(image_zoom_in_tool,), num_workers=4),
            }
        ),
        # Two steps of 32 prompt groups, of which each of the eight samples has room for as much as the question.
        "bus": BusConfig(ring_bytes=16 << 30),
    }
)
