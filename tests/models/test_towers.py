"""Encoders attend to all their pictures, films and sounds in one call of a kernel a layer. That packed is as alone, gradients
included: test_attention.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rondo.models.acceptance import accept
from rondo.models.kernels import FLASH, FLEX
from rondo.models.logprobs import response_log_probs
from rondo.models.units import towers_of
from tests.models import emulated, multimodal


def of_towers(calls: list[tuple[int, ...]], attn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on this machine has the kernel `attn`; `calls` gets the documents of each of its calls for a tower."""
    flash, flex = emulated.flash(), emulated.flex()

    def by_lengths(q: Any, k: Any, v: Any, ends: torch.Tensor, *others: Any, **how: Any) -> Any:
        if not how["causal"]:
            calls.append(tuple(ends.diff().tolist()))
        return flash(q, k, v, ends, *others, **how)

    def by_mask(module: Any, q: Any, k: Any, v: Any, mask: Any, **how: Any) -> Any:
        seen = emulated.visible(mask)
        if bool(seen[0].any()) and not torch.equal(seen, seen.tril()):
            calls.append(tuple(seen.sum(1)[seen.int().argmax(1) == torch.arange(len(seen))].tolist()))
        return flex(module, q, k, v, mask, **how)

    emulated.install(monkeypatch, attn, by_lengths if attn == FLASH else by_mask)


@pytest.mark.parametrize("attn", [FLASH, FLEX])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_omni"])
def test_a_layer_of_a_tower_attends_in_one_call_to_all_that_lies_behind_each_other(
    family: str, attn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[tuple[int, ...]]()
    of_towers(calls, attn, monkeypatch)
    model = multimodal.tiny(family)
    packing = accept(model, attn=attn)
    calls.clear()
    packed = packing.pack(multimodal.ragged(model))
    with torch.no_grad():
        response_log_probs(model, packed)
    images, films = [4, 12, 24], [8, 8, 16]  # patches of each picture, and of each frame
    sound = family == "qwen3_omni"
    images, films = sorted([*images, *[8] * sound]), sorted([*films, *[4] * sound])
    found = [sorted(each) for each in calls[-4:]]
    assert found.count(images) == found.count(films) == 2  # in both layers
    assert len(calls) == 4 + sound  # and in the layer of sounds


def test_towers_whose_kernel_leaks_go_picture_by_picture_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flash, leaked = emulated.flash(), list[int]()

    def leaks(q: Any, k: Any, v: Any, *lengths: Any, **how: Any) -> Any:
        if how["causal"]:
            return flash(q, k, v, *lengths, **how)
        leaked.append(len(q))
        whole = torch.tensor([0, len(q)], dtype=torch.int32)
        return flash(q, k, v, whole, whole, len(q), len(q), **how)

    emulated.install(monkeypatch, FLASH, leaks)
    model = multimodal.tiny("qwen3_vl")
    packing = accept(model, attn=FLASH)
    assert packing.attn == FLASH and leaked
    assert "towers of model=Qwen3VLForConditionalGeneration are not attn=flash_attention_2 reason=" in caplog.text
    assert {tower.config._attn_implementation for tower in towers_of(model)} == {"sdpa"}
    leaked.clear()
    with torch.no_grad():
        response_log_probs(model, packing.pack(multimodal.ragged(model)))
    assert not leaked
