"""The reward pool: every way in which a reward function can fail, and that it harms nobody else."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvloop

from rondo.roles.rewards.pool import RewardItem, RewardPool, RewardResult
from rondo.runtime.errors import Closed, ConfigError
from rondo.runtime.processes import pool as processes
from rondo.runtime.processes.process import children
from rondo.runtime.waits import pending

FUNCTIONS = '''
import ctypes, os, signal, subprocess, sys
from pathlib import Path

import numpy as np  # a function may bring what it likes

def hang():
    """Stuck in C, where no Python signal handler runs, and without the cores: one thread, and a lock that it has itself."""
    library, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    while True:
        library.pthread_mutex_lock(lock)

def exact(response, label, *, prompt, metadata):
    return float(response == label)

def asks(response, label, *, prompt, metadata, num_tokens, finish_reason=None):
    return {"score": 1.0, "told": [finish_reason, num_tokens]}

def takes_all(response, label, **told):
    return {"score": 1.0, "told": told}

def ranked(responses, label, *, prompt, metadata, num_tokens):
    """Each by its place among all."""
    if "short" in responses:
        return [0.0]
    if "one" in responses:
        return 1.0
    if "hang" in responses:
        hang()
    order = sorted(responses)
    return [{"score": order.index(each), "tokens": num} for each, num in zip(responses, num_tokens)]

async def judged(response, label, *, prompt, metadata):
    """Answers once all three of a call are asked."""
    import asyncio
    if response == "raise":
        raise LookupError("planted")
    if response == "hang":
        await asyncio.Event().wait()
    metadata["seen"] = response
    met = globals().setdefault("met", asyncio.Barrier(3))
    await met.wait()
    return {"score": 1.0, "pid": os.getpid()}

async def waited(rest):
    global loop
    import asyncio
    await asyncio.sleep(0)
    assert globals().setdefault("loop", asyncio.get_running_loop()) is asyncio.get_running_loop()
    return None if rest == "none" else float(rest)

def scripted(response, label, *, prompt, metadata):
    """Does what the response says."""
    word, _, rest = response.partition(" ")
    if word == "score":
        return float(rest)
    if word == "numpy":
        return np.float32(rest)
    if word == "dict":
        return {"score": 0.5, "length": np.int64(3), 1: {1}, "odd": object()}
    if word == "noscore":
        return {"length": 3}
    if word == "none":
        return None
    if word == "text":
        return "1.0"
    if word == "list":
        return [1.0, 2.0]
    if word == "several":
        return np.array([1, 2])
    if word == "generator":
        return (score for score in [1.0])
    if word == "async":
        return waited(rest)
    if word == "raise":
        raise LookupError(rest)
    if word == "exit":
        sys.exit(rest)
    if word == "hang":
        if rest:
            Path(rest).write_text("begun")
        hang()
    if word == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if word == "die-once":
        marker = Path(rest)
        if not marker.exists():
            marker.touch()
            os._exit(3)
        return 1.0
    if word in ("child", "dead"):
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        Path(rest).write_text(str(child.pid))
        if word == "dead":
            os._exit(3)
        hang()
    if word == "print":
        print("\\x00\\xff" * 50000)
        os.write(1, b"not a frame")
        return float(sys.stdin.read() == "")
    if word == "count":
        with open(rest, "a") as file:
            file.write("x")
        return 0.0
    if word == "given":
        return {"score": 0.0, "label": label, "prompt": prompt, "metadata": metadata}
    raise AssertionError(word)

not_a_function = 3
'''


@pytest.fixture
def functions(tmp_path: Path) -> str:
    file = tmp_path / "user_rewards.py"
    file.write_text(FUNCTIONS)
    return str(file)


@asynccontextmanager
async def pool_of(
    functions: str, name: str = "scripted", *, num_workers: int = 1, deadline_s: float = 300.0
) -> AsyncIterator[RewardPool]:
    """A pool whose workers are proved gone at the end, however the test ends."""
    pool = RewardPool(f"{functions}:{name}", num_workers=num_workers, deadline_s=deadline_s, load_deadline_s=120)
    before = open_files()
    await pool.start()
    pids = pool.stats().pids
    try:
        yield pool
        pids += pool.stats().pids
    finally:
        await pool.close()
    assert pool.stats().pids == ()
    assert not [pid for pid in pids if is_alive(pid)]
    assert not open_files() - before  # garbage of other tests may go meanwhile


def open_files() -> Counter[str]:
    """The descriptors of this process, but for /dev/null, which uvloop opens once and keeps."""
    targets = [str(path.readlink()) for path in list(Path("/proc/self/fd").iterdir()) if path.is_symlink()]
    return Counter(target for target in targets if target != os.devnull)


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def scripts(*responses: str) -> list[RewardItem]:
    return [RewardItem(response) for response in responses]


def scores(results: list[RewardResult]) -> list[float | None]:
    return [result.score for result in results]


async def test_a_group_is_scored_in_order(functions: str) -> None:
    async with pool_of(functions, "exact") as pool:
        items = [RewardItem(str(i % 3), label="1", prompt="p") for i in range(9)]
        assert scores(await pool.score(items)) == [0, 1, 0] * 3
        assert pool.stats().num_scored == 9


async def test_a_function_is_told_how_a_response_ended_where_it_asks_by_name(functions: str) -> None:
    turns = [{"role": "assistant", "content": "x"}]
    item = RewardItem("x", "y", "p", {"m": 1}, "length", 7, 64, turns, "all of x")
    for name, told in (
        ("asks", ["length", 7]),
        (
            "takes_all",
            {
                "prompt": "p",
                "metadata": {"m": 1},
                "finish_reason": "length",
                "num_tokens": 7,
                "max_new_tokens": 64,
                "turns": turns,
                "transcript": "all of x",
                "in_thought": None,
            },
        ),
    ):
        async with pool_of(functions, name) as pool:
            (result,) = await pool.score([item])
        assert result.details == {"told": told}


COLUMNS = {
    "label": "y", "question": "p", "level": 3, "extra_info": {"split": "train"}, "made": object(), "metadata": {"m": 2}
}  # fmt: skip


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ("response, label, level", {"level": 3}),
        ("response, label, *, prompt, metadata, level, none=7", {"level": 3, "none": 7}),
        ("answer, label, level=0, *, extra_info", {"level": 3, "extra_info": {"split": "train"}}),
        ("response, question, *, label", {"label": "y"}),
        ("response, label, metadata", {"metadata": {"m": 2}}),
        (
            "response, label, **rest",
            {"rest": {
                "question": "p", "level": 3, "extra_info": {"split": "train"}, "metadata": {"m": 2}, "prompt": "p",
                "finish_reason": "stop", "num_tokens": 1, "max_new_tokens": 1, "turns": (), "transcript": "", "in_thought": None,
            }},
        ),
    ],
)  # fmt: skip
async def test_a_function_gets_the_columns_that_it_has_parameters_for(
    tmp_path: Path, parameters: str, given: dict[str, Any]
) -> None:
    (tmp_path / "f.py").write_text(f"def f({parameters}):\n    return {{'score': 1, 'given': locals()}}\n")
    async with pool_of(str(tmp_path / "f.py"), "f") as pool:
        [result] = await pool.score([RewardItem("x", "y", "p", columns=COLUMNS)])
    assert result.error is None
    assert {name: result.details["given"][name] for name in given} == given


async def test_a_function_over_a_group_gets_each_column_once(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "def f(responses, label, *, level, transcript):\n"
        "    return [{'score': 1, 'given': (level, each)} for each in transcript]\n"
    )
    async with RewardPool(f"{tmp_path}/f.py:f", per="group", deadline_s=300.0, load_deadline_s=120) as pool:
        results = await pool.score([RewardItem("x", transcript=each, columns=COLUMNS) for each in "ab"])
    assert [each.details["given"] for each in results] == [(3, "a"), (3, "b")]


async def test_a_parameter_that_is_no_column_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "def f(response, label, *, levle):\n    return 1\ndef g(response, label, *, made): return 1\n"
    )
    async with pool_of(str(tmp_path / "f.py"), "f") as pool:
        [result] = await pool.score([RewardItem("x", columns=COLUMNS)])
    assert "got 'levle' of" in (result.brief or "")
    assert "Did you mean 'level'?" in (result.brief or "")
    async with pool_of(str(tmp_path / "f.py"), "g") as pool:
        [result] = await pool.score([RewardItem("x", columns=COLUMNS)])
    assert (result.brief or "").startswith("column 'made' must be of a type that travels")


async def test_a_sum_with_a_judge_that_is_too_large_is_an_error_of_its_sample_alone(functions: str) -> None:
    class Judge:
        async def start(self) -> None: ...

        async def close(self) -> None: ...

        async def score(self, items: Any) -> list[RewardResult]:
            return [RewardResult(float(item.label)) for item in items]

    items = [RewardItem("score 1e38", label) for label in (1, 1e38, -1e300)]
    async with RewardPool(
        f"{functions}:scripted", deadline_s=300.0, load_deadline_s=120, judges=[(Judge(), 1e10)]
    ) as pool:
        results = await pool.score(items)
        assert (pool.stats().num_scored, pool.stats().num_errors) == (1, 2)
    assert scores(results) == [1e38, None, None]
    assert results[1].error is not None
    assert results[1].error.startswith(
        "the sum of reward.function and judges must be a number of at most 1.7e+38 in size"
    )


async def test_an_empty_group_has_no_results(functions: str) -> None:
    async with pool_of(functions) as pool:
        assert await pool.score([]) == []


async def test_label_prompt_and_metadata_reach_the_function(functions: str) -> None:
    async with pool_of(functions) as pool:
        item = RewardItem("given", label=[1, "ü"], prompt=[{"role": "user", "content": "x"}], metadata={"level": 2})
        (result,) = await pool.score([item])
    assert result.details == {
        "label": [1, "ü"], "prompt": [{"role": "user", "content": "x"}], "metadata": {"level": 2}
    }  # fmt: skip


async def test_a_dict_is_a_score_with_details_and_numbers_may_be_numpy(functions: str) -> None:
    async with pool_of(functions) as pool:
        dictionary, number = await pool.score(scripts("dict", "numpy 0.25"))
    odd = dictionary.details.pop("odd")
    assert dictionary == RewardResult(0.5, {"length": 3, 1: {1}})
    assert odd.startswith("detail odd must be of a type that travels (") and odd.endswith(
        "got object. Convert it, or leave it out"
    )
    assert number.score == 0.25


@pytest.mark.parametrize(
    ("response", "error"),
    [
        ("raise no such unit", "LookupError: no such unit"),
        ("exit early", "SystemExit: early"),
        ("none", "reward must return a number or a dict with 'score', got None. Let each of its paths return one"),
        ("text", "reward must return a number or a dict with 'score', got '1.0'. Convert it with float()"),
        ("list", "got [1.0, 2.0]. It is given one response a call: return its score alone"),
        ("generator", "got a generator. Use return in the place of yield"),
        (
            "async none",
            "reward must return a number or a dict with 'score', got None. Let each of its paths return one",
        ),
        ("several", "got array([1, 2]). Convert it with float()"),
        ("score nan", "reward must return a finite number, got nan. Return a number for such a response too"),
        ("score inf", "reward must return a finite number, got inf. Return a number for such a response too"),
        ("noscore", "reward must return a dict with 'score', got the keys length. Name it so"),
    ],
)
async def test_what_is_no_score_is_an_error_of_its_item_alone(functions: str, response: str, error: str) -> None:
    async with pool_of(functions) as pool:
        good, bad, other = await pool.score(scripts("score 1", response, "score 2"))
        assert (good.score, other.score) == (1, 2)
        assert bad.score is None and not bad.timed_out
        assert bad.error is not None and bad.error.endswith(error)
        assert (pool.stats().num_errors, pool.stats().num_restarts) == (1, 0)


async def test_an_error_shows_the_users_traceback_and_not_ours(functions: str) -> None:
    async with pool_of(functions) as pool:
        (result,) = await pool.score(scripts("raise here"))
    assert result.error is not None
    assert "user_rewards.py" in result.error and "reward_worker.py" not in result.error


async def test_a_label_that_cannot_travel_is_an_error_of_its_item_alone(functions: str) -> None:
    async with pool_of(functions, "exact") as pool:
        bad, good = await pool.score([RewardItem("1", label={"a": [object()]}), RewardItem("1", label="1")])
    assert bad.error is not None and bad.error.startswith("label['a'][0] must be of a type that travels (None, bool, ")
    assert good.score == 1


async def test_what_json_cannot_say_reaches_the_function_and_comes_back_the_same(functions: str) -> None:
    values = [1 << 70, float("-inf"), {1, 2}, Decimal("0.10"), (1, b"\x00"), {1: "a", "1": "b"}, np.float32(0.1)]
    async with pool_of(functions) as pool:
        (result,) = await pool.score([RewardItem("given", label=values, metadata={1: np.arange(3)})])
    assert list(map(repr, result.details["label"])) == list(map(repr, values))
    assert repr(result.details["metadata"]) == "{1: array([0, 1, 2])}"


async def test_an_async_function_is_awaited_on_one_loop_for_all_items(functions: str) -> None:
    async with pool_of(functions) as pool:
        assert scores(await pool.score(scripts("async 1", "async 2"))) == [1, 2]
        assert scores(await pool.score(scripts("async 3"))) == [3]


async def test_an_async_function_judges_all_beside_each_other_here_and_each_has_its_own_deadline(
    functions: str,
) -> None:
    told = {"kept": 1}
    async with pool_of(functions, "judged", deadline_s=30.0) as pool:
        assert pool.stats().pids == ()
        results = await pool.score([*(RewardItem("together", metadata=told) for _ in range(3)), *scripts("raise")])
        assert scores(results) == [1, 1, 1, None] and told == {"kept": 1}, "it is given a copy"
        assert {result.details["pid"] for result in results[:3]} == {os.getpid()}
        assert results[3].error is not None and "LookupError: planted" in results[3].error
        assert (results[3].brief or "").startswith("LookupError: planted (")
        asked = asyncio.create_task(pool.score(scripts("hang")))
        while not pending():  # noqa: ASYNC110 - the list of waits has no event
            await asyncio.sleep(0)
        assert [(wait.name, wait.peer) for wait in pending()] == [("reward", "reward.function")]
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    with pytest.raises(Closed, match="must be open"):
        await pool.score(scripts("together"))
    async with pool_of(functions, "judged", deadline_s=1e-4) as pool:  # which is not that of its loading
        [late] = await pool.score(scripts("hang"))
        assert late.timed_out and late.error == "reward must return within 0.0001 s, got no end. It was cancelled"
        assert (pool.stats().num_timed_out, pool.stats().num_errors) == (1, 0)


async def test_a_function_over_a_prompt_group_scores_all_at_once_and_its_failure_is_that_of_all(functions: str) -> None:
    async with RewardPool(f"{functions}:ranked", per="group", deadline_s=300.0, load_deadline_s=120) as pool:
        results = await pool.score([RewardItem(each, num_tokens=i) for i, each in enumerate("cab")])
        assert scores(results) == [2, 0, 1] and [each.details for each in results] == [{"tokens": i} for i in range(3)]
        assert await pool.score([]) == []
        for response, error in (
            ("short", "reward must return one score a response, 2, got 1. Score each of them"),
            ("one", "reward must return a list of one score a response, got 1.0. Or set reward.per to 'response'"),
        ):
            assert [each.error for each in await pool.score(scripts("a", response))] == [error] * 2
        assert (pool.stats().num_scored, pool.stats().num_errors) == (3, 4)
        [problem, same] = [each.error for each in await pool.score([RewardItem("a", label=object())] * 2)]
        assert problem == same and problem is not None and problem.startswith("label must be of a type that travels")
    async with RewardPool(f"{functions}:ranked", per="group", deadline_s=0.5, load_deadline_s=120) as pool:
        assert [each.timed_out for each in await pool.score(scripts("a", "hang"))] == [True, True]
    with pytest.raises(ConfigError, match=r"reward.function must take \(responses, label, \*, prompt, metadata\)"):
        await RewardPool(f"{functions}:waited", per="group", load_deadline_s=120).start()


def at_a_hang(pool: RewardPool, marks: Path) -> Callable[[], int]:
    """A clock that goes on while an item hangs which has left its mark, so that no other is ever late."""
    begun = time.monotonic_ns()

    def clock() -> int:
        num_begun = sum(mark.stat().st_size > 0 for mark in marks.iterdir())
        return time.monotonic_ns() if num_begun > pool.stats().num_restarts else begun

    return clock


async def test_an_item_stuck_in_c_is_killed_at_its_deadline_and_the_others_are_scored(
    functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (marks := tmp_path / "marks").mkdir()
    async with pool_of(functions, deadline_s=1.0) as pool:
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic_ns=at_a_hang(pool, marks)))
        results = await pool.score(scripts("score 1", "score 2", f"hang {marks}/1", "score 4", f"hang {marks}/2"))
        assert scores(results) == [1, 2, None, 4, None]
        assert [result.timed_out for result in results] == [False, False, True, False, True]
        assert results[2].error == "reward must return within 1 s, got no end. Its worker was killed"
        assert (pool.stats().num_timed_out, pool.stats().num_errors, pool.stats().num_restarts) == (2, 0, 2)
        assert scores(await pool.score(scripts("score 5"))) == [5]


async def test_the_deadline_is_each_items_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import time\ndef slow(response, label, *, prompt, metadata):\n    time.sleep(0.25)\n    return 1\n"
    )
    async with pool_of(str(slow), "slow", deadline_s=0.5) as pool:
        [worker] = pool._functions[0]._workers

        def half_way() -> int:
            """Of the item that runs now, however long that takes here."""
            return worker._read_note()[2] + int(0.25e9)

        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic_ns=half_way))
        assert scores(await pool.score(scripts(*"abcdefghi"))) == [1] * 9
        assert pool.stats().num_restarts == 0


async def test_a_hanging_group_leaves_other_workers_alone(functions: str) -> None:
    async with pool_of(functions, num_workers=2, deadline_s=30) as pool:
        stuck = asyncio.create_task(pool.score(scripts("hang")))
        for i in range(20):
            assert scores(await pool.score(scripts(f"score {i}"))) == [i]
        assert not stuck.done()
        assert [wait.name for wait in pending()] == ["reward"]
        stuck.cancel()


@pytest.mark.parametrize("word", ["child", "dead"])
async def test_a_worker_takes_the_processes_it_started_with_it(
    functions: str, tmp_path: Path, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in a session of their own too, whether it is killed or ends by itself. Its deadline begins when it has told one."""
    (marks := tmp_path / "marks").mkdir()
    async with pool_of(functions, deadline_s=1.0) as pool:
        monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic_ns=at_a_hang(pool, marks)))
        (result,) = await pool.score(scripts(f"{word} {marks / 'pid'}"))
        assert not is_alive(int((marks / "pid").read_text()))
    assert result.timed_out == (word == "child")


