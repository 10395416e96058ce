"""A coordinator for the supervisor's tests: writes down what it is told, and nothing else."""

from __future__ import annotations

from typing import Any

from rondo.runtime.actors.actor import Actor, endpoint
from rondo.runtime.records.record import JsonLines
from rondo.runtime.worker.membership import Membership
from rondo.runtime.worker.service import answer, main


class Coordinator(Actor):
    def __init__(self, me: Membership, lines: JsonLines) -> None:
        self._by = {"attempt": me.attempt, "incarnation": me.incarnation}
        self._lines = lines

    def told(self, what: str, **facts: Any) -> None:
        self._lines.write({"told": what, "by": self._by, **facts})

    @endpoint
    async def member_started(self, group: str, incarnation: int, num_ranks: int) -> None:
        self.told("started", group=group, incarnation=incarnation, num_ranks=num_ranks)

    @endpoint
    async def member_dead(self, group: str, incarnation: int, left: bool = False) -> None:
        self.told("dead", group=group, incarnation=incarnation, left=left)

    @endpoint
    async def member_drains(self, group: str, incarnation: int, stays: bool = False) -> None:
        self.told("drains", group=group, incarnation=incarnation, stays=stays)

    @endpoint
    async def drain(self) -> None:
        self.told("drain")


async def run(me: Membership) -> None:
    with JsonLines(me.run_dir / "coordinator.jsonl") as lines:
        coordinator = Coordinator(me, lines)
        coordinator.told("roster", roster=await me.supervisor.call("roster", deadline_s=20))
        await answer(me, coordinator)


if __name__ == "__main__":
    main(run)
