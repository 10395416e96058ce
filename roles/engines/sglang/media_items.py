"""The media of a prompt, and of turns behind it, as a server takes them: what the trainer's processor made, not the files it
made them from.

Owns the words on the wire. The server's side is `processor/`, a package that SGLang itself loads, and which is the only code of
rondo that runs inside a server.

    body |= media_body(request.media, request.sequence)

Invariant: the server computes on exactly these arrays, so that engine and trainer see the same numbers, and one call of the
processor serves all samples of a prompt and the trainer.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rondo.models.media.inputs import MediaInputs, Modality, joined_sounds
from rondo.runtime.errors import ConfigError

SCHEME = "rondo:"
"""Begins an item, in the place of an address: a server refuses objects that it does not know, and takes any text."""
PROCESSOR = Path(__file__).parent / "processor"
"""On the PYTHONPATH of a server that rondo starts."""
PACKAGE = "rondo_media"
_FIELDS: dict[Modality, str] = {"image": "image_data", "audio": "audio_data", "video": "video_data"}
_OF: dict[Modality, tuple[str, ...]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "audio": ("input_features", "feature_attention_mask"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}


def media_body(media: MediaInputs, sequence: np.ndarray) -> dict[str, Any]:
    """The fields of /generate: one item a modality. `sequence` int32 [T + P]: the prompt, and what it is continued from. `spans`:
    (first token, how many) among which a placeholder stands for a medium."""
    positions = positions_of(media, len(sequence))
    spans = [[at, part.positions.shape[1]] for at, part in media.placed]
    body: dict[str, Any] = {}
    for modality in media.modalities:
        having = [part for _, part in media.placed if modality in part.modalities]
        arrays = joined_sounds(having) if modality == "audio" else [
            np.concatenate([part.arrays[name] for part in having]) for name in _OF[modality]
        ]  # fmt: skip
        described = {name: _described(array) for name, array in zip(_OF[modality], arrays, strict=True)}
        item = {"arrays": described, "positions": _described(positions), "spans": spans}
        body[_FIELDS[modality]] = [SCHEME + orjson.dumps(item).decode()]
    return body


def positions_of(media: MediaInputs, num_tokens: int) -> np.ndarray:
    """int64 [3, num_tokens]: those up to the last medium, then one after the other on all axes. ConfigError for fractions, which
    a server would cut."""
    prompt = media.positions.astype(np.int64)
    if (prompt != media.positions).any():
        raise ConfigError(
            "positions of media must be whole numbers for SGLang, got fractions. Process them with media.whole_positions=True"
        )
    num_after = num_tokens - prompt.shape[1]
    after = int(prompt.max()) + 1 + np.arange(num_after, dtype=np.int64)
    return np.concatenate([prompt, np.broadcast_to(after, (3, num_after))], axis=1)


def _described(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data).decode()
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": data}
