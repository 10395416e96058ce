r"""The reward for programs: an answer's code against the test cases of its row, in the sandbox.

Owns the forms in which data sets write test cases, and what an output has to be. Does not own what the code may do
(`runtime/sandbox/`), or how values leave it (`code_runner.py`). Runs one command a case, so that no case sees another. What is
right is never told to the process in which the answer runs: outputs and values are compared here, and Python that tests runs in a
process of its own.

    code("```python\nprint(int(input()) * 2)\n```", {"inputs": ["4\n"], "outputs": ["8\n"]}, ...)
    ->   {"score": 1.0, "passed": 1.0, "why": None}
"""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import pickletools
import re
import textwrap
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from rondo.roles.rewards.hub import code_runner
from rondo.roles.rewards.hub.named import named
from rondo.runtime.errors import ConfigError
from rondo.runtime.sandbox.sandbox import Limits, Sandbox, sandbox

_FENCE = re.compile(
    r"(?P<indent>[ \t]*(?:(?:[-*+>]|\d+[.)])[ \t]+)*)(?P<mark>`{3,}|~{3,})[ \t]*(?P<about>[^`\r\n]*?)\s*$"
)
_PYTHON = ("python", "python3", "py", "py3", "ipython", "ipython3")
_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_MAX_UNPACKED = 64 << 20
_RUNNER = Path(code_runner.__file__).read_text()


class Case(NamedTuple):
    """One test. `name`: the function that is called, None for a program that reads `given`; `tests`: Python that judges;
    `wrapped`: what is right may stand in a list, as APPS writes some results."""

    given: Any = ""
    right: Any = ""
    name: str | None = None
    tests: str | None = None
    wrapped: bool = False


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
    """1 where the program of the response passes all cases, or without `every` the fraction that it passes. A case that takes
    longer than its deadline, or does not begin within `total_s`, is not passed. Details: `passed`, and `why` one was not."""
    cases = cases_of(label, metadata or {})[:max_cases]
    program = program_of(response, _tested(cases[0]))
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
    script, command, given = _RUNNER, ["-I", "main.py", "answer"], ""
    if case.tests is not None:
        command[-1], given = "tests", json.dumps({"answer": program, "tests": case.tests, "entry": case.name})
    elif case.name is not None:
        for request in ("load", [program]), ("solve", [case.name, code_runner.encode(case.given)]):
            given += json.dumps(["ask", *request, []]) + "\n"
    else:
        script, command, given = program, ["main.py"], str(case.given)
    ran = await box.run(
        {"main.py": script.encode(errors="replace")}, ["python", *command], given.encode(errors="replace"), limits
    )
    if ran.why is not None:
        return ran.why
    if script is program and ran.exit:
        return (ran.errors.strip().splitlines() or [f"exit code {ran.exit}"])[-1][:200]
    try:
        return _why_not(case, ran.output)
    except (LookupError, RecursionError, TypeError, ValueError):  # an answer that wrote what it liked
        return "wrong"


def _why_not(case: Case, output: str) -> str | None:
    """Why what the sandbox said is not right: the verdict of tests, replies to two requests, or what a program printed."""
    if case.tests is not None:
        why = json.loads(output)["why"]
        return None if why is None else str(why)
    if case.name is None:
        return None if same_output(output, case.right) else "wrong"
    replies = [json.loads(line) for line in output.splitlines()]
    if failed := [reply[-1] for reply in replies if reply[0] == "error"]:
        return str(failed[0])
    _, (_, _, shown, _) = replies
    right = same_value(shown, case.right) or (case.wrapped and same_value([shown], case.right))
    return None if right else "wrong"


def _tested(case: Case) -> list[str]:
    """The names of the answer's that a case tests; none for a program."""
    if case.tests is None:
        return [] if case.name is None else [case.name, "Solution"]
    try:
        return code_runner.wanted_names(case.tests, case.name)
    except SyntaxError as error:
        raise ConfigError(
            f"label must hold tests that are Python, got {case.tests[:80]!r} ({error}). Correct them"
        ) from error


