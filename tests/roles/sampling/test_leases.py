from __future__ import annotations

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rondo.roles.config import AgentConfig, RolloutConfig, SGLangConfig
from rondo.roles.data.prompts import TooLong
from rondo.roles.engines.engine import Completion, Request
from rondo.roles.engines.replica import Replica
from rondo.roles.resumed import KeptSamples
from rondo.roles.rewards.pool import RewardStats
from rondo.roles.rollout import RolloutRole
from rondo.roles.sampling.groups import Lease
from rondo.roles.sampling.leases import Progress
from tests.comm.served import served
from tests.roles.test_resumed import BASE_COLUMNS, Groups, leased

A, B = (1, 0), (2, 0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def held(clock: Clock) -> Progress:
    progress = Progress(10.0, clock)
    for key in (A, B):
        progress.begin(key)
    assert progress.since_last({}, 0) == [A, B]
    assert progress.since_last({}, 0) == []  # nothing came further
    return progress


def test_a_group_is_renewed_by_its_own_requests_and_a_hung_one_by_no_others() -> None:
    progress = held(Clock())
    with progress.generating(A, "a/0"), progress.generating(B, "b/0"):
        with progress.generating(A, "a/1"):
            assert progress.since_last({"a/0": 1, "a/1": 1, "b/0": -1}, 0) == [A, B]  # all were asked
            assert progress.since_last({"a/0": 1, "a/1": 9, "b/0": -1}, 0) == [A]
            assert progress.since_last({"a/0": 1, "a/1": 9, "b/0": -8}, 0) == [B]  # it waits, and the line moves
        assert progress.since_last({"a/0": 1, "b/0": 1}, 0) == [A, B]  # a sample has ended; another has its first token
        for tokens in (7, 8, 9):
            assert progress.since_last({"a/0": 1, "b/0": tokens, "an agent's": tokens}, 0) == [B]
        assert progress.since_last({"a/0": 1, "b/0": 9}, 0) == []  # the engine stands still
    assert progress.since_last({}, 0) == [A, B]
    assert progress.since_last({"a/0": 5}, 0) == []


def test_a_group_whose_media_are_prepared_is_renewed_meanwhile() -> None:
    progress = held(Clock())
    with progress.preparing(A):
        assert progress.since_last({}, 0) == [A] == progress.since_last({}, 0)
    assert progress.since_last({}, 0) == [A] and progress.since_last({}, 0) == []
    progress.further(B)  # as its workflow says
    assert progress.since_last({}, 0) == [B] and progress.since_last({}, 0) == []


def test_a_reward_in_computation_renews_its_group_where_nothing_decodes_up_to_its_deadline_and_no_other() -> None:
    clock = Clock()
    progress = held(clock)
    with progress.scoring(B):
        for clock.now in (3.0, 9.0):
            assert progress.since_last({}, 0) == [B]
        clock.now = 11.0
        assert progress.since_last({}, 0) == []  # it hangs
        clock.now = 12.0
        assert progress.since_last({}, 1) == [B]  # it waits for a worker: others are scored
    assert progress.since_last({}, 1) == [B] and progress.since_last({}, 1) == []


def test_a_group_that_is_given_up_is_renewed_no_more() -> None:
    progress = held(Clock())
    with progress.generating(A, "a/0"):
        progress.end(A)
        assert progress.since_last({"a/0": 5}, 0) == []


@pytest.mark.parametrize(
    ("sglang", "num_groups"),
    [
        (None, 8),
        (SGLangConfig(python="p"), 8),
        (SGLangConfig(python="p", num_servers=4), 32),
        (SGLangConfig(urls=("http://a:1", "http://b:1")), 16),
    ],
)
def test_one_wave_decodes_and_one_waits_on_every_server_of_a_replica(
    sglang: SGLangConfig | None, num_groups: int
) -> None:
    assert with_room(sglang=sglang)._room() == num_groups


def with_room(**changes: Any) -> RolloutRole:
    """A replica of 64 slots, for groups of 16 samples."""
    sizes = {
        "prompts_per_step": 8,
        "samples_per_prompt": 16,
        "max_prompt_tokens": 8,
        "max_new_tokens": 8,
        "num_slots": 64,
    }
    config = RolloutConfig(**(sizes | changes))
    role, job = RolloutRole(cast(Any, None)), cast(Any, SimpleNamespace(config=SimpleNamespace(rollout=config)))
    role._job, role._replica = job, Replica(cast(Any, None), job)
    role._progress = Progress(10.0, left=role._fewer.set)
    return role


@pytest.mark.parametrize(
    ("changes", "rooms"),
    [
        ({}, [6, 6, 7, 8, 7]),
        ({"max_episodes": 48}, [1, 1, 1, 1, 1]),
        ({"max_episodes": 8}, [-1, -1, -1, -1, -1]),
        ({"agent": AgentConfig(command=("true",), max_processes=32)}, [2, 2, 2, 2, 2]),
    ],
)
def test_samples_that_are_whole_or_elsewhere_leave_their_places_to_other_groups(
    changes: dict[str, Any], rooms: list[int]
) -> None:
    role = with_room(**changes)
    progress = role._progress
    role._running = cast(Any, dict.fromkeys([A, B]))
    found = [role._room()]
    with ExitStack() as tools:
        for _ in range(15):
            tools.enter_context(progress.elsewhere(A))
        found.append(role._room())
        role._fewer.clear()
        tools.enter_context(progress.elsewhere(A))
        assert role._fewer.is_set(), "whoever waits for room looks again"
        found.append(role._room())
        progress.made(B, 16)
        found.append(role._room())
    found.append(role._room())
    assert found == rooms


class Streams:
    """An engine that answers nobody; `tokens` of those that it has."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.asked, self.left = asyncio.Semaphore(0), asyncio.Semaphore(0)

    def progress(self) -> dict[str, int]:
        return dict(self.tokens)

    async def generate(self, request: Request) -> Completion:
        self.tokens[request.id] = 1
        self.asked.release()
        try:
            await asyncio.Event().wait()
        finally:
            del self.tokens[request.id]
            self.left.release()
        raise AssertionError("nobody sets that event")


async def test_the_lease_of_a_hung_request_is_lost_while_others_stream_and_its_group_is_granted_again() -> None:
    async with asyncio.timeout(60), served(max_staleness=0, base_columns=BASE_COLUMNS, row_bytes=4096) as run:
        bus, grants = await leased(run)
        groups, engine = Groups(bus, KeptSamples()), Streams()
        groups._generate = engine.generate  # type: ignore[method-assign]
        context = SimpleNamespace(progress=lambda: None, span=groups.ctx.span)
        replica = RolloutRole(cast(Any, context))
        replica._job, replica._groups, replica._progress = groups.job, groups, groups.progress
        replica._replica = cast(Any, SimpleNamespace(engine=engine))
        replica._judges = {}
        replica._rewards = cast(Any, SimpleNamespace(stats=lambda: RewardStats(0, 0, 0, 0, 0, ())))
        async with asyncio.TaskGroup() as tasks:
            for grant in grants:
                key = grant["group"], grant["epoch"]
                replica._progress.begin(key)
                replica._running[key] = tasks.create_task(replica._run_group(Lease(**{**grant, "have": {}})))
            for _ in range(6):
                await engine.asked.acquire()
            for run.clock in (30.0, 60.0, 90.0, 120.0, 150.0):
                await replica._renew_those_further()
                run.coordinator.tick()
                for name in engine.tokens:
                    engine.tokens[name] += not name.startswith("0.")
            await replica._renew_those_further()
            for _ in range(2):
                await engine.left.acquire()
            assert sorted(engine.tokens) == ["1.0/0", "1.0/1", "2.0/0", "2.0/1"]
            again = (await bus.call("lease", 1, replica._held()))["grants"]
            assert [(grant["group"], grant["epoch"]) for grant in again] == [(0, 1)]
            for task in replica._running.values():
                task.cancel()


async def test_a_prompt_that_is_too_long_is_settled_without_another_try_and_its_row_told_once() -> None:
    options: dict[str, Any] = {"max_staleness": 0, "base_columns": BASE_COLUMNS, "row_bytes": 4096}
    async with asyncio.timeout(60), served(max_consecutive_filtered=2, **options) as run:
        bus, grants = await leased(run)
        groups, told = Groups(bus, KeptSamples()), list[tuple[str, dict[str, Any]]]()

        async def fill(lease: Lease) -> None:
            raise TooLong(f"a.jsonl:{lease.group % 2}: prompt must have 1 to 8 tokens, got 9", 9)

        async def report(kind: str, data: dict[str, Any]) -> None:
            told.append((kind, data))

        groups.fill = fill  # type: ignore[method-assign]
        replica = RolloutRole(cast(Any, SimpleNamespace(progress=lambda: None, span=groups.ctx.span, report=report)))
        replica._job, replica._groups, replica._progress = groups.job, groups, groups.progress
        for grant in grants:
            key = grant["group"], grant["epoch"]
            replica._progress.begin(key)
            replica._running[key] = asyncio.create_task(asyncio.sleep(0))
            await replica._run_group(Lease(**{**grant, "have": {}}))
        assert run.coordinator.index.counts["filtered"] == len(grants) == 3
        texts = [f"a.jsonl:{row}: prompt must have 1 to 8 tokens, got 9" for row in (0, 1)]
        assert told == [("left_out", {"why": text}) for text in texts]
        assert run.coordinator.index.starving() == (
            "filtered prompt groups in a row must be at most 2 (rollout.max_consecutive_filtered), got 3. "
            f"The last one was filtered for: {texts[0]}"
        )
