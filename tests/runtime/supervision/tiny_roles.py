"""Role classes for the supervisor's tests: as small as they can be, each with one habit."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import numpy

from rondo.runtime.processes import process
from rondo.runtime.worker.context import WorkerContext

IMPORTED_ON = threading.current_thread().name
FORKED = "torch" in sys.modules
HIDDEN = """
import os, time
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid:
        print(pid, flush=True)
    else:
        os.close(1)
        time.sleep(600)
"""
"""Its child's child has a session of its own and, soon, no parent; no environment shows whose it is."""


def count_life(ctx: WorkerContext) -> int:
    """How many processes have had this rank, counted in memory that outlives them."""
    lives = ctx.segments.segment(f"lives/{ctx.group}", 64).view()
    lives[0] += 1
    return lives[0]


def hide(ctx: WorkerContext) -> bool:
    """Leaves a process behind that hides; whether the one of this rank's last life is still there."""
    last = ctx.segments.segment(f"hidden/{ctx.group}", 64).view()[:8]
    left = process.stat(int.from_bytes(last, "little")) is not None if any(last) else False
    done = subprocess.run([sys.executable, "-S", "-c", HIDDEN], check=True, env={}, stdout=subprocess.PIPE)
    last[:] = int(done.stdout).to_bytes(8, "little")
    return left


class Idle:
    """Works until it is asked to stop. Rank 0 leaves a process behind that hides; in its second life it commits a step."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        ctx = self._ctx
        if ctx.rank == 0:
            lives = count_life(ctx)
            left = await ctx.compute(hide, ctx)
            hidden = int.from_bytes(ctx.segments.segment(f"hidden/{ctx.group}", 64).view()[:8], "little")
            facts = {"lives": lives, "left": left, "hidden": hidden, "parent": os.getppid(), "forked": FORKED}
            facts["drawn"] = numpy.random.random()  # the process's own generator
            await ctx.report("lives", {"group": ctx.group, **facts})
            if lives == 2:
                await ctx.report("committed", {"version": 1})
        ctx.progress()
        await ctx.ready()
        await ctx.stopping.wait()
        await ctx.report("saved", {"group": ctx.group, "rank": ctx.rank})


class Stubborn:
    """Computes for ever, outside the interpreter, and does not leave when it is asked."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        await self._ctx.ready()
        await self._ctx.working("train", self._stand)

    def _stand(self) -> None:
        (self._ctx.run_dir / "stands").touch()
        threading.Event().wait()


class Crash:
    """Commits a step in attempt 0; raises in any later attempt, as soon as everything is ready."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        ctx = self._ctx
        await ctx.report("lives", {"lives": count_life(ctx)})
        await ctx.ready()
        while any(state != "ready" for state in await self._states()):  # noqa: ASYNC110  # the supervisor calls no role
            await asyncio.sleep(0.05)
        if ctx.attempt == 0:
            await ctx.report("committed", {"version": 1})
            await ctx.stopping.wait()
        raise ValueError("the pot is empty")

    async def _states(self) -> list[str]:
        return [group["state"] for group in (await self._ctx.supervisor.call("status"))["groups"]]


class Sum:
    """Sums the ranks with a collective, reports, and is done."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        ctx = self._ctx
        with ctx.section("load", 60):
            await ctx.compute(ctx.init_process_group, "cpu", 30)
        await ctx.ready()
        total = await ctx.compute(self._total)
        facts = {
            "total": total, "rank": ctx.rank, "world_size": ctx.world_size, "role_group": ctx.role_group,
            "imported_on": IMPORTED_ON, "threads": os.environ["OMP_NUM_THREADS"], "forked": FORKED,
        }  # fmt: skip
        await ctx.report("metrics", facts)
        await ctx.supervisor.call("looked")

    def _total(self) -> int:
        import torch

        value = torch.tensor([self._ctx.rank + 1])
        torch.distributed.all_reduce(value)
        return int(value)


class Also:
    """A second role in the same process, ready later than the first."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        await self._ctx.report("late", {"thread": await self._ctx.compute(lambda: threading.current_thread().name)})
        await self._ctx.ready()
