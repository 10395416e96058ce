from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from rondo.roles.engines.embedded import embedded
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.embedded.qwen3_forward import Qwen3Forward
from rondo.roles.engines.embedded.slots import Batch, SlotEngine
from rondo.roles.engines.engine import Completion, Engine, Request
from rondo.runtime import waits
from rondo.runtime.errors import Closed, ConfigError, CorruptData, DeadlineExceeded, WorkerDied
from tests.models.builders import full_tensors
from tests.roles.engines.engines import gap, qwen3, ragged, request, run


class Controlled:
    """A real forward that a test can stop before a step, or make fail."""

    def __init__(self, forward: Qwen3Forward) -> None:
        self._forward = forward
        self._calls = 0
        self._stop_at: dict[int, tuple[threading.Event, threading.Event]] = {}
        self.step_error: Exception | None = None
        self.load_error: Exception | None = None

    modalities: tuple[str, ...] = ()
    keeps_prefixes = True
    held = False

    @property
    def vocab_size(self) -> int:
        return self._forward.vocab_size

    def stop_at(self, call: int) -> tuple[threading.Event, threading.Event]:
        """(set when the call is reached, to be set for it to go on)"""
        self._stop_at[call] = (threading.Event(), threading.Event())
        return self._stop_at[call]

    def __call__(self, batch: Batch) -> torch.Tensor:
        self._calls += 1
        if self._calls in self._stop_at:
            reached, go_on = self._stop_at[self._calls]
            reached.set()
            assert go_on.wait(60)
        if self.step_error is not None:
            raise self.step_error
        return self._forward(batch)

    def copy(self, source: int, target: int, length: int) -> None:
        self._forward.copy(source, target, length)

    def clear(self, slot: int | None = None) -> None:
        self._forward.clear(slot)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.load_error is not None:
            raise self.load_error
        self._forward.load(tensors)


class Rig:
    """An engine on a thread of its own, and what stands behind it."""

    def __init__(self, num_slots: int, threads: ThreadPoolExecutor) -> None:
        self.threads = threads
        self.forward = Controlled(Qwen3Forward(qwen3(), num_slots=num_slots, max_length=64))
        self.slots = SlotEngine(self.forward, num_slots=num_slots, max_length=64)
        self.engine = EmbeddedEngine(self.slots, self.compute)

    async def compute(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, function)

    async def until(self, event: threading.Event) -> None:
        assert await asyncio.get_running_loop().run_in_executor(None, event.wait, 60)

    async def idle(self) -> None:
        """After the turn that now runs: another piece of work has had its share of the compute thread."""
        while self.engine._turns is not None and not self.engine._turns.done():
            await self.compute(lambda: None)


@asynccontextmanager
async def rig(num_slots: int = 4) -> AsyncIterator[Rig]:
    with ThreadPoolExecutor(1) as threads:
        made = Rig(num_slots, threads)
        try:
            yield made
        finally:
            await made.engine.close()


