"""The two processes in which the reward `code` runs an answer and its tests: a script that lies in the sandbox.

    python -I code_runner.py answer    runs the answer, and calls its functions as lines on standard input ask
    python -I code_runner.py tests     runs tests of Python; what they call of the answer is called in a process `answer`

Owns what passes between an answer and who judges it: lines of JSON, in which values stand as data and are rebuilt by their type.
Does not own what a right value is (`programs.py`) or what a process may do (`runtime/sandbox/`). Standard library only.

Invariants: the tests and what they expect are never in the answer's process. Nothing that it sends is run, and nothing of it is
compared by rules of its own. The process of the tests hides its memory and its descriptors from the answer's.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import datetime
import functools
import io
import json
import operator
import os
import subprocess
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator, Set
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, json, math, operator, random, re, string, sys
from collections import *; from functools import *; from heapq import *; from itertools import *; from math import *
from typing import *
from builtins import pow
"""
"""What data sets take to be imported; the `pow` of `math` is another function."""
_PR_SET_DUMPABLE = 4
_MAX_PRINTED = 1 << 20


async def _awaitable(value: Any) -> Any:
    return value


_FORMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple), set: (list, set), frozenset: (list, frozenset), Set: (list, set), deque: (list, deque),
    dict: (lambda value: [[key, entry] for key, entry in value.items()], dict),
    bytes: (list, bytes), bytearray: (list, bytearray), Decimal: (str, Decimal), Fraction: (str, Fraction),
    types.CoroutineType: (lambda value: [__import__("asyncio").run(value)], lambda parts: _awaitable(*parts)),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    range: (lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    datetime.datetime: (str, datetime.datetime.fromisoformat), datetime.date: (str, datetime.date.fromisoformat),
}  # fmt: skip
"""Type -> its content as other data, and the way back. Another type's value travels as the first of these that it is."""
_BUILD = {form.__name__: build for form, (_, build) in _FORMS.items()}
_MUTABLE = (list, dict, set, bytearray, deque)
_METHODS = {name for form in (str, int, float, list, *_FORMS) for name in dir(form)}


class NotData(BaseException):
    """The tests ask something of the answer that could only be judged by its own rules. No test catches it."""


def encode(value: Any, refer: Callable[[Any], Any] | None = None) -> Any:
    """Return `value` as JSON holds it. `refer` says what stands for a value that is no data; TypeError without it."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return encode(value.item(), refer)
    for plain in (int, float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, list):
        return [encode(entry, refer) for entry in value]
    for form, (take_apart, _) in _FORMS.items():
        if isinstance(value, form):
            return {form.__name__: encode(take_apart(value), refer)}
    if refer is None:
        raise TypeError(f"{kind.__name__} cannot be passed as data")
    return {"ref": refer(value)}


def decode(shown: Any, resolve: Callable[..., Any] | None = None) -> Any:
    """Return the value that `encode` was given, made of Python's own types. ValueError for no data, unless `resolve` finds it."""
    if isinstance(shown, list):
        return [decode(entry, resolve) for entry in shown]
    if not isinstance(shown, dict):
        return shown
    [(name, content)] = shown.items()
    if name in _BUILD and isinstance(content, list | str):
        return _BUILD[name](decode(content, resolve))
    if resolve is None or name != "ref":
        raise ValueError("a value must be data to be judged")
    return resolve(*content)


def known_names() -> dict[str, Any]:
    """Return what any module finds that does not define it: Python's built-ins, and what data sets take to be imported."""
    names = dict(vars(builtins))
    exec(PRELUDE, names)
    return names


def wanted_names(tests: str, entry: str | None = None) -> list[str]:
    """Return the names that tests take from the answer: the ones in `entry`, and those that they use and do not bind. A name that
    is known to any module means that, unless no other name can be what is tested: then it is that of the first innermost call."""
    known, used, bound, calls, imports = known_names(), list[str](), set[str](), list[ast.Call](), False
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.Name):
            used.append(node.id) if isinstance(node.ctx, ast.Load) else bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
            imports |= node.name == "solution"
        elif isinstance(node, ast.ImportFrom):
            imports |= node.module == "solution"
        elif not isinstance(node, ast.keyword):
            bound.add(getattr(node, "name", None) or getattr(node, "arg", None) or "")
        if isinstance(node, ast.Call) and sum(isinstance(part, ast.Call) for part in ast.walk(node)) == 1:
            calls.append(node)
    named = [node.id for node in ast.walk(ast.parse(entry or "")) if isinstance(node, ast.Name)]
    found = named + [name for name in used if name not in bound and name not in known]
    if not found and not imports:
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
        called = [call.func.id for call in calls if isinstance(call.func, ast.Name) and call.func.id not in bound]
        found = ([name for name in called if not hasattr(builtins, name)] or called)[:1]
    return list(dict.fromkeys(found))


