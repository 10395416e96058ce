"""Qwen3.5, dense and with experts: images and videos as in Qwen3-VL, layers of linear attention between those of full attention.

Linear attention carries a state from token to token, so sequences of this family never share a row.
"""

from __future__ import annotations

from rondo.models.families.family import Family
from rondo.models.families.qwen3_vl import dummy, positions

QWEN3_5 = Family(
    model_types=("qwen3_5", "qwen3_5_moe"),
    modalities=("image", "video"),
    load="AutoModelForImageTextToText",
    towers={"image": "model.visual", "video": "model.visual"},
    parts={"vision": r"\bvisual\.", "projector": r"\bvisual\.merger\."},
    placeholders={"image": "image_token_id", "video": "video_token_id"},
    positions=positions,
    sound_tokens=None,
    dummy=dummy,
)