@pytest.fixture(autouse=True)
async def nothing_is_left_behind() -> AsyncIterator[None]:
    """No wait stays listed, and no future ends with an error that nobody takes."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    yield
    gc.collect()
    assert complaints == []
    assert [each.name for each in waits.pending() if each.peer == "engine"] == []


async def test_samples_generate_concurrently_and_equal_those_of_the_slot_engine() -> None:
    requests = ragged(13)
    expected = run(slot_engine(qwen3(), num_slots=4, max_length=64), requests)
    async with rig() as made:
        engine: Engine = made.engine
        done = await asyncio.gather(*(engine.generate(each) for each in requests))
        assert [each.request_id for each in done] == [each.id for each in requests]
        assert all(each.tokens.tolist() == expected[each.request_id].tokens.tolist() for each in done)
        assert engine.stats().num_completed == 13


async def test_a_group_asked_for_together_shares_its_prefill() -> None:
    async with rig() as made:
        await asyncio.gather(*(made.engine.generate(request(f"g/{number}", 9, 4)) for number in range(4)))
        assert made.engine.stats().prefill_tokens == 9


async def test_other_work_gets_the_compute_thread_between_turns() -> None:
    async with rig() as made:
        made.engine._turn_s = 0.0  # a turn is one step
        reached, go_on = made.forward.stop_at(3)
        generating = asyncio.create_task(made.engine.generate(request("a", 4, 20)))
        await made.until(reached)
        other = asyncio.create_task(made.compute(lambda: made.engine.stats().tokens_generated))
        await asyncio.sleep(0)
        go_on.set()
        assert 3 <= await other < 20
        assert (await generating).tokens.size == 20


async def test_cancel_returns_what_there_is_and_leaves_the_others() -> None:
    async with rig() as made:
        reached, go_on = made.forward.stop_at(5)
        first, second = (asyncio.create_task(made.engine.generate(request(name, 4, 12))) for name in "ab")
        await made.until(reached)
        made.engine.cancel("a")
        made.engine.cancel("never heard of")
        go_on.set()
        cancelled, whole = await first, await second
        assert (cancelled.finish_reason, cancelled.tokens.size) == ("cancelled", 5)
        assert (whole.finish_reason, whole.tokens.size) == ("length", 12)
        made.engine.cancel("a")
        assert cancelled.tokens.tolist() == (await made.engine.generate(request("a", 4, 12))).tokens[:5].tolist()


async def test_a_request_cancelled_before_its_first_token_comes_back_empty() -> None:
    async with rig(num_slots=1) as made:
        reached, go_on = made.forward.stop_at(1)
        first, second = (asyncio.create_task(made.engine.generate(request(name, 4, 3))) for name in "ab")
        await made.until(reached)
        made.engine.cancel("b")
        go_on.set()
        completion = await second
        assert (completion.finish_reason, completion.tokens.size, completion.log_probs.size) == ("cancelled", 0, 0)
        assert (await first).tokens.size == 3


async def test_a_cancelled_caller_frees_its_slot_and_its_id() -> None:
    async with rig(num_slots=1) as made:
        reached, go_on = made.forward.stop_at(4)
        gone = asyncio.create_task(made.engine.generate(request("a", 4, 40)))
        await made.until(reached)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        again = asyncio.create_task(made.engine.generate(request("a", 6, 5)))
        await asyncio.sleep(0)
        go_on.set()
        assert (await again).tokens.size == 5
        assert made.engine.stats().tokens_generated == 4 + 5
        assert made.engine.stats().num_cancelled == 1


async def test_weights_flip_under_sequences_in_flight() -> None:
    async with rig() as made:
        reached, go_on = made.forward.stop_at(6)
        generating = asyncio.create_task(made.engine.generate(request("a", 4, 12)))
        await made.until(reached)
        updating = asyncio.create_task(made.engine.update_weights(9, dict(full_tensors(qwen3(1)))))
        await asyncio.sleep(0)
        assert made.engine.version == 0
        go_on.set()
        await updating
        assert made.engine.version == 9
        assert (await generating).policy_versions.tolist() == [0] * 6 + [9] * 6
        asked = request("b", 4, 12)
        done = await made.engine.generate(asked)
        assert gap(qwen3(1), [asked], {"b": done}) < 2e-5


async def test_an_idle_engine_takes_weights() -> None:
    async with rig() as made:
        await made.engine.update_weights(4, dict(full_tensors(qwen3(1))))
        assert made.engine.version == made.engine.stats().version == 4


async def test_wrong_weights_are_the_publishers_error_alone() -> None:
    async with rig() as made:
        reached, go_on = made.forward.stop_at(2)
        generating = asyncio.create_task(made.engine.generate(request("a", 4, 8)))
        await made.until(reached)
        updating = asyncio.create_task(made.engine.update_weights(1, {}))
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(ConfigError, match="must have exactly the names and shapes of Qwen3ForCausalLM"):
            await updating
        assert (await generating).policy_versions.tolist() == [0] * 8


async def test_an_update_whose_caller_is_gone_before_its_turn_is_not_carried_out() -> None:
    async with rig() as made:
        reached, go_on = made.forward.stop_at(2)
        generating = asyncio.create_task(made.engine.generate(request("a", 4, 8)))
        await made.until(reached)
        updating = asyncio.create_task(made.engine.update_weights(1, dict(full_tensors(qwen3(1)))))
        await asyncio.sleep(0)
        updating.cancel()
        await asyncio.sleep(0)
        assert not updating.done()  # it waits until nobody can read its tensors
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert (await generating).policy_versions.tolist() == [0] * 8


async def test_a_failing_step_fails_everyone_who_waits_and_the_engine_goes_on() -> None:
    requests = ragged(7)
    async with rig() as made:
        reached, go_on = made.forward.stop_at(3)
        asking = [asyncio.create_task(made.engine.generate(each)) for each in requests]
        await made.until(reached)
        error = made.forward.step_error = RuntimeError("out of memory")
        go_on.set()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert [result for result in results if not isinstance(result, Completion)] == [error] * 7
        made.forward.step_error = None
        done = {each.id: await made.engine.generate(each) for each in requests[:3]}
        assert gap(qwen3(), requests[:3], done) < 2e-5


async def test_a_request_whose_numbers_go_wrong_fails_alone() -> None:
    async with rig() as made:
        embedded = made.forward._forward._model.model.embed_tokens.weight
        with torch.no_grad():
            embedded[13] = torch.nan
        asked = [request("good", np.array([1, 2, 3], np.int32), 8), request("bad", np.array([1, 13, 3], np.int32), 8)]
        good, bad = await asyncio.gather(*map(made.engine.generate, asked), return_exceptions=True)
        assert isinstance(bad, CorruptData) and isinstance(good, Completion) and good.tokens.size == 8
        assert 13 not in good.tokens


async def test_half_written_weights_stop_the_engine_until_whole_ones_come() -> None:
    async with rig() as made:
        reached, go_on = made.forward.stop_at(2)
        generating = asyncio.create_task(made.engine.generate(request("a", 4, 8)))
        await made.until(reached)
        error = made.forward.load_error = OSError("bus error")
        updating = asyncio.create_task(made.engine.update_weights(1, {}))
        await asyncio.sleep(0)
        go_on.set()
        assert list(await asyncio.gather(updating, generating, return_exceptions=True)) == [error, error]
        with pytest.raises(OSError, match="bus error"):
            await made.engine.generate(request("b", 4, 8))
        made.forward.load_error = None
        await made.engine.update_weights(2, dict(full_tensors(qwen3(1))))
        assert (await made.engine.generate(request("c", 4, 8))).policy_versions.tolist() == [2] * 8


async def test_impossible_requests_fail_at_once_and_alone() -> None:
    async with rig() as made:
        reached, go_on = made.forward.stop_at(1)
        generating = asyncio.create_task(made.engine.generate(request("a", 4, 8)))
        await made.until(reached)
        with pytest.raises(ConfigError, match="must fit into max_length 64, got 60 \\+ 5"):
            await made.engine.generate(request("long", 60, 5))
        with pytest.raises(ConfigError, match="must be unique in its engine, got 'a' twice"):
            await made.engine.generate(request("a", 5, 5))
        go_on.set()
        assert (await generating).tokens.size == 8


async def test_close_wakes_every_waiter_and_refuses_the_rest() -> None:
    async with rig(num_slots=1) as made:
        reached, go_on = made.forward.stop_at(3)
        asking = [asyncio.create_task(made.engine.generate(request(name, 4, 30))) for name in "ab"]
        await made.until(reached)
        asking.append(asyncio.create_task(made.engine.update_weights(1, {})))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        closing = [asyncio.create_task(made.engine.close()) for _ in range(2)]
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*closing)
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(result) for result in results] == [Closed] * 3
        assert made.engine.stats().tokens_generated == 3
        for late in (made.engine.generate(request("c", 4, 2)), made.engine.update_weights(1, {})):
            with pytest.raises(Closed, match="the engine must be open, got a call after close"):
                await late
        made.engine.cancel("a")


async def test_a_compute_thread_that_is_gone_fails_everyone_and_never_hangs() -> None:
    async def gone(function: Callable[[], Any]) -> Any:
        raise WorkerDied("the compute thread must live, got an exit. Restart the role")

    engine = EmbeddedEngine(slot_engine(qwen3(), num_slots=2, max_length=20), gone)
    results = await asyncio.gather(
        engine.generate(request("a", 4, 8)), engine.update_weights(1, {}), return_exceptions=True
    )
    assert [type(result) for result in results] == [Closed, Closed]
    assert all(isinstance(result, Closed) and isinstance(result.__cause__, WorkerDied) for result in results)
    with pytest.raises(Closed, match="must have its compute thread"):
        await engine.generate(request("b", 4, 8))
    await engine.close()


async def test_a_generation_is_listed_as_a_wait() -> None:
    async with rig() as made:
        reached, go_on = made.forward.stop_at(1)
        generating = asyncio.create_task(made.engine.generate(request("a", 4, 2)))
        await made.until(reached)
        assert ("generate", "engine") in [(each.name, each.peer) for each in waits.pending()]
        go_on.set()
        await generating


async def test_an_idle_engine_takes_no_turns() -> None:
    turns = 0

    async with rig() as made:
        inner = made.engine._compute

        async def counted(function: Callable[[], Any]) -> Any:
            nonlocal turns
            turns += 1
            return await inner(function)

        made.engine._compute = counted
        await made.engine.generate(request("a", 4, 2))
        await made.idle()
        before = turns
        await made.compute(lambda: None)
        assert turns == before >= 1
        asked: Request = request("b", 4, 2)
        await made.engine.generate(asked)
        assert turns > before


@pytest.mark.parametrize("asks", ["generate", "update weights"])
async def test_who_waits_for_an_engine_that_stands_still_is_told_at_the_deadline(
    asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STALL_S", 0.02)
    async with rig() as made:
        go_on = threading.Event()
        standing = asyncio.ensure_future(made.compute(lambda: go_on.wait(60)))  # a step that hangs
        try:
            with pytest.raises(DeadlineExceeded, match=f"wait '{asks}' of 'main' for 'engine' must end within 0.02 s"):
                await (
                    made.engine.generate(request("a", 4, 2))
                    if asks == "generate"
                    else made.engine.update_weights(1, {})
                )
        finally:
            go_on.set()
        await standing
        monkeypatch.setattr(embedded, "STALL_S", 60.0)
        await made.engine.generate(request("a", 4, 2))  # its id is free again


async def test_a_request_whose_slot_is_held_still_comes_no_further_while_others_do_and_those_that_wait_with_them() -> (
    None
):
    async with rig(num_slots=2) as made:
        step = made.slots.step

        def step_but_one() -> list[Completion]:
            ended = step()
            if made.slots._length[0] > 4:  # its prompt, and a token
                made.slots._length[0] -= 1
            return ended

        made.slots.step = step_but_one  # type: ignore[method-assign]
        (reached, go_on), (again, go_on_again) = made.forward.stop_at(4), made.forward.stop_at(8)
        names = ("still", "moves", "waits")
        asking = [asyncio.create_task(made.engine.generate(request(name, 3, 40))) for name in names]
        await made.until(reached)
        before = made.engine.progress()
        go_on.set()
        await made.until(again)
        after = made.engine.progress()
        assert before["still"] == after["still"] == 1 and 0 < before["moves"] < after["moves"]
        assert after["waits"] < before["waits"] < 0
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert made.engine.progress() == {}
        go_on_again.set()