def program_of(response: str, names: Sequence[str] = ()) -> str | None:
    """Return the last block of Python, of those that define one of `names` where any does. Blocks without a language count where
    none is marked as Python, and hold more than output. Without any block it is the whole response; None for no Python."""
    blocks = _blocks(response)
    unmarked = [text for language, text in blocks if not language]
    found = [text for language, text in blocks if language in _PYTHON]
    found = found or list(filter(_does_something, unmarked)) or unmarked
    if not found:
        return None if "```" in response or "~~~" in response or not response.strip() else response
    either = "|".join(map(re.escape, names)) or "(?!)"
    defines = re.compile(rf"^[ \t]*(?:(?:(?:async +)?def|class) +(?:{either})\b|(?:{either}) *=)", re.MULTILINE)
    return ([text for text in found if defines.search(text)] or found)[-1]


def _blocks(response: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks of a response. A block that is not closed is none, and ends where another begins."""
    blocks, opened, lines = list[tuple[str, str]](), None, list[str]()
    for line in response.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if fence is not None and opened is not None and not fence["about"] and fence["mark"].startswith(opened["mark"]):
            language = re.split(r"[\s{}.:,=]+", opened["about"].lower().lstrip("{. "))[0]
            blocks.append((language, textwrap.dedent("".join(lines))))
            opened = None
        elif fence is not None and (opened is None or (fence["about"] and fence["mark"] == opened["mark"])):
            opened, lines = fence, []
        elif opened is not None:
            width = len(opened["indent"])
            lines.append(line[:width].lstrip(" \t>") + line[width:])
    return blocks


def _does_something(text: str) -> bool:
    """Whether a text is Python that does more than name values, as a sample of output may seem to do."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    calls = any(isinstance(node, ast.Call) for part in body for node in ast.walk(part))
    return calls or not all(isinstance(part, ast.Expr | ast.AnnAssign) for part in body)


def same_value(shown: Any, right: Any) -> bool:
    """Return whether a value, as `code_runner.encode` shows it, is what JSON says is right: a list may be a tuple, numbers are
    `_close`, and a truth is a truth alone."""
    if isinstance(right, bool) or isinstance(shown, bool) or right is None:
        return shown is right
    if isinstance(right, int | float):
        return isinstance(shown, int | float) and _close(repr(shown), repr(right))
    if isinstance(shown, dict):
        [(form, shown)] = shown.items()
        if form == "dict" and isinstance(right, dict):
            named = {key if isinstance(key, str) else json.dumps(key): value for key, value in shown}
            return named.keys() == right.keys() and all(same_value(named[key], right[key]) for key in right)
        return form == "tuple" and same_value(shown, right)
    if isinstance(right, list):
        return isinstance(shown, list) and len(shown) == len(right) and all(map(same_value, shown, right))
    return isinstance(shown, str) and bool(shown == right)


def same_output(said: str, right: str) -> bool:
    """Line by line and word by word; a number equals one that is `_close`, otherwise written."""
    lines, rights = ([line.split() for line in text.strip().splitlines()] for text in (said, right))
    return len(lines) == len(rights) and all(
        len(words) == len(wanted) and all(map(_close, words, wanted))
        for words, wanted in zip(lines, rights, strict=True)
    )


def _close(said: str, right: str) -> bool:
    """Whether a word is the right one, or a number as near to it as the harness of APPS asks (`numpy.allclose`), but for whole
    numbers, and for those of few decimals, which are right to half a unit of the last."""
    if said == right or not _NUMBER.fullmatch(said) or not _NUMBER.fullmatch(right):
        return said == right
    number = Decimal(right)
    decimals = -int(number.as_tuple().exponent)
    try:
        most = Decimal("1e-5") * abs(number) + Decimal("1e-8")
        if decimals < 5:
            most = min(most, Decimal(5).scaleb(-decimals - 1) if decimals > 0 else Decimal("1e-6"))
        return abs(Decimal(said) - number) <= most
    except ArithmeticError:  # beyond what Decimal computes with
        return False


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
            cases.append(Case(text, right if name else _lines(right), name, wrapped=bool(name)))
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
        if (
            entry is None
            and re.search(r"^def check\(", found, re.MULTILINE)
            and not re.search(r"^check\(", found, re.MULTILINE)
        ):
            raise ConfigError(
                "metadata must name the entry_point that `check` of the label tests, got none. Add it with data.metadata_key"
            )
        cases = [Case(name=entry, tests=f"{found}\ncheck({entry})" if entry else found)]
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
