"""What a reward worker runs: the user's reward function on one item.

Owns loading the function, and how it is called. Does not own what its result must look like (`scores.py`), the process around it
(`runtime/processes/pool_worker.py`), which functions need none (`function.py`) or what a failed score means (`pool.py`). Imports
the standard library and orjson, and what the user's module imports.

    score = in_worker("rondo.roles.rewards.worker:open_function", {"function": "rewards.py:exact"})
    score(["1234", "1234", "s3142>", {}, ["stop", 5, 64, ["1234"], False]])      # [1.0, {}]: score, details

A function is called with response, label, prompt and metadata, and with those of `ASKED_FOR` that are among its parameters. One
over a whole prompt group is called with the responses of all its samples in the place of one, and lists in those of `ASKED_FOR`;
it returns as many scores.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from rondo.roles.rewards.scores import scored, scored_group
from rondo.roles.rewards.several import chosen, together
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import load_reference
from rondo.runtime.values import Encoded, encode

ASKED_FOR = ("finish_reason", "num_tokens", "max_new_tokens", "turns", "in_thought")
"""What a function may ask for by name: how the response ended ("stop", "length" or "aborted"), its tokens, their limit, a list
of what the policy said in each turn, and whether the prompt, as the policy got it, opened a thought (None: not known)."""
IS_ASYNC = "is it async?"


class Opened(NamedTuple):
    """A function of the user's: `call` gives it an item, and returns what it returns; `check` makes of that what travels, or
    raises what is wrong with it. `is_async` is None of several of which some are."""

    call: Callable[[Any], Any]
    check: Callable[[Any], Encoded]
    is_async: bool | None


def in_worker(
    open_function: str, settings: Mapping[str, Any], sandbox: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Any], Encoded]:
    """What a process of the user's function runs on an item, and waits for where that is to be awaited. The item `IS_ASYNC` asks
    whether the function is to be awaited at all. `sandbox`: settings of that of this process."""
    if sandbox:
        from rondo.runtime.sandbox.sandbox import use  # and with it asyncio

        use(sandbox)
    opened: Opened = load_reference(open_function, "the function of a pool")(**settings)

    def run(item: Any) -> Encoded:
        if item == IS_ASYNC:
            return encode(opened.is_async)
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
    if unknown := args.keys() - {name for part in parts.values() for name in part.taken}:
        raise ConfigError(
            f"reward.args must name parameters of reward.function, got {', '.join(sorted(unknown))}. Correct the name, or add "
            "the parameter"
        )
    check = functools.partial(scored if per == "response" else scored_group, components=components)
    asyncs = {part.is_async for name, part in parts.items() if name in calls}
    return Opened(call, check, asyncs.pop() if len(asyncs) == 1 else None)


class _Part(NamedTuple):
    """One function of the user's; `taken`: those of `reward.args` that it is given."""

    call: Callable[[list[Any]], Any]
    is_async: bool
    taken: frozenset[str]


def _open_one(function: str, per: str, args: Mapping[str, Any]) -> _Part:
    reward = load_reference(function, "reward.function")
    if inspect.isclass(reward):
        raise ConfigError(
            f"reward.function must be a function, got the class {function}. Give it a `def` that makes or uses an object of it"
        )
    names: list[str] = []
    own: dict[str, Any] = {}
    try:
        signature = inspect.signature(reward)
        names = [name for name in ASKED_FOR if _takes(signature, name)]
        own = {name: value for name, value in args.items() if _takes(signature, name)}
        signature.bind("", "", prompt="", metadata={}, **dict.fromkeys(names), **own)
    except TypeError as error:
        raise ConfigError(
            f"reward.function must take ({per if per == 'response' else 'responses'}, label, *, prompt, metadata), got "
            f"{function} ({error}). Change its parameters, or give them in reward.args"
        ) from error
    except ValueError:
        pass  # a builtin without a signature

    def score(item: list[Any]) -> Any:
        response, label, prompt, metadata, told = item
        more = {name: value for name, value in zip(ASKED_FOR, told, strict=True) if name in names}
        return reward(response, label, prompt=prompt, metadata=metadata, **more, **own)

    return _Part(score, inspect.iscoroutinefunction(reward), frozenset(own))


def _takes(signature: inspect.Signature, name: str) -> bool:
    """Whether a parameter takes an argument of this name."""
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    kinds = {each.name: each.kind for each in signature.parameters.values()}
    return kinds.get(name) in by_name or inspect.Parameter.VAR_KEYWORD in kinds.values()


@functools.cache
def _loop() -> Any:
    """The event loop of this process, which keeps what one call leaves open for the next."""
    import asyncio

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop
