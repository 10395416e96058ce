"""Index, coordinator, rings and bus against a plain model: whatever is done in whatever order, the promises B1 to B6 hold.

A hypothesis state machine drives a real coordinator (with its journal, and rings of a few kB in real memory) by the calls that
roles make, and keeps dicts of what the promises say must be true; nothing in the model is read off the index. Bytes count: each
row that a round delivers must be what the first put that counts has put, and stay so until the round is acknowledged.
Samples have one to four parts, and others each time they are put.

Always the same examples. RONDO_MODEL_S=600 looks for new ones for ten minutes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rondo.comm.bus.audit import audit
from rondo.comm.bus.bus import Bus, Round
from rondo.comm.bus.group import Group
from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Event
from rondo.comm.bus.rounds import Rounds
from rondo.comm.ring.records import Column
from rondo.comm.ring.spans import rows_of
from rondo.runtime.errors import CorruptData, Refused
from tests.comm.driver import STREAMS
from tests.comm.inprocess import MEMBERS, RESPONSE, InProcess, Store, ask, payload, put, put_scores, row_bytes
from tests.strength import strength

BUDGET_S = float(os.environ.get("RONDO_MODEL_S", "0"))
P, N, STALENESS, STEPS = 2, 2, 1, 6
MINI_BATCHES, PASSES = 2, 2
MAX_DATA, MAX_INFRA = 1, 3
ROLLOUTS, FORWARDS = ("rollout-0", "rollout-1"), ("actor_fwd", "advantages")
MEDIA_BYTES = 704
PARTS = 4

Row = tuple[int, int, int]
"""Group, sample, part."""


def num_parts(nonce: int, sample: int) -> int:
    """Of a sample, as a put makes it."""
    return 1 + (5 * nonce + 3 * sample) // 2 % PARTS


class Lease:
    """A grant in the hands of a replica, and the room it still has."""

    def __init__(self, grant: dict[str, Any], member: str) -> None:
        self.grant, self.member = grant, member
        self.group, self.epoch = grant["group"], grant["epoch"]
        self.room = N - len(grant["have"])
        self.entries = self.room + (not grant["has_media"])  # records that the reservation is for
        self.begun = False  # media come before the samples


class BusMachine(RuleBasedStateMachine):
    audited = True
    trainers: tuple[str, ...] = ("actor",)
    first_step = 0
    """Of the actor."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory(prefix="rondo-")
        self.store = Store()
        trains = replace(STREAMS[2], mini_batches=MINI_BATCHES, passes=PASSES, whole_samples=True)
        train = [replace(trains, name=name, first_step=self.first_step * (name == "actor")) for name in self.trainers]
        self.members = (*MEMBERS[:-1], *(f"{name}-0" for name in self.trainers))
        self.run_ = InProcess(
            Path(self.folder.name), self.store, ring_bytes=1 << 14, num_steps=STEPS, groups_per_step=P, samples_per_group=N,
            row_bytes=row_bytes(PARTS),
            max_staleness=STALENESS, max_data_failures=MAX_DATA, max_infra_failures=MAX_INFRA, media_bytes=MEDIA_BYTES,
            streams=(*STREAMS[:2], *train),
        )  # fmt: skip
        self.buses: dict[str, Bus] = {}
        self.incarnations = dict.fromkeys(self.members, 0)
        self.tokens = dict.fromkeys(FORWARDS, 1 << 20)
        self.nonce = 0
        # The model.
        self.version = -1
        self.proved: dict[str, int] = {}
        self.leases: list[Lease] = []  # not abandoned, holder alive
        self.state: dict[int, str] = {}  # groups that were ever granted
        self.step_of: dict[int, int] = {}
        self.epoch: dict[int, int] = {}
        self.put: dict[
            int, dict[int, tuple[int, int]]
        ] = {}  # group -> sample -> (nonce, version): the first put that counts
        self.media: dict[int, int] = {}  # group -> nonce
        self.failures: Counter[tuple[int, str]] = Counter()
        self.positions: dict[int, int] = {}
        self.refused = 0
        self.prepared: dict[str, tuple[int, list[Row]]] = {}  # trainable role -> (checksum, rows) of the next version
        self.checksums: dict[str, int] = {}
        self.trained: Counter[tuple[str, Row]] = Counter()
        self.ages: Counter[int] = Counter()
        self.reading: list[tuple[str, Round, list[tuple[Any, np.ndarray]]]] = []
        self.rounds: dict[str, list[str]] = {}  # forward scope -> keys delivered and not acknowledged
        self.counted: dict[str, int] = {}
        self.scored: dict[str, set[Row]] = {stream: set() for stream in FORWARDS}
        self.put_for: set[str] = set()  # rounds whose columns were put and that are not acknowledged yet

    def teardown(self) -> None:
        self.reading.clear()
        for bus in self.buses.values():
            bus.close()
        self.wait(self.run_.stop())
        self.loop.close()
        self.store.close()
        try:
            if self.audited and self.version >= 0:
                self.journal_says_the_same()
        finally:
            self.folder.cleanup()

    def journal_says_the_same(self) -> None:
        """What the audit derives from the journal alone is what the index came to."""
        found = audit(
            Path(self.folder.name) / "journal", N, P, max_data_failures=MAX_DATA, max_infra_failures=MAX_INFRA
        )
        index = self.run_.coordinator.index
        assert (found.num_lost, found.num_trained_twice, found.num_unexpected) == (0, 0, 0)
        assert found.num_admitted == N * index.counts["admitted"]
        assert found.outcomes == {outcome: N * index.counts[outcome] for outcome in found.outcomes}
        assert found.num_leases_lost == sum(self.failures.values())
        assert found.staleness == index.staleness

    async def tick(self) -> None:
        self.run_.coordinator.tick()

    def wait(self, call: Any) -> Any:
        return self.loop.run_until_complete(call)

    def call(self, member: str, *args: Any) -> Any:
        return self.wait(self.buses[member].call(*args))

    def asked(self, member: str, *args: Any) -> Any:
        return self.wait(ask(self.buses[member].call(*args)))

    # ---- life ---------------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.wait(self.run_.start())
        for member in self.members:
            self.returns(member)
        for trainer in self.trainers:
            self.prepares(trainer, [])
        for member in ROLLOUTS:
            self.prove(member)

    def returns(self, member: str) -> None:
        self.incarnations[member] += 1
        self.buses[member] = self.wait(self.run_.bus(member, self.incarnations[member]))

    @rule(member=st.sampled_from((*MEMBERS, "critic-0")), back=st.booleans())
    def dies(self, member: str, back: bool) -> None:
        """What it put counts, its leases go elsewhere, its unread rounds come again; what it alone has prepared is void."""
        member = member if member in self.members else "actor-0"
        self.prepared.pop(member.split("-")[0], None)
        if member in self.buses:
            self.reading = [held for held in self.reading if held[0] != member]
            self.buses.pop(member).close()
            for lease in [lease for lease in self.leases if lease.member == member]:
                self.leases.remove(lease)
                if self.current(lease):
                    self.lost(lease.group, "infra")
            self.proved.pop(member, None)
            self.wait(self.run_.die(member, self.incarnations[member]))
        if back or member.split("-")[0] in self.trainers:
            self.returns(member)

    @precondition(lambda self: len(self.buses) < len(self.members))
    @rule()
    def all_return(self) -> None:
        for member in self.members:
            if member not in self.buses:
                self.returns(member)

    @rule()
    def coordinator_restarts(self) -> None:
        """The replay of its journal is the state that it had; so is a dump that was written and read."""
        for member in self.buses:
            self.call(member, "committed")  # every put is seen
        before = self.run_.coordinator.index.dump()
        rules = self.run_.config.rules
        assert Index.load(rules, orjson.loads(orjson.dumps(before))).dump() == before
        self.wait(self.run_.stop())
        self.wait(self.run_.start())
        assert self.run_.coordinator.index.dump() == before

    @precondition(lambda self: self.version >= 0)
    @rule()
    def checkpoint(self) -> None:
        self.call("actor-0", "checkpoint", self.version)

    # ---- producing ----------------------------------------------------------------------------------------------------

    def current(self, lease: Lease) -> bool:
        return self.state[lease.group] == "running" and self.epoch[lease.group] == lease.epoch

    def lost(self, group: int, kind: str) -> None:
        self.failures[group, kind] += 1
        limit = MAX_DATA if kind == "data" else MAX_INFRA
        if self.failures[group, kind] > limit:
            self.state[group] = "quarantined"
        else:
            self.state[group] = "waiting"
            self.epoch[group] += 1

    @rule(member=st.sampled_from(ROLLOUTS))
    def prove(self, member: str) -> None:
        if member in self.buses:
            self.call(member, "proved", "rollout.0", self.version)
            self.proved[member] = self.version

    @rule(member=st.sampled_from(ROLLOUTS), most=st.integers(1, 3), forget=st.integers(0, 9))
    def lease(self, member: str, most: int, forget: int) -> None:
        if member not in self.buses:
            return
        held = [[lease.group, lease.epoch] for lease in self.leases if lease.member == member and self.current(lease)]
        answer = self.asked(member, "lease", most, held if forget else [])
        if answer is None:
            # B5: the oldest step is never starved by room; then all its groups are in somebody's hands, or this replica has its
            # share of the open steps.
            open_steps = min(self.proved.get(member, -9) + STALENESS + 1, STEPS) - self.version
            if open_steps > 0 and len(held) < -(-open_steps * P // len(self.proved)):
                oldest = [g for g, step in self.step_of.items() if step == self.version and self.state[g] != "surplus"]
                assert not any(self.state[g] == "waiting" for g in oldest)
            return
        if "end" in answer:
            assert self.version == STEPS
            return
        again = 0
        for grant in answer["grants"]:
            group, epoch = grant["group"], grant["epoch"]
            known = [lease for lease in self.leases if (lease.group, lease.epoch) == (group, epoch)]
            if known:  # the same answer for whoever did not hear it
                assert not forget and known[0].member == member
                again += 1
                continue
            assert self.version <= grant["step"] <= self.proved[member] + STALENESS, "staleness is bounded by the lease"
            assert self.state.get(group, "waiting") == "waiting" and epoch == self.epoch.get(group, 0)
            assert self.step_of.setdefault(group, grant["step"]) == grant["step"]
            assert self.positions.setdefault(group, grant["position"]) == grant["position"]
            assert [sample for sample, *_ in grant["have"]] == sorted(self.put.get(group, {}))
            assert grant["has_media"] == (group in self.media)
            self.state[group], self.epoch[group] = "running", epoch
            self.put.setdefault(group, {})
            self.leases.append(Lease(grant, member))
        assert len(answer["grants"]) - again <= most

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def put_some(self, data: st.DataObject) -> None:
        """Samples under a reservation: never refused room, counted once, refused when late or for the second time."""
        lease = data.draw(st.sampled_from(list(self.leases)), label="lease")
        if not lease.room:
            return
        samples = data.draw(
            st.lists(st.integers(0, N - 1), min_size=1, max_size=lease.room, unique=True), label="samples"
        )
        self.put_now(lease, sorted(samples))

    def put_now(self, lease: Lease, samples: list[int]) -> None:
        self.nonce += 1
        version = min(lease.grant["step"], self.proved.get(lease.member, 0))
        parts = [num_parts(self.nonce, sample) for sample in samples]
        put(self.buses[lease.member], lease.grant, samples, self.nonce, version, parts)
        lease.room -= len(samples)
        lease.entries -= len(samples)
        lease.begun = True
        taken = 0
        if self.current(lease):
            for sample, rows in zip(samples, parts, strict=True):
                if sample not in self.put[lease.group]:
                    self.put[lease.group][sample] = self.nonce, version
                    taken += rows
            if len(self.put[lease.group]) == N:
                self.state[lease.group] = "ready"
        self.refused += sum(parts) - taken
        self.call(lease.member, "committed")  # the coordinator has seen it
        if not lease.entries and self.current(lease):  # samples put twice took the room of the others
            self.leases.remove(lease)
            self.lost(lease.group, "data")
            return
        if self.state[lease.group] == "ready" and lease.epoch == self.epoch[lease.group]:
            self.leases.remove(lease)

    @precondition(lambda self: any(lease.room == N and not lease.begun for lease in self.leases))
    @rule()
    def put_media(self) -> None:
        lease = next(lease for lease in self.leases if lease.room == N and not lease.begun)
        lease.begun = True
        if lease.grant["has_media"]:
            return
        self.nonce += 1
        lease.entries -= 1
        pixels = Column("pixel_values", "int32", [np.full(8, self.nonce, np.int32)])
        self.buses[lease.member].put_media(lease.grant["ring"], lease.group, lease.epoch, [pixels], 3)
        if self.current(lease) and lease.group not in self.media:
            self.media[lease.group] = self.nonce
        else:
            self.refused += 1
        self.call(lease.member, "committed")

    @precondition(lambda self: self.leases)
    @rule(all_of_them=st.booleans(), last=st.booleans())
    def put_all(self, all_of_them: bool, last: bool) -> None:
        for lease in list(self.leases) if all_of_them else self.leases[-1:] if last else self.leases[:1]:
            missing = [s for s in range(N) if s not in self.put[lease.group]]
            if self.current(lease) and len(missing) <= lease.room:
                self.put_now(lease, missing)

    @precondition(lambda self: any(self.current(lease) and lease.room for lease in self.leases))
    @rule()
    def put_twice(self) -> None:
        """One sample over and over, until the room of the others is used up: the lease is lost by that."""
        lease = min((one for one in self.leases if self.current(one) and one.room), key=lambda one: one.entries)
        while lease in self.leases and self.current(lease) and lease.room:
            self.put_now(lease, [0])

    @rule(most=st.integers(1, 3), scored=st.booleans(), acked=st.booleans())
    def everyone_works(self, most: int, scored: bool, acked: bool) -> None:
        """What a run mostly does: brings the machine to the states in which the other rules matter."""
        for member in ROLLOUTS:
            self.prove(member)
            self.lease(member, most, 1)
        if scored:
            self.put_all(all_of_them=True, last=True)
            for stream in FORWARDS:
                self.forward(stream, 1 << 20, acked)
                self.scores_and_goes_on_reading(stream)

    @precondition(lambda self: any(self.current(lease) for lease in self.leases))
    @rule()
    def lease_is_lost_and_granted_again(self) -> None:
        self.lease_is_lost()
        for member in ROLLOUTS:
            self.lease(member, 3, 1)

    @precondition(lambda self: any(not self.current(lease) and lease.room for lease in self.leases))
    @rule()
    def put_late(self) -> None:
        lease = next(lease for lease in self.leases if not self.current(lease) and lease.room)
        self.put_now(lease, list(range(N))[: lease.room])

    @precondition(lambda self: any(self.current(lease) for lease in self.leases))
    @rule()
    def lease_is_lost(self) -> None:
        """No progress: the group goes on under the next epoch, and the memory stays with the old holder."""
        lease = next(lease for lease in self.leases if self.current(lease))
        others = [held for held in self.leases if held is not lease]
        self.run_.clock += 60.0
        for member in ROLLOUTS:
            if member in self.buses:
                mine = [[held.group, held.epoch] for held in others if held.member == member]
                lost = self.call(member, "renew", mine)["lost"]
                assert sorted(lost) == sorted(
                    [h.group, h.epoch] for h in others if h.member == member and not self.current(h)
                )
        self.run_.clock += 60.0
        self.wait(self.tick())
        for member in ROLLOUTS:
            if member in self.buses:
                self.call(member, "renew", [[held.group, held.epoch] for held in others if held.member == member])
        self.lost(lease.group, "infra")

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.leases)), label="lease")
        if not self.current(lease):
            self.leases.remove(lease)
            self.call(lease.member, "abandon", lease.group, lease.epoch)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), outcome=st.sampled_from(("filtered", "failed", "error")))
    def settle(self, data: st.DataObject, outcome: str) -> None:
        lease = data.draw(st.sampled_from(list(self.leases)), label="lease")
        current = self.current(lease)
        self.call(lease.member, "settle", lease.group, lease.epoch, outcome, "planted")
        if not current:
            return  # too late: nothing changes
        if outcome == "error":
            self.leases.remove(lease)
            self.lost(lease.group, "data")
        else:
            self.state[lease.group] = outcome
            if outcome == "filtered":
                self.leases.remove(lease)

    # ---- consuming ----------------------------------------------------------------------------------------------------

    @rule(stream=st.sampled_from(FORWARDS), tokens=st.sampled_from((14, 1 << 20)), ack=st.booleans())
    def forward(self, stream: str, tokens: int, ack: bool) -> None:
        member = f"{stream}-0"
        if member not in self.buses or any(name == member for name, *_ in self.reading):
            return
        bus = self.buses[member]
        index = getattr(bus, "at", 0)
        self.call(member, "join", stream, 1, tokens)
        answer = self.asked(member, "next_rounds", stream, 0, index, None)
        if answer is None:  # nothing is left that could be scored
            ready = {row for g, state in self.state.items() if state == "ready" for row in self.rows_of(g)}
            assert ready <= self.scored[stream], "a group that is ready is scored in the end, whoever died meanwhile"
            return
        if "end" in answer:
            return
        made = bus._rounds(stream, answer["rounds"])[0]
        held = self.compare(stream, made)
        bus.at = index + 1  # type: ignore[attr-defined]
        self.reading.append((member, made, held))
        if ack:
            self.acknowledge(member)

    @rule(stream=st.sampled_from(FORWARDS))
    def acknowledge_later(self, stream: str) -> None:
        self.acknowledge(f"{stream}-0")

    def acknowledge(self, member: str) -> None:
        for held in [held for held in self.reading if held[0] == member]:
            self.put_columns(member, held)
            self.reading.remove(held)
            self.wait(self.buses[member].ack(held[1]))
            self.put_for.discard(held[1].key)

    @rule(stream=st.sampled_from(FORWARDS))
    def scores_and_goes_on_reading(self, stream: str) -> None:
        """Columns are put and the round is not acknowledged: its rows stay, even when their step is committed."""
        member = f"{stream}-0"
        for held in [held for held in self.reading if held[0] == member]:
            self.put_columns(member, held)
            self.call(member, "committed")

    def rows_of(self, group: int) -> list[Row]:
        """Of a group that is ready."""
        put = self.put[group].items()
        return [(group, sample, part) for sample, (nonce, _) in put for part in range(num_parts(nonce, sample))]

    def put_columns(self, member: str, held: tuple[str, Round, list[tuple[Any, np.ndarray]]]) -> None:
        self.check_bytes(held[2])
        made, stream = held[1], member.split("-")[0]
        if made.key not in self.put_for:
            put_scores(self.buses[member], stream, made)
            self.put_for.add(made.key)
            rows = {(row.group, row.sample, row.part) for row in made.rows}
            # Scored again after a death, or too late: the first columns count.
            self.refused += sum(row in self.scored[stream] or self.state[row[0]] != "ready" for row in rows)
            self.scored[stream] |= rows

    def compare(self, stream: str, made: Round) -> list[tuple[Any, np.ndarray]]:
        """Every row of a round holds the bytes of the first put that counts; (view, expected) of each."""
        held = []
        for row in made.rows:
            assert self.state[row.group] == "ready" and self.step_of[row.group] == row.step
            nonce, _ = self.put[row.group][row.sample]
            if "tokens" in row.columns:
                held.append((row.array("tokens"), payload(row.group, row.sample, nonce, row.part)))
            if stream in self.trainers:
                score = np.full(RESPONSE, 1000 * row.group + row.sample + row.part / 8, np.float32)
                held += [(row.array("log_probs"), score), (row.array("advantages"), score)]
            if stream in (*self.trainers, "actor_fwd"):
                assert (row.media is not None) == (row.group in self.media)
                if row.media is not None:
                    held.append((row.media["pixel_values"], np.full(8, self.media[row.group], np.int32)))
        self.check_bytes(held)
        return held

    @staticmethod
    def check_bytes(held: list[tuple[Any, np.ndarray]]) -> None:
        for view, expected in held:
            np.testing.assert_array_equal(view, expected)

    @precondition(lambda self: 0 <= self.version < STEPS)
    @rule(tokens=st.sampled_from((14, 28, 1 << 20)), commit=st.booleans(), trainer=st.sampled_from(("actor", "critic")))
    def train(self, tokens: int, commit: bool, trainer: str = "actor") -> None:
        """All rounds of the step that there are; with the last of them the role is prepared, and the step commits once all are,
        with exactly its rows for each."""
        trainer = trainer if trainer in self.trainers else "actor"
        member, step, index, last = f"{trainer}-0", self.version, 0, False
        if trainer == "actor" and step < self.first_step:
            self.rests(step)
            return
        updates: list[list[Row]] = [[] for _ in range(MINI_BATCHES * PASSES)]
        closed: list[int] = []
        self.call(member, "join", trainer, 1, tokens)
        held = []
        while not last:
            answer = self.asked(member, "next_rounds", trainer, 0, index, step)
            if answer is None:
                break
            made = self.buses[member]._rounds(trainer, answer["rounds"])[0]
            held += self.compare(trainer, made)
            assert made.update == len(closed), "updates come one behind the other"
            rows = [(group, sample, part) for group, sample, part in rows_of(made.spans)]
            whole = {row for group in {row[0] for row in rows} for row in self.rows_of(group)}
            assert set(rows) == {row for row in whole if row[:2] in {each[:2] for each in rows}}, "samples stay whole"
            updates[made.update] += rows
            closed += [made.update] * made.closes
            last, index = made.last, index + 1
        rows = [row for update in updates[:MINI_BATCHES] for row in update]
        for update in closed:
            assert sorted(updates[update]) == sorted(updates[update % MINI_BATCHES]), "every pass has the same rows"
        assert all(len(set(update)) == len(update) for update in updates)
        assert len(set(rows)) == len(rows)
        assert all(self.step_of[group] == step for group, *_ in rows)
        spans = [[group, part, sample, 1] for group, sample, part in rows]
        if not last:
            with pytest.raises(Refused, match="every row of its step once"):
                self.call(member, "commit", 0, step + 1, 7, spans, trainer)
            return
        assert len({group for group, *_ in rows}) == P, "a step is P whole groups"
        assert sorted(rows) == sorted(row for group in {group for group, *_ in rows} for row in self.rows_of(group))
        assert closed == list(range(MINI_BATCHES * PASSES))
        self.check_bytes(held)
        if not commit:
            return
        held.clear()
        self.prepares(trainer, rows)

    def rests(self, step: int) -> None:
        """A step that the critic trains alone: nothing comes for the actor, which commits the weights that it has."""
        assert self.call("actor-0", "next_rounds", "actor", 0, 0, step) == {"end": True}
        if "actor" not in self.prepared:
            with pytest.raises(Refused, match="must leave actor as it is"):
                self.call("actor-0", "commit", 0, step + 1, self.checksums["actor"] + 1, [], "actor")
        self.prepares("actor", [])

    def prepares(self, trainer: str, rows: list[Row]) -> None:
        """The last role's report commits, and none before."""
        version, spans = self.version + 1, [[group, part, sample, 1] for group, sample, part in rows]
        checksum = version + (1000 if trainer == "actor" else 2000) if rows or not version else self.checksums[trainer]
        self.prepared.setdefault(trainer, (checksum, rows))
        whole = set(self.prepared) == set(self.trainers)
        for _ in range(2):  # whoever did not hear the answer asks again
            answer = self.call(f"{trainer}-0", "commit", 0, version, checksum, spans, trainer)
            assert answer["version"] == (version if whole else version - 1 if version else None)
        if not whole:
            return
        self.checksums = {role: reported for role, (reported, _) in self.prepared.items()}
        assert self.call(f"{trainer}-0", "committed")["checksums"] == self.checksums
        self.trained.update((role, row) for role, (_, trained) in self.prepared.items() for row in trained)
        step, every = self.version, {row for _, trained in self.prepared.values() for row in trained}
        self.version = version
        self.prepared.clear()
        for group, sample in {row[:2] for row in every}:
            self.state[group] = "trained"
            self.ages[step - self.put[group][sample][1]] += 1
        for group, at in self.step_of.items():
            if at == step and self.state[group] in ("waiting", "running", "ready"):
                self.state[group] = "surplus"

    # ---- promises -----------------------------------------------------------------------------------------------------

    @invariant()
    def accounting(self) -> None:
        if self.version < 0:
            return
        index, status = self.run_.coordinator.index, self.run_.coordinator.status()
        assert index.imbalance() == ""
        counts, mine = status["groups"], Counter(self.state.values())
        for state in ("running", "ready", "trained", "filtered", "failed", "quarantined"):
            assert counts[state] == mine[state], (state, counts, mine)
        settled = sum(n for state, n in counts.items() if state not in ("admitted", "waiting"))
        assert counts["admitted"] == settled + counts["waiting"]
        assert counts["admitted"] >= len(self.state)
        assert all(counts[state] >= self.counted.get(state, 0) for state in ("admitted", "trained", "filtered"))
        self.counted = counts
        assert status["refused_rows"] == self.refused
        assert status["version"] == self.version
        assert status["staleness"] == {str(age): n for age, n in self.ages.items()}

    @invariant()
    def nothing_trains_twice_or_too_old(self) -> None:
        assert all(times == 1 for times in self.trained.values())
        assert all(0 <= age <= STALENESS for age in self.ages)

    @invariant()
    def nobody_s_rows_are_overwritten(self) -> None:
        for member, made, held in self.reading:
            self.check_bytes(held)
            self.buses[member].check(made)

    @invariant()
    def memory_is_bounded(self) -> None:
        if self.version < 0:
            return
        status = self.run_.coordinator.status()
        for ring in status["rings"].values():
            assert 0 <= ring["used"] <= ring["bytes"]
        live = sum(state in ("waiting", "running", "ready") for state in self.state.values())
        pinned = sum(len(made.rows) for _, made, _ in self.reading)
        steps = STALENESS + 1
        assert live <= P * steps
        assert len(self.run_.coordinator.index.groups) <= P * steps + pinned, "settled groups are forgotten"
        if not live and not self.reading and not self.leases:
            assert {ring["used"] for ring in status["rings"].values()} <= {0}
            assert not any(name.startswith("overflow/") for name in status["rings"])


