"""A real coordinator behind a real socket, with real memory; the supervisor is reduced to its roster and its reports."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rondo.comm.bus.bus import Bus, Round
from rondo.comm.bus.coordinator import Coordinator
from rondo.comm.bus.journal import Journal
from rondo.comm.bus.member import Member
from rondo.comm.bus.serve import open_index
from rondo.comm.bus.transitions import CoordinatorConfig
from rondo.comm.ring.records import Column, worst_case_bytes
from rondo.runtime.actors.actor import Actor, Server, endpoint, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.memory.segments import SegmentClient, SegmentServer
from tests.comm.driver import rules

TOKEN = "t0ken"
PROMPT, RESPONSE = 6, 4
ROW_BYTES = worst_case_bytes(1, [("tokens", 4, PROMPT + RESPONSE), ("loss_mask", 1, RESPONSE)])
GROUPS = ("rollout-0", "rollout-1", "actor_fwd-0", "advantages-0", "actor-0")


class Roster(Actor):
    def __init__(self) -> None:
        self.alive: dict[str, int] = {}
        self.draining = set[str]()
        self.left = set[str]()
        self.dead: list[list[Any]] = []
        self.reports: list[tuple[str, dict[str, Any]]] = []

    @endpoint
    async def roster(self) -> dict[str, Any]:
        lives = {name: (number, False) for name, number in self.dead} | {n: (i, True) for n, i in self.alive.items()}
        groups = {
            name: {"incarnation": number, "ranks": 1, "alive": alive, "drains": name in self.draining}
            for name, (number, alive) in lives.items()
            if name not in self.left
        }
        return {"attempt": 0, "draining": False, "groups": groups, "dead": self.dead}

    @endpoint
    async def report(self, source: str, kind: str, data: dict[str, Any]) -> None:
        self.reports.append((kind, data))


class Pieces:
    """What any coordinator stands between: memory, the roster, clients, references; `restart` is its death and return."""

    name: str
    buses: list[Any]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.roster = Roster()
        self.segments = SegmentServer(folder / "handover.sock", TOKEN, lambda _: None)
        self.clients: list[SegmentClient] = []
        self.refs: list[ActorRef] = []
        self.buses = []
        self._server: Server
        self._journal: Journal

    def client(self) -> SegmentClient:
        self.clients.append(SegmentClient(self.folder / "handover.sock", TOKEN))
        return self.clients[-1]

    def ref(self, name: str = "") -> ActorRef:
        name = name or self.name
        self.refs.append(ActorRef(f"unix:{self.folder}/{name}.sock", token=TOKEN, peer=name))
        return self.refs[-1]

    async def start(self, attempt: int = 0) -> None:
        raise NotImplementedError

    async def serve(self, coordinator: Any) -> None:
        self.coordinator = coordinator
        await coordinator.start()
        self._server = await serve(coordinator, f"unix:{self.folder}/{self.name}.sock", token=TOKEN, name=self.name)

    async def stop(self) -> None:
        await self._server.close()
        self.coordinator.close()
        self._journal.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def started(self, member: str, incarnation: int, num_ranks: int) -> None:
        """It is reported the way the supervisor does."""
        self.roster.alive[member] = incarnation
        await self.ref().call("member_started", member, incarnation, num_ranks)

    async def die(self, member: str, incarnation: int = 1) -> None:
        del self.roster.alive[member]
        self.roster.dead.append([member, incarnation])
        await self.ref().call("member_dead", member, incarnation)


S = TypeVar("S", bound=Pieces)


@asynccontextmanager
async def standing(made: Callable[[Path], S]) -> AsyncIterator[S]:
    """Pieces in a folder of their own, with a supervisor's roster beside them; nothing is left of them."""
    with tempfile.TemporaryDirectory(prefix="rondo-") as name:
        run = made(Path(name))
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


class Served(Pieces):
    """A bus; `bus` is a worker's client."""

    name = "coordinator"
    buses: list[Bus]
    coordinator: Coordinator

    def __init__(self, folder: Path, **changes: Any) -> None:
        super().__init__(folder)
        rings = {"rollout": changes.pop("ring_bytes", 1 << 20), "columns": 1 << 20}
        straggler, evaluated = changes.pop("straggler_deadline_s", None), changes.pop("evaluated", False)
        self.clock = 0.0
        self.config = CoordinatorConfig(
            rules=rules(**{"row_bytes": ROW_BYTES, **changes}), publisher="actor-0", rollout_ring_bytes=rings["rollout"],
            column_ring_bytes=rings["columns"], rollout_groups=("rollout-0", "rollout-1"), ranks=dict.fromkeys(GROUPS, 1),
            lease_deadline_s=100.0, straggler_deadline_s=straggler, evaluate_start=evaluated, evaluate_end=evaluated,
        )  # fmt: skip

    async def start(self, attempt: int = 0) -> None:
        self._journal = Journal(self.folder / "journal")
        index, ledger = open_index(self.config, self._journal, self.folder, attempt)
        supervisor = self.ref("supervisor")
        await self.serve(
            Coordinator(self.config, self._journal, index, ledger, self.client(), supervisor, clock=lambda: self.clock)
        )

    async def bus(self, group: str, incarnation: int = 1, *, rank: int = 0, num_ranks: int = 1) -> Bus:
        await self.started(group, incarnation, num_ranks)
        bus = Bus(Member(group, incarnation, rank, num_ranks, 0), self.ref(), self.client())
        await bus.open()
        self.buses.append(bus)
        return bus


def served(**changes: Any) -> AbstractAsyncContextManager[Served]:
    return standing(lambda folder: Served(folder, **changes))


async def prove(bus: Bus, version: int = 0) -> None:
    await bus.call("proved", f"rollout.{bus.member.rank}", version)


def put_group(bus: Bus, grant: dict[str, Any], samples: list[int], value: float = 1.0) -> None:
    tokens = [np.arange(PROMPT + RESPONSE, dtype=np.int32) + 100 * grant["group"] + s for s in samples]
    columns = [
        Column("tokens", "int32", tokens),
        Column("loss_mask", "uint8", [np.ones(RESPONSE, np.uint8) for _ in samples]),
    ]
    info = [[PROMPT + RESPONSE, RESPONSE, value, 0, 0, 0, value] for _ in samples]
    bus.put_samples(grant["ring"], grant["group"], grant["epoch"], samples, columns, info)


async def score(bus: Bus, stream: str, column: str, rounds: int) -> list[Round]:
    """Run `rounds` rounds of a forward stream: the column holds each row's first token."""
    done = []
    async for made in bus.stream(stream, tokens=1 << 20):
        values = [
            np.full(row.response, row.array("tokens" if stream == "actor_fwd" else "loss_mask")[0], np.float32)
            for row in made.rows
        ]
        bus.put_columns(made, {column: values})
        await bus.ack(made)
        done.append(made)
        if len(done) == rounds:
            break
    return done
