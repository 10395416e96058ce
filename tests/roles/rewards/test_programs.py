"""Programs as answers: data sets' forms of test cases, what passes them, and answers that hold nobody up."""

from __future__ import annotations

import base64
import builtins
import json
import pickle
import zlib
from typing import Any

import pytest

from rondo.roles.rewards.hub.programs import Case, cases_of, code, program_of, same_output
from rondo.roles.rewards.pool import RewardItem, RewardPool
from rondo.runtime.errors import ConfigError
from rondo.runtime.sandbox import sandbox as runs
from rondo.runtime.sandbox.sandbox import Ran, Sandbox, SandboxFailed

APPS = {"inputs": ["4\n", "5\n"], "outputs": ["8\n", "10\n"]}
LCB = [{"input": "1\n[2]", "output": "[1, 2]", "testtype": "functional"}]
DOUBLES = "so:\n```python\nprint(int(input()) * 2)\n```\nas asked"


def block(text: str) -> str:
    return f"```python\n{text}\n```"


def scored(response: str, label: Any, metadata: dict[str, Any] | None = None, **args: Any) -> dict[str, Any]:
    return code(
        response, label, prompt="", metadata=metadata or {}, **{"case_deadline_s": 60.0, "total_s": 200.0, **args}
    )


@pytest.mark.parametrize(
    ("label", "metadata", "cases"),
    [
        (json.dumps(APPS), {}, [Case("4\n", "8\n"), Case("5\n", "10\n")]),
        ({"inputs": [["a", "b"]], "outputs": [["c"]]}, {}, [Case("a\nb", "c")]),
        ({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "f"}, {}, [Case([1, 2], [3], "f", wrapped=True)]),
        (json.dumps(LCB), {"func_name": "f"}, [Case([1, [2]], [1, 2], "f")]),
        (
            base64.b64encode(zlib.compress(pickle.dumps(json.dumps([{"input": "1", "output": "2"}])))).decode(),
            {},
            [Case("1", "2")],
        ),
        (["assert f(1) == 1"], {"test_setup_code": "import math"}, [Case(tests="import math\nassert f(1) == 1")]),
        (
            "def check(f):\n    assert f()",
            {"entry_point": "g"},
            [Case(name="g", tests="def check(f):\n    assert f()\ncheck(g)")],
        ),
    ],
)
def test_cases_are_read_as_the_known_data_sets_write_them(
    label: Any, metadata: dict[str, Any], cases: list[Case]
) -> None:
    assert cases_of(label, metadata) == cases


@pytest.mark.parametrize("label", [None, 72, "", [], {"inputs": [], "outputs": []}])
def test_a_label_without_cases_is_an_error_and_not_a_wrong_answer(label: Any) -> None:
    with pytest.raises(ConfigError, match="label must hold test cases"):
        scored(DOUBLES, label)


def test_a_packed_label_is_read_and_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    class Runs:
        def __reduce__(self) -> Any:
            return (print, ("[]",))

    packed = base64.b64encode(zlib.compress(pickle.dumps(Runs()))).decode()
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "print", lambda *_: ran.append(1))
        assert cases_of(packed, {}) == [Case(tests=packed)]
    assert not ran


@pytest.mark.parametrize(
    ("said", "right", "same"),
    [("8\n", "8", True), (" 8  \n9", "8\n9\n", True), ("8.0 1e1", "8 10", True), ("8 9", "8", False), ("x", "X", False),
     ("sNaN", "1", False), ("", "", True), ("8\n8", "8", False), ("9" * 10**6, "1", False)],
)  # fmt: skip
def test_outputs_are_compared_by_line_and_as_numbers(said: str, right: str, same: bool) -> None:
    assert same_output(said, right) is same


def test_the_last_block_of_python_is_the_program() -> None:
    assert program_of("```python\na\n```\nor\n```py\nb\n```\n```bash\nc\n```") == "b\n"
    assert program_of("print(1)") == "print(1)" and program_of("```\na\n```") == "a\n"
    assert program_of("```cpp\nint x;\n```") is program_of("```python\nnever ends") is program_of(" ") is None


def test_programs_functions_and_asserts_are_run_and_what_is_wrong_is_told() -> None:
    assert scored(DOUBLES, APPS) == {"score": 1.0, "passed": 1.0, "why": None}
    assert scored(block("print(8)"), APPS, every=False) == {"score": 0.5, "passed": 0.5, "why": "case 1: wrong"}
    assert scored(block("print(8)"), APPS)["score"] == 0 and scored(block("print(8)"), APPS, max_cases=1)["score"] == 1
    assert scored(block("1/0"), APPS)["why"] == "case 0: ZeroDivisionError: division by zero"
    solution = block(
        "class Solution:\n    def f(self, a: int, b: List[int]):\n        print('noise')\n        return [a, *b]"
    )
    assert scored(solution, LCB, {"func_name": "f"})["score"] == 1
    tests = ["assert f(2) == 2", "assert f(3) == 3"]
    assert scored(block("def f(a): return 2"), tests, every=False)["passed"] == 0.5


def test_a_program_that_leaves_early_or_says_that_all_is_well_passes_nothing() -> None:
    leaves = block("import os\ndef f(*_):\n    print('\\n0 1 2')\n    os._exit(0)")
    assert "ended before it returned" in scored(leaves, ["assert f(1) == 1"])["why"]
    assert scored(leaves, LCB, {"func_name": "f"})["why"] == "case 0: wrong"


async def test_answers_that_hang_fork_or_kill_hold_no_worker_up_and_the_next_ones_are_scored() -> None:
    hostile = [
        "while True: pass",
        "import os\nwhile True: os.fork()",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)",
        "while True: print('x' * 10**6)",
    ]
    items = [RewardItem(block(each), APPS) for each in hostile] + [RewardItem(DOUBLES, APPS)]
    settings: dict[str, Any] = {"deadline_s": 300.0, "load_deadline_s": 120}
    hub = "rondo.roles.rewards.hub:code"
    async with RewardPool(hub, args={"case_deadline_s": 1.0, "total_s": 200.0}, **settings) as pool:
        results = await pool.score(items[:-1])
        assert [each.score for each in results] == [0.0] * len(hostile), results
        assert pool.stats().num_restarts == 0
    async with RewardPool(hub, args={"case_deadline_s": 60.0, "total_s": 200.0}, **settings) as pool:
        [result] = await pool.score(items[-1:])
    assert result.score == 1.0


def test_a_sandbox_that_runs_nothing_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any) -> Ran:
        raise SandboxFailed("no room")

    monkeypatch.setattr(Sandbox, "run", run)
    with pytest.raises(SandboxFailed):
        scored(DOUBLES, APPS)
    assert runs.used() == {}
