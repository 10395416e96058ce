"""Rewards: scores prompt groups, so that a reward function that fails harms only itself.

Owns what is sent to a reward function, what a score or a failure looks like, and the sum of it and what judges say. Does not
own where it runs, and its deadline (`function.py`), how it is called (`worker.py`), how a judge is asked (`genrm.py`) or what a
failed score means for its prompt group (the rollout role decides).

    async with RewardPool("rewards.py:exact", num_workers=2, deadline_s=10, load_deadline_s=1800) as pool:
        results = await pool.score([RewardItem("1234", label="1234", prompt="s3142>"), ...])    # one result an item

Invariant: `score` returns one result an item, in order, whatever the function does. Where it scores whole prompt groups, what
fails fails for all of one. Everything of a prompt group travels as one frame: a group of 8 trivial rewards costs 0.3 ms of CPU,
both sides together.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

from rondo.models.media.refs import MediaRef
from rondo.roles.rewards.function import UserFunction
from rondo.roles.rewards.scores import too_large
from rondo.roles.rewards.worker import ASKED_FOR
from rondo.runtime.processes.pool import Outcome
from rondo.runtime.values import Encoded, encode


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One sample to score. `response` is what the policy said last; `label` and `metadata` come from the data set and reach the
    function as they are. How the sample ended (one of `FINISHES`), its tokens, their limit, its messages behind the prompt, all
    of it as one text, and columns of its row reach a function with parameters for them (`worker.ASKED_FOR`)."""

    response: str
    label: Any = None
    prompt: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    num_tokens: int = 1
    max_new_tokens: int = 1
    turns: Sequence[Mapping[str, Any]] = ()
    transcript: str = ""
    in_thought: bool | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Any] = ()
    """Those of the row, for a judge that is shown the prompt as the policy was."""
    media: Sequence[MediaRef] = ()
    """Those of the prompt, for a reward model that sees them."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A finite `score`, or None with the `error`: a traceback, or what happened to the worker; in one line, `brief`."""

    score: float | None
    details: dict[Any, Any] = field(default_factory=dict)
    error: str | None = None
    timed_out: bool = False
    brief: str | None = None


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Counts since the start; `num_waiting` are groups that wait for a worker now, `pids` the subreapers of the workers that live
    now."""

    num_scored: int
    num_errors: int
    num_timed_out: int
    num_restarts: int
    num_waiting: int
    pids: tuple[int, ...]


class Judge(Protocol):
    """What scores responses beside a function, and counts by itself, such as a `Genrm`."""

    async def start(self) -> None: ...

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]: ...

    async def close(self) -> None: ...


class RewardPool:
    """`function`, or several, in `num_workers` processes where any is a plain one; `by`, `args` and `components` as in
    `RewardConfig`. `per` "group": they are given all items of a call at once.
    `judges`: asked beside it, each with how many times its score is added; they are opened and closed with this. All methods
    belong to one event loop, on the main thread."""

    def __init__(
        self,
        function: str | Mapping[str, str],
        *,
        by: str | None = None,
        args: Mapping[str, Any] = MappingProxyType({}),
        per: Literal["response", "group"] = "response",
        components: Mapping[str, float] = MappingProxyType({}),
        num_workers: int = 1,
        deadline_s: float = 10.0,
        load_deadline_s: float,
        judges: Sequence[tuple[Judge, float]] = (),
    ) -> None:
        self._per_group = per == "group"
        self._judges = judges
        self._settings = {
            "function": function if isinstance(function, str) else dict(function),
            "per": per,
            "components": dict(components),
            "by": by,
            "args": dict(args),
        }
        self._open = functools.partial(
            UserFunction, "rondo.roles.rewards.worker:open_function", work="reward", source="reward.function",
            num_workers=num_workers, deadline_s=deadline_s, load_deadline_s=load_deadline_s,
        )  # fmt: skip
        self._functions = [self._open(self._settings)]
        self._num_scored = self._num_errors = self._num_timed_out = 0

    async def start(self) -> None:
        """Loads the function. ConfigError when it cannot be, with what its module raised."""
        [whole] = self._functions
        await whole.start()
        if whole.is_mixed:  # so that the async ones, which wait, hold up no process and all wait beside each other
            await whole.close()
            self._functions = [self._open(self._settings | {"only": only}) for only in (False, True)]
            await asyncio.gather(*(each.start() for each in self._functions))
        for judge, _ in self._judges:
            await judge.start()

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result an item, in order; never raises for what the function does.

        Raises Closed after `close`, and the pool's own error (ConfigError, WorkerDied) when workers cannot be had any
        more.
        """
        score = self._score_group if self._per_group else self._score_each
        asked = [score(function, items) for function in self._functions]
        found = await asyncio.gather(*asked, *(_judged(items, *each) for each in self._judges))
        results = [functools.reduce(_summed, each) for each in zip(*found[: len(asked)], strict=True)]
        if judged := found[len(asked) :]:
            every = zip(map(_as_rule, results), *judged, strict=True)
            results = [functools.reduce(_summed, each) for each in every]
        results = [bounded(each) for each in results]
        num_scored, num_timed_out = (
            sum(each.score is not None for each in results),
            sum(each.timed_out for each in results),
        )
        self._num_scored += num_scored
        self._num_timed_out += num_timed_out
        self._num_errors += len(results) - num_scored - num_timed_out
        return results

    async def _score_each(self, function: UserFunction, items: Sequence[RewardItem]) -> list[RewardResult]:
        encoded = [await encoded_of([item], [item.response], function.takes) for item in items]
        outcomes = iter(await function.run([item for item in encoded if isinstance(item, Encoded)]))
        found = (next(outcomes) if isinstance(item, Encoded) else item for item in encoded)
        return [_result(outcome, None if outcome.error is not None else outcome.value) for outcome in found]

    async def _score_group(self, function: UserFunction, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Of the samples of one prompt, whose label, prompt and metadata are the same."""
        if not items:
            return []
        encoded = await encoded_of(items, [[item.response for item in items]], function.takes, together=True)
        [outcome] = await function.run([encoded]) if isinstance(encoded, Encoded) else [encoded]
        if outcome.error is None and len(outcome.value) != len(items):
            text = (
                f"reward must return one score a response, {len(items)}, got {len(outcome.value)}. Score each of them"
            )
            outcome = Outcome(error=text, brief=text)
        scores = [None] * len(items) if outcome.error is not None else outcome.value
        return [_result(outcome, score) for score in scores]

    def stats(self) -> RewardStats:
        pool = self._functions[0].stats()  # one that is async has no processes
        return RewardStats(
            self._num_scored, self._num_errors, self._num_timed_out, pool.num_restarts, pool.num_waiting, pool.pids
        )

    async def close(self) -> None:
        """Kills every worker and waits until none is left. Callers of `score` get Closed. May be called twice."""
        for function in self._functions:
            await function.close()
        for judge, _ in self._judges:
            await judge.close()

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def bounded(result: RewardResult, what: str = "the sum of reward.function and judges") -> RewardResult:
    """The result, failed where its score is too large."""
    if result.score is None or (problem := too_large(result.score, what)) is None:
        return result
    return replace(result, score=None, error=problem, brief=problem)


def _as_rule(result: RewardResult) -> RewardResult:
    return result if result.score is None else replace(result, details=result.details | {"rule": result.score})


async def _judged(items: Sequence[RewardItem], judge: Judge, weight: float) -> list[RewardResult]:
    found = await judge.score(items)
    return [each if each.score is None else replace(each, score=weight * each.score) for each in found]


def _summed(one: RewardResult, other: RewardResult) -> RewardResult:
    """The sum of both; where one failed that is what failed."""
    details = one.details | other.details
    if one.score is None or other.score is None:
        return replace(one if one.score is None else other, score=None, details=details)
    return RewardResult(one.score + other.score, details)


def _result(outcome: Outcome, scored: Sequence[Any] | None) -> RewardResult:
    score, details = scored or (None, {})
    return RewardResult(score, details, outcome.error, outcome.timed_out, outcome.brief)


async def encoded_of(
    items: Sequence[RewardItem], before: list[Any], takes: frozenset[str] | None, *, together: bool = False
) -> Encoded | Outcome:
    """Return what travels to a function with parameters of these names, of samples of one prompt, or the outcome that says why it
    cannot. `together`: what differs between the samples is a list."""
    item, told = items[0], [name for name in ASKED_FOR if takes is None or name in takes]
    more = {name: [getattr(each, name) for each in items] for name in told}
    wanted = [name for name in item.columns if (takes is None or name in takes) and name not in (*told, "prompt")]
    columns = await asyncio.to_thread(lambda: {name: item.columns[name] for name in wanted}) if wanted else {}
    if not together:
        more = {name: value for name, [value] in more.items()}
    named = {"label": item.label, "prompt": item.prompt, "metadata": item.metadata}
    try:
        return encode([*before, *named.values(), columns | more, list(item.columns)])
    except TypeError:
        problem = problem_of(named)
    unfit = {name: why for name in columns if (why := problem_of({f"column {name!r}": columns[name]}))}
    if problem is None and takes is not None:
        problem = next(iter(unfit.values()))
    if problem is not None:
        return Outcome(error=problem, brief=problem)
    fit = {
        name: value for name, value in columns.items() if name not in unfit
    }  # of a function that takes whatever there is
    return encode([*before, *named.values(), fit | more, list(item.columns)])


def problem_of(values: Mapping[str, Any]) -> str | None:
    """Which of the values, by its name, cannot travel to a reward function, and why."""
    for name, value in values.items():
        try:
            encode(value, name)
        except TypeError as error:
            return str(error)
    return None
