"""The media of a batch of sequences: arguments of the model's forward, each distinct prompt's media encoded once.

Owns how media of several prompts come together, and the hooks that spare a tower the same work for every sample of a prompt
group. Does not own where sequences lie (`packing.py`) or what a tower is (`families/`).

Invariant: features come out in the order of `media`, which is the order of the placeholders in the flattened batch; equal keys
cross a tower once, and their gradients add up. In a forward every modality that is there takes one pass of its tower, in an
order that is the model's own; so ranks whose batches hold the same modalities run the same collectives.

A model takes every placeholder among its tokens for a feature; but a policy can sample one, and a text can spell one. Those
are hidden from the model behind another token, and their own embeddings are looked up all the same.

    batch = collate(model, [a, a, b])            # two samples of one group, one of another
    with encoded_once(model, batch), embedding(model, hidden_ids):
        model(input_ids=..., position_ids=..., **batch.arguments)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rondo.models.families import family_of
from rondo.models.media.inputs import MediaInputs, Modality, joined_sounds
from rondo.runtime.errors import ConfigError

_VISION: dict[Modality, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
_ORDER: tuple[Modality, ...] = ("audio", "image", "video")


@dataclass(frozen=True, slots=True)
class _Pass:
    """One pass of a tower. `grid` int64 [unique media, 3] for vision; `repeat` int64 [features in the batch], the row of the
    tower's output that each is; None when nothing repeats."""

    grid: torch.Tensor | None
    repeat: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class MediaBatch:
    """Arguments of the forward, and how its towers' passes are narrowed. Empty for text."""

    arguments: Mapping[str, torch.Tensor] = field(default_factory=dict)
    passes: Mapping[Modality, _Pass] = field(default_factory=dict)


def collate(model: Any, media: Sequence[MediaInputs], *, device: torch.device | str = "cpu") -> MediaBatch:
    """The media of the sequences of a batch, in the order in which they lie there. ConfigError for a model of text alone."""
    if not media:
        return MediaBatch()
    media = [part for item in media for _, part in item.placed]
    family = family_of(model)
    if family is None:
        raise ConfigError(
            f"{type(model).__name__} must be of a multimodal family to take {', '.join(media[0].modalities)}, got text alone. "
            "Train on text, or name another model"
        )
    arguments: dict[str, torch.Tensor] = {}
    passes: dict[Modality, _Pass] = {}
    for modality in _ORDER:
        having = [item for item in media if modality in item.modalities]
        if not having:
            continue
        places = {item.key: item for item in having}  # of equal keys the last, at the place of the first
        unique, at = list(places.values()), {key: i for i, key in enumerate(places)}
        if modality == "audio":
            assert family.sound_tokens is not None
            features, mask = joined_sounds(unique)
            arguments |= {"input_features": _tensor(features, device), "feature_attention_mask": _tensor(mask, device)}
            counts = [int(family.sound_tokens(model.config, _frames(item)).sum()) for item in unique]
            grid = None
        else:
            pixels, grids = _VISION[modality]
            side = model.config.vision_config.spatial_merge_size
            arguments[pixels] = _tensor(np.concatenate([item.arrays[pixels] for item in unique]), device)
            arguments[grids] = _tensor(np.concatenate([item.arrays[grids] for item in having]), device)
            counts = [int(item.arrays[grids].prod(1).sum()) // side**2 for item in unique]
            grid = _tensor(np.concatenate([item.arrays[grids] for item in unique]), device)
        starts = np.concatenate([[0], np.cumsum(counts)])
        repeat = None
        if len(unique) < len(having):
            spans = [np.arange(starts[at[item.key]], starts[at[item.key] + 1]) for item in having]
            repeat = _tensor(np.concatenate(spans), device)
        passes[modality] = _Pass(grid, repeat)
    return MediaBatch(arguments, passes)


@contextmanager
def encoded_once(model: Any, batch: MediaBatch) -> Iterator[None]:
    """While the body runs the model's forward on `batch.arguments`, towers see each distinct prompt's media once."""
    if all(found.repeat is None for found in batch.passes.values()):
        yield
        return
    family = family_of(model)
    assert family is not None
    coming: dict[str, list[_Pass]] = {}
    for modality in _ORDER:
        if modality in batch.passes:
            coming.setdefault(family.towers[modality], []).append(batch.passes[modality])
    handles = []
    for path, passes in coming.items():
        narrow, widen = _hooks(passes)
        tower = model.get_submodule(path)
        handles += [
            tower.register_forward_pre_hook(narrow, with_kwargs=True, prepend=True),
            tower.register_forward_hook(widen),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def placeholder_ids(model: Any) -> tuple[int, ...]:
    """Tokens that stand for features; none for a model of text."""
    family = family_of(model)
    if family is None:
        return ()
    return tuple(dict.fromkeys(int(getattr(model.config, name)) for name in family.placeholders.values()))


@contextmanager
def embedding(model: Any, ids: torch.Tensor | None) -> Iterator[None]:
    """While the body runs, the embeddings are those of `ids` (integers, the shape of the input's), whatever the model gives its
    embedding layer. None changes nothing."""
    if ids is None:
        yield
        return

    def swap(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (ids,)

    handle = model.get_input_embeddings().register_forward_pre_hook(swap)
    try:
        yield
    finally:
        handle.remove()


def _hooks(passes: list[_Pass]) -> tuple[Any, Any]:
    """(before, after) a tower's forward, whose calls are `passes` in order."""
    calls = iter(passes)
    under_way: list[_Pass] = []

    def narrow(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        under_way.append(next(calls))
        grid = under_way[-1].grid
        return args, kwargs if grid is None else {**kwargs, "grid_thw": grid}

    def widen(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        done = under_way.pop()
        repeat = done.repeat
        if repeat is None:
            return output
        if done.grid is None:  # sound
            output.last_hidden_state = output.last_hidden_state.index_select(0, repeat)
            return output
        output.pooler_output = output.pooler_output.index_select(0, repeat)
        deepstack = getattr(output, "deepstack_features", None)
        if deepstack:
            output.deepstack_features = [features.index_select(0, repeat) for features in deepstack]
        return output

    return narrow, widen


def _frames(item: MediaInputs) -> np.ndarray:
    return item.arrays["feature_attention_mask"].sum(1)


def _tensor(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