class Peer:
    """One end of the lines between tests and answer: it asks, and does by `perform` what it is asked, also meanwhile."""

    def __init__(self, reader: Any, writer: Any, perform: Callable[..., Any]) -> None:
        self._reader, self._writer, self._perform = reader, writer, perform
        self._objects: list[Any] = []
        self._remotes: dict[int, Any] = {}
        self._exceptions: dict[str, type[Exception]] = {}
        self.lock = threading.RLock()
        self.printed = io.StringIO()
        """What the answer has printed since its last reply."""
        self.has_classes = False
        """Whether the tests have named a class of the answer's, whose objects may pass."""

    def ask(self, request: str, *arguments: Any, **named: Any) -> Any:
        """Have the other end do something; return what it returns, or raise what it raises."""
        given = [*arguments, *named.values()]
        self._send("ask", request, [encode(value, self._refer) for value in given], list(named))
        for kind, printed, *content in self.messages():
            sys.stdout.write(printed)
            if kind == "value":
                value = decode(content[0], self._resolve)
                for at, state in content[1] if value is None else ():  # what works in place returns nothing
                    _update(given[at], decode(state, self._resolve))
                return value
            names, parts, text = content
            raised = self._exception(names)
            try:  # a StopIteration from elsewhere would end a loop of the tests
                error = (
                    raised(*decode(parts)) if raised is not StopIteration or request == "next" else RuntimeError(text)
                )
            except Exception:  # noqa: BLE001 - a class that is not made of its arguments
                error = RuntimeError(text)
            raise error
        raise RuntimeError("the answer ended before it returned")

    def messages(self) -> Iterator[list[Any]]:
        """Yield what the other end says but for what it asks, which is done."""
        for line in self._reader:
            message = json.loads(line)
            if message[0] == "ask":
                kind, *content = self._reply(*message[1:])
                self._send(kind, self.printed.getvalue()[:_MAX_PRINTED], *content)
                self.printed.seek(0)
                self.printed.truncate()
            else:
                yield message

    def _reply(self, request: str, shown: list[Any], names: list[str]) -> list[Any]:
        try:
            given = [decode(value, self._resolve) for value in shown]
            count = len(given) - len(names)
            value = self._perform(request, *given[:count], **dict(zip(names, given[count:], strict=True)))
            states = [encode(each, self._refer) if isinstance(each, _MUTABLE) else None for each in given]
            changed = [[at, state] for at, state in enumerate(states) if state not in (None, shown[at])]
            return ["value", encode(value, self._refer), changed]
        except BaseException as error:  # noqa: BLE001 - SystemExit, too: it is what becomes of the call
            text = traceback.format_exception_only(type(error), error)[-1].strip()[:200]
            try:
                parts = [encode(part) for part in error.args]
            except Exception:  # noqa: BLE001
                parts = [text]
            return ["error", [base.__name__ for base in type(error).__mro__], parts, text]

    def _send(self, *message: Any) -> None:
        self._writer.write(json.dumps(message) + "\n")
        self._writer.flush()

    def _refer(self, value: Any) -> list[Any]:
        """Return what stands for an object of this end: its kind, its number, and the names of its bases where it is a class."""
        if isinstance(value, Remote):
            return ["own", vars(value)["_number"], []]
        if isinstance(value, type):
            kind = "exception" if issubclass(value, Exception) else "class"
        else:
            kind = "object" if not callable(value) and not hasattr(value, "__next__") else "function"
        number = next((at for at, known in enumerate(self._objects) if known is value), len(self._objects))
        self._objects += [value] * (number == len(self._objects))
        return [kind, number, [base.__name__ for base in getattr(value, "__mro__", ())]]

    def _resolve(self, kind: str, number: int, names: list[str]) -> Any:
        """Return the object that a reference of the other end stands for."""
        if kind == "own":
            return self._objects[number]
        if kind == "exception":
            return self._exception(names)
        if kind == "object" and not self.has_classes:
            raise NotData("the answer must return data, got an object, where the tests name no class of its")
        return self._remotes.setdefault(number, Remote(self, kind, number))

    def _exception(self, names: list[str]) -> type[Exception]:
        """Return Python's exception of the first of these names, a class and its bases; one of the same names for another's."""
        known = getattr(builtins, names[0], None) if names else Exception
        if isinstance(known, type) and issubclass(known, Exception):
            return known
        if names[0] not in self._exceptions:
            self._exceptions[names[0]] = type(names[0], (self._exception(names[1:]),), {})
        return self._exceptions[names[0]]


class Remote:
    """An object at the other end that is no data. It equals itself alone: a comparison by the answer's own rules would be its own
    verdict. `_made`: the tests have named it, or made it of a class that they named."""

    def __init__(self, peer: Peer, kind: str, number: int) -> None:
        vars(self).update(_peer=peer, _kind=kind, _number=number, _made=False)

    def _ask(self, request: str, *arguments: Any, **named: Any) -> Any:
        with self._peer.lock:  # tests may have threads
            value = self._peer.ask(request, self, *arguments, **named)
        if request == "call" and self._made and self._kind == "class" and isinstance(value, Remote):
            vars(value)["_made"] = True
        return value

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        if not self._made and (self._kind != "object" or name in _METHODS):  # it would be told what the tests expect
            raise NotData(f"the answer must return data, got no data ({self._kind}) that is asked for {name}")
        return self._ask("getattr", name)

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __eq__(self, other: object) -> bool:
        if other is not None and not isinstance(other, Remote):
            raise NotData(f"the answer must return data to be compared, got no data ({self._kind})")
        return self is other

    __hash__ = object.__hash__

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(self._ask("is_instance", value))


