"""Context: what a role is given. The one object through which it reaches its process, its run and its group.

Owns the compute thread and the group's readiness. Does not own what a role does. A role's coroutines live on the event
loop; everything long runs in `compute`, on the process's one compute thread, in order.

    class ActorRole:
        def __init__(self, ctx: WorkerContext) -> None: ...
        async def run(self) -> None:
            with ctx.section("load", ctx.load_s):
                model = await ctx.compute(load_model, path)
            await ctx.ready()
            while not ctx.stopping.is_set(): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rondo.runtime.actors.actor import Actor, Server
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.config import SupervisionConfig
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.pace import Work
from rondo.runtime.records.telling import telling
from rondo.runtime.records.timeline import Span, span
from rondo.runtime.worker.membership import Membership

P = ParamSpec("P")
T = TypeVar("T")

REPORTS = "reports"
_CALL_S = 30.0


class Process:
    """What the roles of one worker process share. `close` lets nothing wait for a computation that still runs."""

    def __init__(self, me: Membership, world_size: int, local_rank: int, load_s: float) -> None:
        self.me = me
        self.world_size = world_size
        self.local_rank = local_rank
        self.load_s = load_s
        self.coordinator = me.ref("coordinator")
        self.server: Server | None = None
        """What answers the calls to this process."""
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self.pace = SupervisionConfig()
        self.works: dict[tuple[str, str], Work] = {}
        self.not_ready: set[object] = set()
        """The roles that have not called `ready` yet."""

    def close(self) -> None:
        self.coordinator.close()
        self.thread.shutdown(wait=False, cancel_futures=True)


class WorkerContext:
    """One role's view of its worker process. Attributes are fixed for the life of the process."""

    group: str
    """"actor-0"; `role_group` is "actor"."""
    role_group: str
    incarnation: int
    attempt: int
    rank: int
    world_size: int
    local_rank: int
    load_s: float
    """The longest that a load may take, `supervision.load_s`."""
    run_dir: Path
    rt_dir: Path
    token: str
    segments: SegmentClient
    stopping: asyncio.Event
    """Set when the supervisor asks this process to save and leave: the role returns from `run` within the grace."""
    supervisor: ActorRef
    coordinator: ActorRef

    def __init__(self, process: Process) -> None:
        me = process.me
        self.group, self.incarnation, self.attempt, self.rank = me.group, me.incarnation, me.attempt, me.rank
        self.role_group = me.group.rpartition("-")[0] or me.group
        self.world_size, self.local_rank = process.world_size, process.local_rank
        self.load_s = process.load_s
        self.run_dir, self.rt_dir, self.token, self.segments = me.run_dir, me.rt_dir, me.token, me.segments
        self.stopping, self.supervisor, self.coordinator = me.stopping, me.supervisor, process.coordinator
        self.role = self.role_group  # what its spans are filed under; one of several roles of a group has its own name
        self.store = me.store  # (host, port) of the run's TCPStore, where process groups find each other
        self._process = process
        process.not_ready.add(self)

    async def compute(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function on the compute thread and gives its result. A cancelled wait leaves the function running."""
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._process.thread, call)

    async def working(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """`compute`, seen by the supervisor under `name`: past a multiple of what it took before, this process is replaced."""
        work = self.work(name)

        def run() -> T:  # there its time begins: until then others compute
            with work:
                return function(*args, **kwargs)

        return await self.compute(run)

    def work(self, name: str, at_least_s: float = 0.0) -> Work:
        """What this process computes under `name`; `with ctx.work("reward"): ...`, on any thread (`pace.py`)."""
        process, key = self._process, (self.role, name)
        if key not in process.works:
            process.works[key] = Work(process.me.heartbeat, name, process.pace, at_least_s)
        return process.works[key]

    def set_pace(self, limits: SupervisionConfig) -> None:
        """Before the first work of this process."""
        self._process.pace = limits

    @contextlib.contextmanager
    def section(self, name: str, limit_s: float) -> Iterator[None]:
        """While it lasts this process may be silent, but no longer than `limit_s`; then it is killed and replaced."""
        with self.span(name), self._process.me.heartbeat.section(name, limit_s):
            yield

    def span(self, name: str, *, step: int | None = None, beside: str = "", **args: Any) -> Span:
        """The body is a span of this role in the run's timeline; `beside` names what goes on beside its other spans."""
        return span(name, f"{self.role}/{beside}" if beside else self.role, step, **args)

    def offer(self, actor: Actor) -> None:
        """Lets others of this run call the actor's endpoints at "GROUP.RANK"."""
        assert self._process.server is not None
        self._process.server.offer(actor)

    def progress(self) -> None:
        """Counts one more thing done, for the status view."""
        self._process.me.heartbeat.progress()

    async def ready(self) -> None:
        """This role can do its work. The supervisor hears of it when every role of the process has said so."""
        waiting_for = self._process.not_ready
        waiting_for.discard(self)
        if not waiting_for:
            await self._process.me.ready()

    async def report(self, kind: str, data: Mapping[str, Any]) -> None:
        """Writes a record: kind "metrics" to metrics.jsonl, any other to events.jsonl; the status view sees both.

        Kind "fatal" ends the run, and raises where it does not arrive; any other only tells (`telling.py`)."""
        call = self.supervisor.call("report", self.group, kind, dict(data), deadline_s=_CALL_S)
        if kind == "fatal":
            await call
        else:
            with telling(REPORTS):
                await call

    def init_process_group(self, device: str = "cpu", timeout_s: float = 600.0) -> None:
        """Makes torch's default process group over the ranks of this incarnation: gloo on the CPU, NCCL on a device such as
        "cuda:3". To be called on the compute thread.

        Does nothing in a group of one, nor where another role of this process has made it. `timeout_s` is the deadline of every
        collective.
        """
        if self.world_size == 1:
            return
        import torch
        from torch.distributed import init_process_group, is_initialized

        if is_initialized():
            return
        if device != "cpu":
            torch.cuda.set_device(device)
        init_process_group(
            "gloo" if device == "cpu" else "nccl",
            store=self.connect_store(timeout_s),
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )

    def connect_store(self, timeout_s: float = 600.0) -> Any:
        """A connection of its own to the run's store, whose keys are those of this incarnation; blocks."""
        from torch.distributed import PrefixStore, TCPStore

        host, port = self._process.me.store
        store = TCPStore(host, port, is_master=False, timeout=datetime.timedelta(seconds=timeout_s))
        return PrefixStore(f"{self.group}/{self.incarnation}", store)
