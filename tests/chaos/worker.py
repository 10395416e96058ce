"""A process of the chaos run: `python -m`-less entry `main(folder, name, incarnation, seed)`, killed at any moment.

Coordinator, rollout replicas, forward roles and two trainers, on the real bus. Producers append what they attempt and what was
acknowledged to files by one `write(2)` a line, so that a killed process has told all that it knew.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import rondo.comm.bus.journal
from rondo.comm.bus.bus import Bus
from rondo.comm.bus.coordinator import Coordinator
from rondo.comm.bus.curriculum import Rests
from rondo.comm.bus.journal import Journal
from rondo.comm.bus.member import Member
from rondo.comm.bus.serve import open_index
from rondo.comm.bus.transitions import CoordinatorConfig
from rondo.comm.ring.ring import ring_bytes
from rondo.comm.ring.spans import rows_of
from rondo.runtime.actors.actor import serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.processes.guard import die_with_parent
from tests.comm import inprocess
from tests.comm.driver import STREAMS, rules
from tests.comm.inprocess import payload, put, put_scores, row_bytes

TOKEN = "t0ken"
P, N = 4, 2
TRAIN = ("actor", "critic")
MEMBERS = (*inprocess.MEMBERS, "critic-0")
NUM_ROWS, SHORT = 20, 5
"""Rows of the data, and of how many a filter leaves one out; every sample passes, so that the others rest."""
RESTS = Rests(steps=3, solved=1.0, hopeless=None, solved_from=0.0)


def config() -> CoordinatorConfig:
    return CoordinatorConfig(
        rules=rules(
            row_bytes=row_bytes(), num_steps=10**6, groups_per_step=P, samples_per_group=N, max_infra_failures=10**6,
            looks=True, rests=RESTS, streams=(*STREAMS[:2], *(replace(STREAMS[2], name=role) for role in TRAIN)),
        ),
        publisher="actor-0", rollout_ring_bytes=ring_bytes(1 << 13), column_ring_bytes=ring_bytes(1 << 14),
        rollout_groups=("rollout-0", "rollout-1"), ranks=dict.fromkeys(MEMBERS, 1), lease_deadline_s=2.0,
        evaluate_start=False, evaluate_end=False,
    )  # fmt: skip


async def coordinator(folder: Path) -> None:
    rondo.comm.bus.journal.ROTATE_BYTES = 1 << 40  # the checker reads every event
    with Journal(folder / "journal") as journal:
        index, ledger = open_index(config(), journal, folder, 0)
        segments = SegmentClient(folder / "handover.sock", TOKEN)
        supervisor = ActorRef(f"unix:{folder}/supervisor.sock", token=TOKEN, peer="supervisor")
        actor = Coordinator(config(), journal, index, ledger, segments, supervisor)
        await actor.start()
        server = await serve(actor, f"unix:{folder}/coordinator.sock", token=TOKEN, name="coordinator")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(actor.ticking(0.2))
            tasks.create_task(actor.reporting())
        await server.close()


async def rollout(bus: Bus, folder: Path, chance: random.Random) -> None:
    log = os.open(folder / "puts", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    async def prove() -> None:
        version = -1
        while True:
            version = (await bus.call("await_version", version + 1, deadline_s=3600))["version"]
            await bus.call("proved", "rollout.0", version)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(prove())
        while True:
            answer = await bus.call("lease", chance.randint(1, 4), [], deadline_s=3600)
            if "look" in answer:
                await look(bus, **answer["look"])
            for grant in answer.get("grants", []):
                missing = sorted(set(range(N)) - {sample for sample, *_ in grant["have"]})
                parts = [missing] if chance.random() < 0.5 else [[sample] for sample in missing]
                for samples in parts:
                    named = [[grant["group"], sample] for sample in samples]
                    os.write(log, json.dumps(["attempt", named]).encode() + b"\n")
                    put(bus, grant, samples, version=grant["step"])
                    os.write(log, json.dumps(["ack", named]).encode() + b"\n")
                lost = (await bus.call("renew", [[grant["group"], grant["epoch"]]]))["lost"]
                if lost:
                    await bus.call("abandon", grant["group"], grant["epoch"])


async def look(bus: Bus, position: int, numbers: dict[str, int]) -> None:
    number = numbers.get("", position)
    rows = [[at % NUM_ROWS, "short" * (not at % SHORT)] for at in range(number, number + 5)]
    await bus.call(
        "looked_at", position, [["", at] for at in range(position, position + 9)], "", number, rows, NUM_ROWS
    )


async def forward(bus: Bus, stream: str, chance: random.Random) -> None:
    async for made in bus.stream(stream, tokens=1 << 20):
        if chance.random() < 0.1:
            await asyncio.sleep(0.02)  # a slow reader
        put_scores(bus, stream, made)
        await bus.ack(made)


class Snapshot:
    """Weights of two versions that outlive their trainer; the newer one may be of a version that is never committed."""

    def __init__(self, folder: Path, role: str) -> None:
        self._slots = [folder / f"{role}.{slot}" for slot in (0, 1)]

    def write(self, version: int, weights: int) -> None:
        aside = self._slots[version % 2].with_suffix(".aside")
        aside.write_text(json.dumps([version, weights]))
        aside.rename(self._slots[version % 2])

    def read(self, version: int) -> int:
        held, weights = json.loads(self._slots[version % 2].read_text())
        assert held == version, f"version {version} was committed, and the slot has {held}"
        return int(weights)


async def trainer(bus: Bus, role: str, folder: Path, chance: random.Random) -> None:
    """Its weights are a checksum of all rows that it has trained, so equal versions of two roles have equal ones."""
    snapshot = Snapshot(folder, role)

    async def prepare(version: int, weights: int, spans: list[Any]) -> None:
        snapshot.write(version, weights)
        await bus.call("commit", 0, version, weights, spans, role)
        await bus.call("await_version", version, deadline_s=3600)

    if (await bus.call("committed"))["version"] is None:
        await prepare(0, 7, [])
    while True:
        found = await bus.call("committed")
        step, spans = found["version"], []
        weights = snapshot.read(step)
        assert found["checksums"][role] == weights
        async for made in bus.stream(role, tokens=1 << 20, step=step):
            if chance.random() < 0.1:
                await asyncio.sleep(0.02)
            for row in made.rows:
                np.testing.assert_array_equal(row.array("tokens"), payload(row.group, row.sample))
                assert row.array("log_probs")[0] == row.array("advantages")[0] == 1000 * row.group + row.sample
            bus.check(made)
            spans += made.spans
        await prepare(step + 1, zlib.crc32(json.dumps(sorted(rows_of(spans))).encode(), weights), spans)


async def member(folder: Path, name: str, incarnation: int, seed: int) -> None:
    chance = random.Random(f"{seed}/{name}/{incarnation}")
    ref = ActorRef(f"unix:{folder}/coordinator.sock", token=TOKEN, peer="coordinator")
    bus = Bus(Member(name, incarnation, 0, 1, 0), ref, SegmentClient(folder / "handover.sock", TOKEN))
    await ref.call("member_started", name, incarnation, 1, retry=True)
    await bus.open()
    role = name.rsplit("-", 1)[0]
    if role == "rollout":
        await rollout(bus, folder, chance)
    elif role in TRAIN:
        await trainer(bus, role, folder, chance)
    else:
        await forward(bus, role, chance)


def main(folder: str, name: str, incarnation: int, seed: int) -> None:
    die_with_parent()
    path = Path(folder)
    asyncio.run(coordinator(path) if name == "coordinator" else member(path, name, incarnation, seed))
