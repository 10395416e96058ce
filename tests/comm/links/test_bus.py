"""The bus with a replica on another node: its ring is mirrored here, and reservations, media and releases cross the link."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.comm.bus.audit import audit
from rondo.comm.bus.bus import Bus
from rondo.comm.bus.coordinator import Coordinator
from rondo.comm.bus.member import Member
from rondo.comm.links.mirror import Mirror
from rondo.comm.links.receiver import LinkReceiver
from rondo.comm.links.sender import LinkSender
from rondo.comm.ring.records import Column
from rondo.comm.ring.ring import RingTail, ring_bytes
from tests.comm.inprocess import InProcess, Store, Wire, payload, put, put_scores
from tests.comm.links.ends import PATIENCE_S, QUICK, TOKEN

NAME, RING_BYTES = "ring/rollout-0/0", ring_bytes(1 << 13)
STEPS, P, N, MEDIA_BYTES = 12, 2, 2, 704


class Linked:
    """One ring of the replica's node, and its link to here."""

    def __init__(self, name: str, far: Store, num_bytes: int, address: str) -> None:
        self.origin = far.segment(name, num_bytes)
        self.tail = RingTail(self.origin, name)
        self.sender = LinkSender(
            self.origin, name, address, token=TOKEN, node="near", attempt=0, config=QUICK, progress=self.released
        )
        self.task = asyncio.create_task(self.sender.run())

    def released(self, mirrored: int, released: int) -> None:
        """The origin's one releaser is its link."""
        self.tail.poll()
        self.tail.release(released)


class FarReplica:
    """A replica whose memory is its own node's; the coordinator and everybody else have the mirrors."""

    def __init__(self, run: InProcess, far: Store, address: str) -> None:
        wire: Any = Wire(run)
        memory: Any = far
        self.run, self.far, self.address = run, far, address
        self.bus = Bus(Member("rollout-0", 1, 0, 1, 0), wire, memory)
        self.links: dict[str, Linked] = {}

    def link(self, name: str) -> Linked:
        """The ring of a grant: the replica's own, or one that was made for the oldest step where that had no room."""
        if name not in self.links:
            self.links[name] = Linked(name, self.far, self.run.store.segment(name, 0).num_bytes, self.address)
        return self.links[name]

    async def work(self) -> None:
        """Every put is in room that was reserved at the mirror; it is free here once that release has crossed."""
        await self.bus.open()
        held: list[list[int]] = []  # what was put may not have crossed yet
        while "grants" in (answer := await self.bus.call("lease", 1, held)):
            for grant in answer["grants"]:
                link, promised_on = self.link(grant["ring"]), self.run.coordinator.index.space.rings[grant["ring"]].tail
                await link.sender.released_upto(promised_on, deadline_s=PATIENCE_S)
                held.append([grant["group"], grant["epoch"]])
                pixels = Column("pixel_values", "int32", [np.full(8, grant["group"], np.int32)])
                self.bus.put_media(grant["ring"], grant["group"], grant["epoch"], [pixels], 3)
                for sample in range(N):
                    put(self.bus, grant, [sample])
                link.sender.wake()

    async def close(self) -> None:
        for link in self.links.values():
            link.task.cancel()
        await asyncio.gather(*(link.task for link in self.links.values()), return_exceptions=True)
        self.bus.close()


async def forward(bus: Bus, stream: str) -> None:
    async for made in bus.stream(stream, tokens=1 << 20):
        if stream == "actor_fwd":
            for row in made.rows:
                assert row.media is not None
                np.testing.assert_array_equal(row.media["pixel_values"], np.full(8, row.group, np.int32))
            shared = {row.group: id(row.media) for row in made.rows}
            assert all(shared[row.group] == id(row.media) for row in made.rows), (
                "one mapping for all samples of a group"
            )
        put_scores(bus, stream, made)
        await bus.ack(made)


async def train(bus: Bus, receiver: LinkReceiver) -> None:
    for step in range(STEPS):
        spans = []
        async for made in bus.stream("actor", tokens=1 << 20, step=step):
            for row in made.rows:
                np.testing.assert_array_equal(row.array("tokens"), payload(row.group, row.sample))
            bus.check(made)
            spans += made.spans
        await bus.call("commit", 0, step + 1, 7, spans)
        receiver.wake(NAME)


async def prove(bus: Bus) -> None:
    for version in range(STEPS):
        await bus.call("await_version", version)
        await bus.call("proved", "rollout.0", version)


async def test_a_replica_on_another_node_trains_as_one_here_and_its_media_cross_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_back = 0
    room = Coordinator._room

    def counting(self: Coordinator, *args: Any, **how: Any) -> str | None:
        nonlocal held_back
        found = room(self, *args, **how)
        held_back += found is None
        return found

    monkeypatch.setattr(Coordinator, "_room", counting)
    near, far = Store(), Store()
    run = InProcess(
        tmp_path, near, ring_bytes=RING_BYTES, num_steps=STEPS, groups_per_step=P, samples_per_group=N, max_staleness=5,
        media_bytes=MEDIA_BYTES,
    )  # fmt: skip
    await run.start()
    fwd, advantages, actor = [await run.bus(name) for name in ("actor_fwd-0", "advantages-0", "actor-0")]
    await run.coordinator.member_started("rollout-0", 1, 1)
    await actor.call("commit", 0, 0, 7, [])
    receiver = LinkReceiver(
        "near", TOKEN, lambda ring, capacity: Mirror(near.segment(ring, 0), near.doorbell(ring), ring), QUICK
    )
    await run.coordinator.open_ring("rollout-0", 1, 0)
    await receiver.start()
    replica = FarReplica(run, far, receiver.address)
    own = replica.link(NAME)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(replica.work())
        tasks.create_task(prove(replica.bus))
        tasks.create_task(forward(fwd, "actor_fwd"))
        tasks.create_task(forward(advantages, "advantages"))
        tasks.create_task(train(actor, receiver))
    index = run.coordinator.index
    await own.sender.released_upto(index.space.rings[NAME].tail, deadline_s=PATIENCE_S)
    stats = [link.sender.stats() for link in replica.links.values()]

    found = audit(run.folder / "journal", N, P)
    assert (found.num_trained, found.num_lost, found.num_trained_twice, found.num_unexpected) == (
        STEPS * P * N,
        0,
        0,
        0,
    )
    assert held_back > 0, "younger steps waited for room on the other node"
    assert all(one.num_resumes == one.num_resent == 0 for one in stats)
    num_records, num_bytes = sum(one.num_records for one in stats), sum(one.num_bytes for one in stats)
    assert num_records == STEPS * P * (N + 1), "a record a sample, and one for the media of a group"
    assert index.media_bytes + index.row_bytes <= num_bytes <= sum(link.tail.head for link in replica.links.values())
    assert own.tail.tail == index.space.rings[NAME].tail > own.tail.capacity, "room came back"
    await replica.close()
    for bus in (fwd, advantages, actor):
        bus.close()
    await receiver.close()
    await run.stop()
    near.close()
    far.close()
