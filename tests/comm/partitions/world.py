"""A real coordinator of partitions: behind a real socket with real memory (`served`), or in one process, joined by direct calls
(`InProcess`). The supervisor is a roster."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import orjson

from rondo.comm.bus.member import Member
from rondo.comm.partitions.client import Partitions
from rondo.comm.partitions.coordinator import PartitionCoordinator
from rondo.comm.partitions.fold import Fold
from rondo.comm.partitions.serve import open_journal
from rondo.runtime.actors.transport import pack, unpack
from tests.comm import inprocess
from tests.comm import served as bus

TOKEN = bus.TOKEN


class Served(bus.Pieces):
    """Partitions; `bus` is a member's client."""

    name = "partitions"
    buses: list[Partitions]
    coordinator: PartitionCoordinator

    @property
    def fold(self) -> Fold:
        return self.coordinator.fold

    async def start(self, attempt: int = 0) -> None:
        self._journal = open_journal(self.folder / "journals", attempt)
        await self.serve(PartitionCoordinator(self._journal, self.client(), self.ref("supervisor")))

    async def bus(self, member: str, incarnation: int = 1, *, rank: int = 0, num_ranks: int = 1) -> Partitions:
        await self.started(member, incarnation, num_ranks)
        self.buses.append(Partitions(Member(member, incarnation, rank, num_ranks, 0), self.ref(), self.client()))
        return self.buses[-1]


def served() -> AbstractAsyncContextManager[Served]:
    return bus.standing(Served)


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
