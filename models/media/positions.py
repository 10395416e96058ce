"""Positions of a prompt with media, by its family's rule, also where the rule's own code takes one setting for a whole prompt.

Owns cutting such a prompt in pieces. Does not own the rule: the model's `get_rope_index` does, through its family.

    <text> <video with sound> <text> <silent video> <text>
    |--------- piece ---------|---- piece ----------|-----|       each goes on at the last position of the one before, + 1

Invariant: a prompt whose videos all have sound, or all have none, is one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rondo.models.families.family import Family


def positions_of(
    family: Family,
    model: Any,
    tokens: np.ndarray,
    arrays: Mapping[str, np.ndarray],
    *,
    grid_s: Sequence[float],
    with_sound: Sequence[bool],
) -> np.ndarray:
    """float32 [3, T] of tokens [T] and the processor's arrays. For each video: the seconds that a step of its grid in time
    lasts, and whether it brought its sound."""
    tokens = tokens.astype(np.int64)
    options: dict[str, Any] = dict(arrays)
    if grid_s:
        options["video_second_per_grid"] = np.asarray(grid_s, np.float32)
        options["use_audio_in_video"] = any(with_sound)
    if all(with_sound) or not any(with_sound):
        return np.ascontiguousarray(family.positions(model, tokens, options), np.float32)
    found: list[np.ndarray] = []
    start = 0.0
    for piece, part in _pieces(model.config, tokens, options):
        here = family.positions(model, piece, part) + start
        start = float(here[:, -1].max()) + 1
        found.append(here)
    return np.ascontiguousarray(np.concatenate(found, axis=1), np.float32)


def _pieces(config: Any, tokens: np.ndarray, options: Mapping[str, Any]) -> list[tuple[np.ndarray, dict[str, Any]]]:
    """Tokens up to the end of each image or video with the arrays of what lies among them, and the rest."""
    starts = np.flatnonzero(tokens == config.vision_start_token_id)
    ends = np.flatnonzero(tokens == config.vision_end_token_id)
    pieces: list[tuple[np.ndarray, dict[str, Any]]] = []
    begin = num_images = num_videos = num_sounds = 0
    for opening, end in zip(starts.tolist(), ends.tolist(), strict=True):
        piece = tokens[begin : end + 1]
        sounds = int((piece == config.audio_start_token_id).sum())
        part: dict[str, Any] = {}
        if sounds:
            part["feature_attention_mask"] = options["feature_attention_mask"][num_sounds : num_sounds + sounds]
        if tokens[opening + 1] == config.image_token_id:
            part["image_grid_thw"] = options["image_grid_thw"][num_images : num_images + 1]
            num_images += 1
        else:
            part["video_grid_thw"] = options["video_grid_thw"][num_videos : num_videos + 1]
            part["video_second_per_grid"] = options["video_second_per_grid"][num_videos : num_videos + 1]
            part["use_audio_in_video"] = bool(tokens[opening + 1] == config.audio_start_token_id)
            num_videos += 1
        pieces.append((piece, part))
        num_sounds += sounds
        begin = end + 1
    if begin < len(tokens):
        pieces.append((tokens[begin:], {}))  # text and sounds alone: their positions need no arrays
    return pieces
