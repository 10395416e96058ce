"""The actor's way through the rounds of a step: whitening before the first gradient, and a step that is stopped half-way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rondo.comm.weights.snapshot import HotSnapshot, snapshot_bytes
from rondo.roles.actor import ActorRole
from rondo.roles.algorithms.whitening import Whitening, contribution
from rondo.roles.config import CriticConfig, DebugConfig, JobConfig, SamplesConfig
from rondo.roles.training.compute_turns import Turns
from rondo.roles.training.objective import PolicyObjective, TrainRow
from rondo.roles.training.step_totals import reward_figures, reward_sums
from rondo.roles.training.trained_samples import TrainedSamples, rows_of_step
from rondo.runtime.errors import CorruptData
from rondo.runtime.records.timeline import Span, span
from rondo.runtime.waits import pending
from tests.comm.memory import MemorySegment
from tests.roles.training.test_backend import model, rows, trainer
from tests.roles.training.test_trainer_updates import several

__all__ = ["model"]
COLUMNS = {
    "tokens": "tokens", "loss_mask": "mask", "advantages": "advantages", "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs", "policy_versions": "policy_versions",
}  # fmt: skip


class Given:
    """A row of the bus over the arrays of a `TrainRow`."""

    columns = tuple(COLUMNS)
    sample, part, media = 0, 0, None
    finish = "stop"

    def __init__(self, row: TrainRow, group: int = 0) -> None:
        self._row, self.group = row, group
        self.reward = 1.0 if row.mask.any() else None
        self.length, self.response = len(row.tokens), len(row.mask)

    def array(self, column: str) -> np.ndarray:
        found = getattr(self._row, COLUMNS[column])
        assert isinstance(found, np.ndarray)
        return found


@dataclass
class Rounds:
    """A bus that gives these rounds, to whoever asks again the same, and then ends, as when a run is being stopped."""

    made: list[Any]
    asked: list[int] = field(default_factory=list)

    async def stream(self, stream: str, *, tokens: int, step: int, **_: Any) -> AsyncGenerator[Any, None]:
        for made in self.made:
            self.asked.append(made.index)
            yield made

    def check(self, made: Any) -> None:
        """Nothing overwrites what a test holds."""


class Here:
    """The part of a worker that a step needs: computation where it is asked for."""

    rank, world_size = 0, 1

    async def compute(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    async def working(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def progress(self) -> None:
        """Nobody watches."""

    def span(self, name: str, **_: Any) -> Span:
        return span(name, "actor")


def rounds(batch: list[TrainRow], sizes: list[int]) -> list[Any]:
    """Two rows a mini-batch; `sizes`: rows of each round, of the first pass."""
    made, at = [], 0
    for index, size in enumerate(sizes):
        spans = [[at, 0, 0, 1] for at in range(at, at + size)]
        part = SimpleNamespace(
            index=index, step=0, spans=spans, last=False,
            rows=tuple(Given(row, group) for group, row in enumerate(batch[at : at + size], at)),
            key=f"actor/step0/{index}", update=at // 2, closes=(at + size) % 2 == 0,
        )  # fmt: skip
        made.append(part)
        at += size
    return made


def role(config: JobConfig, path: str, made: list[Any]) -> tuple[ActorRole, Rounds]:
    actor, bus = ActorRole(Here()), Rounds(made)  # type: ignore[arg-type]
    actor._job = SimpleNamespace(  # type: ignore[assignment]
        config=config,
        bus=bus,
        turns=Turns(),
        lent=None,
        publishes=True,
        takes_turns=False,
        rests=False,
        has_actor_fwd=False,
        device="cpu",
    )
    actor._trainer = trainer(config, path)
    tensors, state = actor._trainer.state()
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    actor._snapshot = HotSnapshot(MemorySegment(snapshot_bytes(total, len(tensors))))
    actor._snapshot.write(0, tensors, state)
    return actor, bus


async def test_a_step_that_is_stopped_between_updates_leaves_the_committed_version(model: str) -> None:
    actor, _ = role(several(model, 2, 2), model, rounds(rows(0, num_rows=3), [1, 1, 1]))
    before, seen = actor._trainer.checksum(), []
    undo = actor._undo

    async def watched(step: int) -> None:
        seen.append((actor._trainer.moved, actor._trainer.checksum() != before))
        await undo(step)

    actor._undo = watched  # type: ignore[method-assign]
    assert await actor._train(0) is None
    assert seen == [(True, True)]
    assert actor._trainer.checksum() == before and not actor._trainer.moved


async def test_a_step_that_the_critic_trains_alone_is_waited_for_as_long_as_its_samples_take(model: str) -> None:
    alone = several(model, 1, 1).model_copy(update={"critic": CriticConfig(only_steps=1)})
    actor, bus = role(alone, model, [])
    bus.held_up_at, committed = 0.0, asyncio.Event()  # type: ignore[attr-defined]
    actor._settle = lambda *_: committed.wait()  # type: ignore[method-assign,assignment,return-value]
    actor._taken = lambda *_: None  # type: ignore[method-assign,assignment,return-value]
    async with asyncio.TaskGroup() as tasks:
        actor._tasks = tasks
        assert await actor._step(0)
        settled = tasks.create_task(actor._settled())
        await asyncio.sleep(0)
        found = [each for each in pending() if each.name == "settle"]
        committed.set()
    assert [(each.peer, each.deadline_s) for each in found] == [("critic", None)] and settled.result()


async def test_weights_that_are_not_those_that_were_written_are_refused(model: str) -> None:
    actor, _ = role(several(model, 2, 2), model, [])
    written = actor._trainer.checksum()
    await actor._prove(0, written)
    with pytest.raises(
        CorruptData, match="version 0 in the hot snapshot must have the checksum that it was written with"
    ):
        await actor._prove(0, written ^ 1)


async def test_whitening_sees_every_round_of_the_first_pass_before_the_first_gradient(model: str) -> None:
    """Of the samples that have a reward: no token of one whose reward failed trains, and it has no advantage behind it either."""
    batch = rows(1, num_rows=4)
    batch[1] = replace(batch[1], mask=np.zeros_like(batch[1].mask))
    config = several(model, 2, 1, normalize_batch="tokens")
    actor, bus = role(config, model, rounds(batch, [1, 1, 2]))
    used: list[TrainRow] = []
    inner = actor._trainer.objective._sums_of

    def noted(model: Any, chosen: list[TrainRow], *use: Any) -> Any:
        used.extend(chosen)
        return inner(model, chosen, *use)

    actor._trainer.objective._sums_of = noted  # type: ignore[method-assign,assignment]
    assert await actor._train(0) is None
    assert bus.asked == [0, 1, 2, 0, 1, 2]
    white = Whitening.of([contribution(row.advantages, row.mask, "tokens") for at, row in enumerate(batch) if at != 1])
    assert not used[1].advantages.any()
    for at in (0, 2, 3):
        np.testing.assert_array_equal(used[at].advantages, white.apply(batch[at].advantages, batch[at].mask))


async def test_whitening_of_a_step_whose_rounds_end_early_trains_nothing(model: str) -> None:
    actor, bus = role(several(model, 2, 1, normalize_batch="samples"), model, rounds(rows(2, num_rows=3), [1, 1, 1]))
    before = actor._trainer.checksum()
    assert await actor._train(0) is None
    assert bus.asked == [0, 1, 2] and actor._trainer.checksum() == before


async def test_later_mini_batches_are_scored_before_the_first_optimizer_step_and_the_first_never(model: str) -> None:
    batch = rows(3, num_rows=4)
    forwards: list[tuple[int, bool]] = []
    for options, scored in ({"tis_high": 2.0}, [(1, False), (1, False)]), ({"old_log_probs": "rollout"}, []):
        actor, bus = role(several(model, 2, 1, **options), model, rounds(batch, [1, 1, 1, 1]))
        inner = actor._trainer.objective.score

        def noted(model: Any, chosen: list[TrainRow], *_: Any, actor: ActorRole = actor, inner: Any = inner) -> None:
            forwards.append((len(chosen), actor._trainer.moved))
            inner(model, chosen, *_)

        actor._trainer.objective.score = noted  # type: ignore[method-assign,assignment]
        forwards.clear()
        assert (
            await actor._train(0) is None
        )  # the last round closes its update, and a stop comes before the step is whole
        assert forwards == scored
        assert bus.asked == ([0, 1, 2, 3] * 2 if scored else [0, 1, 2, 3])


async def test_a_loss_that_needs_the_drift_of_a_step_has_every_row_scored_and_told_before_the_first_gradient(
    model: str,
) -> None:
    batch = rows(3, num_rows=2)
    config = several(model, 1, 1, name="p3o", normalize_batch="tokens", kl_coef=0.0)
    actor, bus = role(config, model, rounds(batch, [1, 1]))
    objective, scored = actor._trainer.objective, list[int]()
    score, sums = objective.score, objective._sums_of
    objective.score = lambda model, chosen, *_: (scored.append(len(chosen)), score(model, chosen, *_))[1]  # type: ignore[method-assign]
    told: list[tuple[list[int], bool, float]] = []

    def noted(*given: Any) -> Any:
        told.append(([*scored], actor._trainer.moved, objective._constants["ess"]))
        return sums(*given)

    objective._sums_of = noted  # type: ignore[method-assign]
    assert await actor._train(0) is None  # the last round closes its update, and a stop comes before the step is whole
    assert bus.asked == [0, 1] * 2
    # The weights are again those that the step began with: both rows at once say the same.
    whole = PolicyObjective(several(model, 1, 1, name="p3o"), objective._packing, "cpu", over_ranks=False)
    whole.score(actor._trainer.model, batch, [[at, 0, 0, 1] for at in range(2)])
    whole.measure_drift(lambda values: values)
    assert [each[:2] for each in told] == [([1, 1], False)] * 2
    assert 0 < whole._constants["ess"] < 1
    assert [ess for *_, ess in told] == pytest.approx([whole._constants["ess"]] * 2, rel=1e-5)


async def test_a_rank_without_rows_of_a_round_reads_it_where_another_role_scores(model: str) -> None:
    config = several(model, 1, 1, old_log_probs="actor_fwd")
    actor, _ = role(config, model, [])
    actor._job.has_actor_fwd = True  # type: ignore[misc]
    assert actor._read(SimpleNamespace(rows=(), step=0)) == ([], [])  # type: ignore[arg-type]


def test_a_step_says_of_how_many_samples_the_reward_failed_and_leaves_them_out_of_its_mean() -> None:
    rows = [SimpleNamespace(reward=reward, finish=finish, part=0) for reward, finish in (
        (0.5, "stop"), (None, "length"), (0.0, "length"), (1.0, "aborted")
    )]  # fmt: skip
    sums = reward_sums(cast(Any, rows[:1])) + reward_sums(cast(Any, rows[1:]))
    assert reward_figures(sums.tolist()) == {
        "reward_mean": 0.5, "num_samples": 4, "num_failed": 1, "truncated_fraction": 0.5
    }  # fmt: skip
    assert reward_figures(reward_sums(cast(Any, rows[1:2])).tolist())["reward_mean"] is None
    rows[3].part = 1
    assert reward_figures(reward_sums(cast(Any, rows)).tolist())["num_samples"] == 3, "a sample counts once"


async def test_a_run_of_rollouts_alone_keeps_its_step_and_leaves_the_weights(model: str, tmp_path: Path) -> None:
    batch = rows(4, num_rows=2)
    made = rounds(batch, [1, 1])
    made[1].last = made[1].closes = True
    config = several(model, 1, 1).model_copy(
        update={"debug": DebugConfig(rollout_only=True), "samples": SamplesConfig(keep=1)}
    )
    actor, bus = role(config, model, made)
    before, settled, told = actor._trainer.checksum(), list[Any](), list[Any]()

    async def call(name: str, *_: Any) -> dict[str, float]:
        return {"longest_wait_s": 0.0}

    async def report(kind: str, metrics: Any) -> None:
        told.append(metrics)

    bus.call, actor._ctx.report = call, report  # type: ignore[attr-defined,method-assign,assignment]
    actor._begin_settle = lambda version, spans, *_: settled.append((version, spans))  # type: ignore[method-assign,misc]
    actor._step_began = 0.0
    actor._kept = TrainedSamples(tmp_path, config.samples, 0, 1)
    assert await actor._train(0) is not None
    assert settled == [(1, [[0, 0, 0, 1], [1, 0, 0, 1]])] and actor._trainer.checksum() == before
    assert told[0]["num_samples"] == 2 and "loss" not in told[0]
    await actor._keep(0)
    assert [row.group for row in rows_of_step(tmp_path, 0)] == [0, 1]
