"""The critic's two works in one process: values are of committed weights alone, whatever it trains beside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rondo.roles.config import CriticConfig, JobConfig
from rondo.roles.critic import CriticRole
from rondo.roles.training.compute_turns import Turns
from rondo.roles.training.work import Work
from rondo.runtime.errors import DeadlineExceeded, Stopping
from tests.roles.test_actor import Here
from tests.roles.training.test_backend import job

FIGURES = {"returns_mean": 0.0, "returns_square": 1.0, "error_mean": 0.0, "error_square": 0.5, "value_loss": 0.25}


class Told(Here):
    stopping = asyncio.Event()
    attempt, group = 0, "critic-0"

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    async def report(self, kind: str, data: dict[str, Any]) -> None:
        self.records.append(data)


class Trainer:
    """A model whose weights are a number."""

    def __init__(self) -> None:
        self.weights, self.model, self.moved = 0, None, False
        self.objective = SimpleNamespace(score=self._score)

    def _score(self, model: None, rows: list[Any], *, behind: bool) -> list[np.ndarray]:
        return [np.full(row.response, self.weights, np.float32) for row in rows]

    def accumulate(self, *_: Any, **__: Any) -> None: ...

    def finish(self, step: int) -> tuple[dict[str, float], list[Any]]:
        self.weights += 1
        return dict(FIGURES), [[0, 0, 0, 1]]

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return values

    def beside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def checksum(self) -> int:
        return self.weights

    def join_checksums(self, part: int) -> int:
        return part

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {"weights": self.weights}

    def load_state(self, tensors: dict[str, Any], state: dict[str, Any]) -> None:
        self.weights = state["weights"]

    def discard(self) -> None: ...


class Row:
    group, part, media, reward, finish, response, length = 0, 0, None, 1.0, "stop", 2, 4
    columns = ("tokens", "policy_versions")

    def array(self, column: str) -> np.ndarray:
        return np.zeros(4 if column == "tokens" else 2, np.int32 if column == "policy_versions" else np.float32)


class Bus:
    """Rounds to score as they are put, one round of every step to train, and a commit that waits for the actor."""

    held_up_at = 0.0

    def __init__(self) -> None:
        self.scoring: asyncio.Queue[Any] = asyncio.Queue()
        self.put: list[tuple[int, float]] = []
        self.commits: list[int] = []
        self.asked = asyncio.Event()
        self.committed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def stream(self, stream: str, *, tokens: int, step: int = 0, **_: Any) -> AsyncGenerator[Any, None]:
        if stream == "critic":
            yield self.round(step, last=True)
            return
        while (made := await self.scoring.get()) is not None:
            yield made

    def round(self, step: int, *, last: bool = False) -> Any:
        return SimpleNamespace(step=step, rows=[Row()], spans=[[0, 0, 0, 1]], closes=last, last=last, update=0)

    def put_columns(self, made: Any, columns: dict[str, list[np.ndarray]]) -> None:
        self.put.append((int(columns["values_version"][0][0]), float(columns["values"][0][0])))

    async def ack(self, made: Any) -> None: ...

    def check(self, made: Any) -> None: ...

    async def call(self, method: str, *args: Any, **_: Any) -> Any:
        if method == "commit":
            self.commits.append(args[1])
            self.asked.set()
        elif method == "await_version":
            return await self.committed


class Snapshot:
    def __init__(self) -> None:
        self.held: dict[int, dict[str, Any]] = {0: {"weights": 0}}

    def write(self, version: int, tensors: dict[str, Any], state: dict[str, Any], checksum: int) -> None:
        self.held[version] = state

    def read(self, version: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, self.held[version]


async def _nothing(**_: Any) -> None: ...


def config(**critic: Any) -> JobConfig:
    found = job("model", name="ppo", kl_coef=0.0)
    return found.model_copy(update={"critic": CriticConfig(micro_batch_tokens=64, **critic), "num_steps": 1})


@asynccontextmanager
async def opened(**critic: Any) -> AsyncIterator[tuple[CriticRole, Bus, asyncio.Task[None]]]:
    """A critic that scores under version 0."""
    role, bus = CriticRole(Told()), Bus()  # type: ignore[arg-type]
    trainer: Any = Trainer()
    role._job = SimpleNamespace(config=config(**critic), bus=bus, turns=Turns(), takes_turns=False, device="cpu")  # type: ignore[assignment]
    role._trainer, role._snapshot = trainer, Snapshot()  # type: ignore[assignment]
    role._work = Work(1.0, 0.0, "cpu", None)
    role._saving = SimpleNamespace(is_due=lambda version: False, let_go_of_snapshots=_nothing)  # type: ignore[assignment]
    role._step_began = 0.0
    role._taken = lambda _=None: SimpleNamespace(state=trainer.state())  # type: ignore[method-assign, assignment, return-value]
    async with asyncio.TaskGroup() as tasks:
        role._tasks = tasks
        await role._publish(0)
        scoring = tasks.create_task(role._score_rounds())
        yield role, bus, scoring
        bus.scoring.put_nowait(None)


async def settled_loop() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_nothing_is_scored_between_the_optimizer_and_the_commit() -> None:
    async with opened() as (role, bus, _):
        bus.scoring.put_nowait(bus.round(0))
        await settled_loop()
        assert bus.put == [(0, 0.0)]
        assert await role._step(0)
        bus.scoring.put_nowait(bus.round(1))
        await bus.asked.wait()  # its snapshot is written on a thread
        await settled_loop()
        assert bus.commits == [1] and len(bus.put) == 1
        bus.committed.set_result({"version": 1})
        assert await role._settled()
        await settled_loop()
        assert bus.put == [(0, 0.0), (1, 1.0)]


async def test_what_is_withdrawn_leaves_the_committed_weights_which_score_again() -> None:
    async with opened() as (role, bus, _):
        reached = asyncio.create_task(role._train_all(0))
        bus.committed.set_exception(Stopping("version 1 must be made by every trainable role"))
        assert await reached == 0 and role._trainer.weights == 0  # type: ignore[comparison-overlap]
        assert role._version is None
        await role._publish(0)
        bus.scoring.put_nowait(bus.round(1))
        await settled_loop()
        assert bus.put == [(0, 0.0)]


async def test_a_commit_that_does_not_come_ends_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rondo.roles.critic.POLL_S", 0.01)
    role, bus = CriticRole(Told()), Bus()  # type: ignore[arg-type]
    role._job, role._trainer = SimpleNamespace(config=config(), bus=bus), Trainer()  # type: ignore[assignment]
    with pytest.raises(DeadlineExceeded, match=r"wait 'committed critic' .* for 'actor'"):
        await role._scored(bus.round(0))


@pytest.mark.parametrize("only_steps", [0, 1])
async def test_a_step_that_trains_the_critic_alone_is_told_by_it(only_steps: int) -> None:
    async with opened(only_steps=only_steps) as (role, bus, _):
        bus.committed.set_result({"version": 1})
        assert await role._step(0) and await role._settled()
        (record,) = role._ctx.records  # type: ignore[attr-defined]
        assert record["critic"]["explained_variance"] == 0.5 and "error_mean" not in record["critic"]
        assert ("reward_mean" in record, "version" in record) == (bool(only_steps), bool(only_steps))