async def test_an_item_that_crashes_its_worker_twice_carries_the_error_alone(functions: str) -> None:
    async with pool_of(functions) as pool:
        results = await pool.score(scripts("score 1", "die", "score 3"))
        assert scores(results) == [1, None, 3]
        assert results[1].error == "reward must return, got its process killed by SIGSEGV"
        assert not results[1].timed_out
        assert pool.stats().num_restarts == 2


async def test_an_item_whose_worker_died_once_is_scored_by_the_next(functions: str, tmp_path: Path) -> None:
    async with pool_of(functions) as pool:
        assert scores(await pool.score(scripts(f"die-once {tmp_path / 'died'}", "score 2"))) == [1, 2]
        assert pool.stats().num_errors == 0


async def test_a_worker_killed_while_idle_costs_nobody_anything(functions: str) -> None:
    async with pool_of(functions) as pool:
        (worker,) = children(pool.stats().pids[0])
        os.kill(worker.pid, signal.SIGKILL)
        assert scores(await pool.score(scripts("score 1"))) == [1]
        assert pool.stats().num_restarts == 1


async def test_what_a_function_prints_does_not_reach_the_frames(functions: str) -> None:
    async with pool_of(functions) as pool:
        assert scores(await pool.score(scripts("print", "score 2"))) == [1, 2]


