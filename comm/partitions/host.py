"""A bus of its own: memory, coordinator and membership for programs on this node that are no role of a run.

Owns what the supervisor owns in a run, as far as a bus needs it: segments and doorbells, the coordinator's process and its
restarts, and the proof that a member is dead. Members are processes that somebody else starts; they come in with `joining.py`,
by the folder, and leave or die. The host starts none of them and kills none.

    rondo bus FOLDER                                    # in a process of its own; or: async with Host(folder): ...

    FOLDER, mode 0700    bus (says that the folder is a bus's), token, lock, supervisor.sock, handover.sock, partitions.sock,
                         partitions.log, run/ (with the journal)

Invariants: one host a folder (a lock says so); nothing is written or removed in a folder that is no bus's; a member's incarnation
is over when its last process is gone, proved by a pidfd or said by the process itself, and the next one begins when the
coordinator has heard so; what a host held ends with it (`partitions/checkpoint.py` keeps rows), so one begins with an empty bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rondo.runtime.actors.actor import Actor, Server, endpoint, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.admin.tokens import write_private
from rondo.runtime.errors import ConfigError, PeerGone, Refused, WorkerDied
from rondo.runtime.memory.segments import SegmentServer
from rondo.runtime.processes.process import exit_text, over, stat
from rondo.runtime.supervision.launcher import start as start_process
from rondo.runtime.waits import waiting

HOST, HANDOVER, COORDINATOR, TOKEN = "supervisor.sock", "handover.sock", "partitions.sock", "token"
_MARK, _LOG, _RUN = "bus", "partitions.log", "run"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_PATH_BYTES = 107  # of a Unix socket
_READY_S = 60.0
_TOLD_S = 600.0
_RESTARTS, _WITHIN_S = 5, 60.0
_SERVICE = "partitions"


@dataclass(slots=True)
class _Life:
    """One incarnation of a member: its processes, by rank, those that are gone, and whether the coordinator knows its end."""

    incarnation: int
    ranks: int
    seats: dict[int, str] = field(default_factory=dict)  # rank -> who has it, as it named itself
    gone: set[int] = field(default_factory=set)
    buried: bool = False

    @property
    def over(self) -> bool:
        return bool(self.gone) and len(self.gone) == len(self.seats)


class Host(Actor):
    """Serves a bus in `folder` until it is closed. To be opened on the main thread: the coordinator dies with that thread."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).absolute()
        longest = len(str(self.folder / COORDINATOR).encode())
        if longest > _MAX_PATH_BYTES:
            raise ConfigError(
                f"the paths of a bus's sockets must have at most {_MAX_PATH_BYTES} bytes, got {longest} in {self.folder}. "
                "Choose a shorter folder."
            )
        self._lives: dict[str, _Life] = {}
        self._dead: list[list[Any]] = []
        self._changed = asyncio.Condition()
        self._beside: set[asyncio.Task[None]] = set()  # keep the coordinator, watch members, tell of deaths
        self._ready = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._open = contextlib.ExitStack()
        self._server: Server
        self._coordinator: ActorRef
        self.failed: asyncio.Future[None]

    # ---- life -------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Host:
        self.failed = asyncio.get_running_loop().create_future()
        _make_own(self.folder)
        try:
            self._open.enter_context(_locked(self.folder))
            token = self._begin_anew()
            segments = SegmentServer(self.folder / HANDOVER, token, lambda _: None)
            segments.start()
            self._open.callback(segments.close)
            self._server = await serve(self, f"unix:{self.folder}/{HOST}", token=token, name="host")
            self._coordinator = ActorRef(f"unix:{self.folder}/{COORDINATOR}", token=token, peer="coordinator")
            self._open.callback(self._coordinator.close)
            self._go(self._keep_coordinator())
            async with waiting("bus ready", peer="coordinator", deadline_s=_READY_S):
                ready = asyncio.ensure_future(self._ready.wait())
                await asyncio.wait((ready, self.failed), return_when=asyncio.FIRST_COMPLETED)
                ready.cancel()
            if self.failed.done():
                self.failed.result()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """The coordinator ends, the memory goes with its last mapping, and members hear that their peer is gone."""
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        if hasattr(self, "_server"):
            await self._server.close()
        self._open.close()

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._beside.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _begin_anew(self) -> str:
        """What a host before this one left is of no use: its memory is gone. Returns the token of this one."""
        for name in (HOST, HANDOVER, COORDINATOR, _LOG, TOKEN):
            (self.folder / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / _RUN, ignore_errors=True)
        (self.folder / _RUN).mkdir()
        token = secrets.token_hex(16)
        write_private(self.folder / TOKEN, token)
        return token

    # ---- the coordinator --------------------------------------------------------------------------------------------

    async def _keep_coordinator(self) -> None:
        """It restarts from its journal; one that does not come up, or ends again and again, ends the bus."""
        environment = os.environ | {
            "RONDO_RT_DIR": str(self.folder), "RONDO_RUN_DIR": str(self.folder / _RUN), "RONDO_ATTEMPT": "0",
            "RONDO_GROUP": _SERVICE, "RONDO_INCARNATION": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "rondo.comm.partitions.serve"]
        now = asyncio.get_running_loop().time
        restarts: deque[float] = deque(maxlen=_RESTARTS)
        while True:
            self._ready.clear()
            self._process = start_process(command, environment, self.folder / _LOG)
            await over(self._process.pid)
            code = self._process.wait()  # it is a zombie: this does not block
            if not self._ready.is_set() or (len(restarts) == _RESTARTS and now() - restarts[0] < _WITHIN_S):
                lines = (self.folder / _LOG).read_text(errors="replace").splitlines() or ["nothing"]
                self._fail(WorkerDied(
                    f"the coordinator of the bus must stay up, got {exit_text(code)}, and in its log {lines[-1]!r}. "
                    f"Read {self.folder / _LOG}"
                ))  # fmt: skip
                return
            restarts.append(now())

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()  # whoever waits for it raises it; nobody has to

    @endpoint
    async def roster(self) -> dict[str, Any]:
        """For a coordinator that starts. Who lives is in its journal, or told by a call that is repeated until it arrives."""
        return {"attempt": 0, "draining": False, "groups": {}, "dead": self._dead}

    @endpoint
    async def ready(self, group: str, incarnation: int, rank: int) -> None:
        self._ready.set()

    @endpoint
    async def report(self, source: str, kind: str, data: dict[str, Any]) -> None:
        if kind == "fatal":
            self._fail(WorkerDied(f"the bus must keep its accounts, got {data['cause']}. Read {self.folder / _LOG}"))

    # ---- members ----------------------------------------------------------------------------------------------------

    @endpoint
    async def join(self, member: str, rank: int, ranks: int, pid: int, start_time: int, nonce: str) -> int:
        """The incarnation that this process is rank `rank` of. Waits while processes of the one before are still there.

        `nonce` is the caller's own: whoever did not hear the answer asks again with the same one.
        """
        if not _NAME.fullmatch(member) or not 0 <= rank < ranks:
            raise ConfigError(
                "a member must have a name of 1 to 64 letters, digits, '_', '.' or '-', and a rank below ranks, got "
                f"{member!r}, rank {rank} of {ranks}."
            )
        async with self._changed:
            while (life := self._seat(member, rank, ranks, nonce)) is None:
                await self._changed.wait()
        if rank not in life.seats:
            life.seats[rank] = nonce
            found = stat(pid)
            if found is None or found.start_time != start_time:
                self._gone(member, life, rank)
                raise Refused(f"a member must live on the node of its bus, got pid {pid}, which is not here.")
            self._go(self._watch(member, life, rank, pid))
        await self._coordinator.call(
            "member_started", member, life.incarnation, life.ranks, deadline_s=_TOLD_S, retry=True
        )
        return life.incarnation

    def _seat(self, member: str, rank: int, ranks: int, nonce: str) -> _Life | None:
        """The life that has this seat; None while an older one has to end first."""
        life = self._lives.get(member)
        if life is not None and life.seats.get(rank) == nonce and rank not in life.gone:
            return life  # its answer was lost
        if life is None or life.buried:
            fresh = _Life(life.incarnation + 1 if life is not None else 1, ranks)
            self._lives[member] = fresh
            return fresh
        if life.ranks != ranks and not life.over:
            raise Refused(
                f"member {member} must have {life.ranks} ranks as its other processes say, got {ranks}. Let them end first."
            )
        return None if life.gone or rank in life.seats else life

    @endpoint
    async def leave(self, member: str, incarnation: int, rank: int) -> None:
        """This process holds nothing of the bus any more; what it has not acknowledged comes again."""
        life = self._lives.get(member)
        if life is not None and life.incarnation == incarnation:
            self._gone(member, life, rank)

    async def _watch(self, member: str, life: _Life, rank: int, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            await over(pid)
        self._gone(member, life, rank)

    def _gone(self, member: str, life: _Life, rank: int) -> None:
        if rank in life.gone:
            return
        life.gone.add(rank)
        if life.over:
            self._dead.append([member, life.incarnation])
            self._go(self._tell_death(member, life))

    async def _tell_death(self, member: str, life: _Life) -> None:
        await self._coordinator.call("member_dead", member, life.incarnation, deadline_s=_TOLD_S, retry=True)
        life.buried = True
        async with self._changed:
            self._changed.notify_all()


def _make_own(folder: Path) -> None:
    """A new or empty folder becomes a bus's, one that is a bus's stays so. ConfigError for any other."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = sorted(path.name for path in folder.iterdir())
    except (FileExistsError, NotADirectoryError):
        found = ["a file"]
    if found and _MARK not in found:
        raise ConfigError(
            f"the folder of a bus must be new, empty or that of an earlier bus, got {', '.join(found[:4])} in {folder}. "
            "Choose another one."
        )
    (folder / _MARK).touch(0o600)


@contextlib.contextmanager
def _locked(folder: Path) -> Any:
    """Held while a host lives, however it ends. Refused when another one holds it."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Refused(f"folder {folder} must have one host, got a second one. Join the bus that is there.") from error
    try:
        yield
    finally:
        os.close(fd)


async def serve_until_told(folder: Path) -> None:
    """`rondo bus FOLDER`: until SIGTERM or SIGINT. Raises WorkerDied when the bus cannot go on."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    async with Host(folder) as host:
        print(f"bus ready folder={host.folder}", flush=True)
        waiting_for = asyncio.ensure_future(told.wait())
        await asyncio.wait((waiting_for, host.failed), return_when=asyncio.FIRST_COMPLETED)
        waiting_for.cancel()
        if host.failed.done():
            host.failed.result()


def token_of(folder: Path) -> str:
    """What members show. PeerGone where no host is."""
    try:
        return (folder / TOKEN).read_text().strip()
    except OSError as error:
        raise PeerGone(
            f"a bus must be in {folder}, got {error.strerror}. Start one with `rondo bus {folder}`"
        ) from error
