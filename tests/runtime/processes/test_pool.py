"""The pool: arrays and bytes both ways, errors, bounds, and workers that are lost. Single failing items: test_rewards.py."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from rondo.runtime.errors import Closed, ConfigError, DeadlineExceeded
from rondo.runtime.processes import pool as pool_module
from rondo.runtime.processes import pool_worker
from rondo.runtime.processes.pool import Outcome, Pool
from rondo.runtime.processes.process import children
from rondo.runtime.values import Encoded, encode

FUNCTIONS = '''
import os, signal, sys, time
from pathlib import Path

from rondo.runtime.errors import ConfigError, CorruptData

def open_scripted(**settings):
    def scripted(item):
        """Does what the item says."""
        match item:
            case ["echo", value]:
                return value
            case ["settings"]:
                return settings
            case ["zeros", size]:
                import numpy as np
                return {"zeros": np.zeros(size, np.uint8), "size": size}
            case ["corrupt"]:
                try:
                    1 / 0
                except ZeroDivisionError as error:
                    raise CorruptData("the medium must be whole, got half") from error
            case ["raise"]:
                raise LookupError("no such thing")
            case ["object"]:
                return object()
            case ["die"]:
                os.kill(os.getpid(), signal.SIGSEGV)
            case ["hang", started]:
                Path(started).touch()
                while True:
                    time.sleep(1000)
            case ["wait", file]:
                while not Path(file).exists():
                    time.sleep(0.001)
                return file
            case ["garble"]:
                for entry in [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]:
                    if os.readlink(f"/proc/self/fd/{entry}").startswith("socket"):
                        os.write(int(entry), b"\\xff" * 100)
                return None
            case ["fork", how]:
                child = os.fork()
                if child:
                    os.waitpid(child, 0)
                    return "worker"
                if how == "raise":
                    raise LookupError("child")
                return "child"
            case ["answer", request]:
                from rondo.runtime.processes.pool_worker import frame_of
                from rondo.runtime.values import encode
                head, _ = frame_of(request, [(encode("not what was asked"), None, None, None)])
                for entry in [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]:
                    if os.readlink(f"/proc/self/fd/{entry}").startswith("socket"):
                        os.write(int(entry), head)
                return "late"
            case ["modules"]:
                return [name for name in ("numpy", "torch", "pydantic", "asyncio", "decimal") if name in sys.modules]

    return scripted

def open_wrong(**settings):
    raise ConfigError(f"level must be 1, got {settings['level']}. Change it")

def open_forking(**settings):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    return lambda item: "child" if child == 0 else item

def open_broken(**settings):
    return settings["no such setting"]
'''


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "pool_functions.py"
    file.write_text(FUNCTIONS)
    return str(file)


def made(functions: str, name: str = "open_scripted", **options: Any) -> Pool:
    settings = options.pop("settings", {})
    options = {"work": "test", "source": "test.function", "deadline_s": 30.0, "load_deadline_s": 120.0} | options
    return Pool(f"{functions}:{name}", settings, **options)


@asynccontextmanager
async def pool_of(functions: str, **options: Any) -> AsyncIterator[Pool]:
    """A pool that is proved to have left nothing, however the test ends."""
    before = open_files()
    async with made(functions, **options) as pool:
        yield pool
        pids = pool.stats().pids
    assert pool.stats().pids == ()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]  # noqa: ASYNC240
    assert not open_files() - before  # garbage of other tests may go meanwhile


def open_files() -> Counter[str]:
    targets = [str(path.readlink()) for path in list(Path("/proc/self/fd").iterdir()) if path.is_symlink()]
    return Counter(target for target in targets if target != os.devnull)


def items(*values: Any) -> list[Encoded]:
    return [encode(value) for value in values]


VALUES: list[Any] = [
    None,
    [1, "ü", {"a": [True, 0.5]}],
    b"\x00\xff",
    np.arange(12, dtype=np.float32).reshape(3, 4).T,
    [b"", {"x": np.zeros((0, 3), np.int64), "y": np.arange(5, dtype=np.int16)}, "z"],
]


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, np.ndarray):
        return (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and bool((ours == theirs).all())
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and bool(ours == theirs)


async def test_values_of_json_bytes_and_arrays_travel_both_ways_side_by_side(functions: str) -> None:
    async with pool_of(functions) as pool:
        outcomes = await pool.run(items(*(["echo", value] for value in VALUES)))
    assert all(same(value, outcome.value) for value, outcome in zip(VALUES, outcomes, strict=True))


async def test_settings_reach_the_function_that_opens(functions: str) -> None:
    async with pool_of(functions, settings={"level": 2, "names": ["a"]}) as pool:
        assert await pool.run(items(["settings"])) == [Outcome({"level": 2, "names": ["a"]})]


async def test_a_worker_of_json_imports_nothing_heavy(functions: str) -> None:
    async with pool_of(functions) as pool:
        assert await pool.run(items(["modules"])) == [Outcome([])]


def test_arrays_larger_than_any_socket_buffer_arrive_whole_on_both_kinds_of_loop(functions: str) -> None:
    array = np.random.default_rng(0).integers(0, 255, 24 << 20, np.uint8)

    async def echoed() -> None:
        async with pool_of(functions) as pool:
            [outcome] = await pool.run(items(["echo", array]))
            np.testing.assert_array_equal(outcome.value, array)

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(echoed())


async def test_an_error_of_the_tree_is_its_text_and_another_one_its_traceback(functions: str) -> None:
    async with pool_of(functions) as pool:
        known, unknown, no_value, good = await pool.run(items(["corrupt"], ["raise"], ["object"], ["echo", 1]))
    assert known == Outcome(None, text := "the medium must be whole, got half", "CorruptData", brief=text)
    assert unknown.kind == "LookupError" and unknown.error is not None
    assert unknown.error.startswith("Traceback") and unknown.error.endswith("LookupError: no such thing")
    assert "pool_functions.py" in unknown.error and "pool_worker.py" not in unknown.error
    assert unknown.brief is not None and unknown.brief.startswith("LookupError: no such thing (")
    assert unknown.brief.endswith("pool_functions.py:24)")
    assert no_value.brief is not None and "value must be of a type that travels" in no_value.brief
    assert good == Outcome(1)


async def test_what_cannot_travel_is_refused_where_it_is_handed_in() -> None:
    with pytest.raises(TypeError, match=r"^value must be of a type that travels .*, got object"):
        encode(object())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("open_wrong", r"^level must be 1, got 2. Change it$"),
        (
            "open_broken",
            r"^test.function must load without errors, got KeyError: 'no such setting' \(.*/pool_functions.py:\d+\). Correct it$",
        ),
    ],
)
async def test_a_function_that_cannot_be_opened_stops_the_start(functions: str, name: str, text: str) -> None:
    pool = made(functions, name=name, settings={"level": 2}, num_workers=2)
    with pytest.raises(ConfigError, match=text):
        await pool.start()
    assert pool.stats().pids == ()


async def test_an_answer_beyond_its_bound_is_an_error_of_its_item_alone(functions: str) -> None:
    async with pool_of(functions, max_bytes=1 << 16) as pool:
        large, small, exact = await pool.run(items(["zeros", 1 << 20], ["zeros", 1 << 10], ["zeros", 1 << 16]))
        text = "what an item returns must have at most 65536 bytes, got 1048576. Return less"
        assert large == Outcome(None, text, "OutOfSpace", brief=text)
        assert (small.value["size"], exact.value["size"]) == (1 << 10, 1 << 16)
        assert pool.stats().num_restarts == 0


def test_a_worker_whose_parent_died_with_an_answer_unread_ends_without_a_word() -> None:
    mine, parents = socket.socketpair()
    with mine:
        mine.sendall(b"an answer")
        parents.close()
        assert pool_worker._receive(mine) is None


async def test_a_function_that_writes_into_our_socket_costs_the_worker(functions: str) -> None:
    async with pool_of(functions) as pool:
        [bad] = await pool.run(items(["garble"]))
        assert bad.error == "test must return, got its process killed by SIGKILL"
        assert await pool.run(items(["echo", 1])) == [Outcome(1)]


async def test_a_process_that_a_function_forks_and_that_returns_into_our_loop_answers_nobody(functions: str) -> None:
    async with pool_of(functions) as pool:
        forked = items(["fork", "return"], ["echo", 1], ["fork", "raise"], ["echo", 2])
        assert await pool.run(forked) == [Outcome("worker"), Outcome(1), Outcome("worker"), Outcome(2)]
        assert await pool.run(items(["echo", 3])) == [Outcome(3)]
    async with pool_of(functions, name="open_forking") as pool:
        assert await pool.run(items(1, 2)) == [Outcome(1), Outcome(2)]


@pytest.mark.parametrize("request_number", [0, 2])
async def test_an_answer_to_another_request_costs_the_worker_and_is_nobodys(
    functions: str, request_number: int
) -> None:
    async with pool_of(functions) as pool:
        [bad] = await pool.run(items(["answer", request_number]))
        assert bad.error == "test must return, got its process killed by SIGKILL"
        [several] = await pool.run(items(["answer", 1]))  # the number of a worker's first request
        assert several.value == "not what was asked"
        assert await pool.run(items(["echo", 1])) == [Outcome(1)]


async def test_a_crash_leaves_the_arrays_of_the_items_beside_it_whole(functions: str) -> None:
    array = np.arange(1 << 16)
    async with pool_of(functions) as pool:
        before, crashed, after = await pool.run(items(["echo", array], ["die"], ["echo", array]))
        np.testing.assert_array_equal(before.value, array)
        np.testing.assert_array_equal(after.value, array)
        assert crashed.error == "test must return, got its process killed by SIGSEGV"
        stats = pool.stats()
        assert (stats.num_done, stats.num_errors, stats.num_timed_out, stats.num_restarts) == (2, 1, 0, 2)


async def test_a_stopped_worker_that_had_not_begun_costs_its_item_nothing(
    functions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.monotonic_ns
    async with pool_of(functions) as pool:
        (process,) = children(pool.stats().pids[0])
        os.kill(process.pid, signal.SIGSTOP)
        asked = asyncio.create_task(pool.run(items(["echo", 1])))
        (worker,) = pool._workers
        while not worker._request:  # noqa: ASYNC110 - until the item is handed over, in one step of the loop
            await asyncio.sleep(0)
        with monkeypatch.context() as later:
            later.setattr(time, "monotonic_ns", lambda: now_ns() + 31 * 10**9)
            worker._check_deadline()
        assert await asked == [Outcome(1)]
        assert (pool.stats().num_timed_out, pool.stats().num_restarts) == (0, 1)


async def test_an_answer_that_waits_for_a_busy_loop_is_no_overdue_item(
    functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = time.monotonic_ns
    async with pool_of(functions) as pool:
        file = tmp_path / "go"
        asked = asyncio.create_task(pool.run(items(["echo", 1], ["wait", str(file)])))
        (worker,) = pool._workers
        while not worker._request:  # noqa: ASYNC110 - until the items are handed over, in one step of the loop
            await asyncio.sleep(0)
        file.touch()
        assert select.select([worker._socket], [], [], 60)[0]  # the loop stands still meanwhile
        monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + 31 * 10**9)
        worker._check_deadline()
        assert await asked == [Outcome(1), Outcome(str(file))]
        monkeypatch.undo()
        assert await pool.run(items(["echo", 3])) == [Outcome(3)]
        assert (pool.stats().num_timed_out, pool.stats().num_restarts) == (0, 0)


async def test_only_so_many_calls_are_let_in_and_closing_wakes_those_outside(functions: str, tmp_path: Path) -> None:
    async with pool_of(functions, num_workers=2, max_waiting=3) as pool:
        calls = [asyncio.create_task(pool.run(items(["hang", str(tmp_path / str(i))]))) for i in range(9)]
        while sum((tmp_path / str(i)).exists() for i in range(9)) < 2:  # noqa: ASYNC110 - two processes begin on their own
            await asyncio.sleep(0)
        stats = pool.stats()
        assert (stats.num_waiting, stats.num_at_door) == (3, 4)
        await pool.close()
        assert all(isinstance(error, Closed) for error in await asyncio.gather(*calls, return_exceptions=True))
        assert pool.stats().num_at_door == 0


async def test_a_place_inside_goes_to_the_next_also_when_its_call_was_cancelled(functions: str) -> None:
    async with pool_of(functions, max_waiting=0) as pool:
        calls = [asyncio.create_task(pool.run(items(["echo", i]))) for i in range(6)]
        await asyncio.sleep(0)
        for call in calls[:3]:
            call.cancel()
        outcomes = await asyncio.gather(*calls[3:])
        assert [outcome.value for [outcome] in outcomes] == [3, 4, 5]


async def test_who_waits_for_workers_that_do_not_get_on_is_told(
    functions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stands(*_: Any) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(pool_module._Worker, "run", stands)
    monkeypatch.setattr(pool_module, "_SPARE_S", 0.02)
    async with pool_of(functions, deadline_s=0.0, load_deadline_s=60.0) as pool:
        pool._load_deadline_s = 0.0  # they have loaded
        with pytest.raises(DeadlineExceeded, match=r"wait 'test' of 'main' for 'test workers' must end within 0\.02 s"):
            await pool.run(items(["echo", 1]))


async def test_files_of_the_working_directory_are_imported_in_nobodys_place(
    functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("random", "queue", "secrets", "socket", "orjson", "hmac"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(__file__)\n")
    (tmp_path / "mine_of_tests.py").write_text("def opened():\n    return lambda item: [item]\n")
    monkeypatch.chdir(tmp_path)
    async with pool_of(functions) as pool:
        assert await pool.run(items(["echo", 1])) == [Outcome(1)]
    async with Pool(
        "mine_of_tests:opened", {}, work="test", source="test", deadline_s=30.0, load_deadline_s=120.0
    ) as pool:
        assert await pool.run(items(1)) == [Outcome([1])]
