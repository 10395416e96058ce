"""A coordinator for the supervisor's tests: writes down what it is told, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from rondo.runtime.actors.actor import Actor, endpoint, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.records.record import JsonLines


class Coordinator(Actor):
    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def told(self, what: str, **facts: Any) -> None:
        life = {"attempt": int(os.environ["RONDO_ATTEMPT"]), "incarnation": int(os.environ["RONDO_INCARNATION"])}
        self._lines.write({"told": what, "by": life, **facts})

    @endpoint
    async def member_started(self, group: str, incarnation: int, num_ranks: int) -> None:
        self.told("started", group=group, incarnation=incarnation, num_ranks=num_ranks)

    @endpoint
    async def member_dead(self, group: str, incarnation: int) -> None:
        self.told("dead", group=group, incarnation=incarnation)

    @endpoint
    async def drain(self) -> None:
        self.told("drain")


async def main() -> None:
    rt_dir, token = os.environ["RONDO_RT_DIR"], (Path(os.environ["RONDO_RT_DIR"]) / "token").read_text()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    with JsonLines(Path(os.environ["RONDO_RUN_DIR"]) / "coordinator.jsonl") as lines:
        coordinator = Coordinator(lines)
        with ActorRef(f"unix:{rt_dir}/supervisor.sock", token=token, peer="supervisor") as supervisor:
            async with await serve(coordinator, f"unix:{rt_dir}/coordinator.sock", token=token, name="coordinator"):
                coordinator.told("roster", roster=await supervisor.call("roster", deadline_s=20))
                await supervisor.call("ready", os.environ["RONDO_GROUP"], int(os.environ["RONDO_INCARNATION"]), 0)
                await ended.wait()


if __name__ == "__main__":
    asyncio.run(main())
