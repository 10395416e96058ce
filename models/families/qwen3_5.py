"""Qwen3.5, dense and with experts: images and videos as in Qwen3-VL, layers of linear attention between those of full attention.

Linear attention carries a state from token to token, so sequences of this family never share a row.
"""

from __future__ import annotations

from dataclasses import replace

from rondo.models.families.qwen3_vl import QWEN3_VL

QWEN3_5 = replace(
    QWEN3_VL,
    model_types=("qwen3_5", "qwen3_5_moe"),
    parts={"vision": r"\bvisual\.", "projector": r"\bvisual\.merger\."},
)
