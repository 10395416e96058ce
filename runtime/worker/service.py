"""A service's process: what the supervisor starts beside the role groups, one plain process each.

Owns its way in (the environment that the supervisor gives, its references) and its end: it serves one actor until SIGTERM.
Owns no work.

    async def run(service: Service) -> None:
        await service.answer(Coordinator(...))

    main(run)

Invariant: it dies with who started it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from rondo.runtime.actors.actor import Actor, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.processes.process import die_with_parent
from rondo.runtime.records import timeline
from rondo.runtime.supervision.spec import ATTEMPT, GROUP, INCARNATION, RT_DIR, RUN_DIR
from rondo.runtime.waits import set_waiter

_READY_S = 30.0


@dataclass(frozen=True)
class Service:
    """What a service has of its run."""

    name: str
    incarnation: int
    attempt: int
    rt_dir: Path
    run_dir: Path
    token: str
    supervisor: ActorRef
    segments: SegmentClient
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is to end."""

    async def answer(self, actor: Actor, *beside: Coroutine[Any, Any, None]) -> None:
        """Serve `actor` under this service's name until it is to end, with these coroutines beside it."""
        server = await serve(actor, f"unix:{self.rt_dir}/{self.name}.sock", token=self.token, name=self.name)
        await self.supervisor.call("ready", self.name, self.incarnation, 0, deadline_s=_READY_S, retry=True)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in beside]
            await self.told.wait()
            for task in running:
                task.cancel()
        await server.close()


def main(run: Callable[[Service], Coroutine[Any, Any, None]]) -> None:
    """The process of a service, from its start to its end."""
    die_with_parent()
    name, incarnation, attempt = os.environ[GROUP], int(os.environ[INCARNATION]), int(os.environ[ATTEMPT])
    rt_dir, run_dir = Path(os.environ[RT_DIR]), Path(os.environ[RUN_DIR])
    set_waiter(name)
    timeline.begin(run_dir, name, 0, incarnation, attempt)

    async def serving() -> None:
        token = (rt_dir / "token").read_text().strip()
        with ExitStack() as opened:
            supervisor = ActorRef(f"unix:{rt_dir}/supervisor.sock", token=token, peer="supervisor")
            opened.callback(supervisor.close)
            segments = opened.enter_context(SegmentClient(f"{rt_dir}/handover.sock", token))
            service = Service(name, incarnation, attempt, rt_dir, run_dir, token, supervisor, segments)
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, service.told.set)
            await run(service)

    uvloop.run(serving())
    timeline.end()
