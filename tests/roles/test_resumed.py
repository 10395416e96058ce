"""Samples that a checkpoint keeps: copied from real rings, written, and put again by the replica that gets their group."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from rondo.comm.bus.bus import Bus
from rondo.comm.bus.group import REWARD
from rondo.comm.ring.records import Column, record_bytes
from rondo.comm.ring.ring import Record
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, JobConfig, RewardConfig, RolloutConfig, SamplesConfig
from rondo.roles.data.datasets import Row
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.engines.stops import Stops
from rondo.roles.resumed import FILE, KeptRow, KeptSamples, copy_samples, write_samples
from rondo.roles.rewards.pool import RewardResult
from rondo.roles.sampling.groups import Lease, PromptGroups, Sample
from rondo.roles.sampling.leases import Progress
from rondo.roles.streams import BASE_COLUMNS, ROUTED, WORDS, row_bytes
from rondo.runtime.records.timeline import span
from tests.comm.served import Served, prove, served

PROMPT = np.array([5, 6, 7], np.int32)


def columns(group: int, sample: int, part: int = 0) -> dict[str, np.ndarray]:
    """Of a row; each has a length of its own, and the empty answer is one of them."""
    draw, response = np.random.default_rng([group, sample, part]), 2 * sample + part
    return {
        "tokens": np.concatenate([PROMPT, draw.integers(0, 99, response, np.int32)]),
        "loss_mask": np.ones(response, np.uint8),
        "rollout_log_probs": draw.standard_normal(response, np.float32),
        "policy_versions": np.zeros(response, np.int32),
    }


def put(bus: Bus, grant: Mapping[str, Any], samples: list[int], parts: list[int] | None = None) -> None:
    parts = parts or [1] * len(samples)
    rows = [(s, part) for part in range(max(parts)) for s, num in zip(samples, parts, strict=True) if part < num]
    made = [columns(grant["group"], sample, part) for sample, part in rows]
    fields = [Column(name, made[0][name].dtype.name, [each[name] for each in made]) for name in BASE_COLUMNS]
    info = [[3 + 2 * sample + part, 2 * sample + part, 0.25 * sample, 0, 0, 0, 0.25 * sample] for sample, part in rows]
    bus.put_samples(grant["ring"], grant["group"], grant["epoch"], samples, fields, info, parts)


def equal(kept: list[KeptRow], expected: list[tuple[int, ...]]) -> None:
    assert [(each.group, each.sample, each.part) for each in kept] == [(*row, 0)[:3] for row in expected]
    for each in kept:
        response = 2 * each.sample + each.part
        assert each.info == (3 + response, response, 0.25 * each.sample, 0, 0, 0, 0.25 * each.sample)
        for name, array in columns(each.group, each.sample, each.part).items():
            assert each.columns[name].dtype == array.dtype and np.array_equal(each.columns[name], array)


async def leased(run: Served) -> tuple[Bus, list[dict[str, Any]]]:
    bus, actor = await run.bus("rollout-0"), await run.bus("actor-0")
    await actor.call("commit", 0, 0, 7, [])
    await prove(bus)
    return bus, (await bus.call("lease", 3, []))["grants"]


async def saved(run: Served, bus: Bus, folder: Path) -> bytes:
    """The index of a checkpoint that is written to `folder`, with the samples that lie on the bus now."""
    await bus.call("renew", [])  # the coordinator has seen every put of this replica
    state = (await run.buses[1].call("checkpoint", 0))["state"]
    write_samples(folder, copy_samples(run.buses[1], state))
    return cast(bytes, state)


async def test_what_lies_on_the_bus_unfinished_groups_included_comes_back_from_a_checkpoint_to_the_bit(
    tmp_path: Path,
) -> None:
    async with served(max_staleness=0, base_columns=BASE_COLUMNS, row_bytes=4096) as run:
        bus, (first, second, third) = await leased(run)
        put(bus, second, [1])
        put(bus, first, [1])
        put(bus, first, [0])
        put(bus, third, [0, 1], [2, 3])
        await saved(run, bus, tmp_path)
        assert KeptSamples.read(tmp_path, (*BASE_COLUMNS, WORDS)).take(0, 0, PROMPT)[0].columns[WORDS].size == 0
        kept = KeptSamples.read(tmp_path)
        assert len(kept) == 5
        equal(kept.take(first["group"], first["position"], PROMPT), [(0, 0), (0, 1)])
        equal(kept.take(second["group"], second["position"], PROMPT), [(1, 1)])
        assert kept.take(second["group"], second["position"], PROMPT) == []  # each is given out once
        parts = kept.take(third["group"], third["position"], PROMPT)
        equal(parts, [(2, 0), (2, 1), (2, 0, 1), (2, 1, 1), (2, 1, 2)])


async def test_a_group_that_was_settled_after_the_index_was_read_is_left_out(tmp_path: Path) -> None:
    async with served(max_staleness=0, base_columns=BASE_COLUMNS, row_bytes=4096) as run:
        bus, (first, second, _) = await leased(run)
        put(bus, first, [0])
        put(bus, second, [0])
        await bus.call("renew", [])
        state = (await run.buses[1].call("checkpoint", 0))["state"]
        await bus.call("settle", first["group"], first["epoch"], "filtered", "equal rewards")
        equal(copy_samples(run.buses[1], state), [(1, 0)])


async def overflowing(run: Served, samples: list[int]) -> tuple[Bus, Bus, dict[str, Any], bytes]:
    """A replica and the actor, one group put into an overflow ring, and the index of a checkpoint."""
    bus, actor = await run.bus("rollout-0"), await run.bus("actor-0")
    await actor.call("commit", 0, 0, 7, [])
    await prove(bus)
    space = run.coordinator.index.space
    space.reserve("other", "ring/rollout-0/0", [space.rings["ring/rollout-0/0"].capacity])
    (grant,) = (await bus.call("lease", 1, []))["grants"]
    assert grant["ring"].startswith("overflow/")
    put(bus, grant, samples)
    await bus.call("renew", [])
    return bus, actor, grant, (await actor.call("checkpoint", 0))["state"]


async def test_copying_goes_on_while_the_rounds_let_go_of_the_overflow_ring_that_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(max_staleness=0, base_columns=BASE_COLUMNS, row_bytes=4096) as run:
        _, actor, _, state = await overflowing(run, [0, 1])
        arrays = Record.arrays

        def after_the_loop_got_a_round(record: Record, name: str) -> list[np.ndarray]:
            actor._rounds("train", [])
            return arrays(record, name)

        monkeypatch.setattr(Record, "arrays", after_the_loop_got_a_round)
        equal(copy_samples(actor, state), [(0, 0), (0, 1)])


async def test_a_group_whose_overflow_ring_was_taken_away_is_left_out() -> None:
    async with served(max_staleness=0, base_columns=BASE_COLUMNS, row_bytes=4096) as run:
        bus, actor, grant, state = await overflowing(run, [0])
        await bus.call("settle", grant["group"], grant["epoch"], "filtered", "equal rewards")
        await bus.call("abandon", grant["group"], grant["epoch"])
        assert [name for name, _ in run.segments.stats().segments if name.startswith("overflow/")] == []
        assert copy_samples(actor, state) == []


def test_samples_of_another_prompt_or_position_are_not_used_and_no_samples_leave_no_file(tmp_path: Path) -> None:
    write_samples(tmp_path, [])
    assert not (tmp_path / FILE).exists()
    assert len(KeptSamples.read(tmp_path)) == len(KeptSamples.read(None)) == 0
    sample = KeptRow(4, 9, 1, 0, (5, 2, 0.25, 0, 0, 0, 0.25), columns(4, 1))
    assert KeptSamples([sample]).take(4, 8, PROMPT) == []
    assert KeptSamples([sample]).take(4, 9, PROMPT + 1) == []
    equal(KeptSamples([sample]).take(4, 9, PROMPT), [(4, 1)])


class Groups(PromptGroups):
    """Those of a replica whose engine answers at once; it notes what it was asked for."""

    def __init__(self, bus: Bus, kept: KeptSamples, *, replay: str = "off", num_samples: int = 2) -> None:
        rollout = SimpleNamespace(
            samples_per_prompt=num_samples, temperature=1.0, filter=None, on_new_weights="continue", max_interruptions=None,
            mask_old_tokens=False, mask_truncated=False, max_new_tokens=3, max_prompt_tokens=8, max_turns=None, max_rows=1,
            max_episode_s=None,
        )  # fmt: skip
        config = SimpleNamespace(
            rollout=rollout, algorithm=AlgorithmConfig(), data=DataConfig(path="x"), seed=0,
            train=SimpleNamespace(router_replay=replay), media=None, samples=SamplesConfig(),
            reward=SimpleNamespace(per="response", deadline_s=1.0, overlong=lambda *_: 0.0),
            num_parts=0, compares_parts=False, genrm=None, judged_s=0.0,
        )  # fmt: skip
        super().__init__(
            ctx=cast(Any, SimpleNamespace(span=lambda name, **_: span(name, "rollout"))),
            job=cast(Any, SimpleNamespace(bus=bus, config=config)),
            engine=cast(Any, None), tokenizer=None, stops=Stops(()), rewards=cast(Any, None), media=None,
            rows=cast(Any, SimpleNamespace(row=lambda _: Row("row", "p", None, {}))),
            order=cast(Any, SimpleNamespace(locate=lambda position: SimpleNamespace(row=position))),
            kept=kept,
            progress=Progress(10.0),
        )  # fmt: skip
        self.asked = list[str]()

    async def prepare(self, row: Row, data: Any, keep: Any = None) -> tuple[np.ndarray, None]:
        return PROMPT, None

    def params(self, temperature: float) -> SamplingParams:
        return SamplingParams(max_new_tokens=4)

    async def _generate(self, request: Request) -> Completion:
        self.asked.append(request.id)
        tokens = np.full(2, 42, np.int32)
        # The engine of the second group's first sample has told no experts.
        experts = None if request.id == "1.0/0" else np.arange(4 * 3 * 2, dtype=np.int16).reshape(4, 3, 2)
        return Completion(request.id, tokens, np.zeros(2, np.float32), np.zeros(2, np.int32), "length", experts)

    async def _score(self, row: Row, finished: Any) -> list[Sample]:
        return [Sample(each, RewardResult(1.0), 1.0) for each in finished]

    def _log(self, lease: Lease, row: Row, samples: Any) -> None:
        pass


async def test_routed_experts_lie_on_the_bus_and_come_back_from_a_checkpoint_also_where_none_were_told(
    tmp_path: Path,
) -> None:
    async with served(max_staleness=0, base_columns=(*BASE_COLUMNS, ROUTED), row_bytes=4096) as run:
        bus, grants = await leased(run)
        groups = Groups(bus, KeptSamples(), replay="r3")
        async with asyncio.timeout(60):
            for grant in grants[:2]:
                await groups.fill(Lease(**{**grant, "have": {}}))
        await saved(run, bus, tmp_path)
        assert run.coordinator.index.counts["ready"] == 2
    kept = KeptSamples.read(tmp_path, (*BASE_COLUMNS, ROUTED))
    for group, shapes in ((0, [(4, 3, 2), (4, 3, 2)]), (1, [(0, 3, 2), (4, 3, 2)])):
        samples = kept.take(group, grants[group]["position"], PROMPT)
        found = [each.columns["routed_experts"] for each in samples]
        assert [array.shape for array in found] == shapes and {array.dtype for array in found} == {np.dtype(np.int16)}
        assert found[1].ravel().tolist() == list(range(24))
        assert list(samples[0].columns) == [*BASE_COLUMNS, ROUTED]
    assert len(KeptSamples.read(tmp_path)) == 4


def test_what_is_reserved_for_a_sample_holds_the_experts_of_the_longest() -> None:
    config = JobConfig(
        name="routed", num_steps=1, model=ModelConfig(path="model"), data=DataConfig(rows="tests.e2e.updates:words"),
        reward=RewardConfig(function="tests.e2e.updates:parity"),
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_prompt_tokens=100, max_new_tokens=300),
    )  # fmt: skip
    length, response = 400, 300
    arrays = {
        "tokens": np.zeros(length, np.int32), "loss_mask": np.zeros(response, np.uint8),
        "rollout_log_probs": np.zeros(response, np.float32), "policy_versions": np.zeros(response, np.int32),
        "routed_experts": np.zeros((length - 1, 48, 8), np.int16),
    }  # fmt: skip
    taken = record_bytes([(0, 0, 0, 1)], [Column(name, array.dtype.name, [array]) for name, array in arrays.items()])
    assert row_bytes(config) < taken <= row_bytes(config, 48 * 8 * 2) < taken + 4096


async def test_a_replica_of_a_resumed_run_puts_what_is_kept_and_generates_only_the_rest(tmp_path: Path) -> None:
    async with served(max_staleness=0, base_columns=BASE_COLUMNS, row_bytes=4096) as run:
        bus, (first, second, _) = await leased(run)
        put(bus, first, [0, 1], [2, 1])
        put(bus, second, [1])
        state = orjson.loads(await saved(run, bus, tmp_path))
    async with served(max_staleness=0, base_columns=BASE_COLUMNS, row_bytes=4096) as run:
        run.coordinator._emit({"event": "snapshot", "state": state}, {"event": "attempt", "attempt": 0})
        bus, grants = await leased(run)
        assert [(grant["group"], grant["have"]) for grant in grants] == [(0, []), (1, []), (2, [])]
        groups = Groups(bus, KeptSamples.read(tmp_path))
        async with asyncio.timeout(60):
            for grant in grants:
                await groups.fill(Lease(**{**grant, "have": {}}))
        await bus.call("renew", [])
        assert groups.asked == ["1.1/0", "2.1/0", "2.1/1"]
        index = run.coordinator.index
        assert index.counts["ready"] == 3
        equal(copy_samples(bus, orjson.dumps(index.dump()))[:3], [(0, 0), (0, 0, 1), (0, 1)])
        assert index.groups[1].info[REWARD] == [1.0, 0.25]
