"""Media that rondo's processor has made already, for the Qwen families of images, videos and audio.

Runs inside the server, with SGLang and without rondo. Owns the way from the words on the wire (`media.py`) to SGLang's own
`processor_output`, which it computes on as though its processor had made them; positions come with them. Whatever else a request
brings goes the server's own way.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

_SCHEME = "rondo:"


class RondoMediaProcessor(QwenVLImageProcessor):
    """That of SGLang, which takes arrays too."""

    models = QwenVLImageProcessor.models

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        image_data = _taken(image_data)
        request_obj.video_data = _taken(request_obj.video_data)
        request_obj.audio_data = _taken(request_obj.audio_data)
        return await super().process_mm_data_async(image_data, input_text, request_obj, *args, **kwargs)


def _taken(items: Any) -> Any:
    """The same items, those of ours as SGLang's `processor_output`."""
    if not isinstance(items, list):
        return items
    return [_output(item) if isinstance(item, str) and item.startswith(_SCHEME) else item for item in items]


def _output(text: str) -> dict[str, Any]:
    item = json.loads(text.removeprefix(_SCHEME))
    positions = _tensor(item["positions"])
    after = positions.max() + 1 - positions.shape[1]
    arrays = {name: _tensor(told) for name, told in item["arrays"].items()}
    return {
        "format": "processor_output",
        **arrays,
        "mrope_positions": positions,
        "mrope_position_delta": after.reshape(1, 1),
    }


def _tensor(told: Mapping[str, Any]) -> torch.Tensor:
    array = np.frombuffer(base64.b64decode(told["data"], validate=True), told["dtype"])
    return torch.from_numpy(array.reshape(told["shape"]).copy())
