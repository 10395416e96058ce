"""Media that rondo's processor has made already, for the Qwen families of images, videos and audio.

Runs inside the server, with SGLang and without rondo. Owns the way from the words on the wire (`media_items.py`) to SGLang's own
`processor_output`, which it computes on as though its processor had made them; positions come with them. Whatever else a request
brings goes the server's own way.

Sound is cut into the windows within which the model's encoder attends, each an item of its own:

    prompt    <text> a a a a a a a a a <text> a a a a        three items, all as wide as a window: SGLang encodes the sounds of
    windows         |  first  | second|      | one  |        all requests that begin together in one call

Invariants: the encoder gets what it would get of whole sounds, since it knows nothing beyond a window. A token that was sampled
and looks like a place of media is none.
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sglang.srt.models.qwen3_omni_moe import _get_feat_extract_output_lengths
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

_SCHEME = "rondo:"
_SPANS, _PLACES = "rondo_spans", "rondo_places"
"""(first token, how many) of a sequence where media lie; where in it those of a modality are."""


class RondoMediaProcessor(QwenVLImageProcessor):
    """That of SGLang, which takes arrays too."""

    models = QwenVLImageProcessor.models

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        image_data = _taken(image_data, input_text, self.IM_TOKEN_ID)
        request_obj.video_data = _taken(request_obj.video_data, input_text, self.VIDEO_TOKEN_ID)
        request_obj.audio_data = _taken(request_obj.audio_data, input_text, self.audio_token_id)
        return await super().process_mm_data_async(image_data, input_text, request_obj, *args, **kwargs)

    def collect_mm_items_from_processor_output(self, data_dict: Any, *args: Any, **kwargs: Any) -> Any:
        items = super().collect_mm_items_from_processor_output(data_dict, *args, **kwargs)
        places = data_dict.get(_PLACES) if isinstance(data_dict, dict) else None
        if places is None:
            return items
        found = []
        for item in items:
            if item.is_audio():
                found += _windows(item, places, self.hf_config.audio_config.n_window_infer)
            else:
                item.offsets = _spans(places)
                found.append(item)
        return found


def _windows(item: Any, places: np.ndarray, width: int) -> list[Any]:
    """An item for each window of `width` frames, at its own audio tokens."""
    found, begin = [], 0
    for sound, mask in zip(item.feature, item.feature_attention_mask, strict=True):
        num_frames = int(mask.sum())
        for start in range(0, num_frames, width):
            num = min(width, num_frames - start)
            feature, heard = sound.new_zeros(1, sound.shape[0], width), mask.new_zeros(1, width)
            feature[0, :, :num], heard[0, :num] = sound[:, start : start + num], 1
            end = begin + int(_get_feat_extract_output_lengths(num))
            part = copy.copy(item)
            part.model_specific_data = {**item.model_specific_data, "feature_attention_mask": heard}
            part.feature, part.offsets, part.hash = feature, _spans(places[begin:end]), None
            found.append(part)
            begin = end
    if begin != len(places):
        raise ValueError(f"the prompt must have {begin} audio tokens for its sounds, got {len(places)}")
    return found


def _spans(places: np.ndarray) -> list[tuple[int, int]]:
    """Ascending places as (first, last) of those that follow each other."""
    cuts = np.flatnonzero(np.diff(places) > 1) + 1
    return [(int(part[0]), int(part[-1])) for part in np.split(places, cuts)]


def _taken(items: Any, sequence: Any, token: int | None) -> Any:
    """The same items, those of ours as SGLang's `processor_output`; `token` stands for them in the prompt."""
    if not isinstance(items, list):
        return items
    found = [_output(item) if isinstance(item, str) and item.startswith(_SCHEME) else item for item in items]
    for item in found:
        if isinstance(item, dict) and _SPANS in item:
            within = np.concatenate([np.arange(at, at + size) for at, size in item[_SPANS]])
            item[_PLACES] = within[np.asarray(sequence)[within] == token]
    return found


def _output(text: str) -> dict[str, Any]:
    item = json.loads(text.removeprefix(_SCHEME))
    positions = _tensor(item["positions"])
    after = positions.max() + 1 - positions.shape[1]
    arrays = {name: _tensor(told) for name, told in item["arrays"].items()}
    return {
        "format": "processor_output",
        _SPANS: item["spans"],
        **arrays,
        "mrope_positions": positions,
        "mrope_position_delta": after.reshape(1, 1),
    }


def _tensor(told: Mapping[str, Any]) -> torch.Tensor:
    array = np.frombuffer(base64.b64decode(told["data"], validate=True), told["dtype"])
    return torch.from_numpy(array.reshape(told["shape"]).copy())
