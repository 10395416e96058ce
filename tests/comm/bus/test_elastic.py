"""Replicas that come and leave while the bus works: what they had is done once, by them or by others, and their rings go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from rondo.comm.bus.audit import Audit, audit
from rondo.comm.bus.bus import Bus
from rondo.comm.bus.group import NEVER
from tests.comm.inprocess import InProcess, Store, ask, payload, put, put_scores
from tests.strength import strength

STEPS, P, N = 4, 4, 2
FORWARDS = ("actor_fwd", "advantages")


class Elastic(InProcess):
    """Buses by name, each with the grants and the rounds that it has."""

    def __init__(self, folder: Path, store: Store, **changes: Any) -> None:
        sizes = {"num_steps": STEPS, "groups_per_step": P, "samples_per_group": N, "max_staleness": 0}
        super().__init__(folder, store, **{**sizes, **changes})
        self.config = replace(self.config, column_ring_bytes=1 << 15)
        self.buses: dict[str, Bus] = {}
        self.lives: dict[str, int] = {}
        self.granted: dict[str, list[dict[str, Any]]] = {}
        self.read: dict[str, int] = {}

    async def comes(self, name: str) -> Bus:
        self.lives[name] = self.lives.get(name, 0) + 1
        self.buses[name] = await self.bus(name, self.lives[name])
        self.granted[name], self.read[name] = [], 0
        return self.buses[name]

    async def drains(self, name: str, *, stays: bool = False) -> None:
        self.roster.groups[name]["drains"] = not stays
        await self.coordinator.member_drains(name, self.lives[name], stays)

    async def goes(self, name: str, *, left: bool) -> None:
        """It is dead; `left`: for good."""
        self.buses.pop(name).close()
        self.roster.dead.append([name, self.lives[name]])
        self.roster.groups[name].update(alive=False, drains=False)
        if left:
            del self.roster.groups[name]
        await self.coordinator.member_dead(name, self.lives[name], left)

    async def again(self, name: str) -> Bus:
        """Another life follows this one."""
        await self.goes(name, left=False)
        return await self.comes(name)

    async def leased(self, name: str, most: int = 9) -> str:
        """What a replica was told: "grants", "end", or "" while there is nothing."""
        held = [[grant["group"], grant["epoch"]] for grant in self.granted[name]]
        answer = await ask(self.buses[name].call("lease", most, held)) or {}
        self.granted[name] += answer.get("grants", [])
        return next(iter(answer), "")

    async def puts(self, name: str, most: int = 99) -> None:
        bus = self.buses[name]
        for grant in self.granted[name][:most]:
            [lost] = [(await bus.call("renew", [[grant["group"], grant["epoch"]]]))["lost"]]
            if lost:
                await bus.call("abandon", grant["group"], grant["epoch"])
            else:
                put(bus, grant, sorted(set(range(N)) - {sample for sample, *_ in grant["have"]}))
        del self.granted[name][:most]
        await bus.call("committed")

    async def scores(self, name: str, most: int = 99) -> str:
        """As `leased`, of a forward replica, which scores what it gets."""
        bus, stream, told = self.buses[name], name.rpartition("-")[0], ""
        await bus.join(stream, 1 << 20)
        while most > 0:
            answer = await ask(bus.call("next_rounds", stream, 0, self.read[name])) or {}
            told = next(iter(answer), "")
            for made in bus._rounds(stream, answer.get("rounds", ()))[:most]:
                put_scores(bus, stream, made)
                await bus.ack(made)
                self.read[name] += 1
                most -= 1
            if told != "rounds":
                break
        return told

    async def trains(self) -> bool:
        """The oldest step, where all of it is there."""
        actor, step, spans = self.buses["actor-0"], self.coordinator.index.step, []
        if len(self.coordinator.index.membership(step)) < P:
            return False
        index, whole = 0, False
        await actor.join("actor", 1 << 20)
        while not whole:
            answer = await ask(actor.call("next_rounds", "actor", 0, index, step)) or {}
            if "end" in answer:
                assert index == 0 and (await actor.call("committed"))["restarts"]
                await self.again("actor-0")
            if "rounds" not in answer:
                return False
            for made in actor._rounds("actor", answer["rounds"]):
                for row in made.rows:
                    np.testing.assert_array_equal(row.array("tokens"), payload(row.group, row.sample))
                    assert row.array("log_probs")[0] == row.array("advantages")[0] == 1000 * row.group + row.sample
                spans, index, whole = spans + made.spans, index + 1, made.last
                actor.check(made)
        await actor.call("commit", 0, step + 1, 7, spans)
        for name in self.named("rollout"):
            await self.buses[name].call("proved", "rollout.0", step + 1)
        return True

    def named(self, role: str) -> list[str]:
        return [name for name in self.buses if name.rpartition("-")[0] == role]

    def rings(self) -> set[str]:
        return {name.split("/")[1] for name in self.coordinator.index.space.rings}

    def found(self) -> Audit:
        assert self.coordinator.index.imbalance() == ""
        return audit(self.folder / "journal", N, P)


@asynccontextmanager
async def elastic(**changes: Any) -> AsyncIterator[Elastic]:
    store = Store()
    with TemporaryDirectory(prefix="rondo-") as folder:
        run = Elastic(Path(folder), store, **changes)
        await run.start()
        for name in ("actor-0", "rollout-0", "actor_fwd-0", "advantages-0"):
            await run.comes(name)
        await run.buses["actor-0"].call("commit", 0, 0, 7, [])
        await run.buses["rollout-0"].call("proved", "rollout.0", 0)
        yield run
        for bus in run.buses.values():
            bus.close()
        await run.stop()
    store.close()


async def test_a_replica_that_comes_gets_a_ring_of_its_own_and_leases_once_its_weights_are_proved() -> None:
    async with elastic() as run:
        bus = await run.comes("rollout-7")
        rings = run.coordinator.index.space.rings
        assert rings["ring/rollout-7/0"].capacity == rings["ring/rollout-0/0"].capacity
        assert await run.leased("rollout-7") == ""
        await bus.call("proved", "rollout.0", 0)
        assert await run.leased("rollout-7") == "grants" and len(run.granted["rollout-7"]) == P // 2  # its share
        assert {grant["ring"] for grant in run.granted["rollout-7"]} == {"ring/rollout-7/0"}


async def test_one_that_drains_gets_nothing_new_ends_with_its_last_row_and_its_ring_goes_with_that() -> None:
    async with elastic() as run:
        await (await run.comes("rollout-1")).call("proved", "rollout.0", 0)
        assert await run.leased("rollout-1") == "grants"
        await run.drains("rollout-1")
        assert await run.leased("rollout-0") == "grants" and len(run.granted["rollout-0"]) == P // 2
        assert await run.leased("rollout-1") == ""
        await run.puts("rollout-1", 1)
        assert await run.leased("rollout-1") == ""
        await run.puts("rollout-1")
        assert await run.leased("rollout-1") == "end"
        await run.goes("rollout-1", left=True)
        assert "rollout-1" in run.rings() and "rollout-1" not in run.coordinator.index.members
        await run.puts("rollout-0")
        for stream in FORWARDS:
            await run.scores(f"{stream}-0")
        assert await run.trains()
        assert "rollout-1" not in run.rings() and "ring/rollout-1/0" not in run.store.held
        assert (run.found().num_lost, run.found().num_leases_lost, run.found().num_trained) == (0, 0, P * N)


async def test_what_one_that_is_ended_had_goes_to_others_and_says_nothing_against_the_prompts() -> None:
    async with elastic(max_infra_failures=0) as run:
        for name in ("rollout-1", "rollout-2"):
            await (await run.comes(name)).call("proved", "rollout.0", 0)
            assert await run.leased(name) == "grants"
            await run.drains(name)
            await run.goes(name, left=name == "rollout-1")  # the other one comes back
        assert {grant["epoch"] for grant in run.granted["rollout-2"]} == {1}
        assert run.coordinator.index.counts["quarantined"] == 0 == run.found().num_leases_lost
        assert await run.leased("rollout-0") == "grants" and len(run.granted["rollout-0"]) == P
        bus = await run.comes("rollout-2")
        await bus.call("proved", "rollout.0", 0)
        assert await run.leased("rollout-2") == ""  # it drains no more: all is granted


async def test_a_judge_that_drains_hears_that_it_may_leave_and_who_follows_weights_does_not() -> None:
    async with elastic() as run:
        for name in ("genrm-0", "rollout-1"):
            await run.comes(name)
        newer = {"genrm-0": NEVER, "rollout-1": 7}
        waits = [asyncio.create_task(run.buses[name].call("weights", "x.0", than)) for name, than in newer.items()]
        await asyncio.sleep(0)
        for name in newer:
            await run.drains(name)
        assert await waits[0] == {"end": True} and await ask(run.buses["genrm-0"].call("weights", "x.0", NEVER))
        assert await ask(run.buses["rollout-1"].call("weights", "x.0", 7)) is None and not waits[1].done()
        waits[1].cancel()


async def test_one_that_stays_after_all_goes_on() -> None:
    async with elastic() as run:
        await run.drains("rollout-0")
        await run.drains("rollout-0", stays=True)
        assert await run.leased("rollout-0") == "grants"


async def test_a_scorer_that_drains_ends_its_round_and_what_it_does_not_end_others_do() -> None:
    async with elastic() as run:
        await run.comes("actor_fwd-1")
        await run.leased("rollout-0")
        await run.puts("rollout-0", 1)
        bus = run.buses["actor_fwd-1"]
        await bus.join("actor_fwd", 1 << 20)
        assert await ask(bus.call("next_rounds", "actor_fwd", 0, 0)) is not None
        await run.drains("actor_fwd-1")
        assert await run.scores("actor_fwd-1") == "end"
        await run.puts("rollout-0", 1)
        await run.scores("actor_fwd-0")
        await run.comes("actor_fwd-2")
        await run.puts("rollout-0", 1)
        assert await ask(run.buses["actor_fwd-2"].call("join", "actor_fwd", 1, 1 << 20)) is None
        assert await ask(run.buses["actor_fwd-2"].call("next_rounds", "actor_fwd", 0, 0)) is not None
        await run.drains("actor_fwd-2")
        await run.goes("actor_fwd-2", left=True)  # at its deadline, with a round in its hands
        await run.goes("actor_fwd-1", left=True)
        assert {"actor_fwd-1"} == run.rings() & {"actor_fwd-1", "actor_fwd-2"}  # where rows lie
        await run.puts("rollout-0")
        await run.scores("actor_fwd-0")
        await run.scores("advantages-0")
        assert await run.trains() and run.rings() == {"rollout-0", "actor_fwd-0", "advantages-0", "actor-0"}
        assert run.coordinator.index.rounds.lanes["actor_fwd"].layouts.keys() == {"actor_fwd-0"}


async def test_a_trainer_that_is_to_start_again_ends_the_step_that_it_has_begun_and_gets_no_other_one() -> None:
    async with elastic(max_staleness=1) as run:
        await run.leased("rollout-0")
        await run.puts("rollout-0")
        for stream in FORWARDS:
            await run.scores(f"{stream}-0")
        actor = run.buses["actor-0"]
        await actor.join("actor", 1 << 20)
        assert await ask(actor.call("next_rounds", "actor", 0, 0, 0)) is not None
        await run.drains("actor-0")
        assert await run.trains()
        assert await ask(actor.call("next_rounds", "actor", 0, 0, 1)) == {"end": True}
        await run.drains("actor-0", stays=True)  # too late: one rank of it leaves
        assert await ask(actor.call("next_rounds", "actor", 0, 0, 1)) == {"end": True}
        await run.again("actor-0")
        await run.leased("rollout-0")
        await run.puts("rollout-0")
        for stream in FORWARDS:
            await run.scores(f"{stream}-0")
        assert await run.trains() and run.coordinator.index.version == 2


async def test_a_trainer_whose_process_scores_too_leaves_at_once_and_its_step_comes_again() -> None:
    async with elastic() as run:
        actor = run.buses["actor-0"]
        for stream in ("actor", "advantages"):
            await actor.join(stream, 1 << 20)
        await run.leased("rollout-0")
        await run.puts("rollout-0", 1)
        for stream in FORWARDS:
            await run.scores(f"{stream}-0")
        assert await ask(actor.call("next_rounds", "actor", 0, 0, 0)) is not None
        await run.drains("actor-0")
        assert await ask(actor.call("next_rounds", "actor", 0, 1, 0)) == {"end": True}
        await run.again("actor-0")
        await run.again("actor_fwd-0")
        await run.puts("rollout-0")
        for stream in FORWARDS:
            await run.scores(f"{stream}-0")
        assert await run.trains()
        assert run.coordinator.index.rounds.lanes["actor_fwd"].planned.keys() == {"actor_fwd-0.2"}  # of no dead life


async def test_a_coordinator_that_comes_back_knows_who_drains_and_who_left_meanwhile() -> None:
    async with elastic() as run:
        for name in ("rollout-1", "rollout-2"):
            await (await run.comes(name)).call("proved", "rollout.0", 0)
            await run.leased(name, 1)
            await run.drains(name)
        await run.stop()
        run.roster.groups.pop("rollout-1")
        run.roster.dead.append(["rollout-1", 1])
        await run.start()
        assert "rollout-1" not in run.coordinator.index.members and "rollout-1" not in run.rings()
        assert await run.leased("rollout-2") == ""
        await run.puts("rollout-2")
        assert await run.leased("rollout-2") == "end"
        assert await run.leased("rollout-0") == "grants" and len(run.granted["rollout-0"]) == P - 1


async def test_memory_of_a_ring_that_is_gone_is_let_go_by_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rondo.comm.bus.bus._KEPT", 4)
    async with elastic(num_steps=10) as run:
        await (await run.comes("rollout-1")).call("proved", "rollout.0", 0)
        for _ in range(9):
            for name in run.named("rollout"):
                await run.leased(name)
                await run.puts(name)
            for stream in FORWARDS:
                await run.scores(f"{stream}-0")
            assert await run.trains()
            if "rollout-1" in run.buses:
                assert "ring/rollout-1/0" in set(run.buses["actor-0"]._views)
                await run.drains("rollout-1")
                assert await run.leased("rollout-1") == "end"
                await run.goes("rollout-1", left=True)
        viewed = set(run.buses["actor-0"]._views)
        assert viewed >= {"ring/rollout-0/0", "ring/actor_fwd-0/0"} and "ring/rollout-1/0" not in viewed


async def test_nothing_is_lost_or_twice_whoever_comes_leaves_is_ended_or_dies_in_whatever_order() -> None:
    for seed in range(strength(quick=4, full=200)):
        async with elastic(max_staleness=1, max_infra_failures=99) as run:
            await act(run, random.Random(seed))
            found = run.found()
            assert (found.num_trained, found.num_lost, found.num_trained_twice) == (STEPS * P * N, 0, 0), seed
            assert run.rings() <= set(run.buses), seed  # of who has left nothing is there
            assert not run.coordinator._draining_members.keys() - run.buses.keys(), seed


async def act(run: Elastic, chance: random.Random) -> None:
    """Everybody works, and somebody comes or leaves at every turn, until the run is done."""
    names = {"rollout": 0, **dict.fromkeys(FORWARDS, 0)}
    draining = set[str]()
    for _ in range(10_000):
        if run.coordinator.index.done:
            break
        role = chance.choice(list(names))
        living = [name for name in run.named(role) if name not in draining]
        what = chance.choice(("comes", "drains", "dies", "ends", "stays", "restart", "trainer", *["works"] * 8))
        if what == "comes" and len(run.named(role)) < 4:
            names[role] += 1
            bus = await run.comes(f"{role}-{names[role]}")
            if role == "rollout":
                await bus.call("proved", "rollout.0", run.coordinator.index.version)
        elif what == "drains" and len(living) > 1:
            draining.add(name := chance.choice(living))
            await run.drains(name)
        elif what == "stays" and draining:
            draining.discard(name := chance.choice(sorted(draining)))
            await run.drains(name, stays=True)
        elif what == "ends" and draining:
            draining.discard(name := chance.choice(sorted(draining)))
            await run.goes(name, left=True)
        elif what == "dies":
            name = chance.choice(run.named(role))
            left = name in draining
            draining.discard(name)
            await run.goes(name, left=left)
            if not left:
                bus = await run.comes(name)
                if role == "rollout":
                    await bus.call("proved", "rollout.0", run.coordinator.index.version)
        elif what == "trainer":
            await (run.drains("actor-0") if chance.random() < 0.7 else run.again("actor-0"))
        elif what == "restart":
            await run.stop()
            await run.start()
        await work(run, chance, draining)
    for name in [name for name in run.buses if name in draining]:
        await run.goes(name, left=True)


async def work(run: Elastic, chance: random.Random, draining: set[str]) -> None:
    for name in run.named("rollout"):
        if await run.leased(name, chance.randint(1, 3)) == "end" and name in draining:
            draining.discard(name)
            await run.goes(name, left=True)
        else:
            await run.puts(name, chance.randint(0, 2))
    for stream in FORWARDS:
        for name in run.named(stream):
            if await run.scores(name, chance.randint(0, 2)) == "end" and name in draining:
                draining.discard(name)
                await run.goes(name, left=True)
    await run.trains()
    await asyncio.sleep(0)
