"""What becomes of a prompt group whose rewards fail, and what its samples say of themselves on the bus."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from rondo.comm.bus.group import FINISH, NO_VERSION, REWARD
from rondo.roles.advantages import _advantages
from rondo.roles.algorithms.advantages import of_group
from rondo.roles.config import AlgorithmConfig, DataConfig, RewardConfig, SamplesConfig
from rondo.roles.data.datasets import Row
from rondo.roles.engines.engine import Completion, FinishReason, Request
from rondo.roles.resumed import KeptSamples, copy_samples, write_samples
from rondo.roles.rewards.function import UserFunction
from rondo.roles.rewards.pool import RewardItem, RewardResult
from rondo.roles.sampling.columns import columns_of
from rondo.roles.sampling.episode import Made, SampleRow, unsaid
from rondo.roles.sampling.filters import Ended, equal_rewards
from rondo.roles.sampling.groups import Lease, PromptGroups
from tests.comm.served import served
from tests.roles.test_resumed import BASE_COLUMNS, Groups, leased


class FirstNumber:
    added_tokens_decoder: Mapping[int, Any] = {}
    all_special_ids: Sequence[int] = ()

    def decode(self, tokens: list[int], **_: Any) -> str:
        return str(tokens[0])


class Scored(Groups):
    """Samples of 3 tokens, the last one cut off at that; `rewards` by their number, None of one that fails. Each group is scored
    one sample after the other."""

    def __init__(
        self, bus: Any, rewards: Mapping[int, float | None], folder: Path, *, kept: KeptSamples | None = None
    ) -> None:
        super().__init__(bus, kept or KeptSamples(), num_samples=len(rewards))
        self.ctx = cast(Any, SimpleNamespace(
            span=lambda *_, **__: nullcontext(), work=lambda *_: nullcontext(), load_s=1.0, run_dir=folder
        ))  # fmt: skip
        self.rewards = cast(Any, SimpleNamespace(score=self._rewarded))
        self.tokenizer = FirstNumber()
        self.rows = cast(
            Any,
            SimpleNamespace(
                row=lambda _: SimpleNamespace(
                    name="row 9", label=None, prompt="p", metadata={}, columns={}, tools=(), media=()
                )
            ),
        )
        self._by_number, self._before = dict(rewards), {number: asyncio.Event() for number in rewards}
        self._before[0].set()

    async def _generate(self, request: Request) -> Completion:
        number = int(request.id.rpartition("/")[2])
        self.asked.append(request.id)
        await self._before[number].wait()
        tokens = np.full(3, number, np.int32)
        last = number == len(self._by_number) - 1
        return Completion("", tokens, -tokens.astype(np.float32), np.zeros(3, np.int32), "length" if last else "stop")

    async def _rewarded(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        found = []
        for item in items:
            number = int(item.response)
            if number + 1 in self._before:
                self._before[number + 1].set()
            reward = self._by_number[number]
            found.append(RewardResult(reward, {}, None if reward is not None else "planted"))
        return found

    async def _score(self, row: Any, finished: Any) -> Any:
        return await PromptGroups._score(self, row, finished)

    def _log(self, *args: Any) -> None:
        PromptGroups._log(self, *args)


async def test_a_reward_that_fails_fails_its_sample_alone_and_nothing_is_generated_again(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    shape: dict[str, Any] = {"base_columns": BASE_COLUMNS, "row_bytes": 4096, "samples_per_group": 4}
    async with asyncio.timeout(60), served(max_staleness=0, **shape) as run:
        bus, grants = await leased(run)
        groups = Scored(bus, {0: None, 1: 0.0, 2: 1.0, 3: 0.5}, tmp_path)
        await groups.fill(Lease(**{**grants[0], "have": {}}))
        again = await bus.call("renew", [])
        assert again == {"lost": []} and groups.asked == [f"0.0/{number}" for number in range(4)]
        index = run.coordinator.index
        assert index.groups[0].state == "ready"
        assert index.groups[0].info[REWARD] == [None, 0.0, 1.0, 0.5]
        assert index.groups[0].info[FINISH] == [0, 0, 0, 1]
        advantages = await run.bus("advantages-0")
        made = await anext(advantages.stream("advantages", tokens=1 << 20))
        assert [(row.reward, row.finish) for row in made.rows] == [
            (None, "stop"),
            (0.0, "stop"),
            (1.0, "stop"),
            (0.5, "length"),
        ]
        found = _advantages(list(made.rows), of_group(AlgorithmConfig(name="dr_grpo"), []))
        assert [each.tolist() for each in found] == [[0.0] * 3, [-0.5] * 3, [0.5] * 3, [0.0] * 3]
        assert [row.array("loss_mask").tolist() for row in made.rows] == [[0] * 3, [1] * 3, [1] * 3, [1] * 3]
        write_samples(tmp_path, copy_samples(bus, orjson.dumps(index.dump())))
        kept = KeptSamples.read(tmp_path).take(0, grants[0]["position"], np.array([5, 6, 7], np.int32))
        assert [row.info[REWARD] for row in kept] == [None, 0.0, 1.0, 0.5]
        # Too few have one: the group fails at once, and another prompt takes its place.
        groups = Scored(bus, {0: 1.0, 1: None, 2: None, 3: None}, tmp_path)
        await groups.fill(Lease(**{**grants[1], "have": {}}))
        await bus.call("abandon", grants[1]["group"], 0)
        assert len(groups.asked) == 4 and 1 not in index.groups
        assert (index.counts["failed"], index.counts["quarantined"], index.consecutive_failed) == (1, 0, 1)
        assert index.last_error == (
            "1 of 4 samples have a reward, 2 must. The first that failed: reward of row 9, sample 1: planted"
        )
        # One that an earlier holder put without a reward counts so.
        groups = Scored(bus, {0: 1.0, 1: 1.0, 2: None, 3: 1.0}, tmp_path)
        groups._before[3].set()
        groups.job.config.rollout.filter = "zero_std"  # type: ignore[misc]
        await groups.fill(Lease(**{**grants[2], "have": {2: Ended(None, "stop", 3)}}))
        assert [name.rpartition("/")[2] for name in groups.asked] == ["0", "1", "3"]
        assert (index.counts["failed"], index.counts["filtered"]) == (1, 1), "equal among those that have one"
    lines = [orjson.loads(line) for line in (tmp_path / "samples" / "step_000000.jsonl").read_bytes().splitlines()]
    assert [(line["group"], line["sample"], line["reward"], line.get("error")) for line in lines] == [
        (0, 0, None, "planted"), (1, 0, 1.0, None), (1, 1, None, "planted"), (1, 2, None, "planted"), (2, 0, 1.0, None),
    ]  # fmt: skip
    assert {(line["finish_reason"], line["num_tokens"]) for line in lines} == {("stop", 3)}


def columns(made: Sequence[Made], results: Sequence[RewardResult], **rollout: bool) -> dict[str, list[Any]]:
    reward = RewardConfig(function="rewards:exact", components={"right": 1.0, "short": 0.5})
    config = SimpleNamespace(
        rollout=SimpleNamespace(**{"mask_old_tokens": False, "mask_truncated": False} | rollout),
        train=SimpleNamespace(router_replay="off"), components=reward.components, num_parts=2, algorithm=AlgorithmConfig(),
        media=None,
    )  # fmt: skip
    found = columns_of(cast(Any, config), made, results)
    assert found[1].name == "loss_mask" and found[1].arrays[0].dtype == np.uint8
    return {each.name: [array.tolist() for array in each.arrays] for each in found}


def part(reason: FinishReason, *versions: int) -> SampleRow:
    tokens = np.arange(len(versions), dtype=np.int32)
    return SampleRow(tokens, Completion("", tokens, -tokens.astype(np.float32), np.array(versions, np.int32), reason))


def test_samples_that_their_limit_cut_off_can_be_left_out_of_the_loss() -> None:
    ends: list[FinishReason] = ["stop", "length", "cancelled"]
    made = [Made(at, (part(reason, 0, 0, 0),)) for at, reason in enumerate(ends)]
    results = [RewardResult(2.0, {"right": 1.5, "short": 1.0}), RewardResult(0.5, {"right": 0.0, "short": 1.0})]
    for masks, expected in ((False, [[1] * 3, [1] * 3, [0] * 3]), (True, [[1] * 3, [0] * 3, [0] * 3])):
        found = columns(made, [*results, RewardResult(None)], mask_truncated=masks)
        assert found["loss_mask"] == expected
        assert found["reward_parts"][:2] == [[1.5, 1.0], [0.0, 1.0]] and np.isnan(found["reward_parts"][2]).all()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("mask_truncated", [[0, 0], [1, 1], [0, 0], [1, 1, 0]]),
        ("mask_old_tokens", [[0, 0], [0, 1], [0, 1], [1, 1, 0]]),
    ],
)
def test_what_is_left_out_of_the_loss_of_several_rows_is_by_the_end_and_the_newest_weights_of_their_sample(
    setting: str, expected: list[list[int]]
) -> None:
    cut = Made(0, (part("stop", 1, 1), part("length", 1, 2)))
    whole = Made(1, (part("length", 0, 1), part("stop", 1, 1, NO_VERSION)))  # a branch alone was cut off
    rights = [RewardResult(1.0, {"right": 1.0, "short": 0.0})] * 2
    assert columns([cut, whole], rights, **{setting: True})["loss_mask"] == expected


def test_of_a_sample_that_nobody_sampled_nothing_is_in_the_loss() -> None:
    nothing = [Made(0, (part("cancelled", NO_VERSION),))]
    assert columns(nothing, [RewardResult(1.0, {"right": 1.0, "short": 0.0})], mask_old_tokens=True)["loss_mask"] == [
        [0]
    ]


async def test_a_prompt_is_tokenized_beside_the_loop_one_at_a_time() -> None:
    loop, running, most = asyncio.get_running_loop(), 0, 0
    turned = threading.Event()

    def slow(text: str, **_: Any) -> dict[str, list[int]]:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(60), "the loop turns meanwhile"
        running -= 1
        return {"input_ids": [1, 2]}

    groups = Groups(None, KeptSamples())  # type: ignore[arg-type]
    groups.job.config.rollout.max_prompt_tokens = 8  # type: ignore[misc]
    groups.tokenizer = slow
    row = Row("row", "a", None, {})
    async with asyncio.timeout(60):
        made = await asyncio.gather(*(PromptGroups.prepare(groups, row, DataConfig(path="x")) for _ in range(4)))
    assert [prompt.tolist() for prompt, _ in made] == [[1, 2]] * 4 and most == 1


async def test_a_reward_over_the_whole_group_is_asked_once_when_all_samples_are_there(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    shape: dict[str, Any] = {"base_columns": BASE_COLUMNS, "row_bytes": 4096, "samples_per_group": 3}
    async with asyncio.timeout(60), served(max_staleness=0, **shape) as run:
        bus, grants = await leased(run)
        groups, asked = Scored(bus, {0: 0.0, 1: 1.0, 2: 0.5}, tmp_path), list[list[str]]()
        groups.job.config.reward.per = "group"  # type: ignore[misc]
        rewarded = groups.rewards.score

        async def score(items: Sequence[RewardItem]) -> list[RewardResult]:
            asked.append([item.response for item in items])
            return await rewarded(items)

        groups.rewards = cast(Any, SimpleNamespace(score=score))
        for number in (1, 2):
            groups._before[number].set()
        await groups.fill(Lease(**{**grants[0], "have": {}}))
        await bus.call("renew", [])
        assert asked == [["0", "1", "2"]] and run.coordinator.index.groups[0].info[REWARD] == [0.0, 1.0, 0.5]


KEEP = """
async def waits(samples):
    import asyncio
    await asyncio.sleep(0)
    return keep(samples)

