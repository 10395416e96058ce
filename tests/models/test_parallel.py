"""One process: precision, recomputation, and what is done to gradients. Two processes: test_fsdp.py."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from rondo.models import parallel
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.packing import PackedBatch, Packing, pack
from rondo.models.parallel.experts import check_experts
from rondo.models.published import own_weights
from rondo.models.units import decoder_layers
from rondo.runtime.errors import ConfigError
from tests.models import multimodal
from tests.models.builders import RAGGED, folder_of, full_tensors, sequences, tiny

PACKED = pack(sequences(RAGGED))


def gradients(model: Any) -> list[torch.Tensor]:
    model.train()
    log_probs, entropy = response_log_probs(model, PACKED, chunk_tokens=9, with_entropy=True)
    assert entropy is not None
    (log_probs.sum() + entropy.sum()).backward()
    return [parameter.grad for parameter in model.parameters()]


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return response_log_probs(model.eval(), PACKED)[0]


def test_one_process_in_float32_keeps_the_model_untouched() -> None:
    model = tiny("qwen3")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    assert parallel.compute_in(model) is model
    assert {name: module.__dict__ for name, module in model.named_modules()} == before


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3_moe", False)])
def test_bfloat16_computes_as_a_bfloat16_model_and_keeps_float32_weights(
    family: str, tied: bool, tmp_path: Path
) -> None:
    path = folder_of(tmp_path, family, tied=tied)
    model = parallel.compute_in(load_model(path), dtype="bfloat16")
    half = load_model(path, dtype="bfloat16")
    assert torch.equal(scores(model), scores(half))
    ours, theirs = gradients(model), gradients(half)
    assert {parameter.dtype for parameter in model.parameters()} == {g.dtype for g in ours} == {torch.float32}
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in model.parameters())
    assert all(torch.equal(mine, other.float()) for mine, other in zip(ours, theirs, strict=True))
    # A second micro-batch adds up in float32.
    assert all(torch.equal(twice, 2 * once.float()) for twice, once in zip(gradients(model), theirs, strict=True))


def test_weights_are_given_back_when_a_forward_fails() -> None:
    model = parallel.compute_in(tiny("qwen3"), dtype="bfloat16")
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[100_000]]))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_recomputed_layers_give_equal_gradients_and_run_twice(param_dtype: str) -> None:
    plain = parallel.compute_in(tiny("qwen3"), dtype=param_dtype)
    recomputed = parallel.compute_in(tiny("qwen3"), dtype=param_dtype, activation_checkpointing=True)
    calls = []
    recomputed.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(scores(plain), scores(recomputed))
    assert len(calls) == 1
    expected = gradients(plain)
    assert all(torch.equal(a, b) for a, b in zip(gradients(recomputed), expected, strict=True))
    assert len(calls) == 3


def test_recomputation_needs_layers() -> None:
    with pytest.raises(ConfigError, match=r"must have decoder layers to act on, got none in Linear\. Set it to False"):
        parallel.compute_in(torch.nn.Linear(2, 2), activation_checkpointing=True)


def test_layers_are_found_in_every_family() -> None:
    names = {family: [type(layer).__name__ for layer in decoder_layers(tiny(family))] for family in ("qwen3", "gpt2")}
    assert names == {"qwen3": ["Qwen3DecoderLayer"] * 2, "gpt2": ["GPT2Block"] * 2}


def test_the_norm_is_of_all_gradients_and_clipping_scales_them_down_to_it() -> None:
    model = tiny("qwen3")
    whole = torch.cat([gradient.flatten() for gradient in gradients(model)])
    reference = copy.deepcopy(model)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    assert parallel.clip_grad_norm(model, 1e9) == pytest.approx(whole.norm().item(), rel=1e-5)
    assert torch.equal(torch.cat([p.grad.flatten() for p in model.parameters()]), whole)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    parallel.clip_grad_norm(model, 0.5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)
    parallel.scale_gradients(model, 4.0)
    assert parallel.clip_grad_norm(model, 1e9) == pytest.approx(2.0, rel=1e-4)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_is_told_and_spoils_no_other_gradient(bad: float) -> None:
    model = tiny("qwen3")
    before = [gradient.clone() for gradient in gradients(model)]
    model.model.norm.weight.grad[0] = bad
    assert not torch.isfinite(torch.tensor(parallel.clip_grad_norm(model, 1.0)))
    assert torch.equal(model.model.embed_tokens.weight.grad, before[0])


def test_discarded_gradients_are_gone() -> None:
    model = tiny("qwen3")
    gradients(model)
    parallel.discard_gradients(model)
    assert parallel.clip_grad_norm(model, 1.0) == 0.0


# ---- encoders -----------------------------------------------------------------------------------------------------------


def media_gradients(model: Any, packed: PackedBatch) -> dict[str, torch.Tensor]:
    response_log_probs(model.train(), packed)[0].sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", multimodal.FAMILIES)
def test_encoders_in_bfloat16_compute_as_those_of_a_bfloat16_model(family: str, tmp_path: Path) -> None:
    path = str(multimodal.folder_of(tmp_path, family))
    half, model = load_model(path, dtype="bfloat16"), load_model(path)
    packed = Packing.of(model).pack([*multimodal.ragged(model), *multimodal.long_prompt(model)], train=True)
    parallel.compute_in(model, dtype="bfloat16", activation_checkpointing=True)
    with torch.no_grad():
        assert torch.equal(response_log_probs(model, packed)[0], response_log_probs(half, packed)[0])
    ours, theirs = media_gradients(model, packed), media_gradients(half, packed)
    assert ours.keys() == theirs.keys() == dict(model.named_parameters()).keys()
    # The vision tower runs twice, for images and videos, and what both give adds up in float32 here.
    twice = {name for name in ours if "visual" in name}
    assert all(torch.equal(ours[name], theirs[name].float()) for name in ours.keys() - twice)
    for name in twice:
        atol = 0.02 * theirs[name].abs().max().item()
        torch.testing.assert_close(ours[name], theirs[name].float(), rtol=0, atol=atol, msg=name)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", multimodal.FAMILIES)
def test_blocks_of_encoders_are_recomputed_one_by_one(family: str) -> None:
    plain, recomputed = multimodal.tiny(family), multimodal.tiny(family)
    parallel.compute_in(recomputed, activation_checkpointing=True)
    packed = Packing.of(plain).pack(multimodal.ragged(plain), train=True)
    calls: Counter[str] = Counter()
    for name in ("visual", "visual.blocks.0"):
        recomputed.get_submodule(f"model.{name}").register_forward_hook(lambda *_, name=name: calls.update([name]))
        inner = recomputed.get_submodule(f"model.{name}")
        first = inner.patch_embed if name == "visual" else inner.attn
        first.register_forward_hook(lambda *_, name=name: calls.update([f"{name} inside"]))
    expected, found = media_gradients(plain, packed), media_gradients(recomputed, packed)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # Two passes, of images and of videos; what is recomputed runs twice in each.
    assert calls == {"visual": 2, "visual inside": 2, "visual.blocks.0": 2, "visual.blocks.0 inside": 4}


def test_layers_of_encoders_are_units_too() -> None:
    names = Counter(type(layer).__name__ for layer in decoder_layers(multimodal.tiny("qwen3_omni")))
    assert names == {
        "Qwen3OmniMoeAudioEncoderLayer": 1,
        "Qwen3OmniMoeVisionBlock": 2,
        "Qwen3OmniMoeThinkerTextDecoderLayer": 2,
    }


def test_weights_that_were_asked_for_stay_the_models_own_while_a_forward_runs_on_copies() -> None:
    model = parallel.compute_in(tiny("qwen3"), dtype="bfloat16")
    before = {name: tensor.clone() for name, tensor in full_tensors(model)}
    asked = own_weights(model)
    seen: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_pre_hook(lambda *_: seen.update(asked))
    scores(model)
    assert seen.keys() == before.keys()
    assert all(torch.equal(seen[name], before[name]) and seen[name].dtype == torch.float32 for name in before)


def test_experts_are_shared_out_whole() -> None:
    model = tiny("qwen3_moe")
    check_experts(model, 4)
    told = r"must divide the experts of a layer, got 3 with 4 in model\.layers\.0\.mlp\.experts\. Change"
    with pytest.raises(ConfigError, match=told):
        check_experts(model, 3)
