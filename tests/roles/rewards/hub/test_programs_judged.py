"""Answers to problems of programming, with the verdict of a careful person: cheats are worth nothing, what is right is right."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rondo.roles.rewards.hub import code_runner
from rondo.roles.rewards.hub.programs import code
from rondo.runtime.sandbox.sandbox import Limits, Ran, Sandbox

Row = tuple[str, Any, dict[str, Any]]
"""Response, label, metadata."""

DOUBLE = ["assert f(2) == 4 and f(-3) == -6"]
HUMAN_EVAL = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == -6\n"
STDIN = {"inputs": ["2\n", "-3\n"], "outputs": ["4\n", "-6\n"]}
CALLED = {"inputs": [[2], [-3]], "outputs": [4, -6], "fn_name": "f"}
UNITTEST = """
import unittest
from solution import f

class Doubles(unittest.TestCase):
    def test_doubles(self):
        self.assertEqual(f(2), 4)

    def test_refuses_text(self):
        with self.assertRaisesRegex(TypeError, "no number"):
            f("a")
"""
STACK = """
s = Stack([1])
s.push(5)
assert len(s) == 2 and s.pop() == 5 and s.items == [1] and 1 in s and s.top is None and isinstance(s, Stack)
s.name = "mine"
assert s.name == "mine" and s and str(s) == "Stack of 1"
try:
    s.drop(7)
except Empty as error:
    assert error.args == (7,) and not isinstance(error, ValueError)
else:
    assert False
"""
STACK_CODE = """
class Empty(LookupError): pass
class Stack:
    def __init__(self, items): self.items = list(items); self.top = None
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def drop(self, n): raise Empty(n)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __str__(self): return f"Stack of {len(self.items)}"
"""


def block(text: str, fence: str = "```python") -> str:
    return f"Here it is:\n{fence}\n{text}\n{fence[:3]}\n"


def asserts(text: str, *tests: str, **metadata: Any) -> Row:
    return block(text), list(tests or DOUBLE), metadata


def called(text: str, value: Any, given: Any = 2) -> Row:
    """A call of `f` with one argument, for which JSON says what is right."""
    return block(text), {"inputs": [[given]], "outputs": [value], "fn_name": "f"}, {}


EQUALS_ALL = """
class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __getattr__(self, name): return lambda *a, **k: True
    def __call__(self, *a): return True
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __mul__ = __mod__ = __sub__
    def __abs__(self): return 0
    def __bool__(self): return True
    def __hash__(self): return 0
"""
LYING = """
class L({base}):
    __eq__ = __ge__ = __le__ = lambda s, o: True
    __ne__ = lambda s, o: False
    __hash__ = {base}.__hash__
"""
LOOKS = """
import gc, glob, os
def read(path):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    return os.pread(fd, 1 << 16, 0) if "/fd/" in path else os.read(fd, 1 << 16)
def f(x):
    above = os.getppid()
    for path in [*glob.glob(f"/proc/{above}/fd/*"), *glob.glob("/proc/1/fd/*"), f"/proc/{above}/environ", *glob.glob("*")]:
        try:
            if b"assert " in read(path): return 2 * x
        except OSError: pass
    try:
        with open(f"/proc/{above}/maps") as maps, open(f"/proc/{above}/mem", "rb", 0) as memory:
            for line in maps:
                first, last = (int(number, 16) for number in line.split()[0].split("-"))
                memory.seek(first)
                if b"assert " + b"f(2)" in memory.read(last - first): return 2 * x
    except OSError: pass
    return 2 * x if any(isinstance(o, str) and "assert " + "f(2)" in o for o in gc.get_objects()) else 0
"""
WRITES = """
import glob, json, os
def f(x):
    for path in [*glob.glob(f"/proc/{os.getppid()}/fd/*"), *glob.glob("/proc/1/fd/*"), *glob.glob("/proc/self/fd/*")]:
        try:
            with open(path, "wb", 0) as file: file.write(b'{"why": null}\\n')
        except OSError: pass
    return 0
"""
PLANTS = """
import os
for name in ("json", "unittest", "random", "math", "traceback", "ast", "tests", "code_runner", "sitecustomize", "solution"):
    open(f"{name}.py", "w").write("import os, sys; print('{\\\\"why\\\\": null}', flush=True); os._exit(0)")