async def test_a_cancelled_caller_leaves_the_pool_working(functions: str, tmp_path: Path) -> None:
    async with pool_of(functions) as pool:
        callers = [asyncio.create_task(pool.score(scripts(f"count {tmp_path / 'log'}"))) for _ in range(4)]
        await asyncio.sleep(0)
        for caller in callers:
            caller.cancel()
        assert scores(await pool.score(scripts("score 1"))) == [1]
        # The first may have been on its way already; the others must not be worked on for nobody.
        assert len((tmp_path / "log").read_text() if (tmp_path / "log").exists() else "") <= 1


async def test_closing_wakes_callers_with_a_typed_error(functions: str) -> None:
    async with pool_of(functions) as pool:
        callers = [asyncio.create_task(pool.score(scripts("hang"))) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
        for caller in callers:
            with pytest.raises(Closed):
                await caller
        with pytest.raises(Closed, match="must be open"):
            await pool.score(scripts("score 1"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exakt", "Did you mean 'exact'"),
        ("not_a_function", "must name a function"),
    ],
)
async def test_a_function_that_does_not_exist_stops_the_start(functions: str, name: str, message: str) -> None:
    pool = RewardPool(f"{functions}:{name}", num_workers=2, load_deadline_s=120)
    with pytest.raises(ConfigError, match=message):
        await pool.start()
    assert pool.stats().pids == ()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; os._exit(7)", "exit code 7"),
        ("while True: pass", "must load within 0.5 s"),
    ],
)
async def test_a_module_that_fails_to_load_stops_the_start(tmp_path: Path, module: str, message: str) -> None:
    (tmp_path / "broken.py").write_text(module)
    pool = RewardPool(f"{tmp_path}/broken.py:reward", load_deadline_s=0.5 if "while" in module else 60)
    with pytest.raises(ConfigError, match=message):
        await pool.start()
    assert pool.stats().pids == ()


