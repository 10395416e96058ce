r"""The reward for programs: an answer's code against the test cases of its row, in the sandbox.

Owns the forms in which data sets write test cases, and what an output has to be. Does not own what the code may do
(`runtime/sandbox/`). Runs one command a case, so that no case sees another; what is right is never told to it, but where the
tests are Python, which judge themselves beside the code.

    code("```python\nprint(int(input()) * 2)\n```", {"inputs": ["4\n"], "outputs": ["8\n"]}, ...)
    ->   {"score": 1.0, "passed": 1.0, "why": None}
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickletools
import re
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from rondo.roles.rewards.hub.named import named
from rondo.runtime.errors import ConfigError
from rondo.runtime.sandbox.sandbox import Limits, Ran, Sandbox, sandbox

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("", "python", "python3", "py")
_MAX_UNPACKED = 64 << 20
_CALL = """
import bisect, collections, copy, functools, heapq, itertools, json, math, random, re, string, sys
from collections import *; from functools import *; from heapq import *; from itertools import *; from math import *
from typing import *
_name, _arguments, _mark = json.load(sys.stdin)
with open("answer.py") as _file:
    exec(compile(_file.read(), "answer.py", "exec"))
_found = getattr(Solution(), _name) if "Solution" in globals() else globals()[_name]
_found = _found(*_arguments)
print(); print(_mark + json.dumps(_found))
"""
_TESTS = """
import sys
_mark = sys.stdin.readline()
with open("answer.py") as _file:
    exec(compile(_file.read(), "answer.py", "exec"))
with open("tests.py") as _file:
    exec(compile(_file.read(), "tests.py", "exec"))