class TwoTrainers(BusMachine):
    """The critic trains every step, the actor all but the first."""

    trainers = ("actor", "critic")
    first_step = 1


def check(
    max_examples: int, *, derandomize: bool, machine: type[BusMachine] = BusMachine, phases: tuple[Phase, ...] = tuple(Phase)
) -> None:  # fmt: skip
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples, stateful_step_count=60, derandomize=derandomize, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), phases=phases,
        ),
    )  # fmt: skip


def test_the_bus_keeps_its_promises_whatever_is_done_in_whatever_order() -> None:
    for machine in (BusMachine, TwoTrainers):
        check(strength(quick=40, full=200), derandomize=True, machine=machine)
    until = time.monotonic() + BUDGET_S
    while time.monotonic() < until:
        for machine in (BusMachine, TwoTrainers):
            check(50, derandomize=False, machine=machine)


def _takes_late_puts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "_held", lambda self, epoch: self.state == "running")


def _late(machine: BusMachine) -> None:
    machine.lease("rollout-0", 1, 1)
    machine.lease_is_lost_and_granted_again()
    machine.put_late()


def _frees_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounds, "pinned", lambda self, group: False)


def _read_on(machine: BusMachine) -> None:
    machine.everyone_works(3, scored=True, acked=False)
    for trainer in machine.trainers:
        machine.train(1 << 20, commit=True, trainer=trainer)
    machine.nobody_s_rows_are_overwritten()