def keep(samples):
    if samples[0]["num_tokens"] > 9:
        raise LookupError("planted")
    return None if samples[0]["num_tokens"] == 9 else any(each["finish_reason"] == "length" for each in samples)
"""


async def test_a_filter_of_the_users_sees_how_samples_ended_and_its_own_failure_fails_the_group(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(KEEP)
    samples = [Ended(1.0, "stop", 3), Ended(None, "length", 4)]
    how: Any = {"work": "filter", "source": "rollout.keep", "deadline_s": 300.0, "load_deadline_s": 300.0}
    async with AsyncExitStack() as pools:
        settings = ({"function": f"{tmp_path}/mine.py:{name}"} for name in ("keep", "waits"))
        opened = [UserFunction("rondo.roles.sampling.filters:open_keep", each, **how) for each in settings]
        for pool in opened:
            await pools.enter_async_context(pool)
        groups = Groups(None, KeptSamples())  # type: ignore[arg-type]
        groups.job.config.algorithm = AlgorithmConfig(name="reinforce_plus_plus")  # type: ignore[misc]
        for groups.keep in opened:
            assert await groups._outcome(samples, []) is None
            assert await groups._outcome(samples[:1], []) == ("filtered", "rollout.keep said no")
        cases = [(9, "rollout.keep must return True or False, got None"), (10, "planted")]
        for groups.keep, (num_tokens, error) in itertools.product(opened, cases):
            outcome = await groups._outcome([samples[0]._replace(num_tokens=num_tokens)], [])
            assert outcome is not None and outcome[0] == "failed" and error in outcome[1]
    assert not equal_rewards([*samples, Ended(0.5, "stop", 1)]) and equal_rewards(samples)


async def test_a_response_near_its_limit_is_put_with_less_reward_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    shape: dict[str, Any] = {"base_columns": (*BASE_COLUMNS, "words"), "row_bytes": 4096, "samples_per_group": 2}
    async with asyncio.timeout(60), served(max_staleness=0, **shape) as run:
        bus, grants = await leased(run)
        groups = Scored(bus, {0: 1.0, 1: None}, tmp_path)
        groups.job.config.algorithm = AlgorithmConfig(name="reinforce_plus_plus")  # type: ignore[misc]
        groups.job.config.rollout.max_new_tokens = 4  # type: ignore[misc]
        groups.job.config.reward.overlong = RewardConfig(  # type: ignore[method-assign]
            function="rewards:exact", overlong_tokens=2, overlong_penalty=0.5
        ).overlong
        groups.job.config.samples = SamplesConfig(keep=1)  # type: ignore[misc]
        await groups.fill(Lease(**{**grants[0], "have": {}}))
        index = run.coordinator.index
        assert index.groups[0].info[REWARD] == [0.75, None]  # 3 of 4 tokens: half of the way
        assert index.groups[0].verdicts() == [1.0, None]
        await bus.call("renew", [])
        kept = copy_samples(bus, orjson.dumps(run.coordinator.index.dump()))
        words = [orjson.loads(each.columns["words"].tobytes()) for each in kept]
        assert words == [
            {"response": "0", "prompt": "p", "details": {"overlong": -0.25}},
            {"response": "1", "prompt": "p", "details": {}, "error": "planted"},
        ]
    first, second = map(orjson.loads, (tmp_path / "samples" / "step_000000.jsonl").read_bytes().splitlines())
    assert (first["reward"], first["details"]) == (0.75, {"overlong": -0.25}) and second["reward"] is None


async def test_a_group_whose_samples_differ_in_what_their_length_takes_off_alone_is_filtered(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    shape: dict[str, Any] = {"base_columns": BASE_COLUMNS, "row_bytes": 4096, "samples_per_group": 2}
    async with asyncio.timeout(60), served(max_staleness=0, **shape) as run:
        bus, grants = await leased(run)
        groups = Scored(bus, {0: 1.0, 1: 1.0}, tmp_path)
        groups.job.config.rollout.filter = "zero_std"  # type: ignore[misc]
        taken = iter((0.0, 0.5))
        groups.job.config.reward.overlong = lambda *_: next(taken)  # type: ignore[method-assign]
        await groups.fill(Lease(**{**grants[0], "have": {}}))
        assert run.coordinator.index.counts["filtered"] == 1
        groups.job.config.reward.overlong = lambda *_: 1e39  # type: ignore[method-assign]
        too_much = groups._sample(Made(0, (unsaid(np.zeros(1, np.int32)),)), RewardResult(1.0), 4).result
        assert (too_much.score, too_much.error) == (
            None,
            "a reward without reward.overlong_penalty must be a number of at most 1.7e+38 in size, got -1e+39. Scale it down",
        )


def test_the_penalty_of_overlong_responses_rises_evenly_up_to_the_limit() -> None:
    config = RewardConfig(function="rewards:exact", overlong_tokens=4)
    assert [config.overlong(length, 16) for length in (1, 12, 13, 15, 16, 20)] == [0, 0, 0.25, 0.75, 1, 1]
    assert RewardConfig(function="rewards:exact").overlong(16, 16) == 0
    with pytest.raises(ValueError, match=r"reward.overlong_tokens must be set with reward.overlong_penalty"):
        RewardConfig(function="rewards:exact", overlong_penalty=2.0)
