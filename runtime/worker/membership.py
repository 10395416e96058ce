"""Membership: how a process of a run finds itself, makes itself known, shows that it lives, and hears that it is to leave.

Owns the first steps of every worker and service, the store among them: it dies with who started it, reads the environment, tells
the supervisor pid, start time and session, beats, and looks at SIGTERM who sent it. Does not own what the process is for.

    me = Membership.join()                        # Refused when this incarnation was replaced meanwhile
    async with me.living():
        await me.ready()
        await me.stopping.wait()
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import ConfigError, Fatal
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.processes import process
from rondo.runtime.processes.guard import PARENT_PID
from rondo.runtime.supervision import spec
from rondo.runtime.supervision.heartbeat import BEAT_S, HeartbeatWriter, segment_bytes, segment_name
from rondo.runtime.supervision.orders import EXIT_FAILED, EXIT_USAGE

_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Membership:
    """One process's place in a run: rank `rank` of life `incarnation` of `group`, a role group or a service."""

    group: str
    incarnation: int
    attempt: int
    rank: int
    run_dir: Path
    rt_dir: Path
    token: str
    segments: SegmentClient
    heartbeat: HeartbeatWriter
    supervisor: ActorRef
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the supervisor asks this process to save and leave."""

    @classmethod
    def join(cls, rank: int = 0) -> Membership:
        """Registers this process. PeerGone when no supervisor listens, Refused when it wants none of this process."""
        process.die_with_parent()
        pid = os.getpid()
        os.environ[PARENT_PID] = str(pid)  # what this process starts asks for this parent
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        group, incarnation = os.environ[spec.GROUP], int(os.environ[spec.INCARNATION])
        rt_dir, run_dir = Path(os.environ[spec.RT_DIR]), Path(os.environ[spec.RUN_DIR])
        token = (rt_dir / "token").read_text().strip()
        segments = SegmentClient(rt_dir / "handover.sock", token)
        segments.register(group, incarnation, rank, pid, process.start_time(pid), os.getsid(0))
        heartbeat = HeartbeatWriter(
            segments.segment(segment_name(group, incarnation), segment_bytes(rank + 1)).view(), rank
        )
        heartbeat.beat()
        supervisor = ActorRef(f"unix:{rt_dir}/supervisor.sock", token=token, peer="supervisor")
        attempt = int(os.environ[spec.ATTEMPT])
        return cls(group, incarnation, attempt, rank, run_dir, rt_dir, token, segments, heartbeat, supervisor)

    @property
    def store(self) -> tuple[str, int]:
        """Host and port of the run's TCPStore, where process groups find each other."""
        host, _, port = os.environ[spec.STORE].rpartition(":")
        return host, int(port)

    def ref(self, name: str) -> ActorRef:
        """A reference to the actor at `<name>.sock`: "coordinator" or "<group>.<rank>"."""
        return ActorRef(f"unix:{self.rt_dir}/{name}.sock", token=self.token, peer=name)

    async def ready(self) -> None:
        """This process can do its work."""
        self.heartbeat.beat()  # before anybody measures from the last one
        await self.supervisor.call("ready", self.group, self.incarnation, self.rank, deadline_s=_CALL_S, retry=True)

    @contextlib.asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        """While the body lasts the loop beats, and hears when it is to leave."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def beat() -> None:
            nonlocal timer
            self.heartbeat.beat()
            timer = loop.call_later(BEAT_S, beat)

        loop.add_signal_handler(signal.SIGTERM, self._look)
        self._look()  # it may have come before
        beat()
        try:
            yield
        finally:
            assert timer is not None
            timer.cancel()
            self.supervisor.close()

    @contextlib.asynccontextmanager
    async def ending_the_run(self) -> AsyncIterator[None]:
        """Reports an error of the body that no restart mends. The run ends with it, with exit code 2 for a setting or file that
        breaks a rule, and with 1 for a `Fatal` one."""
        try:
            yield
        except* ConfigError as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            told = {"cause": str(first), "exit_code": EXIT_FAILED if isinstance(first, Fatal) else EXIT_USAGE}
            await self.supervisor.call("report", self.group, "fatal", told, deadline_s=_CALL_S)
            raise

    def _look(self) -> None:
        """torchrun sends SIGTERM too, when another rank died, and service managers do to all processes: then nobody leaves."""
        if self.heartbeat.asked_to_leave:
            self.stopping.set()
