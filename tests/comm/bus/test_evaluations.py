"""Evaluations beside the training: their weights stay, one replica works on each, and one result counts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from rondo.comm.bus.bus import Bus
from rondo.comm.bus.versions import Versions
from rondo.runtime.errors import ConfigError, Refused
from tests.comm.inprocess import InProcess, Store, ask


@asynccontextmanager
async def running(folder: Path, **changes: Any) -> AsyncIterator[InProcess]:
    store = Store()
    run = InProcess(folder, store, num_slots=3, num_steps=4, groups_per_step=1, samples_per_group=1)
    run.config = dataclasses.replace(run.config, **{"evaluate_every": 1, "num_pinned": 1, **changes})
    try:
        await run.start()
        yield run
        await run.stop()
    finally:
        store.close()


async def publish(actor: Bus, version: int, checksum: int) -> int:
    """The slot that the version was published in."""
    slot = int((await actor.call("begin_publish", version))["slot"])
    await actor.call("end_publish", slot, version, checksum)
    return slot


def reach(run: InProcess, version: int) -> None:
    """The committed version, without what was trained for it."""
    run.coordinator._emit(
        {
            "event": "commit",
            "role": "actor",
            "version": version,
            "checksum": version,
            "attempt": run.attempt,
            "spans": [],
        }
    )


async def evaluated(bus: Bus, label: str, version: int, reward: float = 0.5) -> None:
    await bus.call("evaluated", label, {"version": version, "reward": reward})


async def test_the_weights_of_a_version_stay_until_its_evaluation_has_a_result(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        actor, rollout = await run.bus("actor-0"), await run.bus("rollout-0")
        reach(run, 0)
        await publish(actor, 0, 70)
        assert await ask(rollout.call("evaluation")) is None  # version 0 is no multiple of a step
        reach(run, 1)
        slot = await publish(actor, 1, 71)
        due = (await rollout.call("evaluation"))["evaluate"]
        assert due == {"label": "version_1", "version": 1, "slot": slot, "checksum": 71, "attempt": 0}
        await rollout.call("proved", "evaluation.0", 1)
        for version in (2, 3, 4):
            reach(run, version)
            assert await publish(actor, version, 70 + version) != slot
        await evaluated(rollout, "version_1", 1)
        assert {await publish(actor, version, 80) for version in (5, 6, 7)} >= {slot}


async def test_an_evaluation_of_a_dead_replica_is_taken_up_again_and_only_the_first_result_counts(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as run:
        actor, one, other = [await run.bus(name) for name in ("actor-0", "rollout-0", "rollout-1")]
        reach(run, 1)
        slot = await publish(actor, 1, 71)
        first = await one.call("evaluation")
        assert await one.call("evaluation") == first  # its answer was lost
        assert await ask(other.call("evaluation")) is None
        await run.die("rollout-0", 1)
        assert run.coordinator.index.versions.slots[slot].holders == set()
        assert await other.call("evaluation") == first
        await run.stop()
        await run.start()  # a coordinator that forgot who works on it
        back = await run.bus("rollout-0", 2)
        assert await back.call("evaluation") == first
        await evaluated(other, "version_1", 1, 0.25)
        await evaluated(back, "version_1", 1, 0.75)
        assert run.coordinator.index.evaluations["version_1"]["reward"] == 0.25
        assert await ask(other.call("evaluation")) is None


async def test_what_cannot_be_kept_is_told_and_left_out_but_never_the_last_version(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        actor, rollout = await run.bus("actor-0"), await run.bus("rollout-0")
        reach(run, 1)
        await publish(actor, 1, 71)
        assert (await rollout.call("evaluation"))["evaluate"]["version"] == 1
        for version in (2, 3):
            reach(run, version)
            await publish(actor, version, 70 + version)
            assert "version_1 still runs" in run.coordinator.index.evaluations[f"version_{version}"]["skipped"]
        told = [run.coordinator._reports.get_nowait() for _ in range(run.coordinator._reports.qsize())]
        assert [data["version"] for kind, data in told if kind == "evaluation_skipped"] == [2, 3]
        reach(run, 4)
        await publish(actor, 4, 74)
        assert list(run.coordinator.index.versions.pins) == ["version_1", "version_4"]
        await publish(actor, 4, 74)  # again, by an actor that came back: there is room for it
        await evaluated(rollout, "version_1", 1)
        assert (await rollout.call("evaluation"))["evaluate"]["version"] == 4
        await evaluated(rollout, "version_4", 4)
        assert await rollout.call("evaluation") == {"end": True}


async def test_a_run_that_goes_on_from_a_checkpoint_evaluates_its_version_and_none_whose_weights_are_gone(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, num_pinned=2) as run:
        actor = await run.bus("actor-0")
        for version in (1, 2):
            reach(run, version)
            await publish(actor, version, 70 + version)
        assert list(run.coordinator.index.versions.pins) == ["version_1", "version_2"]
        folder = tmp_path / "checkpoints" / "step_000002"
        folder.mkdir(parents=True)
        saved = {"version": 2, "index": run.coordinator.index.dump()}
        (folder / "index.json").write_bytes(orjson.dumps(saved))
        await run.stop()
        (folder / "COMPLETE").write_text("2\n")
        run.attempt = 1
        await run.start()
        assert run.coordinator.index.attempt == 1 and run.coordinator.index.versions.pins == {}
        actor, rollout = await run.bus("actor-0", 2), await run.bus("rollout-0", 2)
        await publish(actor, 2, 72)
        assert "gone" in run.coordinator.index.evaluations["version_1"]["skipped"]
        assert (await rollout.call("evaluation"))["evaluate"]["version"] == 2


@pytest.mark.parametrize("at_end", [False, True])
async def test_the_last_version_is_evaluated_once(tmp_path: Path, at_end: bool) -> None:
    async with running(tmp_path, evaluate_every=4, evaluate_end=at_end) as run:
        actor, rollout = await run.bus("actor-0"), await run.bus("rollout-0")
        reach(run, 4)
        asked = await ask(rollout.call("evaluation"))
        assert asked == ({"end": True} if at_end else None)  # what is not published yet is waited for
        await publish(actor, 4, 74)
        if not at_end:
            assert (await rollout.call("evaluation"))["evaluate"]["label"] == "version_4"
            await evaluated(rollout, "version_4", 4)
        assert await rollout.call("evaluation") == {"end": True}


def test_pins_survive_a_dump() -> None:
    versions = Versions(3)
    versions.begin(1, 4)
    versions.publish(1, 4, 9)
    versions.pins["version_4"] = 1
    again = Versions.load(versions.dump())
    assert again.dump() == versions.dump() and again.pins == {"version_4": 1}
    versions.begin(2, 5)
    versions.publish(2, 5, 9)
    assert versions.writable() == 0


async def test_every_engine_evaluates_a_part_at_the_end_and_one_that_dies_loses_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, evaluate_every=None, evaluate_end=True, num_pinned=0) as run:
        one, other = await run.bus("rollout-0"), await run.bus("rollout-1")
        reach(run, 4)
        for bus in (one, other):
            await bus.call("proved", "rollout.0", 4)
        assert [(await bus.call("lease", 1, []))["evaluate"]["part"] for bus in (one, other)] == [0, 1]
        await other.call("evaluated_part", "end", 1, {"rewards": [["s", 1, [1.0]]]})
        await other.call("evaluated_part", "end", 1, {"rewards": []})  # the first one counts
        assert await ask(other.call("lease", 1, [])) is None  # the rest is with the first replica
        await run.die("rollout-0", 1)
        taken_up = {"label": "end", "version": 4, "part": 0, "of": 2}
        assert (await other.call("lease", 1, []))["evaluate"] == taken_up
        await run.stop()
        await run.start()  # a coordinator that forgot who works on it, and not what was found
        assert (await other.call("lease", 1, []))["evaluate"] == taken_up
        await other.call("evaluated_part", "end", 0, {"rewards": [["s", 0, [0.5]]]})
        due = (await other.call("lease", 1, []))["evaluate"]
        assert sorted(part["rewards"][0] for part in due["parts"]) == [["s", 0, [0.5]], ["s", 1, [1.0]]]
        await evaluated(other, "end", 4)
        assert await other.call("lease", 1, []) == {"end": True}
        assert run.coordinator.index.evaluation_parts == {}


async def asks(run: InProcess, name: str, version: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = await run.coordinator.ask_evaluation(f"asked-{name}", ["math"], version)
    return found


async def test_what_somebody_asks_for_is_evaluated_once_alone_and_with_the_weights_that_are_there(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, evaluate_every=None, num_pinned=0) as run:
        actor, rollout = await run.bus("actor-0"), await run.bus("rollout-0")
        reach(run, 0)
        with pytest.raises(Refused, match="weights must be published"):
            await asks(run, "a")
        await publish(actor, 0, 70)
        reach(run, 1)
        slot = await publish(actor, 1, 71)
        with pytest.raises(ConfigError, match=r"version must be one whose weights are held \(0, 1\), got 7"):
            await asks(run, "a", 7)
        waiting = asyncio.create_task(rollout.call("evaluation"))
        await asyncio.sleep(0)
        assert (await asks(run, "a"))["status"] == "PENDING"
        place = {"slot": slot, "version": 1, "checksum": 71, "attempt": 0, "sets": ["math"]}
        assert (await waiting)["evaluate"] == {"label": "asked-a", **place}  # whoever waits for one is woken
        assert (await asks(run, "a"))["status"] == "RUNNING"
        with pytest.raises(Refused, match=r"asked for alone, got asked-a without a result"):
            await asks(run, "b")
        await rollout.call("proved", "evaluation.0", 1)
        assert run.coordinator.index.versions.pins == {}
        await rollout.call("evaluated", "asked-a", {"version": 1, "reward": 0.5})
        assert await asks(run, "a") == {"status": "COMPLETED", "result": {"version": 1, "reward": 0.5}}
        await run.stop()
        await run.start()  # results are journalled, questions are not
        assert (await asks(run, "a"))["status"] == "COMPLETED" and (await asks(run, "c", 0))["status"] == "PENDING"


async def test_who_dies_of_what_somebody_asked_for_is_not_given_it_again_nor_are_weights_that_are_gone(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, evaluate_every=None, num_pinned=0) as run:
        actor, rollout = await run.bus("actor-0"), await run.bus("rollout-0")
        reach(run, 0)
        await publish(actor, 0, 70)
        await asks(run, "a")
        assert (await rollout.call("evaluation"))["evaluate"]["label"] == "asked-a"
        await run.die("rollout-0", 1)
        back = await run.bus("rollout-0", 2)
        assert await ask(back.call("evaluation")) is None
        assert await asks(run, "a") == {
            "status": "FAILED", "result": {"skipped": "rollout-0, which worked on it, ended"},
        }  # fmt: skip
        await asks(run, "b", 0)
        for version in (1, 2, 3):
            reach(run, version)
            await publish(actor, version, 70 + version)
        found = await asks(run, "b", 0)
        assert found["status"] == "FAILED" and found["result"]["skipped"].startswith("its weights are gone")
        told = [run.coordinator._reports.get_nowait() for _ in range(run.coordinator._reports.qsize())]
        assert [data["label"] for kind, data in told if kind == "evaluation_failed"] == ["asked-a", "asked-b"]