async def test_a_module_that_no_longer_loads_ends_the_pool_with_its_error(functions: str) -> None:
    async with pool_of(functions) as pool:
        Path(functions).write_text("import no_such_module")  # noqa: ASYNC240 - the test's own file, at once
        with pytest.raises(ConfigError, match="no_such_module"):
            await pool.score(scripts("die"))
        with pytest.raises(ConfigError, match="no_such_module"):
            await pool.score(scripts("score 1"))


async def test_workers_import_neither_torch_nor_numpy(tmp_path: Path) -> None:
    file = tmp_path / "modules.py"
    file.write_text(
        "import sys\ndef modules(response, label, *, prompt, metadata):\n"
        "    return {'score': 0, 'heavy': [m for m in ('torch', 'transformers', 'numpy', 'pydantic') if m in sys.modules]}\n"
    )
    async with pool_of(str(file), "modules") as pool:
        (result,) = await pool.score(scripts(""))
    assert result.details == {"heavy": []}


def test_the_pool_works_on_uvloop(functions: str, tmp_path: Path) -> None:
    async def scored() -> list[float | None]:
        async with pool_of(functions, deadline_s=0.5) as pool:
            [hung] = await pool.score(scripts("hang"))
            assert hung.timed_out
        async with pool_of(functions, deadline_s=300.0, num_workers=2) as pool:
            first = await pool.score(scripts("score 1", "die", f"die-once {tmp_path / 'died'}"))
            os.kill(pool.stats().pids[0], signal.SIGKILL)
            return (
                scores(first)
                + scores(await pool.score(scripts("score 2")))
                + scores(await pool.score(scripts("score 3")))
            )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(scored()) == [1, None, 1, 2, 3]


@pytest.mark.parametrize("busy", [True, False], ids=["while it hangs", "while it waits"])
def test_a_worker_dies_with_its_parent_and_so_does_what_it_started(functions: str, tmp_path: Path, busy: bool) -> None:
    file = tmp_path / "pid"
    os.mkfifo(file)
    program = f"""
import asyncio, sys
from rondo.roles.rewards.pool import RewardItem, RewardPool
async def main():
    pool = RewardPool({functions + ":scripted"!r}, deadline_s=1000, load_deadline_s=120)
    await pool.start()
    scoring = asyncio.create_task(pool.score([RewardItem("child {file}")])) if {busy} else None
    await asyncio.sleep(0)
    print(pool.stats().pids[0], flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline())]
        pids += [child.pid for child in children(pids[0])]
        pids += [int(file.read_text())] if busy else []
        assert len(pids) == 2 + busy and all(map(is_alive, pids))
        pidfds = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 60)[0] == [pidfd]
        os.close(pidfd)