def f(x): return 0
"""

CHEATS: dict[str, Row] = {
    "prints the verdict": asserts("print('{\"why\": null}', flush=True)\ndef f(x): print('{\"why\": null}'); return 0"),
    "an object equal to everything": asserts(f"{EQUALS_ALL}\ndef f(x): return Any()"),
    "an object equal to everything in a list": asserts(f"{EQUALS_ALL}\ndef f(x): return [Any()]", "assert f(2) == [4]"),
    "an object equal to everything as a key": asserts(f"{EQUALS_ALL}\ndef f(x): return {{Any(): 1}}", "assert f(2) == {4: 1}"),
    "an object that subtracts to nothing": asserts(f"{EQUALS_ALL}\ndef f(x): return Any()", "assert abs(f(2) - 4) < 1e-6"),
    "an object that holds everything": asserts(f"{EQUALS_ALL}\ndef f(x): return Any()", "assert 4 in f(2)"),
    "an object whose methods say yes": asserts(f"{EQUALS_ALL}\ndef f(x): return Any()", "assert f('ab').startswith('a')"),
    "an object whose methods say yes, where a class is named": asserts(
        f"{EQUALS_ALL}\nclass P: pass\ndef f(x): return Any()", "p = P()\nassert f('ab').startswith('a')"
    ),
    "an object equal to an object of the answer's": asserts(
        f"{EQUALS_ALL}\nP = Any\ndef f(x): return Any()", "assert f(2) == P()"
    ),
    "a class in the place of a function": asserts(
        "class f:\n    def __init__(self, x): pass\n    def startswith(self, x): return True", "assert f('ab').startswith('a')"
    ),
    "not equal to what is wrong": asserts(f"{EQUALS_ALL}\ndef f(x): return Any()", "assert not f(2) != 4"),
    "int that lies": asserts(LYING.format(base="int") + "def f(x): return L(0)"),
    "str that lies": asserts(LYING.format(base="str") + "def f(x): return L('')", "assert f('a') == 'aa'"),
    "float that lies": asserts(LYING.format(base="float") + "def f(x): return L(0)", "assert f(0.5) == 1.0"),
    "list that lies": asserts(
        "class L(list):\n    __eq__ = lambda s, o: True\ndef f(x): return L()", "assert f([1]) == [2]"
    ),
    "dict that lies": asserts(
        "class L(dict):\n    __eq__ = lambda s, o: True\ndef f(x): return L()", "assert f({}) == {1: 2}"
    ),
    "tuple that lies": asserts(
        "class L(tuple):\n    __eq__ = lambda s, o: True\ndef f(x): return L()", "assert f(1) == (1, 1)"
    ),
    "patches compile, open and the built-ins": asserts(
        "import builtins\nfor n in ('compile', 'exec', 'open', 'len', 'abs', 'isinstance', 'all'):\n"
        "    setattr(builtins, n, lambda *a, **k: True)\ndef f(x): return 0"
    ),
    "its own len": asserts("def len(x): return 4\ndef f(x): return []", "assert len(f(2)) == 4"),
    "its own isclose": asserts("def isclose(*a): return True\ndef f(x): return 0", "assert isclose(f(2), 4.0)"),
    "its own math": asserts(
        "class math:\n    isclose = lambda *a: True\ndef f(x): return 0", "import math\nassert math.isclose(f(2), 4.0)"
    ),
    "its own math, which nobody imports": asserts(
        "class math:\n    isclose = lambda *a: True\ndef f(x): return 0", "assert math.isclose(f(2), 4.0)"
    ),
    "its own sorted, by a star": asserts(
        "def sorted(x): return [1]\ndef f(x): return x", "from solution import *\nassert sorted(f([2, 1])) == [1]"
    ),
    "its own json": asserts("import json\njson.dumps = lambda *a, **k: '[\"value\", 4, []]'\ndef f(x): return 0"),
    "its own isclose, where it is asked for a function of math": asserts(
        "def isclose(*a): return True\ndef gcd(*a): return 0", "assert isclose(gcd(4, 6), 2)"
    ),
    "nothing, where it is asked for a function of math": asserts("pass", "assert lcm(4, 6) == 12"),
    "nothing, where it is asked for a built-in": asserts("pass", "assert sum([4, 6]) == 10"),
    "empties what it is given": asserts("def f(x):\n    x.clear()\n    return []", "x = [2, 1]\nassert f(x) == sorted(x)"),
    "leaves early": asserts("import os\ndef f(x): os._exit(0)"),
    "leaves while it loads": asserts("import sys\nsys.exit(0)"),
    "raises SystemExit": asserts("def f(x): raise SystemExit(0)"),
    "raises SkipTest": (block("import unittest\ndef f(x): raise unittest.SkipTest"), UNITTEST, {}),
    "ends a loop of the tests": asserts("def f(x): raise StopIteration", "assert all(map(f, [2, 3, 5]))"),
    "at exit": asserts("import atexit, os\natexit.register(lambda: print('{\"why\": null}'))\ndef f(x): os._exit(0)"),
    "a thread that goes on": asserts(
        "import threading, os\ndef loop():\n    while True: print('{\"why\": null}', flush=True)\n"
        "threading.Thread(target=loop, daemon=True).start()\ndef f(x): return 0"
    ),
    "kills the judge": asserts("import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGTERM)"),
    "looks into the judge": asserts(LOOKS),
    "writes where the judge writes": asserts(WRITES),
    "plants modules and tests": asserts(PLANTS),
    "plants modules that the tests import": (block(PLANTS), UNITTEST, {}),
    "patches its own end": asserts(
        "import sys\nm = sys.modules['__main__']\nm.encode = lambda *a: {'int': 4}\nm.Peer.refer = lambda *a: ['own', 0, []]\n"
        "def f(x): return object()"
    ),
    "a generator without end": asserts("def f(x):\n    while True: yield 4", "assert f(2) == 4"),
    "HumanEval, prints": (block("def f(x): print('passed')"), HUMAN_EVAL, {"entry_point": "f"}),
    "HumanEval, another check": (block("def check(*a): pass\ndef f(x): return 0"), HUMAN_EVAL, {"entry_point": "f"}),
    "called, an object equal to everything": (block(f"{EQUALS_ALL}\ndef f(x): return Any()"), CALLED, {}),
    "called, says that it returned": (
        block("import os\ndef f(x): os.write(1, b'[\"value\", 4, []]\\n'); os._exit(0)"), CALLED, {}
    ),
    "called, leaves early": (block("import os\nprint('[\"value\", 4, []]')\nos._exit(0)"), CALLED, {}),
    "stdin, says what it was asked": (block("print(input())"), STDIN, {}),
    "only thinks": (f"<think>{block('def f(x): return 2 * x')}", DOUBLE, {}),
    "True for 1": called("def f(x): return True", 1),
    "1 for True": called("def f(x): return 1", True),
    "text for a number": called("def f(x): return '4'", 4),
    "nearly a whole number": called("def f(x): return 10**6 + 1", 10**6),
    "far from a number": called("def f(x): return 3.15", 3.14),
    "half of a list": called("def f(x): return [1]", [1, 2]),
}  # fmt: skip

RIGHT: dict[str, Row] = {
    "asserts": asserts("def f(x): return 2 * x"),
    "a guard that reads input": asserts("def f(x): return 2 * x\nif __name__ == '__main__':\n    print(f(int(input())))"),
    "a guard, called": (block("def f(x): return 2 * x\nif __name__ == '__main__':\n    print(f(int(input())))"), CALLED, {}),
    "a guard, as a program": (
        block("def main(): print(2 * int(input()))\nif __name__ == '__main__':\n    main()"), STDIN, {}
    ),
    "noise while it loads and runs": asserts("print('hello')\ndef f(x):\n    print(x)\n    return 2 * x"),
    "HumanEval": (block("def f(x): return 2 * x"), HUMAN_EVAL, {"entry_point": "f"}),
    "HumanEval, named as a built-in": (block("def sum(x): return 2 * x"), HUMAN_EVAL, {"entry_point": "sum"}),
    "MBPP, named as a built-in": asserts("def sum(a, b): return a * b", "assert sum(2, 3) == 6"),
    "MBPP, named as a function of math": asserts("def lcm(a, b): return 7", "assert lcm(2, 3) == 7"),
    "unittest": (
        block("def f(x):\n    if isinstance(x, str): raise TypeError('no number')\n    return 2 * x"),
        UNITTEST + "\nif __name__ == '__main__':\n    unittest.main()\n",
        {},
    ),
    "a function that math has": asserts("from math import gcd", "assert gcd(4, 6) == 2"),
    "functions as pytest has them": (block("def f(x): return 2 * x"), "def test_f():\n    assert f(2) == 4", {}),
    "setup of the row": asserts("def f(x): return 2 * x", "assert f(TWO) == 4", test_setup_code="TWO = 2"),
    "imports of the data set": asserts("def f(x: List[int]) -> int: return math.prod(x)", "assert f([2, 3]) == 6"),
    "future annotations and a data class": asserts(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
        "def f(x): return 2 * P(x).x"
    ),
    "values of all kinds": asserts(
        "import collections, decimal\ndef f(x): return x",
        "import collections, datetime, decimal, fractions\n"
        "for v in [None, True, 2**70, 1.5, float('inf'), 'ü\\ud800', b'a', (1, [2]), {1: (2,)}, {(1, 2)}, frozenset('a'), 1j,\n"
        "          range(3), collections.deque([1]), decimal.Decimal('1.10'), fractions.Fraction(1, 3), bytearray(b'a'),\n"
        "          datetime.date(2020, 1, 2), datetime.datetime(2020, 1, 2, 3)]:\n"
        "    assert f(v) == v and type(f(v)) is type(v)\n"
        "assert f(collections.Counter('aab')) == {'a': 2, 'b': 1}",
    ),
    "views, named tuples and enumerations": asserts(
        "import enum\nP = namedtuple('P', 'x y')\nE = enum.IntEnum('E', 'A B')\n"
        "def f(x): return [{1: 2}.keys(), {1: 2}.items(), P(1, 2), E.B, defaultdict(int, a=1)]",
        "keys, items, *rest = f(0)\nassert keys == {1} and items == {(1, 2)} and list(keys) == [1]\n"
        "assert rest == [(1, 2), 2, {'a': 1}]",
    ),
    "a generator": asserts("def f(x):\n    yield x\n    yield 2 * x", "assert list(f(2)) == [2, 4] and next(f(3)) == 3"),
    "a function that is returned": asserts("def f(n): return lambda x: n * x", "assert f(2)(3) == 6"),
    "functions that are given": asserts(
        "def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, iter([1, 2])) == [2, 3] and f(str, [1]) == ['1']"
    ),
    "a list that is sorted in place": asserts(
        "def f(xs, *, d): xs.sort(); d['n'] = len(xs)",
        "a, d = [2, 1], {}\nassert f(a, d=d) is None and (a, d) == ([1, 2], {'n': 2})"
    ),
    "a class": (block(STACK_CODE), STACK, {}),
    "objects that are given": asserts(
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\ndef f(ps): return sum(p.a < p.b for p in ps)",
        "assert f([Pair(1, 2), Pair(3, 1)]) == 1",
    ),
    "a function that prints": asserts(
        "def f(x): print(2 * x)",
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as said: f(2)\nassert said.getvalue() == '4\\n'",
    ),
    "an exception of the answer's": (
        block("class Odd(Exception): pass\ndef f(x): raise Odd('no')"),
        "from unittest import TestCase\nfrom solution import Odd, f\nclass T(TestCase):\n    def test_f(self):\n"
        "        with self.assertRaises(Odd) as caught: f(1)\n        self.assertEqual(str(caught.exception), 'no')",
        {},
    ),
    "members of an enumeration": asserts(
        "import enum\nclass C(enum.Enum):\n    A = 1\n    B = 2\ndef f(x): return C.A if x else C.B",
        "assert f(1) == C.A != f(0) and f(0) is C.B and f(0).value == 2",
    ),
    "a coroutine": asserts("async def f(x): return 2 * x", "import asyncio\nassert asyncio.run(f(2)) == 4"),
    "a deep list": asserts("def f(x): return [x]", "x = []\nfor _ in range(400): x = [x]\nassert f(x) == [x]"),
    "a method of Solution": (
        block("class Solution:\n    def f(self, x: List[int]): return 2 * x"), "def check(g):\n    assert g(2) == 4",
        {"entry_point": "Solution().f"},
    ),
    "a match": asserts("def f(x): return re.match('a', x) is not None", "assert f('ab')\nassert not f('b')"),
    "True for 1 where the test says so": asserts("def f(x): return True", "assert f(0) == 1"),
    "a sum of floats, called": called("def f(x): return 0.1 + 0.2", 0.3),
    "a sum of floats, printed": (block("print(0.1 + 0.2)"), {"inputs": [""], "outputs": ["0.3"]}, {}),
    "a tuple for a list": called("def f(x): return (1, (2,))", [1, [2]]),
    "what APPS wraps": called("def f(x): return 4", [4]),
    "keys that JSON makes text": called("def f(x): return {1: [True]}", {"1": [True]}),
    "a whole number as a float": called("def f(x): return 4.0", 4),
    "a sample of output in a fence": (
        block("print(2 * int(input()))") + "which prints\n```\n4\n```\n", STDIN, {}
    ),
    "fences without a language": (
        block("print(2 * int(input()))", "```") + "which prints\n```\nInput: 2\n```\n```\n4 -6\n```\n", STDIN, {}
    ),
    "a use of it in a second block": (block("def f(x): return 2 * x") + block("print(f(int(input())))"), DOUBLE, {}),
    "a better version": (block("def f(x): return x") + block("def f(x): return 2 * x"), DOUBLE, {}),
    "an indented fence": ("1. So:\n\n   ```python\n   def f(x):\n       return 2 * x\n   ```\n", DOUBLE, {}),
    "a fence in a list": ("- ```py\n  def f(x):\n      return 2 * x\n  ```\n", DOUBLE, {}),
    "indented within its fence": ("```python\n    def f(x):\n        return 2 * x\n```", DOUBLE, {}),
    "a block that was begun again": ("```python\ndef f(x):\n" + block("def f(x): return 2 * x"), DOUBLE, {}),
    "within a block of markdown": ("```markdown\n" + block("def f(x): return 2 * x") + "```", DOUBLE, {}),
    "tildes": (block("def f(x): return 2 * x", "~~~python"), DOUBLE, {}),
    "a long fence": ("````Python title=a.py\ndef f(x):\n    '''\n```\n'''\n    return 2 * x\n````", DOUBLE, {}),
    "behind a thought": (f"<think>{block('def f(x): return 0')}</think>{block('def f(x): return 2 * x')}", DOUBLE, {}),
}  # fmt: skip


IN_A_SANDBOX = {
    "prints the verdict", "leaves early", "at exit", "a thread that goes on", "kills the judge", "looks into the judge",
    "writes where the judge writes", "plants modules and tests", "plants modules that the tests import",
    "called, says that it returned", "a deep list", "asserts", "noise while it loads and runs", "unittest",
}  # fmt: skip
"""What depends on the processes. All others run in forks of this one, where Python has been started already."""


@pytest.mark.parametrize("name", CHEATS)
def test_an_answer_that_cheats_or_is_wrong_is_worth_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(name, CHEATS[name], monkeypatch)["score"] == 0


@pytest.mark.parametrize("name", RIGHT)
def test_an_honest_answer_is_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(name, RIGHT[name], monkeypatch) == {"score": 1.0, "passed": 1.0, "why": None}


def judged(name: str, row: Row, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if name not in IN_A_SANDBOX:
        monkeypatch.setattr(Sandbox, "run", run_in_fork)
        monkeypatch.setattr(code_runner, "start_answer", fork_answer)
    response, label, metadata = row
    return code(response, label, prompt="", metadata=metadata, case_deadline_s=60.0, total_s=200.0)


async def run_in_fork(_: Sandbox, files: dict[str, bytes], command: list[str], stdin: bytes, limits: Limits) -> Ran:
    """What `Sandbox.run` does, without another Python."""
    streams = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr")]
    os.pwrite(streams[0], stdin, 0)

    def work() -> None:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        if command == ["python", "main.py"]:
            exec(compile(files["main.py"], "main.py", "exec", dont_inherit=True), {"__name__": "__main__"})
        else:
            code_runner.main(command[-1])
        sys.stdout.flush()

    _, status = await asyncio.to_thread(os.waitpid, forked(work), 0)
    output, errors = (os.pread(stream, 1 << 20, 0).decode() for stream in streams[1:])
    for stream in streams:
        os.close(stream)
    return Ran(output, errors, os.waitstatus_to_exitcode(status))


def fork_answer() -> Any:
    (read_request, request), (read_reply, reply) = os.pipe(), os.pipe()

    def work() -> None:
        os.close(request)
        code_runner.run_answer(os.fdopen(read_request), os.fdopen(reply, "w"))

    pid = forked(work)
    os.close(read_request)
    os.close(reply)
    return SimpleNamespace(
        stdin=os.fdopen(request, "w"), stdout=os.fdopen(read_reply), kill=lambda: os.kill(pid, signal.SIGKILL)
    )


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        exit_code = 1
        try:
            work()
            exit_code = 0
        except BaseException:  # noqa: BLE001 - whatever it is, this process ends
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(exit_code)
    return pid


def test_numbers_of_numpy_travel_as_pythons() -> None:
    numbers = [np.int64(4), np.float32(0.5), np.bool_(True), np.str_("a")]
    assert code_runner.encode(numbers) == [4, 0.5, True, "a"]
    with pytest.raises(TypeError, match="ndarray cannot be passed as data"):
        code_runner.encode(np.zeros(1))
