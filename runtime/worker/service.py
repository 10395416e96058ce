"""A service's process: what the supervisor starts beside the role groups, one process each.

Owns the way from its start to its end: it serves one actor until it is asked to leave. Owns no work.

    async def run(me: Membership) -> None:
        await answer(me, Coordinator(...))

    main(run)
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from rondo.runtime.actors.actor import Actor, serve
from rondo.runtime.records import timeline
from rondo.runtime.waits import set_waiter
from rondo.runtime.worker.membership import Membership


async def answer(me: Membership, actor: Actor, *beside: Coroutine[Any, Any, None]) -> None:
    """Serves `actor` under this service's name until it is to leave, with these coroutines beside it."""
    server = await serve(actor, f"unix:{me.rt_dir}/{me.group}.sock", token=me.token, name=me.group)
    await me.ready()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in beside]
        await me.stopping.wait()
        for task in running:
            task.cancel()
    await server.close()


def walk_all_seldom() -> None:
    """The garbage collector never walks what was imported, and what a service holds a hundred times more seldom than by itself:
    100,000 rows take it a tenth of a second, in which nobody is answered."""
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1000)


def main(run: Callable[[Membership], Coroutine[Any, Any, None]]) -> None:
    """The process of a service, from its start to its end."""
    me = Membership.join()
    set_waiter(me.group)
    timeline.begin(me.run_dir, me.group, 0, me.incarnation, me.attempt)

    async def living() -> None:
        async with me.living(), me.ending_the_run():
            await run(me)

    walk_all_seldom()
    with me.segments:
        uvloop.run(living())
    timeline.end()
