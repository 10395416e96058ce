"""What rondo has to know about a family of multimodal models beyond what transformers gives every model.

Owns the record. Each family fills one in its own file beside this one; `families/__init__.py` lists them. Everything else
(forward, weights, generation) goes through transformers' own modules.

Invariant: text-only models have no family and need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.models.media.inputs import MediaInputs, Modality

Positions = Callable[[Any, np.ndarray, Mapping[str, Any]], np.ndarray]
"""(model or its modules on the meta device, tokens int64 [T], the processor's arrays and options) -> float32 [3, T]."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family, by the `model_type` of the config that is trained."""

    model_types: tuple[str, ...]
    """Of `model.config`, once loaded."""
    modalities: tuple[Modality, ...]
    load: str
    """Name of the class in transformers whose `from_pretrained` loads it."""
    towers: Mapping[Modality, str]
    """Modality -> path of the module that encodes it; images and videos may share one."""
    parts: Mapping[str, str]
    """"vision", "audio", "projector" -> regular expression that the names of its parameters match (re.search);
    "projector" wins over the tower it lies in; what matches none is "language"."""
    placeholders: Mapping[Modality, str]
    """Modality -> attribute of the config that holds its placeholder's token id."""
    positions: Positions
    sound_tokens: Callable[[Any, np.ndarray], np.ndarray] | None
    """(config, frames of each audio int64 [n]) -> placeholders of each int64 [n]; None for families without audio."""
    dummy: Callable[[Any], tuple[np.ndarray, MediaInputs]]
    """(config) -> the shortest prompt that runs every tower once: tokens int32 [T], and its media. Finite features of zeros."""
