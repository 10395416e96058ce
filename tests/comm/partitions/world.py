"""A real coordinator of partitions: behind a real socket with real memory (`served`), or in one process, joined by direct calls
(`InProcess`). The supervisor is a roster."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from rondo.comm.bus.member import Member
from rondo.comm.partitions.client import Partitions
from rondo.comm.partitions.coordinator import PartitionCoordinator
from rondo.comm.partitions.fold import Fold
from rondo.comm.partitions.serve import open_journal
from rondo.runtime.actors.actor import Server, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.actors.transport import pack, unpack
from rondo.runtime.memory.segments import SegmentClient, SegmentServer
from tests.comm import inprocess
from tests.comm import served as bus

TOKEN = bus.TOKEN


class Served:
    """The pieces of a bus; `restart` is a coordinator's death and return, `bus` a member's client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.roster = bus.Roster()
        self.segments = SegmentServer(folder / "handover.sock", TOKEN, lambda _: None)
        self.clients: list[SegmentClient] = []
        self.refs: list[ActorRef] = []
        self.buses: list[Partitions] = []
        self.coordinator: PartitionCoordinator
        self._server: Server

    @property
    def fold(self) -> Fold:
        return self.coordinator.fold

    def client(self) -> SegmentClient:
        self.clients.append(SegmentClient(self.folder / "handover.sock", TOKEN))
        return self.clients[-1]

    def ref(self, name: str = "partitions") -> ActorRef:
        self.refs.append(ActorRef(f"unix:{self.folder}/{name}.sock", token=TOKEN, peer=name))
        return self.refs[-1]

    async def start(self, attempt: int = 0) -> None:
        self._journal = open_journal(self.folder / "journals", attempt)
        self.coordinator = PartitionCoordinator(self._journal, self.client(), self.ref("supervisor"))
        await self.coordinator.start()
        self._server = await serve(
            self.coordinator, f"unix:{self.folder}/partitions.sock", token=TOKEN, name="partitions"
        )

    async def stop(self) -> None:
        await self._server.close()
        self.coordinator.close()
        self._journal.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def bus(self, member: str, incarnation: int = 1, *, rank: int = 0, num_ranks: int = 1) -> Partitions:
        """A member's client; its start is told the way the supervisor does."""
        self.roster.alive[member] = incarnation
        await self.ref().call("member_started", member, incarnation, num_ranks)
        self.buses.append(Partitions(Member(member, incarnation, rank, num_ranks, 0), self.ref(), self.client()))
        return self.buses[-1]

    async def die(self, member: str, incarnation: int = 1) -> None:
        del self.roster.alive[member]
        self.roster.dead.append([member, incarnation])
        await self.ref().call("member_dead", member, incarnation)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(prefix="rondo-") as name:
        run = Served(Path(name))
        run.segments.start()
        supervisor = await serve(run.roster, f"unix:{name}/supervisor.sock", token=TOKEN, name="supervisor")
        try:
            await run.start()
            yield run
            await run.stop()
        finally:
            for each in (*run.buses, *run.refs):
                each.close()
            await supervisor.close()
            for client in run.clients:
                client.close()
            run.segments.close()


class InProcess:
    """Calls go through their form on the wire, and nothing else is between a member and the coordinator."""

    peer = "partitions"

    def __init__(self, folder: Path, store: inprocess.Store) -> None:
        self.folder, self.store, self.roster = folder, store, inprocess.Roster()
        self.coordinator: PartitionCoordinator

    @property
    def fold(self) -> Fold:
        return self.coordinator.fold

    async def call(self, method: str, *args: Any, deadline_s: float = 60.0, retry: bool = False) -> Any:
        answer = await getattr(self.coordinator, method)(*orjson.loads(orjson.dumps(args)))
        header, buffers = pack(answer)
        return unpack(header, [memoryview(bytes(buffer)) for buffer in buffers])

    async def start(self) -> None:
        roster: Any = self.roster
        self.journal = open_journal(self.folder / "journals", 0)
        self.coordinator = PartitionCoordinator(self.journal, self.store, roster)
        await self.coordinator.start()

    async def stop(self) -> None:
        self.coordinator.close()
        self.journal.close()

    async def bus(self, member: str, incarnation: int = 1) -> Partitions:
        self.roster.groups[member] = {"incarnation": incarnation, "alive": True}
        await self.coordinator.member_started(member, incarnation, 1)
        wire: Any = self
        return Partitions(Member(member, incarnation, 0, 1, 0), wire, self.store)

    async def die(self, member: str, incarnation: int) -> None:
        self.roster.groups.pop(member)
        self.roster.dead.append([member, incarnation])
        await self.coordinator.member_dead(member, incarnation)
