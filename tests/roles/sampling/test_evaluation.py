"""Evaluation: the estimators, one version alone, equal scores for equal weights, and a bounded share of the engine's time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from rondo.roles.config import DataConfig, EvalConfig, EvalSet, JobConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.row_filters import Filtered
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.embedded.time_share import Share
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.engines.replica import Replica
from rondo.roles.engines.stops import Stops
from rondo.roles.rewards.pool import RewardItem, RewardResult
from rondo.roles.sampling.episode import Episode
from rondo.roles.sampling.evaluation import SET, Evaluator, figures, pass_at_k, result
from rondo.roles.sampling.predict import MOST_AT_ONCE, Predictor
from rondo.roles.sampling.workflow import Client, Context
from rondo.runtime.errors import ConfigError, Refused, RondoError
from rondo.runtime.waits import PROCESS, pending
from tests.models.builders import full_tensors
from tests.roles.engines.engines import prompt_of, qwen3
from tests.roles.test_config import changed
from tests.schedules import later


def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_solved_one() -> None:
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            choices = list(itertools.combinations([1] * c + [0] * (n - c), k))
            assert math.isclose(pass_at_k(n, c, k), sum(map(any, choices)) / len(choices)), (n, c, k)


def test_pass_at_k_of_large_numbers_is_exact() -> None:
    assert math.isclose(pass_at_k(1000, 3, 100), 1 - math.comb(997, 100) / math.comb(1000, 100), rel_tol=1e-12)


def test_the_figures_of_a_set_are_means_over_its_prompts() -> None:
    config = EvalSet(samples_per_prompt=4, solved_from=0.5)
    found = figures(config, [[1.0, 0.0, 0.0, 0.0], [0.5, 0.25, 0.5, 0.5]])
    assert found == {"mean@4": 2.75 / 8, "pass@1": 0.5, "pass@2": (0.5 + 1) / 2, "pass@4": 1.0}
    assert EvalSet(samples_per_prompt=6).figures == ("mean@6", "pass@1", "pass@2", "pass@4", "pass@6")
    assert EvalSet(samples_per_prompt=6, pass_at=(5,)).ks == (5,)
    assert tuple(found) == config.figures


class Scores:
    """A reward that depends on every character of the response."""

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [RewardResult(sum(map(ord, item.response)) % 97 / 97, {}, None) for item in items]


class Letters:
    added_tokens_decoder: Mapping[int, Any] = {}
    all_special_ids: Sequence[int] = ()

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(token) for token in tokens)


class Numbers:
    def __init__(self, num: int, broken: int = -1, filtered: int = -1) -> None:
        self._num, self._broken, self._filtered = num, broken, filtered

    def __len__(self) -> int:
        return self._num

    def row(self, index: int) -> Row:
        if index == self._broken:
            raise RowError(f"row {index}: broken")
        if index == self._filtered:
            raise Filtered(f"row {index}", "too short")
        return Row(f"row {index}", str(index), None, {})


async def prepare(row: Row, data: DataConfig) -> tuple[np.ndarray, None]:
    return prompt_of(3 + int(row.prompt)), None


async def inline(function: Any) -> Any:
    return function()


def evaluator(evaluation: EvalConfig, **sets: Numbers) -> Evaluator:
    job = JobConfig.model_validate(changed(("evaluation", evaluation.model_dump())))
    rewards: Any = Scores()
    return Evaluator(job, sets, Letters(), Stops(()), rewards, prepare, SamplingParams(6, top_p=0.9))


def engine(seed: int = 0, num_slots: int = 8, version: int = 0) -> EmbeddedEngine:
    slots = slot_engine(qwen3(seed), num_slots=num_slots, max_length=40, fixed_shapes=True, version=version)
    return EmbeddedEngine(slots, inline)


SETS = EvalConfig(
    sets={
        "easy": EvalSet(num_prompts=3, samples_per_prompt=4, top_k=20, max_new_tokens=4),
        "hard": EvalSet(num_prompts=2, temperature=0),
    }
)


async def whole(asking: Evaluator, engine: EmbeddedEngine, *, num_slots: int = 8, of: int = 1) -> dict[str, Any]:
    """The result of an evaluation in `of` parts, as JSON carries them."""
    parts = [
        await asking.evaluate(engine, "end", 0, num_slots=num_slots, part=part, of=of) for part in reversed(range(of))
    ]
    assert asking.config.evaluation is not None
    return result(asking.config.evaluation.named_sets(), 0, orjson.loads(orjson.dumps(parts)))


async def test_equal_weights_get_equal_scores_whoever_asks_and_other_weights_get_others() -> None:
    asking = evaluator(SETS, easy=Numbers(3), hard=Numbers(2))
    first = await whole(asking, engine())
    assert first == await whole(asking, engine(num_slots=4), num_slots=4)
    assert first["sets"].keys() == {"easy", "hard"} and (first["num_prompts"], first["num_samples"]) == (5, 14)
    assert first["sets"]["easy"].keys() == {"mean@4", "pass@1", "pass@2", "pass@4", "num_prompts"}
    assert first["reward"] == (first["sets"]["easy"]["mean@4"] + first["sets"]["hard"]["mean@1"]) / 2
    assert first["num_failed"] == 0 and "first_failed" not in first
    assert (await whole(asking, engine(1)))["sets"] != first["sets"]


@pytest.mark.parametrize("of", [2, 3, 7])
async def test_several_replicas_find_together_what_one_finds(of: int) -> None:
    config = EvalConfig(num_prompts=5, samples_per_prompt=4)
    asking = replace(evaluator(config, held_out=Numbers(5, broken=3)), rewards=cast(Any, Moody()))
    assert await whole(asking, engine(), of=of) == await whole(asking, engine())


async def test_a_prompt_that_cannot_be_used_is_in_no_mean_and_is_told_and_one_that_a_filter_leaves_out_is_not_there() -> (
    None
):
    config = EvalConfig(num_prompts=4, solved_from=0.0)
    found = await whole(evaluator(config, held_out=Numbers(4, broken=1, filtered=2)), engine())
    assert (found["num_samples"], found["num_failed"], found["first_failed"]) == (3, 1, "row 1: broken")
    assert found["num_prompts"] == 3 and found["sets"]["held_out"]["pass@1"] == 1.0


async def hangs_for_1(row: Row, client: Client, context: Context) -> None:
    if row.prompt == "1":
        await asyncio.Event().wait()  # a judge that does not answer
    await context.each(client, Episode.generate)


async def test_a_workflow_that_hangs_costs_its_own_prompt_and_no_answer_that_takes_long_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EvalConfig(num_prompts=3, solved_from=0.0)
    job = JobConfig.model_validate(changed(("evaluation", config.model_dump()), ("rollout.lease_deadline_s", 50)))
    asking = replace(evaluator(config, held_out=Numbers(3)), config=job, workflow=hangs_for_1)
    slow, generate = engine(), EmbeddedEngine.generate
    waits_for_1, asked = asyncio.Event(), set[str]()

    async def late(request: Request) -> Completion:
        asked.add(request.id)
        await waits_for_1.wait()
        return await generate(slow, request)

    slow.generate = late  # type: ignore[method-assign]
    evaluating = asyncio.create_task(whole(asking, slow))

    def under_way() -> list[str]:
        return sorted(wait.peer for wait in pending() if wait.name == "workflow of an evaluation")

    async with asyncio.timeout(120):
        # Neither the begin of a wait nor its end is an event.
        while under_way() != ["row 0", "row 1", "row 2"] or len(asked) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
        later(50)
        monkeypatch.setattr(PROCESS, "clock", lambda: time.monotonic() + 50)
        while under_way() != ["row 0", "row 2"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        waits_for_1.set()
        found = await evaluating
    assert (found["num_samples"], found["num_failed"]) == (3, 1) and found["sets"]["held_out"]["pass@1"] == 1.0
    assert found["first_failed"].startswith("row 1: rollout.workflow must come further within 50 s")


class Moody(Scores):
    """Fails for the second sample of the prompt that is called "1"."""

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        found = await super().score(items)
        return [found[0], RewardResult(None, {}, "planted"), *found[2:]] if items[0].prompt == "1" else found


class Failing(Scores):
    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        return [RewardResult(None, {}, "planted") for _ in items]


async def test_a_reward_that_fails_is_in_no_mean_and_is_told() -> None:
    asking = evaluator(EvalConfig(num_prompts=3, samples_per_prompt=4), held_out=Numbers(3))
    [every] = [each["rewards"] for each in [await asking.evaluate(engine(), "end", 0, num_slots=8)]]
    found = await whole(replace(asking, rewards=cast(Any, Moody())), engine())
    assert (found["num_samples"], found["num_failed"]) == (12, 1)
    assert found["first_failed"] == "reward of row 1, sample 1: planted"
    scores = [score for _, index, scores in every for number, score in enumerate(scores) if (index, number) != (1, 1)]
    assert found["reward"] == pytest.approx(sum(scores) / 11)
    # Of three samples nothing is known of pass@4.
    assert found["sets"]["held_out"]["pass@4"] == np.mean(
        [pass_at_k(4, sum(score >= 1 for score in scores), 4) for _, index, scores in every if index != 1]
    )
    found = await whole(replace(asking, rewards=cast(Any, Failing())), engine())
    assert found["reward"] is None and found["num_failed"] == 12 and found["sets"]["held_out"] == {"num_prompts": 3}


async def test_an_evaluation_whose_engine_took_other_weights_meanwhile_has_no_result() -> None:
    flipping = engine(version=3)
    asking = evaluator(EvalConfig(num_prompts=2), held_out=Numbers(2))
    await flipping.update_weights(4, dict(full_tensors(qwen3(1))))
    with pytest.raises(ExceptionGroup) as raised:
        await asking.evaluate(flipping, "version_3", 3, num_slots=8)
    assert raised.group_contains(
        RondoError, match=r"version 3 must sample under that version alone, got tokens of \[4\]"
    )


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.mark.parametrize(("share", "pause"), [(0.25, 6.0), (0.5, 2.0), (1.0, 0.0)])
async def test_a_share_leaves_the_rest_of_the_time_to_others_while_they_have_work(share: float, pause: float) -> None:
    clock, busy, queue_s = Clock(), [True], [0.0]

    def turn() -> str:
        clock.now += 2.0
        return "done"

    async def compute(function: Any, *args: Any) -> Any:
        clock.now += queue_s[0]
        return function(*args)

    paced = Share(compute, share, lambda: busy[0], clock=clock, sleep=clock.sleep)
    for _ in range(3):
        assert await paced.compute(turn) == "done"
    assert clock.slept == ([pause] * 2 if pause else [])
    busy[0] = False
    clock.slept.clear()
    await paced.compute(turn)
    assert clock.slept == []
    queue_s[0] = 1.0  # a trainer on the same thread
    for _ in range(2):
        await paced.compute(turn)
    assert clock.slept == ([pause] if pause else [])


@pytest.mark.parametrize(("group", "rank", "holds"), [("rollout-0", 0, 1), ("rollout-1", 0, 0), ("rollout-0", 1, 0)])
async def test_one_process_of_a_run_holds_the_engine_of_evaluations_beside_the_training(
    group: str, rank: int, holds: int
) -> None:
    made = list[int]()

    async def compute(function: Any, num_slots: int, **_: Any) -> Any:
        made.append(num_slots)
        return slot_engine(qwen3(), num_slots=num_slots, max_length=16)

    section = contextlib.nullcontext
    ctx = SimpleNamespace(
        group=group, role_group="rollout", rank=rank, compute=compute, section=lambda *_: section(), load_s=1
    )
    job = SimpleNamespace(config=SimpleNamespace(evaluation=EvalConfig(every=2, num_slots=4)))
    replica = Replica(cast(Any, ctx), cast(Any, job))
    assert replica.evaluates is bool(holds)
    if holds:
        assert await replica.open_beside() is await replica.open_beside()
    assert made == [4] * holds


async def test_a_row_of_somebodys_goes_through_workflow_and_reward_behind_all_others_and_leaves_nothing() -> None:
    asking, own = evaluator(SETS), engine(version=3)
    asked = list[Request]()

    class Watched:
        async def generate(self, request: Request) -> Completion:
            asked.append(request)
            return await own.generate(request)

    predictor = Predictor(asking, cast(Any, Watched()))
    lines = await predictor.predict({"prompt": "2", "label": "x"}, 3, 7)
    again = await predictor.predict({"row": {"prompt": "2", "label": "x"}}, 3, 7)
    assert [each["tokens"].tolist() for each in again] == [each["tokens"].tolist() for each in lines]
    assert len({request.id for request in asked}) == 6
    assert {(each.kind, each.priority) for each in asked} == {("evaluation", -1)}
    assert {(each["reward"] is not None, *each["versions"], len(each["log_probs"])) for each in lines} == {(True, 3, 6)}
    with pytest.raises(
        ConfigError, match=r"the row that is asked must have .*'prompt'|the row that is asked: .*prompt"
    ):
        await predictor.predict({"row": {"other": "2"}}, 1, 0)


async def test_only_so_many_rows_of_somebodys_are_under_way() -> None:
    asking, holds = evaluator(SETS), asyncio.Event()

    class Holding:
        async def generate(self, request: Request) -> Completion:
            await holds.wait()
            raise RondoError("planted")

    predictor = Predictor(asking, cast(Any, Holding()))
    tasks = [asyncio.create_task(predictor.predict({"prompt": "1"}, 1, 0)) for _ in range(MOST_AT_ONCE)]
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="must be under way here"):
        await predictor.predict({"prompt": "1"}, 1, 0)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    holds.set()
    for task in tasks[1:]:
        with pytest.raises(RondoError, match="planted"):
            await task
    assert predictor._num_under_way == 0


async def test_of_the_sets_those_are_evaluated_that_are_asked_for() -> None:
    asking = evaluator(SETS, easy=Numbers(3), hard=Numbers(2))
    part = await asking.evaluate(engine(), "asked-a", 0, num_slots=8, names=("hard",))
    assert {name for name, *_ in part["rewards"]} == {"hard"} and len(part["rewards"]) == 2


async def test_a_set_with_a_reward_of_its_own_is_scored_by_that_and_the_others_by_the_runs() -> None:
    class Checks(Scores):
        async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
            assert [item.metadata for item in items] == [{SET: "own"}] * len(items)
            return [RewardResult(7.0) for _ in items]

    config = EvalConfig(sets={"own": EvalSet(num_prompts=3, reward="exact"), "runs": EvalSet(num_prompts=3)})
    asking = replace(evaluator(config, own=Numbers(3), runs=Numbers(3)), checkers=cast(Any, Checks()))
    found = (await whole(asking, engine()))["sets"]
    assert found["own"]["mean@1"] == 7.0 and found["runs"]["mean@1"] < 7.0
