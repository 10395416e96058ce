"""Media of several prompts in one batch: in order, each distinct prompt's once through its towers, gradients added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models.families import family_of
from rondo.models.logprobs import response_log_probs
from rondo.models.media.batch import collate, encoded_once
from rondo.models.media.inputs import MediaInputs
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.runtime.errors import ConfigError
from tests.models import builders
from tests.models.multimodal import FAMILIES, group, prompt, sample, tiny


def media(one: Packable) -> MediaInputs:
    assert one.media is not None
    return one.media


def apart(batch: Sequence[Packable]) -> list[Packable]:
    """The same, as if every sample had media of its own."""
    return [
        one if one.media is None else replace(one, media=replace(one.media, key=f"{one.media.key} {number}"))
        for number, one in enumerate(batch)
    ]


@contextmanager
def seen_by_towers(model: Any) -> Iterator[list[tuple[str, int]]]:
    """(path of the tower, patches or frames that it takes) of every pass."""
    family = family_of(model)
    assert family is not None
    passes: list[tuple[str, int]] = []
    handles = []
    for path in dict.fromkeys(family.towers.values()):

        def told(module: Any, args: tuple[Any, ...], kwargs: Any, path: str = path) -> None:
            passes.append((path, args[0].shape[0] if "visual" in path else args[0].shape[1]))

        handles.append(model.get_submodule(path).register_forward_pre_hook(told, with_kwargs=True))
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def gradients(model: Any, batch: Sequence[Packable]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, and the gradient of a random weighing of them."""
    log_probs, _ = response_log_probs(model, Packing.of(model).pack(batch, train=True))
    weights = torch.randn(len(log_probs), generator=torch.Generator().manual_seed(2))
    (weights * log_probs).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return log_probs.detach(), found


def test_media_lie_in_the_order_of_their_sequences_and_repeat_only_where_they_are_cheap() -> None:
    model = tiny("qwen3_vl")
    first, second = prompt(model, 1, image=(1, 2)), prompt(model, 2, image=(2, 2), video=(1, 1, 1))
    batch = collate(model, [media(second), media(first), media(second)])
    assert batch.arguments["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 4], [1, 4, 4]]
    assert batch.arguments["video_grid_thw"].tolist() == [[1, 2, 2]] * 2
    expected = np.concatenate([media(second).arrays["pixel_values"], media(first).arrays["pixel_values"]])
    assert np.array_equal(batch.arguments["pixel_values"].numpy(), expected)
    assert batch.arguments["pixel_values_videos"].shape == (4, 96)


def test_sounds_are_padded_to_the_longest() -> None:
    model = tiny("qwen3_omni")
    batch = collate(model, [media(prompt(model, 1, audio=30)), media(prompt(model, 2, audio=110))])
    assert batch.arguments["input_features"].shape == (2, 16, 110)
    assert batch.arguments["feature_attention_mask"].sum(1).tolist() == [30, 110]
    assert not batch.arguments["input_features"][0, :, 30:].any()


def test_text_brings_no_arguments() -> None:
    assert collate(tiny("qwen3_vl"), []).arguments == {}
    assert collate(builders.tiny("qwen3"), []).arguments == {}


def test_a_model_of_text_refuses_media() -> None:
    asked = prompt(tiny("qwen3_vl"), 1, image=(1, 1))
    with pytest.raises(
        ConfigError, match=r"Qwen3ForCausalLM must be of a multimodal family to take image, got text alone\."
    ):
        collate(builders.tiny("qwen3"), [media(asked)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_crosses_its_towers_once_with_the_gradient_of_all_its_samples(family: str) -> None:
    model = tiny(family)
    sound = {"audio": 60} if family == "qwen3_omni" else {}
    both = prompt(model, 1, image=(2, 1), video=(2, 1, 1), **sound)
    other = prompt(model, 2, image=(1, 3))
    batch = [*group(both, 10, (3, 6, 2)), *group(other, 20, (4, 4)), sample(prompt(model, 3), 30, 5)]
    with seen_by_towers(model) as once:
        log_probs, together = gradients(model, batch)
    with seen_by_towers(model) as every_time:
        expected, separately = gradients(model, apart(batch))
    # Images, then videos, each with the dummy's 4 patches; sound, with the dummy's 8 frames, before them.
    sounds, all_sounds = ([("model.audio_tower", n)] if sound else [] for n in (60 + 8, 3 * 60 + 8))
    assert once == [*sounds, ("model.visual", 8 + 12 + 4), ("model.visual", 8 + 4)]
    assert every_time == [*all_sounds, ("model.visual", 3 * 8 + 2 * 12 + 4), ("model.visual", 3 * 8 + 4)]
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=4e-6)
    assert together.keys() == separately.keys() == dict(model.named_parameters()).keys()
    for name, gradient in separately.items():
        atol = 1e-5 * max(gradient.abs().max().item(), 1e-2)
        torch.testing.assert_close(together[name], gradient, rtol=1e-4, atol=atol, msg=name)
    assert max(g.abs().max() for name, g in together.items() if "visual" in name) > 1e-2


def test_hooks_are_gone_after_a_forward_that_fails() -> None:
    model = tiny("qwen3_vl")
    asked = prompt(model, 1, image=(1, 1))
    batch = collate(model, [media(asked), media(asked)])
    with pytest.raises(ZeroDivisionError), encoded_once(model, batch):
        raise ZeroDivisionError
    assert not model.model.visual._forward_hooks
    assert not model.model.visual._forward_pre_hooks