print(); print(_mark)
"""


class Case(NamedTuple):
    """One test. `name`: the function that is called, None for a program that reads `given`; `tests`: Python that judges."""

    given: Any = ""
    right: Any = ""
    name: str | None = None
    tests: str | None = None


@named
def code(
    response: str,
    label: Any,
    *,
    prompt: Any,
    metadata: Any,
    every: bool = True,
    case_deadline_s: float = 6.0,
    total_s: float = 8.0,
    max_cases: int | None = None,
) -> dict[str, Any]:
    """1 where the last block of Python passes all cases, or without `every` the fraction that it passes. A case that takes longer
    than its deadline, or does not begin within `total_s`, is not passed. Details: `passed`, and `why` the first one was not."""
    cases = cases_of(label, metadata or {})[:max_cases]
    program = program_of(response)
    if program is None:
        return {"score": 0.0, "passed": 0.0, "why": "no code"}
    passed, why = asyncio.run(_tried(sandbox(), program, cases, every, case_deadline_s, time.monotonic() + total_s))
    fraction = passed / len(cases)
    return {"score": float(passed == len(cases)) if every else fraction, "passed": fraction, "why": why}


async def _tried(
    box: Sandbox, program: str, cases: Sequence[Case], every: bool, deadline_s: float, until: float
) -> tuple[int, str | None]:
    passed, first = 0, None
    limits = Limits(**box.limits)
    for number, case in enumerate(cases):
        left = until - time.monotonic()
        why: str | None = "deadline"
        if left > 0:
            why = await _judged(box, program, case, replace(limits, deadline_s=min(deadline_s, left)))
        passed += why is None
        first = first or (None if why is None else f"case {number}: {why}")
        if why is not None and (every or left <= 0):
            break
    return passed, first


async def _judged(box: Sandbox, program: str, case: Case, limits: Limits) -> str | None:
    """Why a case is not passed, None where it is."""
    files, mark = {"answer.py": program.encode(errors="replace")}, secrets.token_hex(16)
    if case.tests is not None:
        files |= {"main.py": _TESTS.encode(), "tests.py": case.tests.encode(errors="replace")}
        given = mark + "\n"
    elif case.name is not None:
        files["main.py"] = _CALL.encode()
        given = json.dumps([case.name, case.given, mark])
    else:
        files["main.py"] = files.pop("answer.py")
        given = case.given
    ran = await box.run(files, ["python", "main.py"], given.encode(errors="replace"), limits)
    if ran.why is not None:
        return ran.why
    if case.name is None and case.tests is None:
        right = ran.exit == 0 and same_output(ran.output, case.right)
    else:
        right = ran.exit == 0 and _told(ran, mark, case)
    if right or not ran.exit:
        return None if right else "wrong"
    return (ran.errors.strip().splitlines() or [f"exit code {ran.exit}"])[-1][:200]


def _told(ran: Ran, mark: str, case: Case) -> bool:
    """What was said last, behind the mark that the code is given when it is called."""
    _, found, said = ran.output.rpartition(f"\n{mark}")
    if not found or case.tests is not None:
        return bool(found)
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):
        return False
    # APPS wraps some results in a list.
    return bool(value == case.right or (isinstance(case.right, list) and case.right == [value]))


def program_of(response: str) -> str | None:
    """The last block of Python; without any block the whole response. None where there is no Python."""
    blocks = _FENCE.findall(response)
    if not blocks:
        return None if "```" in response or not response.strip() else response
    return next((text for language, text in reversed(blocks) if language.lower() in _LANGUAGES), None)


def same_output(said: str, right: str) -> bool:
    """Line by line, without spaces at their ends; a line of numbers equals one of the same numbers otherwise written."""
    lines, rights = ([line.strip() for line in text.strip().splitlines()] for text in (said, right))
    return len(lines) == len(rights) and all(map(_same_line, lines, rights))


def _same_line(said: str, right: str) -> bool:
    if said == right:
        return True
    words, rights = said.split(), right.split()
    try:
        return len(words) == len(rights) and all(Decimal(a) == Decimal(b) for a, b in zip(words, rights, strict=True))
    except InvalidOperation:
        return words == rights


def cases_of(label: Any, metadata: Mapping[str, Any]) -> list[Case]:
    """Test cases in the forms of APPS and TACO ({"inputs", "outputs", "fn_name"}), LiveCodeBench (a list of {"input", "output",
    "testtype"}, its private ones packed or not, with `func_name` in the metadata), MBPP (a list of asserts) and HumanEval (a text
    that defines `check`, with `entry_point` in the metadata); each as a value, or as JSON. ConfigError for others."""
    found = _unpacked(label)
    cases: list[Case] = []
    if isinstance(found, Mapping) and "inputs" in found and "outputs" in found:
        name = found.get("fn_name")
        for given, right in zip(found["inputs"], found["outputs"], strict=False):
            text = given if name else _lines(given)
            cases.append(Case(text, right if name else _lines(right), name))
    elif (
        isinstance(found, Sequence) and not isinstance(found, str) and all(isinstance(each, Mapping) for each in found)
    ):
        name = metadata.get("func_name") or metadata.get("fn_name")
        for each in found:
            if each.get("testtype", "stdin") == "functional":
                given = [json.loads(line) for line in each["input"].strip().splitlines()]
                cases.append(Case(given, json.loads(each["output"]), str(name)))
            else:
                cases.append(Case(each["input"], each["output"]))
    elif isinstance(found, Sequence) and not isinstance(found, str):
        before = str(metadata.get("test_setup_code") or "")
        cases = [Case(tests=f"{before}\n{each}") for each in found]
    elif isinstance(found, str) and found.strip():
        entry = metadata.get("entry_point")
        cases = [Case(tests=f"{found}\ncheck({entry})" if entry else found)]
    if not cases:
        raise ConfigError(
            "label must hold test cases for the reward 'code': inputs and outputs, a list of input and output, or Python that "
            f"asserts, got {str(label)[:80]!r}. See docs/rewards.md"
        )
    return cases


def _lines(value: Any) -> str:
    """APPS has some inputs and outputs as lists of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _unpacked(label: Any) -> Any:
    """JSON as its value; what LiveCodeBench packs (base64 of zlib of a pickled text of JSON), unpacked: the pickle is
    read, and not run."""
    if not isinstance(label, str):
        return label
    try:
        return json.loads(label)
    except ValueError:
        pass
    try:
        unpack = zlib.decompressobj()
        content = unpack.decompress(base64.b64decode(label, validate=True), _MAX_UNPACKED)
        return json.loads(next(text for _, text, _ in pickletools.genops(content) if isinstance(text, str)))
    except (ValueError, zlib.error, StopIteration):
        return label
