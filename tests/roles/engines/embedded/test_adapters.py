"""An engine with adapters samples with the newest it has, as the trainer computes them; one that leaves them out is found."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models.config import LoraConfig
from rondo.models.lora import adapt, adapted, canary_of, load_published, published_adapter
from rondo.roles.engines.adapters import prove_adapters
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.embedded.shared_weights import Lent
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.training.mismatch import Canary
from rondo.runtime.errors import Fatal
from tests.roles.engines.engines import full_log_probs, gap, llama, qwen3, qwen3_moe, ragged, request, run
from tests.strength import strength

ROUNDING = 5e-5
"""Of float32, in the worst token; the mean is below 1e-5."""
LORA = LoraConfig(rank=3, alpha=2.0)
EXPERTS = LoraConfig(rank=3, alpha=2.0, targets=("q_proj", "experts"))
PARTS = LoraConfig(rank=2, targets=("k_proj", "o_proj", "layers.1.mlp.up_proj"))


def trained(make: Callable[..., Any], lora: LoraConfig, seed: int = 0) -> Any:
    """A trainer's model, whose adapter has moved."""
    model = make()
    adapt(model, lora, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in published_adapter(model).values():
            tensor.copy_(0.2 * torch.randn_like(tensor))
    return model


def engine_of(make: Callable[..., Any], lora: LoraConfig, **options: Any) -> tuple[Any, SlotEngine]:
    model = make()
    adapt(model, lora)
    return model, slot_engine(model, num_slots=4, max_length=64, **options)


@pytest.mark.parametrize("lora", [LORA, PARTS], ids=["all", "parts"])
@pytest.mark.parametrize(
    "make", [qwen3, functools.partial(qwen3, hidden_size=512, num_hidden_layers=1), llama, qwen3_moe]
)
def test_it_samples_as_the_trainer_computes(make: Callable[..., Any], lora: LoraConfig) -> None:
    if lora is PARTS and make is not qwen3:
        lora = LoraConfig(rank=2, targets=("q_proj", "experts" if make is qwen3_moe else "o_proj"))
    model, (_, slots) = trained(make, lora), engine_of(make, lora)
    slots.load_weights(1, published_adapter(model))
    requests = ragged(5)
    assert gap(model, requests, run(slots, requests)) < ROUNDING


def test_versions_flip_between_two_steps_and_a_shared_prompt_is_computed_anew() -> None:
    first, second = trained(qwen3, LORA, 1), trained(qwen3, LORA, 2)
    _, slots = engine_of(qwen3, LORA)
    slots.load_weights(1, published_adapter(first))
    asked = request("a", 9, 12)
    slots.add(asked)
    for _ in range(4):
        slots.step()
    slots.load_weights(2, published_adapter(second))
    behind = request("b", asked.prompt, 12)
    done = run(slots, [behind])
    assert done["a"].policy_versions.tolist() == [1] * 4 + [2] * 8
    assert gap(second, [behind], done) < ROUNDING
    before = full_log_probs(first, asked, done["a"].tokens) - done["a"].log_probs
    assert float(np.abs(before[:4]).max()) < ROUNDING


def test_an_engine_over_a_lent_base_has_adapters_of_its_own_and_sleeps_without_losing_either() -> None:
    model = trained(qwen3, LORA)
    lent, before = Lent(model), {name: tensor.clone() for name, tensor in published_adapter(model).items()}
    slots = slot_engine(lent.model, num_slots=4, max_length=64, shares=True, sleeps=True)
    assert lent.model.lm_head.weight is model.lm_head.weight
    slots.load_weights(1, published_adapter(trained(qwen3, LORA, 5)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_adapter(model).items())
    slots.sleep()
    assert slots.asleep
    slots.load_weights(2, published_adapter(model))
    requests = ragged(3)
    assert gap(model, requests, run(slots, requests)) < ROUNDING


def test_an_engine_of_its_own_base_keeps_it_while_it_sleeps() -> None:
    model, (_, slots) = trained(qwen3, LORA), engine_of(qwen3, LORA, sleeps=True)
    slots.sleep()
    slots.load_weights(1, published_adapter(model))
    requests = ragged(3)
    assert gap(model, requests, run(slots, requests)) < ROUNDING


def proved(model: Any, slots: SlotEngine, lora: LoraConfig, *, alike: bool) -> None:
    async def compute(function: Callable[[], Any]) -> Any:
        return function()

    async def ask() -> None:
        engine = EmbeddedEngine(slots, compute)
        canary = Canary.of(model, lora)
        await prove_adapters(engine, 0, published_adapter(model), canary, lora, name="rollout.0", alike=alike)
        await engine.update_weights(0, published_adapter(model))
        await engine.close()

    asyncio.run(ask())


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("forward", ["auto", "hf"])
def test_a_canary_proves_an_engine_that_computes_with_adapters(forward: str, alike: bool) -> None:
    model, (_, slots) = trained(qwen3, LORA), engine_of(qwen3, LORA, forward=forward)
    before = {name: tensor.clone() for name, tensor in published_adapter(model).items()}
    proved(model, slots, LORA, alike=alike)
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_adapter(model).items())
    requests = ragged(2)
    assert gap(model, requests, run(slots, requests)) < ROUNDING


@pytest.mark.parametrize("alike", [True, False])
def test_an_engine_that_leaves_adapters_out_ends_the_run_though_a_fresh_one_shows_nothing(alike: bool) -> None:
    model = qwen3()
    adapt(model, LORA, dtype=torch.float32)
    deaf, slots = engine_of(qwen3, LORA, forward="hf")
    for product in adapted(deaf).values():
        product.alone = True
    slots.load_weights(0, published_adapter(model))
    requests = ragged(3)
    assert gap(model, requests, run(slots, requests)) < ROUNDING
    with pytest.raises(Fatal, match=r"an engine must compute with the adapters that it is given, got rollout\.0"):
        proved(model, slots, LORA, alike=alike)


@pytest.mark.parametrize("sleeps", [False, True])
def test_an_engine_that_keeps_an_older_version_ends_the_run(sleeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, slots = engine_of(qwen3, LORA, sleeps=sleeps)
    slots.load_weights(1, published_adapter(trained(qwen3, LORA, 1)))
    monkeypatch.setattr(slots._forward, "load", lambda _: None)
    with pytest.raises(
        Fatal, match=r"must generate with the adapter that it is given, got other tensors than version 2"
    ):
        slots.load_weights(2, published_adapter(trained(qwen3, LORA, 2)))
    assert slots.version == 1


OF_EXPERTS = ["gate_up_proj_adapter", "down_proj_adapter"]
TARGETS = ["k_proj", "down_proj", *OF_EXPERTS, "q_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]


@pytest.mark.parametrize("target", TARGETS[: strength(quick=3, full=9)])
def test_a_single_target_that_is_left_out_is_found(target: str) -> None:
    make, lora = (qwen3_moe, EXPERTS) if "adapter" in target else (qwen3, LORA)
    deaf, slots = engine_of(make, lora, forward="hf")
    product = next(each for path, each in adapted(deaf).items() if path.endswith(target))
    product.alone = True
    with pytest.raises(Fatal, match="It leaves out adapters, or some targets"):
        proved(trained(make, lora), slots, lora, alike=True)


def test_a_canary_is_drawn_alike_by_whoever_knows_names_and_shapes() -> None:
    model = trained(qwen3, LORA)
    shapes = {name: tuple(tensor.shape) for name, tensor in published_adapter(model).items()}
    first, second = canary_of(shapes, LORA), canary_of(dict(reversed(shapes.items())), LORA)
    assert all(torch.equal(first[name], second[name]) for name in shapes)
    load_published(model, first)
