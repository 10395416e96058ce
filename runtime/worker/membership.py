"""Membership: how a process of a run finds itself, makes itself known, and shows that it lives.

Owns the first steps of every worker and of the store's process: read the environment, tell the supervisor pid, start time
and session, beat. Does not own what the process is for.

    with Membership.join(rank=0) as me:           # Refused when this incarnation was replaced meanwhile
        async with me.beating(): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.processes import process
from rondo.runtime.supervision import spec
from rondo.runtime.supervision.heartbeat import BEAT_S, HeartbeatWriter, segment_name


@dataclass(frozen=True, slots=True)
class Membership:
    """One process's place in a run: rank `rank` of life `incarnation` of `group`."""

    group: str
    incarnation: int
    attempt: int
    rank: int
    run_dir: Path
    rt_dir: Path
    token: str
    store: tuple[str, int]
    segments: SegmentClient
    heartbeat: HeartbeatWriter

    @classmethod
    def join(cls, rank: int) -> Membership:
        """Registers this process. PeerGone when no supervisor listens, Refused when it wants none of this process."""
        variables = os.environ
        group, incarnation = variables[spec.GROUP], int(variables[spec.INCARNATION])
        rt_dir = Path(variables[spec.RT_DIR])
        token = (rt_dir / "token").read_text().strip()
        host, _, port = variables[spec.STORE].rpartition(":")
        segments = SegmentClient(rt_dir / "handover.sock", token)
        pid = os.getpid()
        segments.register(group, incarnation, rank, pid, process.start_time(pid), os.getsid(0))
        heartbeat = HeartbeatWriter(segments.segment(segment_name(group, incarnation), 0).view(), rank)
        heartbeat.beat()
        return cls(
            group, incarnation, int(variables[spec.ATTEMPT]), rank, Path(variables[spec.RUN_DIR]), rt_dir, token,
            (host, int(port)), segments, heartbeat,
        )  # fmt: skip

    def ref(self, name: str) -> ActorRef:
        """A reference to the actor at `<name>.sock`: "supervisor", "coordinator" or "<group>.<rank>"."""
        return ActorRef(f"unix:{self.rt_dir}/{name}.sock", token=self.token, peer=name)

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """The loop shows that it lives while the body lasts."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def beat() -> None:
            nonlocal timer
            self.heartbeat.beat()
            timer = loop.call_later(BEAT_S, beat)

        beat()
        try:
            yield
        finally:
            assert timer is not None
            timer.cancel()
