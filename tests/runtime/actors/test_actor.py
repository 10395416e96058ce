"""Calls between real ends of real sockets: order, deadlines, cancellation, restarts, the bounded mailbox.

Run as a script this file is the server process that the restart tests kill:  python test_actor.py ADDRESS
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from rondo.runtime.actors import actor as actor_module
from rondo.runtime.actors import ref as ref_module
from rondo.runtime.actors import transport as wire
from rondo.runtime.actors.actor import CLEANUP_S, Actor, Server, answering, endpoint, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.actors.transport import FrameProtocol, connect, pack
from rondo.runtime.errors import (
    Closed,
    DeadlineExceeded,
    PeerGone,
    ProtocolError,
    Refused,
    RemoteError,
)
from rondo.runtime.waits import PROCESS, pending, waiting

TOKEN = "a token of this run"


class Probe(Actor):
    """Answers, fails or holds, and lets a test see when."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.cancelled: list[Any] = []
        self.most_at_once = 0
        self._open = 0
        self._changed = asyncio.Condition()
        self._released: set[Any] = set()

    @endpoint
    async def echo(self, value: Any, *, times: int = 1) -> Any:
        return value if times == 1 else [value] * times

    @endpoint
    async def log(self, value: Any) -> int:
        self.begun.append(value)
        return len(self.begun)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def hold(self, key: Any) -> Any:
        """Begins, and ends when the test releases `key`."""
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        self.begun.append(key)
        try:
            await self._notify()
            async with self._changed:
                await self._changed.wait_for(lambda: key in self._released)
            return key
        except asyncio.CancelledError:
            self.cancelled.append(key)
            asyncio.get_running_loop().create_task(self._notify())
            raise
        finally:
            self._open -= 1

    @endpoint
    async def hold_answered(self, key: Any) -> Any:
        """As `hold`, and answers as soon as it has begun."""
        asyncio.get_running_loop().call_soon(answering(), key)
        return await self.hold(key)

    @endpoint
    async def clean_up(self, key: Any) -> None:
        """Holds until it is cancelled, and then until the test releases `key`; `begun` says how far it came."""
        try:
            await self.hold("for ever")
        finally:
            self.begun.append("cleans up")
            await self.hold(key)
            self.begun.append("clean")

    @endpoint
    async def hold_once(self, key: str, marker: str) -> int:
        """Holds in the first process that is asked, answers in the next."""
        path = Path(marker)
        if not path.exists():  # noqa: ASYNC240
            path.touch()  # noqa: ASYNC240
            await self.hold(key)
        return os.getpid()

    @endpoint
    async def until_begun(self, count: int) -> None:
        await self.begun_count(count)

    @endpoint
    async def fail(self, kind: str) -> None:
        raise {"value": ValueError("lr must be positive, got -1"), "key": KeyError("x"), "refused": Refused("late epoch"),
               "zero": ZeroDivisionError("division by zero"), "cancelled": asyncio.CancelledError(),
               "deadline": DeadlineExceeded("round", "actor-0.0", "coordinator", 9.0), "gone": PeerGone("third"),
               }[kind]  # fmt: skip

    @endpoint
    async def unsendable(self) -> object:
        return object()

    async def not_an_endpoint(self) -> None: ...

    async def begun_count(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.begun) >= count)

    async def cancelled_count(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.cancelled) >= count)

    async def release(self, *keys: Any) -> None:
        self._released.update(keys)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test under uvloop and asyncio, and looks for tasks and waits that it left."""

    async def checked(tmp_path: Path) -> None:
        await test(tmp_path)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert pending() == ()

    @pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
    def on_a_loop(run: Callable[[Coroutine[Any, Any, None]], None], tmp_path: Path) -> None:
        run(checked(tmp_path))

    on_a_loop.__name__ = test.__name__
    on_a_loop.__doc__ = test.__doc__
    return on_a_loop


@asynccontextmanager
async def served(tmp_path: Path, **options: Any) -> AsyncGenerator[tuple[Probe, ActorRef, Server]]:
    """A probe, a reference to it and its server, over a Unix socket."""
    probe = Probe()
    async with await serve(probe, f"unix:{tmp_path}/probe", token=TOKEN, name="probe-0", **options) as server:
        with ActorRef(server.address, token=TOKEN, peer="probe-0") as ref:
            yield probe, ref, server
    assert not (tmp_path / "probe").exists()


def another_ref(server: Server, **options: Any) -> ActorRef:
    return ActorRef(server.address, **{"token": TOKEN, "peer": "probe-0", **options})


async def first_step() -> None:
    """Lets what was just started begin."""
    await asyncio.sleep(0)


# ---------------------------------------------------------------------------------------------- calls


@on_both_loops
async def test_a_call_gives_the_endpoints_result(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, ref, _):
        assert await ref.call("echo", {"a": [1, None, "ü"]}) == {"a": [1, None, "ü"]}
        assert await ref.call("echo", "x", times=2, deadline_s=None) == ["x", "x"]


@on_both_loops
async def test_an_endpoint_may_answer_before_it_ends_and_then_has_its_place_free_again(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=2) as (probe, ref, server):
        assert [await ref.call("hold_answered", key) for key in (1, 2)] == [1, 2]
        assert server.stats().num_running == 2
        third = asyncio.create_task(ref.call("echo", 3))
        await probe.begun_count(2)
        await probe.release(1)
        assert await third == 3 and ref.stats().num_on_the_way == 0


@on_both_loops
async def test_a_server_that_closes_ends_calls_that_are_answered_already(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, _):
        assert await ref.call("hold_answered", 1) == 1
    assert probe.cancelled == [1]


@on_both_loops
async def test_an_answering_endpoint_outside_a_server_just_returns(tmp_path: Path) -> None:
    probe = Probe()
    await probe.release(1)
    assert await probe.hold_answered(1) == 1


@on_both_loops
async def test_calls_work_over_tcp_on_a_port_of_the_systems_choice(tmp_path: Path) -> None:
    async with await serve(Probe(), "tcp:127.0.0.1:0", token=TOKEN, name="probe-0") as server:
        assert server.address.startswith("tcp:127.0.0.1:") and not server.address.endswith(":0")
        with another_ref(server) as ref:
            assert await ref.call("echo", b"raw") == b"raw"


@on_both_loops
async def test_arrays_and_bytes_travel_at_any_depth_in_both_directions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    value: dict[str, Any] = {
        "0-d": np.array(1.5, np.float32),
        "empty": np.empty((0, 3), np.int32),
        "bfloat16": rng.integers(0, 1 << 16, (5, 3)).astype(np.uint16),
        "deep": [[{"media": [b"", b"jpeg", rng.standard_normal((300, 1000)).astype(np.float32)]}], None],
    }
    async with served(tmp_path) as (_, ref, _):
        arrived = await ref.call("echo", value)
    media, expected = arrived["deep"][0][0]["media"], value["deep"][0][0]["media"]
    assert list(media[:2]) == [b"", b"jpeg"]
    pairs = [(arrived[key], value[key]) for key in ("0-d", "empty", "bfloat16")] + [(media[2], expected[2])]
    for got, want in pairs:
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_array_equal(got, want)


@on_both_loops
async def test_many_calls_at_once_keep_their_answers_apart_and_begin_in_order(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, _):
        calls = [ref.call("log", i) for i in range(1000)]
        assert await asyncio.gather(*calls) == list(range(1, 1001))
        assert probe.begun == list(range(1000))


@on_both_loops
async def test_calls_of_one_caller_begin_in_order_through_a_full_mailbox(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=3) as (probe, ref, _):
        await asyncio.gather(*[ref.call("log", i) for i in range(100)])
        assert probe.begun == list(range(100))


@on_both_loops
async def test_an_unknown_endpoint_is_told_and_other_methods_are_out_of_reach(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, ref, _):
        for name in ("ecco", "not_an_endpoint", "__init__", "rondo.nothing"):
            with pytest.raises(ValueError) as caught:
                await ref.call(name)
            assert str(caught.value) == (
                "endpoint of probe-0 must be one of clean_up, echo, fail, hold, hold_answered, hold_once, log, pid, unsendable, "
                f"until_begun, got {name!r}"
            )


@pytest.mark.parametrize("name", ["plain", "with_deadline"])
def test_an_endpoint_is_a_coroutine_function_without_the_callers_keywords(name: str) -> None:
    def plain(self: Actor) -> None: ...

    async def with_deadline(self: Actor, deadline_s: float) -> None: ...

    with pytest.raises(TypeError, match="must be `async def` without parameters named deadline_s or retry"):
        endpoint({"plain": plain, "with_deadline": with_deadline}[name])  # type: ignore[type-var]


# ---------------------------------------------------------------------------------------------- errors


@on_both_loops
async def test_a_remote_error_arrives_with_its_type_and_remote_traceback(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, ref, server):
        kinds = {
            "value": ValueError,
            "key": KeyError,
            "refused": Refused,
            "deadline": DeadlineExceeded,
            "gone": PeerGone,
        }
        for name, kind in kinds.items():
            with pytest.raises(kind) as caught:
                await ref.call("fail", name, retry=True)
            assert type(caught.value) is kind
            assert "in fail\n" in caught.value.remote_traceback  # type: ignore[attr-defined]
            assert "Remote traceback (probe-0)" in caught.value.__notes__[0]
        assert server.stats().num_errors == len(kinds)


@on_both_loops
async def test_an_error_of_a_type_that_does_not_travel_is_a_remote_error(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, ref, _):
        for kind, name in (("zero", "ZeroDivisionError"), ("cancelled", "asyncio.exceptions.CancelledError")):
            with pytest.raises(RemoteError) as caught:
                await ref.call("fail", kind)
            assert caught.value.type_name == name


@on_both_loops
async def test_wrong_arguments_and_unsendable_results_are_type_errors_at_the_caller(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, ref, _):
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'value'"):
            await ref.call("echo")
        with pytest.raises(TypeError, match="must be JSON, bytes or a numpy array, got object"):
            await ref.call("unsendable")
        with pytest.raises(TypeError, match="must be JSON, bytes or a numpy array, got object"):
            await ref.call("echo", object())
        assert await ref.call("echo", 1) == 1


@on_both_loops
async def test_what_is_larger_than_the_other_side_takes_fails_alone_and_the_connection_stays(tmp_path: Path) -> None:
    async with served(tmp_path, max_frame_bytes=1000) as (_, ref, server):
        with pytest.raises(ValueError, match="Send it in parts"):
            await ref.call("echo", bytes(1001))
        with another_ref(server, max_frame_bytes=10) as narrow:
            with pytest.raises(ValueError, match="Send it in parts") as caught:
                await narrow.call("echo", bytes(11))
            assert "in _run" in caught.value.remote_traceback  # type: ignore[attr-defined]
            assert await narrow.call("echo", bytes(10)) == bytes(10)
            assert narrow.stats().num_connects == 1


# ---------------------------------------------------------------------------------------------- deadlines, cancellation


async def over(probe: Probe, ref: ActorRef, server: Server, running: int) -> None:
    """Returns once so many calls run and no more; all others were cancelled, if they had begun before their deadline."""
    await ref.call("rondo.ping")  # answered behind all that was sent before
    while server.stats().num_running > running:  # noqa: ASYNC110 - only the server tells
        await asyncio.sleep(0)
    assert len(probe.cancelled) == len(probe.begun) - running and len(set(probe.cancelled)) == len(probe.cancelled)


@on_both_loops
async def test_past_its_deadline_a_call_raises_naming_both_sides_and_is_cancelled_at_the_actor(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, server):
        await ref.call("rondo.ping")
        with pytest.raises(DeadlineExceeded) as caught:
            await ref.call("hold", 1, deadline_s=0.02)
        error = caught.value
        assert (error.name, error.peer, error.deadline_s) == ("call hold", "probe-0", 0.02)
        assert error.waiter == PROCESS.waiter
        await over(probe, ref, server, running=0)
        assert await ref.call("echo", 1) == 1


@on_both_loops
async def test_of_calls_on_the_way_only_the_late_one_ends(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, server):
        await ref.call("echo", 1)
        patient = asyncio.create_task(ref.call("hold", "patient", deadline_s=60))
        endless = asyncio.create_task(ref.call("hold", "endless", deadline_s=None))
        with pytest.raises(DeadlineExceeded):
            await ref.call("hold", "hasty", deadline_s=0.02)
        await over(probe, ref, server, running=2)
        await probe.release("patient", "endless")
        assert await asyncio.gather(*[patient, endless]) == ["patient", "endless"]
        assert set(probe.cancelled) <= {"hasty"}


@on_both_loops
async def test_each_of_several_late_calls_ends_at_its_own_deadline(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, server):
        await ref.call("echo", 1)
        deadlines_s = [60, 0.06, 0.02, 0.04]
        calls = [asyncio.create_task(ref.call("hold", deadline_s, deadline_s=deadline_s)) for deadline_s in deadlines_s]
        for call in calls[1:]:
            with pytest.raises(DeadlineExceeded):
                await call
        await over(probe, ref, server, running=1)
        await probe.release(60)
        assert await calls[0] == 60


@on_both_loops
async def test_cancelling_a_call_cancels_it_at_the_actor(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, _):
        call = asyncio.create_task(ref.call("hold", 1))
        await probe.begun_count(1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await probe.cancelled_count(1)


@on_both_loops
async def test_calls_cancelled_at_any_moment_leave_nothing_behind(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=4) as (_, ref, server):
        await ref.call("echo", 1)
        for num_steps in range(12):
            calls = [asyncio.create_task(ref.call("hold", i)) for i in range(10)]
            for _ in range(num_steps):
                await first_step()
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        # Room for a call returns with the actor's last word on each of the cancelled ones.
        assert await asyncio.gather(*[ref.call("echo", i) for i in range(20)]) == list(range(20))
        stats = server.stats()
        assert (stats.num_running, stats.num_queued) == (0, 0)
        assert (ref.stats().num_on_the_way, ref.stats().num_queued) == (0, 0)


@on_both_loops
async def test_a_callers_disconnect_cancels_its_calls_and_no_others(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, server):
        kept = asyncio.create_task(ref.call("hold", "kept"))
        leaving = another_ref(server)
        calls = [asyncio.create_task(leaving.call("hold", i)) for i in range(3)]
        await probe.begun_count(4)
        leaving.close()
        for call in calls:
            with pytest.raises(Closed):
                await call
        await probe.cancelled_count(3)
        await probe.release("kept")
        assert await kept == "kept"
        assert sorted(probe.cancelled) == [0, 1, 2]


@on_both_loops
async def test_what_a_cancelled_call_cleans_up_is_not_cut_off_by_its_callers_end_or_the_servers(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, server):
        call = asyncio.create_task(ref.call("clean_up", "key"))
        await probe.begun_count(1)
        call.cancel()
        await probe.begun_count(3)
        ref.close()  # its connection ends while the call cleans up
        while server.stats().num_callers:  # noqa: ASYNC110 - only the server tells
            await asyncio.sleep(0)
        closing = server.close()
        assert [wait.deadline_s for wait in pending() if wait.name == "cleanup"] == [CLEANUP_S]
        await probe.release("key")
        await closing
        assert probe.begun == ["for ever", "cleans up", "key", "clean"]


@on_both_loops
async def test_a_cleanup_that_does_not_end_is_cancelled_again_at_its_deadline(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor_module, "CLEANUP_S", 0.02)
        async with served(tmp_path) as (probe, ref, _):
            call = asyncio.create_task(ref.call("clean_up", "never"))
            await probe.begun_count(1)
            call.cancel()
            await probe.cancelled_count(2)
            assert probe.cancelled == ["for ever", "never"] and "clean" not in probe.begun


@on_both_loops
async def test_closing_the_server_cancels_its_calls_and_waits_for_their_end(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, server):
        call = asyncio.create_task(ref.call("hold", 1))
        await probe.begun_count(1)
        await server.close()
        assert probe.cancelled == [1]
        assert server.stats().num_running == server.stats().num_callers == 0
        with pytest.raises(PeerGone, match="probe-0 must stay until it has answered"):
            await call
        with pytest.raises(PeerGone, match="must have a listener"):
            await ref.call("echo", 1)


@on_both_loops
async def test_a_closed_reference_stays_closed(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, ref, _):
        await ref.call("echo", 1)
        ref.close()
        with pytest.raises(Closed, match="Make a new one"):
            await ref.call("echo", 1, retry=True)


@on_both_loops
async def test_a_call_is_listed_as_a_wait_while_it_lasts(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, _):
        for key in (1, 2):  # once with and once without a connection at hand
            call = asyncio.create_task(ref.call("hold", key, deadline_s=30))
            await probe.begun_count(key)
            assert [(wait.name, wait.peer, wait.deadline_s) for wait in pending()] == [("call hold", "probe-0", 30)]
            await probe.release(key)
            await call


# ---------------------------------------------------------------------------------------------- mailbox


@on_both_loops
async def test_a_full_mailbox_holds_calls_back_at_the_caller(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=2) as (probe, ref, server):
        calls = [asyncio.create_task(ref.call("hold", i)) for i in range(5)]
        await probe.begun_count(2)
        assert (ref.stats().num_on_the_way, ref.stats().num_queued) == (2, 3)
        assert (server.stats().num_running, server.stats().num_queued) == (2, 0)
        await probe.release(0)
        await probe.begun_count(3)
        assert ref.stats().num_queued == 2
        await probe.release(*range(5))
        assert await asyncio.gather(*calls) == [0, 1, 2, 3, 4]
        assert probe.most_at_once == 2
        assert probe.begun == [0, 1, 2, 3, 4]


@on_both_loops
async def test_a_newcomer_does_not_overtake_calls_that_wait_for_room(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=2) as (probe, ref, _):

        async def hold_then_log() -> None:
            await ref.call("hold", "a")
            await ref.call("log", "newcomer")

        calls = [hold_then_log(), ref.call("hold", "b"), ref.call("log", "first"), ref.call("log", "second")]
        tasks = [asyncio.create_task(call) for call in calls]
        await probe.begun_count(2)
        await probe.release("a", "b")
        await asyncio.gather(*tasks)
        assert probe.begun == ["a", "b", "first", "second", "newcomer"]


@on_both_loops
async def test_callers_together_run_no_more_than_the_mailbox(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=2) as (probe, ref, server):
        running = [asyncio.create_task(ref.call("hold", i)) for i in range(2)]
        await probe.begun_count(2)
        with another_ref(server) as other:
            await other.call("rondo.ping")
            queued = asyncio.create_task(other.call("hold", "queued"))
            await first_step()
            await other.call("rondo.ping")  # answered behind it: the call has arrived
            assert (server.stats().num_running, server.stats().num_queued) == (2, 1)
            queued.cancel()
            await asyncio.gather(queued, return_exceptions=True)
            await other.call("rondo.ping")
            assert server.stats().num_queued == 0
            queued = asyncio.create_task(other.call("hold", "next"))
            await first_step()
            await other.call("rondo.ping")
            await probe.release(0, 1, "next")
            assert await queued == "next"
        await asyncio.gather(*running)
        assert probe.begun == [0, 1, "next"]
        assert probe.most_at_once == 2


@on_both_loops
async def test_the_queued_calls_of_a_caller_that_left_never_begin(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=1) as (probe, ref, server):
        running = asyncio.create_task(ref.call("hold", 1))
        await probe.begun_count(1)
        stranger = await raw_caller(server)
        stranger.call(1, "log", "queued")
        await stranger.frame()  # ping's answer, sent behind it
        assert server.stats().num_queued == 1
        stranger.transport.close()
        await stranger.ended
        await another_ref_ping(server)
        assert server.stats().num_queued == 0
        await probe.release(1)
        await running
        assert probe.begun == [1]


@on_both_loops
async def test_a_cancellation_is_read_however_full_the_mailbox_is(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=1) as (probe, ref, _):
        first = asyncio.create_task(ref.call("hold", 1))
        second = asyncio.create_task(ref.call("hold", 2))
        await probe.begun_count(1)
        first.cancel()
        await probe.begun_count(2)
        await probe.release(2)
        assert await second == 2
        assert probe.cancelled == [1]


@on_both_loops
async def test_an_actor_tells_what_it_waits_for_however_full_its_mailbox_is(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=1) as (probe, ref, _):
        calls = [asyncio.create_task(ref.call("hold", key)) for key in (1, 2)]
        await probe.begun_count(1)
        names = [wait["name"] for wait in (await ref.call("rondo.waits"))["waits"]]
        assert names == ["call hold", "call hold", "call rondo.waits"]
        await probe.release(1, 2)
        await asyncio.gather(*calls)


@on_both_loops
async def test_waiting_for_room_ends_at_the_deadline(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=1) as (probe, ref, _):
        first = asyncio.create_task(ref.call("hold", 1))
        await probe.begun_count(1)
        with pytest.raises(DeadlineExceeded):
            await ref.call("hold", 2, deadline_s=0.02)
        await probe.release(1)
        assert await first == 1
        assert await ref.call("echo", 3) == 3
        assert probe.begun == [1]


async def another_ref_ping(server: Server) -> None:
    with another_ref(server) as ref:
        await ref.call("rondo.ping")


# ---------------------------------------------------------------------------------------------- strangers


class RawCaller(FrameProtocol):
    """A caller that keeps no rule by itself."""

    def __init__(self) -> None:
        super().__init__("probe-0", 1 << 20)
        self.frames: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def frame_received(self, kind: int, call_id: int, header: memoryview, buffers: Any) -> None:
        self.frames.put_nowait((kind, wire.unpack(header, buffers)))

    def lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)

    async def frame(self) -> tuple[int, Any]:
        return await self.frames.get()

    def call(self, call_id: int, name: str, *arguments: Any) -> None:
        """Sends a call, and a ping behind it."""
        self.send(wire.CALL, call_id, *pack((name, arguments, {})))
        self.send(wire.CALL, call_id + 1_000_000, *pack(("rondo.ping", [], {})))


async def raw_caller(server: Server, token: str = TOKEN) -> RawCaller:
    caller = await connect(server.address, RawCaller)
    caller.say_hello(token, "stranger")
    assert (await caller.frame())[0] == wire.WELCOME
    return caller


@on_both_loops
async def test_a_wrong_token_is_refused_at_once_even_with_retry(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, _, server):
        with another_ref(server, token="a guess") as ref:
            with pytest.raises(Refused, match="probe-0 refused: the token must be the run's own"):
                await ref.call("echo", 1, retry=True)
        await another_ref_ping(server)


@on_both_loops
async def test_calls_behind_a_wrong_token_never_run(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, _, server):
        caller = await connect(server.address, RawCaller)
        caller.say_hello("a guess", "stranger")
        caller.call(1, "log", 1)
        assert await caller.frame() == (
            wire.REFUSAL, ["Refused", "the token must be the run's own, got another. Read it from the run-time directory"]
        )  # fmt: skip
        await caller.ended
        assert probe.begun == []
        assert server.stats().num_calls == 0


@on_both_loops
async def test_a_caller_that_ignores_the_mailbox_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path, mailbox=1) as (probe, _, server):
        caller = await raw_caller(server)
        caller.send(wire.CALL, 1, *pack(("hold", [1], {})))
        caller.send(wire.CALL, 2, *pack(("hold", [2], {})))
        kind, (name, text) = await caller.frame()
        assert (kind, name) == (wire.REFUSAL, "ProtocolError")
        assert text.endswith("have at most 1 on the way, got call 2 as number 2")
        await caller.ended
        await probe.cancelled_count(1)


@on_both_loops
async def test_a_caller_that_breaks_the_protocol_is_refused_and_others_stay(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, ref, server):
        await ref.call("echo", 1)
        broken: list[tuple[int, bytes]] = [
            (wire.CALL, b"{"), (wire.CALL, b"[]"), (wire.CALL, b'["echo",{},{}]'), (wire.REPLY, b"1"), (99, b"1"),
        ]  # fmt: skip
        for kind, header in broken:
            caller = await raw_caller(server)
            caller.send(kind, 1, header)
            assert (await caller.frame())[1][0] == "ProtocolError"
            await caller.ended
        assert await ref.call("echo", 2) == 2
        assert ref.stats().num_connects == 1


@on_both_loops
async def test_an_actor_that_breaks_the_protocol_fails_the_calls_on_the_way(tmp_path: Path) -> None:
    class Liar(FrameProtocol):
        def __init__(self) -> None:
            super().__init__("caller", 1 << 20)

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.expect_hello(TOKEN, self.welcome)

        def welcome(self) -> None:
            self.send(wire.WELCOME, 0, b'{"name":"liar","window":9,"max_frame_bytes":1000}')

        def frame_received(self, kind: int, call_id: int, header: memoryview, buffers: Any) -> None:
            self.send(wire.ERROR, call_id, b'{"type":"ValueError"}')

        def lost(self, error: Exception | None) -> None: ...

    listener = await wire.listen(f"unix:{tmp_path}/liar", Liar)
    with ActorRef(listener.address, token=TOKEN, peer="liar") as ref:
        with pytest.raises(ProtocolError, match="an error must arrive as its description"):
            await ref.call("echo", 1)
    listener.close()


# ---------------------------------------------------------------------------------------------- restarts


@asynccontextmanager
async def process(address: str) -> AsyncGenerator[subprocess.Popen[bytes]]:
    """A server in a process of its own, killed at the end."""
    child = subprocess.Popen([sys.executable, __file__, address])  # noqa: ASYNC220  # it is not waited for on the loop
    try:
        yield child
    finally:
        child.kill()
        child.wait()


@on_both_loops
async def test_a_retried_call_outlives_a_killed_server_and_finds_the_next_one(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/probe"
    with ActorRef(address, token=TOKEN, peer="probe-0") as ref:
        early = asyncio.create_task(ref.call("pid", retry=True))  # before anybody listens
        await first_step()
        async with process(address) as first:
            assert await early == first.pid
            marker = str(tmp_path / "held")
            held = asyncio.create_task(ref.call("hold_once", "held", marker, retry=True))
            once = asyncio.create_task(ref.call("hold", "once"))
            await ref.call("until_begun", 2)
            first.send_signal(signal.SIGKILL)
            first.wait()
            with pytest.raises(PeerGone, match="The call may have run"):
                await once
            assert (tmp_path / "probe").exists()  # the dead server's socket file
            async with process(address) as second:
                assert await held == second.pid != first.pid
                assert await ref.call("pid") == second.pid
        assert ref.stats().num_connects == 2


@on_both_loops
async def test_a_call_without_retry_fails_at_once_where_nobody_listens(tmp_path: Path) -> None:
    with ActorRef(f"unix:{tmp_path}/nobody", token=TOKEN, peer="probe-0") as ref:
        with pytest.raises(PeerGone, match="must have a listener"):
            await ref.call("echo", 1)


@on_both_loops
async def test_a_retried_call_ends_at_its_deadline_and_tells_its_last_attempt(tmp_path: Path) -> None:
    waits: list[waiting] = []

    async def nobody(*arguments: Any) -> Any:
        try:
            return await connect(*arguments)
        finally:
            asyncio.get_running_loop().call_soon(waits[-1]._expire)  # the time is over behind the first attempt

    with pytest.MonkeyPatch.context() as patch, ActorRef(f"unix:{tmp_path}/nobody", token=TOKEN, peer="probe-0") as ref:
        patch.setattr(ref_module, "waiting", lambda *what, **how: waits.append(waiting(*what, **how)) or waits[-1])
        patch.setattr(ref_module, "connect", nobody)
        with pytest.raises(DeadlineExceeded) as caught:
            await ref.call("echo", 1, retry=True, deadline_s=60)
        assert caught.value.deadline_s == 60
        assert "Last attempt: unix:" in caught.value.__notes__[0]


@on_both_loops
async def test_a_reference_reconnects_by_itself_after_its_server_came_back(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, ref, server):
        assert await ref.call("echo", 1) == 1
        await server.close()
        async with await serve(Probe(), server.address, token=TOKEN, name="probe-0"):
            assert await ref.call("echo", 2, retry=True) == 2
            assert await ref.call("echo", 3) == 3
        assert ref.stats().num_connects == 2


@on_both_loops
async def test_a_cancelled_call_to_nobody_ends_at_once(tmp_path: Path) -> None:
    with ActorRef(f"unix:{tmp_path}/nobody", token=TOKEN, peer="probe-0") as ref:
        call = asyncio.create_task(ref.call("echo", 1, retry=True))
        await first_step()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


# ---------------------------------------------------------------------------------------------- built in


@on_both_loops
async def test_every_actor_answers_who_it_is_what_it_waits_for_and_where_it_stands(tmp_path: Path) -> None:
    async with served(tmp_path) as (probe, ref, _):
        assert await ref.call("rondo.ping") == {"name": "probe-0", "pid": os.getpid(), "waiter": PROCESS.waiter}
        async with waiting("round", peer="coordinator", deadline_s=60):
            waits = await ref.call("rondo.waits")
        assert waits["waiter"] == PROCESS.waiter
        assert ("round", "coordinator", 60) in [(w["name"], w["peer"], w["deadline_s"]) for w in waits["waits"]]
        assert waits["totals"]["call rondo.ping"] > 0
        held = asyncio.create_task(ref.call("hold", 1))
        await probe.begun_count(1)
        text = await ref.call("rondo.stacks")
        assert "most recent call first" in text  # threads
        assert "in Probe.hold\n" in text  # tasks
        await probe.release(1)
        await held


@on_both_loops
async def test_stats_count_what_happened(tmp_path: Path) -> None:
    async with served(tmp_path) as (_, ref, server):
        assert (ref.stats().connected, ref.stats().num_connects) == (False, 0)
        await asyncio.gather(ref.call("echo", 1), ref.call("fail", "value"), return_exceptions=True)
        stats = server.stats()
        assert (stats.name, stats.num_callers, stats.num_calls, stats.num_errors) == ("probe-0", 1, 2, 1)
        assert (ref.stats().connected, ref.stats().num_calls, ref.stats().num_connects) == (True, 2, 1)


async def main(address: str) -> None:
    async with await serve(Probe(), address, token=TOKEN, name="probe-0"):
        forever: Awaitable[None] = asyncio.get_running_loop().create_future()
        await forever


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
