"""Worker: one process of a role group, forked of its root, or started as `python -m rondo.runtime.worker.worker ROLE_CLASS...`.

Owns the life of the process: it dies with its root, registers, beats, loads the role classes on the compute thread,
runs all roles in one task group, and leaves. Does not own what a role does (`context.py` is what it is given).

    exit 0    every role has returned, by itself or because it was asked to by the supervisor (`ctx.stopping`), or what it waited
              for comes no more since the run is being stopped (`Stopping`)
    exit 1    a role raised: its traceback is in the log; the supervisor replaces the whole role group, or ends the run where no
              restart repairs it (`ConfigError`, `Fatal`)
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

import uvloop

from rondo.runtime.actors.actor import Actor, serve
from rondo.runtime.errors import Stopping
from rondo.runtime.records import telling, timeline
from rondo.runtime.records.record import log_to_stderr
from rondo.runtime.reference import load_reference
from rondo.runtime.supervision.proxy import NOT_FORKED
from rondo.runtime.supervision.spec import LOAD_S
from rondo.runtime.waits import set_waiter
from rondo.runtime.worker.context import REPORTS, Process, WorkerContext
from rondo.runtime.worker.membership import Membership

_SWITCH_S = 0.0002
"""The interpreter's switch interval: beside busy Python code the loop answers in 40 us instead of 5 ms."""

log = logging.getLogger("rondo.worker")


class Role(Protocol):
    """What a role class is: made with a `WorkerContext`, then run once."""

    async def run(self) -> None: ...


async def run(me: Membership, references: Sequence[str]) -> None:
    """Runs the roles to their end. Raises what the first of them raised, in a group."""
    variables = os.environ
    process = Process(me, int(variables["WORLD_SIZE"]), int(variables["LOCAL_RANK"]), float(variables[LOAD_S]))
    address = f"unix:{me.rt_dir}/{me.group}.{me.rank}.sock"
    try:
        # Like every actor it gives its waits and stacks, and what its roles offer.
        async with me.living(), await serve(Actor(), address, token=me.token, name=me.group) as process.server:
            contexts = [WorkerContext(process) for _ in references]
            if NOT_FORKED in os.environ:
                await contexts[0].report("not_forked", {"rank": me.rank, "why": os.environ[NOT_FORKED]})
            loading = timeline.span("load", contexts[0].role_group, part="classes")
            async with me.ending_the_run():
                with loading, me.heartbeat.section("load", process.load_s):
                    classes = await contexts[0].compute(_load, references)
                for context, role_class in zip(contexts, classes, strict=True):
                    context.role = getattr(role_class, "role", context.role_group)
                roles: list[Role] = [role(context) for role, context in zip(classes, contexts, strict=True)]
            telling.PROCESS.listener = _to_supervisor(contexts[0])
            async with asyncio.TaskGroup() as group:
                for role, reference in zip(roles, references, strict=True):
                    group.create_task(_run_to_end(me, role), name=reference)
            # Nothing that fails from here on is a reason to run the roles again.
            me.heartbeat.leave()
    finally:
        telling.PROCESS.listener = None  # the loop ends
        process.close()


async def _run_to_end(me: Membership, role: Role) -> None:
    """At a stop a role ends alone: another one of this process may save. What no restart mends ends the run."""
    try:
        async with me.ending_the_run():
            await role.run()
    except* Stopping as group:
        log.info("left: %s", group.exceptions[0])


def _to_supervisor(context: WorkerContext) -> Callable[[str, dict[str, Any]], None]:
    """What this process cannot tell is an event of the run."""
    loop, reports = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def report(kind: str, data: dict[str, Any]) -> None:
        task = loop.create_task(context.report(kind, data))
        reports.add(task)
        task.add_done_callback(reports.discard)

    def hear(kind: str, data: dict[str, Any]) -> None:
        if data["what"] != REPORTS:  # it would not arrive either
            loop.call_soon_threadsafe(report, kind, data)

    return hear


def _load(references: Sequence[str]) -> list[Any]:
    classes = [load_reference(reference, "a role class") for reference in references]
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in os.environ:  # one that was forked has loaded it under another number
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    gc.freeze()  # what was imported stays, and is never walked again
    return classes


def main(references: Sequence[str]) -> None:
    sys.setswitchinterval(_SWITCH_S)
    me = Membership.join(int(os.environ["RANK"]))
    name = f"{me.group}.{me.rank}"
    Path("/proc/self/comm").write_text(name[:15])  # as `top` shows it
    set_waiter(name)
    log_to_stderr({"group": me.group, "rank": me.rank, "incarnation": me.incarnation})
    timeline.begin(me.run_dir, me.group, me.rank, me.incarnation, me.attempt)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(me, references))
    except BaseException as error:  # noqa: BLE001  # whatever it is, it is told, and then this process ends
        _fail(error)
    _destroy_process_group()
    _leave(0)


def _fail(error: BaseException) -> NoReturn:
    """Tells the error and ends: the compute thread may hang in a collective that no peer will ever join."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    log.error("a role failed", exc_info=error)
    _leave(1)


def _leave(code: int) -> NoReturn:
    """Ends at once: gloo's threads free tensors while Python finalizes, and abort a process that has done its work."""
    timeline.end()
    for stream in (sys.stdout, sys.stderr):
        with telling.telling("log"):
            stream.flush()
    os._exit(code)


def _destroy_process_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
