"""What a reward worker runs: the user's reward function on one item.

Owns loading the function, and how it is called. Does not own what its result must look like (`scores.py`), the process around it
(`runtime/processes/pool_worker.py`), which functions need none (`function.py`) or what a failed score means (`pool.py`). Imports
the standard library and orjson, and what the user's module imports.

    score = in_worker("rondo.roles.rewards.worker:open_function", {"function": "rewards.py:exact"})
    score(["1234", "1234", "s3142>", {}, {"num_tokens": 5}, ["prompt", "label"]])      # [1.0, {}]: score, details

A function is called with response and label, and by name with what it has parameters for of prompt, metadata, `ASKED_FOR` and
the columns of the row. One over a whole prompt group is called with the responses of all its samples in the place of one, and
lists in those of `ASKED_FOR`; it returns as many scores.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rondo.roles.rewards.scores import RewardError, scored, scored_group
from rondo.roles.rewards.several import chosen, together
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import load_reference
from rondo.runtime.values import Encoded, encode

ASKED_FOR = ("finish_reason", "num_tokens", "max_new_tokens", "turns", "transcript", "in_thought")
"""What a function may have parameters for: how the sample ended ("stop", "length" or "aborted"), its tokens, their limit, its
messages as dicts with role and content, all of it as one text, and whether what stands in front of the response opened a thought
(None: not known)."""
_KNOWN = frozenset({"prompt", "metadata", *ASKED_FOR})
_NOT_FIRST = frozenset({"label", "prompt", "prompts", "metadata", "completions", "environments"})
_NOT_SECOND = frozenset({"response", "responses", "prompt", "prompts", "metadata", "completion", "completions"})
"""Names, some of them TRL's, of a first or second parameter that mean something else than what it is given by position."""
IS_ASYNC = "is it async?"


class Opened(NamedTuple):
    """A function of the user's: `call` gives it an item, and returns what it returns; `check` makes of that what travels, or
    raises what is wrong with it. `is_async` is None of several of which some are. `takes`: names that its parameters have, beside
    the first ones; None where it takes any."""

    call: Callable[[Any], Any]
    check: Callable[[Any], Encoded]
    is_async: bool | None
    takes: frozenset[str] | None = frozenset()


def in_worker(
    open_function: str, settings: Mapping[str, Any], sandbox: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Any], Encoded]:
    """What a process of the user's function runs on an item, and waits for where that is to be awaited. The item `IS_ASYNC` asks
    whether the function is to be awaited at all, and what it takes. `sandbox`: settings of that of this process."""
    if sandbox:
        from rondo.runtime.sandbox.sandbox import use  # and with it asyncio

        use(sandbox)
    opened: Opened = load_reference(open_function, "the function of a pool")(**settings)

    def run(item: Any) -> Encoded:
        if item == IS_ASYNC:
            return encode([opened.is_async, opened.takes])
        value = opened.call(item)
        return opened.check(_loop().run_until_complete(value) if hasattr(value, "__await__") else value)

    return run


def open_function(
    function: str | Mapping[str, str],
    per: str = "response",
    components: Mapping[str, float] = MappingProxyType({}),
    by: str | None = None,
    args: Mapping[str, Any] = MappingProxyType({}),
    only: bool | None = None,
) -> Opened:
    """The function that scores one item, of one response or of a group's; or several, each a component by its name or, with `by`,
    the one that this metadata names. `components`: what their dicts must hold, with weights. `args`: of the functions that have
    such parameters. `only` those that are async, or are not: the score is what these add to it. ConfigError for one that cannot
    be called so."""
    named = {"": function} if isinstance(function, str) else function
    parts = {name: _open_one(each, per, args) for name, each in named.items()}
    calls = {name: part.call for name, part in parts.items() if only in (None, part.is_async)}
    if only is not None and by is None:
        components = {name: components[name] for name in calls}
    if isinstance(function, str):
        call = calls[""]
    elif by is None:
        call = together(calls, per == "group")
    else:

        def nothing(item: Any) -> Any:
            """The score of a row that another function has."""
            return 0.0 if per == "response" else [0.0] * len(item[0])

        call = chosen(dict.fromkeys(parts, nothing) | calls, by)
    if unknown := args.keys() - {name for part in parts.values() for name in part.own}:
        raise ConfigError(
            f"reward.args must name parameters of reward.function, got {', '.join(sorted(unknown))}. Correct the name, or add "
            "the parameter"
        )
    check = functools.partial(scored if per == "response" else scored_group, components=components)
    asyncs = {part.is_async for name, part in parts.items() if name in calls}
    takes = [part.takes for name, part in parts.items() if name in calls]
    every = None if None in takes else frozenset([by] if by else []).union(*filter(None, takes))
    return Opened(call, check, asyncs.pop() if len(asyncs) == 1 else None, every)