for _name in ("call", "getitem", "setitem", "setattr", "len", "bool", "next", "str", "repr"):
    setattr(Remote, f"__{_name}__", functools.partialmethod(Remote._ask, _name))


def _update(argument: Any, state: Any) -> None:
    """Give an argument that was changed in place its new content."""
    if isinstance(argument, _MUTABLE) and type(argument) is type(state):
        argument.clear()
        getattr(argument, "update" if isinstance(argument, dict | set) else "extend")(state)


def run_answer(reader: Any, writer: Any) -> None:
    """Do with an answer, a module of its own, what the other end asks, until that ends."""
    module = sys.modules["answer"] = types.ModuleType("answer")
    names = vars(module)
    names["__builtins__"] = known_names()

    def load(text: str) -> list[str]:
        exec(compile(text, "answer.py", "exec", dont_inherit=True), names)
        return [name for name in names if name[:2] != "__"]

    def solve(name: str, arguments: list[Any]) -> Any:
        """As LeetCode asks, or as a function."""
        return getattr(names["Solution"]() if hasattr(names.get("Solution"), name) else module, name)(*arguments)

    def perform(request: str, *arguments: Any, **named: Any) -> Any:
        does = own.get(request) or getattr(builtins, request, None) or getattr(operator, request)
        return does(*arguments, **named)

    def is_instance(kind: type, value: Any) -> bool:
        return isinstance(value, kind)

    own: dict[str, Callable[..., Any]] = {"load": load, "solve": solve, "name": names.get, "is_instance": is_instance}

    peer = Peer(reader, writer, perform)
    peer.has_classes = True
    sys.stdout = peer.printed
    for _ in peer.messages():
        pass


def run_tests(peer: Peer, answer: str, tests: str, entry: str | None) -> None:
    """Run tests of an answer: the text, then its classes of `unittest` and its functions `test...` without parameters. What they
    raise is raised."""
    own, known, wanted = set(peer.ask("load", answer)), known_names(), wanted_names(tests, entry)

    def of_answer(name: str) -> Any:
        if name not in own:
            raise AttributeError(name)
        value = peer.ask("name", name)
        if isinstance(value, Remote):
            # What is not named as a class is to return data, whatever the answer made it.
            vars(value)["_made"] = name[0].isupper() or vars(value)["_kind"] == "object"
            peer.has_classes |= vars(value)["_kind"] == "class" and name[0].isupper()
        return value

    solution, module = types.ModuleType("solution"), types.ModuleType("__main__")
    vars(solution).update(__getattr__=of_answer, __all__=[name for name in own - known.keys() if name[0] != "_"])
    sys.modules |= {"__main__": module, "solution": solution}
    sys.argv = ["tests"]
    names = vars(module)
    names["__builtins__"] = {name: value for name, value in known.items() if name not in wanted}
    names |= {name: of_answer(name) for name in wanted if name in own}
    try:
        exec(compile(tests, "<tests>", "exec", dont_inherit=True), names)
    except SystemExit as end:  # of the tests, as `unittest.main` ends: an answer's is another exception here
        if end.code:
            raise
        return
    if unittest := sys.modules.get("unittest"):
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
        for _, text in (*result.failures, *result.errors):
            raise AssertionError(text.strip().splitlines()[-1])
    for name, function in list(names.items()):
        if name.startswith("test") and isinstance(function, types.FunctionType) and not function.__code__.co_argcount:
            function()


def start_answer() -> Any:
    """Start the process of the answer, which may not look into this one."""
    if ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError("the process of the tests must be hidden from the answer's")
    line = [sys.executable, "-I", "-c", Path(__file__).read_text(), "answer"]
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main(what: str) -> None:
    sys.set_int_max_str_digits(0)
    sys.setrecursionlimit(10_000)
    reader, writer = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what is printed is nobody's verdict
    if what == "answer":
        run_answer(reader, writer)
        return
    spec = json.loads(reader.read())
    process, why = start_answer(), None

    def perform(request: str, given: Any, *arguments: Any, **named: Any) -> Any:
        """What an answer may do with functions and iterators that the tests give it."""
        if request == "call":
            return given(*arguments, **named)
        return next(given) if request == "next" else iter(given)

    try:
        run_tests(Peer(process.stdout, process.stdin, perform), **spec)
    except BaseException as error:  # noqa: BLE001 - whatever the tests raise is why they are not passed
        why = traceback.format_exception_only(type(error), error)[-1].strip()[:200]
    writer.write(json.dumps({"why": why}))
    writer.flush()
    process.kill()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
