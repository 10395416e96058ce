"""An engine that gives its memory away between two steps: what it samples afterwards is what it would have sampled without."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.embedded.shared_weights import Flip, Lent
from rondo.roles.engines.embedded.slots import SlotEngine
from rondo.roles.engines.replica import Replica
from rondo.roles.training.compute_turns import Turns
from rondo.runtime.waits import pending
from tests.models.builders import full_tensors
from tests.roles.engines.engines import llama, qwen3, qwen3_tied, request
from tests.roles.training.test_backend import job as job_of
from tests.roles.training.test_backend import model

__all__ = ["model"]


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors(model)}


def sampled(slots: SlotEngine, name: str) -> list[Any]:
    slots.add(request(name, 7, 12))
    while slots.has_work:
        done = slots.step()
    return [done[0].tokens.tolist(), done[0].log_probs.tolist(), done[0].policy_versions.tolist()]


def held_bytes(model: Any) -> int:
    return sum(parameter.untyped_storage().nbytes() for parameter in model.parameters())


@pytest.mark.parametrize("make", [qwen3, qwen3_tied, llama])
def test_it_samples_the_same_with_and_without_sleep_and_holds_no_weights_meanwhile(make: Callable[..., Any]) -> None:
    build = functools.partial(slot_engine, num_slots=4, max_length=64)
    model = make()
    plain, sleeping = build(make()), build(model, sleeps=True)
    assert sampled(plain, "a") == sampled(sleeping, "a")
    whole = held_bytes(model)
    sleeping.sleep()
    assert sleeping.asleep and sleeping.held and whole > 0 == held_bytes(model)
    newer = weights(make(seed=3))
    for slots in (plain, sleeping):
        slots.load_weights(1, newer)
    assert not sleeping.held and held_bytes(model) == whole
    assert sampled(plain, "b") == sampled(sleeping, "b")


def test_an_engine_with_work_stays_awake() -> None:
    slots = slot_engine(qwen3(), num_slots=4, max_length=64, sleeps=True)
    slots.add(request("a", 7, 4))
    slots.sleep()
    assert not slots.asleep and not slots.held


def test_one_that_generates_with_lent_tensors_leaves_them_and_wakes_at_the_next_flip() -> None:
    model = qwen3()
    lent = Lent(model)
    slots = slot_engine(lent.model, num_slots=4, max_length=64, lent=lent, sleeps=True)
    lent.holds(0)
    slots.load_weights(0, Flip(0))
    before, whole = sampled(slots, "a"), held_bytes(model)
    slots.sleep()
    assert slots.held and held_bytes(model) == whole
    slots.load_weights(0, Flip(0))
    assert sampled(slots, "a") == before


async def test_a_replica_in_turn_with_the_trainer_gives_its_memory_once_it_has_nothing_to_generate(model: str) -> None:
    spans: list[str] = []

    async def compute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def noted(name: str, **_: Any) -> Any:
        spans.append(name)
        return contextlib.nullcontext()

    job = SimpleNamespace(
        config=job_of(model), model_path=model, device="cpu", takes_turns=True, rests=False, lent=None, turns=Turns()
    )
    stopping = asyncio.Event()
    replica = Replica(cast(Any, SimpleNamespace(compute=compute, span=noted, stopping=stopping)), cast(Any, job))
    await replica.open(contextlib.AsyncExitStack())
    engine = cast(EmbeddedEngine, replica.engine)
    engine._slots.add(request("a", 7, 3))
    await job.turns.make_room()
    assert not engine.asleep and spans == []  # it has something to generate
    job.rests = True  # the trainer needs its memory
    making = asyncio.create_task(job.turns.make_room())
    await asyncio.sleep(0)
    assert not making.done() and [wait.name for wait in pending()] == ["engine to end"]
    stopping.set()  # it may never have an end then
    await making
    assert not engine.asleep
    stopping.clear()
    making = asyncio.create_task(job.turns.make_room())
    await asyncio.sleep(0)
    while engine._slots.has_work:
        engine._slots.step()
    await making
    assert engine.asleep and spans == ["sleep"]
    await job.turns.make_room()
    assert engine.asleep and spans == ["sleep"]


async def test_a_request_that_comes_while_it_sleeps_asks_for_weights_and_is_generated_under_them() -> None:
    woken = asyncio.Event()
    with ThreadPoolExecutor(1) as threads:

        async def compute(function: Callable[[], Any]) -> Any:
            return await asyncio.get_running_loop().run_in_executor(threads, function)

        slots = slot_engine(qwen3(), num_slots=4, max_length=64, sleeps=True)
        engine = EmbeddedEngine(slots, compute, wake=woken.set)
        first = await engine.generate(request("a", 7, 6))
        await compute(engine.sleep)
        asking = asyncio.create_task(engine.generate(request("b", 7, 6)))
        async with asyncio.timeout(60):
            await woken.wait()
        assert not asking.done() and slots.asleep
        await engine.update_weights(0, weights(qwen3()))
        again = await engine.generate(request("c", 7, 6, seed=int.from_bytes(b"a", "big")))
        np.testing.assert_array_equal(first.tokens, again.tokens)
        assert len((await asking).tokens) == 6
        await engine.close()
