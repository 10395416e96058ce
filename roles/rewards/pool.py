"""Rewards: scores prompt groups in killable processes, so that a reward function that fails harms only itself.

Owns what is sent to a reward function, and what a score or a failure looks like. Does not own the processes and their
deadlines (`runtime/processes/pool.py`), what they run (`reward_worker.py`) or what a failed score means for its prompt group
(the rollout role decides).

    async with RewardPool("rewards.py:exact", num_workers=2, deadline_s=10, load_deadline_s=1800) as pool:
        results = await pool.score([RewardItem("1234", label="1234", prompt="s3142>"), ...])    # one result an item

Invariant: `score` returns one result an item, in order, whatever the function does. Everything of a prompt group travels as
one frame: a group of 8 trivial rewards costs 0.3 ms of CPU, both sides together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rondo.roles.rewards.worker import ASKED_FOR
from rondo.runtime.processes.pool import Item, Outcome, Pool
from rondo.runtime.values import encode


@dataclass(frozen=True, slots=True)
class RewardItem:
    """One response to score. `label` and `metadata` come from the data set and reach the function as they are. How the response
    ended (one of `FINISHES`), its tokens and their limit reach one that asks for them by name (`reward_worker.ASKED_FOR`)."""

    response: str
    label: Any = None
    prompt: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = "stop"
    num_tokens: int = 1
    max_new_tokens: int = 1


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
    """Counts since the start; `num_waiting` are groups that wait for a worker now, `pids` the keepers of the workers that live
    now."""

    num_scored: int
    num_errors: int
    num_timed_out: int
    num_restarts: int
    num_waiting: int
    pids: tuple[int, ...]


class RewardPool:
    """`num_workers` processes that run `function`. All methods belong to one event loop, on the main thread."""

    def __init__(
        self, function: str, *, num_workers: int = 1, deadline_s: float = 10.0, load_deadline_s: float
    ) -> None:
        self._pool = Pool(
            "rondo.roles.rewards.worker:open_function",
            {"function": function},
            work="reward",
            source="reward.function",
            num_workers=num_workers,
            deadline_s=deadline_s,
            load_deadline_s=load_deadline_s,
        )
        self._num_unsent = 0

    async def start(self) -> None:
        """Starts the workers. ConfigError when the function cannot be loaded, with what its module raised."""
        await self._pool.start()

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result an item, in order; never raises for what the function does.

        Raises Closed after `close`, and the pool's own error (ConfigError, WorkerDied) when workers cannot be had any
        more.
        """
        encoded = [encoded_item(item) for item in items]
        outcomes = iter(await self._pool.run([item for item in encoded if isinstance(item, Item)]))
        self._num_unsent += sum(isinstance(item, RewardResult) for item in encoded)
        return [_result(next(outcomes)) if isinstance(item, Item) else item for item in encoded]

    def stats(self) -> RewardStats:
        pool = self._pool.stats()
        return RewardStats(
            pool.num_done,
            pool.num_errors + self._num_unsent,
            pool.num_timed_out,
            pool.num_restarts,
            pool.num_waiting,
            pool.pids,
        )

    async def close(self) -> None:
        """Kills every worker and waits until none is left. Callers of `score` get Closed. May be called twice."""
        await self._pool.close()

    async def __aenter__(self) -> RewardPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _result(outcome: Outcome) -> RewardResult:
    score, details = (None, {}) if outcome.error is not None else outcome.value
    return RewardResult(score, details, outcome.error, outcome.timed_out, outcome.brief)


def encoded_item(item: RewardItem) -> Item | RewardResult:
    """The item as it travels, or the result that says why it cannot."""
    try:
        told = [getattr(item, name) for name in ASKED_FOR]
        return Item.of([item.response, item.label, item.prompt, item.metadata, told])
    except TypeError:
        problem = problem_of({"prompt": item.prompt, "label": item.label, "metadata": item.metadata})
        return RewardResult(None, {}, problem, brief=problem)


def problem_of(values: Mapping[str, Any]) -> str | None:
    """Which of the values, by its name, cannot travel to a reward function, and why."""
    for name, value in values.items():
        try:
            encode(value, name)
        except TypeError as error:
            return str(error)
    return None
