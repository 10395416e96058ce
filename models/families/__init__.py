"""Families of multimodal models: family (the record), qwen3_vl, qwen3_5, qwen3_omni, one file each.

A family of your own: one file that fills a `Family`, and its name in `FAMILIES`.
"""

from __future__ import annotations

from typing import Any

from rondo.models.families.family import Family
from rondo.models.families.qwen3_5 import QWEN3_5
from rondo.models.families.qwen3_omni import QWEN3_OMNI
from rondo.models.families.qwen3_vl import QWEN3_VL

FAMILIES: tuple[Family, ...] = (QWEN3_OMNI, QWEN3_VL, QWEN3_5)


def family_of(model_or_config: Any) -> Family | None:
    """The family of a loaded model or of its config; None for a model of text alone."""
    config = getattr(model_or_config, "config", model_or_config)
    found = getattr(config, "model_type", None)
    return next((family for family in FAMILIES if found in family.model_types), None)