def _forgets_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounds, "forget", lambda self, member: [])


def _dead_reader(machine: BusMachine) -> None:
    machine.everyone_works(3, scored=False, acked=False)
    machine.put_all(all_of_them=True, last=True)
    machine.forward("actor_fwd", 1 << 20, ack=False)
    machine.dies("actor_fwd-0", back=True)
    machine.forward("actor_fwd", 1 << 20, ack=True)


def _keeps_what_the_dead_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Index._on_dead

    def kept(self: Index, event: Event) -> None:
        prepared = self.prepared
        dead(self, event)
        self.prepared = prepared

    monkeypatch.setattr(Index, "_on_dead", kept)


def _prepared_alone(machine: BusMachine) -> None:
    machine.everyone_works(3, scored=True, acked=True)
    machine.train(1 << 20, commit=True, trainer="actor")
    machine.dies("actor-0", back=True)
    machine.train(1 << 20, commit=True, trainer="critic")


@pytest.mark.parametrize(
    ("plant", "act", "told"),
    [
        (_takes_late_puts, _late, "running|refused"),
        (_frees_what_is_read, _read_on, "must not be released|must stay until it is acknowledged"),
        (_forgets_the_dead, _dead_reader, "ready is scored in the end"),
        (_keeps_what_the_dead_prepared, _prepared_alone, "assert 1 == 0"),
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], act: Callable[[BusMachine], None], told: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By the acts that meet it; the same acts pass without the fault."""
    _run(act)
    plant(monkeypatch)
    with pytest.raises((AssertionError, CorruptData), match=told):
        _run(act)


def _run(act: Callable[[BusMachine], None]) -> None:
    machine = TwoTrainers()
    machine.audited = False  # a planted fault shows where it is met
    try:
        machine.begin()
        act(machine)
        machine.accounting()
    finally:
        machine.teardown()
