"""An engine over the trainer's own tensors: the same samples, honest versions, and never a token between two of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.embedded.shared_weights import Flip, Lent
from rondo.runtime.errors import CorruptData
from tests.roles.engines.engines import llama, qwen3, qwen3_moe, qwen3_tied, request

NUM_SLOTS, LENGTH = 4, 64


def move(model: Any, seed: int = 1) -> None:
    """What an optimizer step does: other values in the same tensors."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


class Rig:
    """A trainer's model, an engine over its tensors, and the one thread that both compute on."""

    def __init__(self, model: Any, threads: ThreadPoolExecutor) -> None:
        self.model, self._threads = model, threads
        self.lent = Lent(model)
        self.slots = slot_engine(self.lent.model, num_slots=NUM_SLOTS, max_length=LENGTH, lent=self.lent)
        self.engine = EmbeddedEngine(self.slots, self.compute, turn_s=0.0)

    async def compute(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def flip(self, version: int) -> None:
        self.lent.holds(version)
        await self.engine.update_weights(version, Flip(version))

    async def train(self) -> int:
        """An optimizer step, as the trainer makes it; the tokens that were generated until then."""

        def step() -> int:
            self.lent.moves()
            move(self.model)
            return self.slots.stats().tokens_generated

        made: int = await self.compute(step)
        return made


@asynccontextmanager
async def rig(model: Any) -> AsyncIterator[Rig]:
    with ThreadPoolExecutor(1) as threads:
        made = Rig(model, threads)
        try:
            yield made
        finally:
            await made.engine.close()


@pytest.mark.parametrize("make", [qwen3, qwen3_tied, llama, qwen3_moe])
async def test_it_samples_what_an_engine_with_its_own_copy_samples_before_and_after_an_optimizer_step(
    make: Callable[[], Any],
) -> None:
    def samples_of(model: Any) -> list[np.ndarray]:
        own = slot_engine(model, num_slots=NUM_SLOTS, max_length=LENGTH)
        own.add(request("a", 7, 12))
        while own.has_work:
            done = own.step()
        return [done[0].tokens, done[0].log_probs]

    moved = make()
    move(moved)
    async with rig(make()) as made:
        for version, model in enumerate([make(), moved]):
            if version:
                await made.train()
            await made.flip(version)
            found = await made.engine.generate(request("a", 7, 12))
            assert set(found.policy_versions.tolist()) == {version}
            for wanted, got in zip(samples_of(model), [found.tokens, found.log_probs], strict=True):
                np.testing.assert_array_equal(got, wanted)


async def test_nothing_is_sampled_from_the_optimizer_step_on_until_the_version_is_committed() -> None:
    async with rig(qwen3()) as made:
        await made.flip(0)
        going = asyncio.create_task(made.engine.generate(request("a", 7, 40)))
        while made.slots.stats().tokens_generated < 3:
            await made.compute(lambda: None)
        before = await made.train()
        late = asyncio.create_task(made.engine.generate(request("b", 5, 4)))
        for _ in range(20):
            await made.compute(lambda: None)  # the commit is under way, and other work computes
        assert 3 <= before == made.slots.stats().tokens_generated < 40
        await made.flip(1)
        first, second = await going, await late
        assert sorted(set(first.policy_versions.tolist())) == [0, 1] and (np.diff(first.policy_versions) >= 0).all()
        assert (first.policy_versions == 0).sum() == before
        assert set(second.policy_versions.tolist()) == {1}


async def test_an_engine_that_is_not_held_while_the_tensors_move_fails_instead_of_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(qwen3()) as made:
        await made.flip(0)
        await made.train()
        monkeypatch.setattr(type(made.slots), "held", False)  # the planted fault
        with pytest.raises(CorruptData, match="must be policy version 0 while the engine samples, got None"):
            await made.engine.generate(request("a", 7, 4))
        assert made.slots.stats().tokens_generated == 0


async def test_a_flip_that_comes_when_the_tensors_move_again_leaves_the_engine_held_until_the_next() -> None:
    async with rig(qwen3()) as made:
        made.lent.holds(0)
        flip = await made.lent.newer_than(-1)
        await made.train()
        await made.engine.update_weights(flip.version, flip)
        going = asyncio.create_task(made.engine.generate(request("a", 7, 4)))
        for _ in range(20):
            await made.compute(lambda: None)
        assert made.slots.held and made.slots.stats().tokens_generated == 0
        await made.flip(1)
        assert set((await going).policy_versions.tolist()) == {1}


async def test_whoever_follows_is_told_of_each_version_once_it_is_whole() -> None:
    lent = Lent(qwen3())
    following = asyncio.create_task(lent.newer_than(0))
    lent.holds(0)
    await asyncio.sleep(0)
    lent.moves()
    await asyncio.sleep(0)
    assert not following.done()
    lent.holds(1)
    assert (await following).version == 1


def test_the_lent_model_has_the_trainers_parameters_and_nothing_else_of_it() -> None:
    model = qwen3_tied()
    lent = Lent(model)
    model.train()
    assert [id(p) for p in lent.model.parameters()] == [id(p) for p in model.parameters()]
    assert lent.model.lm_head.weight is lent.model.model.embed_tokens.weight
    slots = slot_engine(lent.model, num_slots=NUM_SLOTS, max_length=LENGTH, lent=lent)
    assert model.training and not lent.model.training
    assert slots.held
    with pytest.raises(AssertionError, match="must get no others"):
        slots.load_weights(0, {})