class _Part(NamedTuple):
    """One function of the user's; `own`: the names of `reward.args` that it takes; `takes` as of `Opened`."""

    call: Callable[[list[Any]], Any]
    is_async: bool
    own: frozenset[str]
    takes: frozenset[str] | None


def _open_one(function: str, per: str, args: Mapping[str, Any]) -> _Part:
    reward = load_reference(function, "reward.function")
    if inspect.isclass(reward):
        raise ConfigError(
            f"reward.function must be a function, got the class {function}. Give it a `def` that makes or uses an object of it"
        )
    first = "response" if per == "response" else "responses"
    call, own, takes = by_name(reward, function, "reward.function", first, args)

    def score(item: list[Any]) -> Any:
        return call(item[0], *item[1:])

    return _Part(score, inspect.iscoroutinefunction(reward), frozenset(own), takes)


def by_name(
    function: Callable[..., Any], name: str, setting: str, first: str, args: Mapping[str, Any] | None = None
) -> tuple[Callable[..., Any], frozenset[str], frozenset[str] | None]:
    """Return a call of (response, label, prompt, metadata, other arguments by name, names of the row's columns) that passes a
    function of the user's those that it has parameters for, with the names of `args` that it takes, and all names that it takes.
    ConfigError where it cannot be called so. Parameters of a reward with a name are set in `args` alone."""
    kind, is_ours = inspect.Parameter, name.startswith("rondo.roles.rewards.hub:")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without one
        signature = inspect.signature(lambda response, label, *, prompt, metadata: None)
    parameters = list(signature.parameters.values())
    positional = [each for each in parameters if each.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD)][:2]
    names = [each.name for each in positional]
    named = {
        each.name: each
        for each in parameters[len(positional) :]
        if each.kind in (kind.KEYWORD_ONLY, kind.POSITIONAL_OR_KEYWORD)
    }
    takes_all = any(each.kind is kind.VAR_KEYWORD for each in parameters)

    def takes(key: str) -> bool:
        return key in named or (takes_all and key not in names)

    takes_more = any(each.kind is kind.VAR_POSITIONAL for each in parameters)
    wrong = [key for key, misleading in zip(names, (_NOT_FIRST, _NOT_SECOND), strict=False) if key in misleading]
    if wrong or (len(names) < 2 and not takes_more):
        lacks = (
            f"without a parameter {(first, 'label')[len(names)]!r}"
            if not wrong
            else f"with {wrong[0]!r} in their place"
        )
        raise ConfigError(
            f"{setting} must take ({first}, label, *, prompt, metadata), got {name} {lacks}. The first two are given by "
            f"position: write `def {name.rpartition(':')[2]}({first}, label, *, prompt, metadata)`, with names of columns behind "
            "the *; label is None where data.label is"
        )
    own = {key: value for key, value in (args or {}).items() if takes(key)}
    wanted = {key for key in named if not is_ours or key in _KNOWN}
    required = [key for key in wanted - own.keys() if named[key].default is kind.empty]
    try:
        signature.bind("", "", **dict.fromkeys(required), **own)
    except TypeError as error:
        raise ConfigError(
            f"{setting} must take ({first}, label, *, prompt, metadata), got {name} ({error}). Change its parameters"
            f"{'' if args is None else ', or give them in reward.args'}"
        ) from error

    def call(response: Any, label: Any, prompt: Any, metadata: Any, more: dict[str, Any], columns: list[str]) -> Any:
        if metadata or not isinstance(more.get("metadata"), dict):
            more = more | {"metadata": metadata}
        given = {
            key: value
            for key, value in (more | {"prompt": prompt}).items()
            if key in wanted or (takes_all and takes(key))
        } | own
        if missing := sorted(set(required) - given.keys()):
            from rondo.runtime.section import nearest

            raise RewardError(
                f"{setting} must have parameters that the columns of the data have, got {missing[0]!r} of {name}. "
                f"{nearest(missing[0], sorted({*columns, *_KNOWN}))} Rename it, or give it a default"
            )
        return function(response, label, **given)

    return call, frozenset(own), None if takes_all else frozenset(wanted)


@functools.cache
def _loop() -> Any:
    """The event loop of this process, which keeps what one call leaves open for the next."""
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop
