"""A server that generates: one that rondo starts and ends, or one that runs already.

Owns the process of a server: its command line, environment, key, port and log, and its end. Owns nothing of what it answers
(`client.py`), and not when it is started again (`restarts.py`).

    server = SGLangServer(Launch(python, model_path="/models/qwen3"), log=log, folder=private)
    client = await server.start(deadline_s=600)          # it answers
    why = await server.gone()                            # it is no longer there
    await server.close()

Invariant: a server dies with this process, also when this process is killed: the kernel ends its launcher
(`runtime/processes/guard.py`), and every process of a server asks the kernel for the same. It listens on the loopback
interface only, and wants a key that is in no command line and no environment: it stands in a file that only this user reads,
with all other arguments.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from rondo.roles.engines.sglang.client import ServerError, SGLangClient
from rondo.roles.engines.sglang.media_items import PACKAGE, PROCESSOR
from rondo.roles.engines.sglang.shared_memory import FOLDER, SharedNames
from rondo.runtime.admin.tokens import write_private
from rondo.runtime.errors import DeadlineExceeded, PeerGone, WorkerDied
from rondo.runtime.processes.process import Stat, below, exit_text, kill_session, over, processes
from rondo.runtime.records.logs import LOGS
from rondo.runtime.supervision.launcher import start as start_guarded
from rondo.runtime.waits import wait_for, waiting

LOOPBACK = "127.0.0.1"
Argument = str | int | float | bool | list[str]
T = TypeVar("T")
_POLL_S = 0.25
_ASK_S = 30.0
_DEATH_S = 60.0
"""A process that a device's driver holds in the kernel outlives SIGKILL."""
_MAX_FOLDER_BYTES = 90
"""Of a folder in which a server's Unix sockets have room for their names."""

# torchrun describes the rollout's own processes with these, and a server would take them for its own.
_OF_TORCHRUN = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """How a server is started: as `tensor_parallel` ranks, each on a GPU from `first_device` on, or, without one, on a core."""

    python: str
    model_path: str
    dtype: str = "auto"
    first_device: int | None = None
    tensor_parallel: int = 1
    max_running: int | None = None
    max_tokens: int | None = None
    """Tokens that the cache holds; only where a processor computes, since a server measures the memory of a GPU itself."""
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def settings(self, port: int, key: str) -> dict[str, Argument]:
        """All arguments by name; the user's own win, but for address and key."""
        found: dict[str, Argument] = {
            "model-path": self.model_path, "dtype": self.dtype, "skip-server-warmup": True, "weight-version": "-1",
            "log-level-http": "warning", "incremental-streaming-output": True,
        }  # fmt: skip
        if self.max_running is not None:
            found["max-running-requests"] = self.max_running
        if self.tensor_parallel > 1:
            found["tp-size"] = self.tensor_parallel
        if self.first_device is not None:
            found["base-gpu-id"] = self.first_device
        else:
            # A share of the machine's memory would be taken, and filled with zeros, for the cache. A server with nothing to do
            # would keep a core busy, which others compute on.
            found |= {
                "device": "cpu",
                "attention-backend": "torch_native",
                "mem-fraction-static": 0.2,
                "sleep-on-idle": True,
            }
            if self.max_tokens is not None:
                found["max-total-tokens"] = self.max_tokens
        given = {name.replace("_", "-"): value for name, value in self.arguments.items()}
        return {**found, **given, "host": LOOPBACK, "port": port, "api-key": key}

    def surroundings(self, temporary: Path) -> dict[str, str]:
        """The environment of the server: this process's, without what is meant for this process alone. `temporary` is a folder
        for files that it does not remove itself."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in _OF_TORCHRUN and not name.startswith(("TORCHELASTIC_", "PYTHON"))
        }
        chosen = {
            # Neither the folder in which the run was started nor a user's site comes before the server's own packages.
            "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1",
            # Log-probs are to be those after the temperature.
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        }  # fmt: skip
        if len(os.fsencode(temporary)) <= _MAX_FOLDER_BYTES:
            chosen["TMPDIR"] = str(temporary)
            user = os.environ.get("USER", str(os.getuid()))
            chosen["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{user}"
        if self.first_device is None:
            # A core for each rank, which the server wants to be told where they are more than the machine has sockets.
            cores = list(itertools.islice(itertools.cycle(sorted(os.sched_getaffinity(0))), self.tensor_parallel))
            chosen |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
            if len(cores) > 1:
                chosen["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
        chosen |= self.environment
        chosen["PYTHONPATH"] = os.pathsep.join(filter(None, (chosen.get("PYTHONPATH"), str(PROCESSOR))))
        return {**kept, "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": PACKAGE, **chosen}


class Server(Protocol):
    """Something that is started, answers at an address, and may leave. After `gone` it may be started again."""

    @property
    def name(self) -> str: ...

    async def start(self, deadline_s: float) -> SGLangClient:
        """Until it answers. An open client, which is the caller's to close."""

    async def gone(self) -> str:
        """Waits until it no longer answers, and says why."""

    def workers(self) -> Mapping[int, Stat] | None:
        """Its processes, by pid, but for the one that speaks HTTP; None where they are not ours to see. Blocks for some
        milliseconds."""

    async def close(self) -> None: ...


class SGLangServer:
    """One server that rondo starts. For the main thread's event loop: the kernel ends the server with that thread.

    `folder` is private to this user and gets the server's settings; `log` is appended to.
    """

    def __init__(self, launch: Launch, *, log: Path, folder: Path, name: str = "sglang", grace_s: float = 10.0) -> None:
        self.name = name
        self.log = log
        self.key = secrets.token_hex(32)  # no text that begins with "-": the server would take it for an option
        self.port = 0
        self._launch = launch
        self._grace_s = grace_s
        self._settings = folder / f"{name}.yaml"
        self._temporary = folder / f"{name}.tmp"
        self._names: SharedNames | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._exit: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int | None:
        """Of the launcher, which leads the session of all its processes; None while none runs."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self, deadline_s: float) -> SGLangClient:
        await self._end(0.0)  # one that is still there was of no use
        with held_port() as self.port:
            return await self._start(deadline_s)

    async def _start(self, deadline_s: float) -> SGLangClient:
        self._settings.unlink(missing_ok=True)
        write_private(self._settings, json.dumps(self._launch.settings(self.port, self.key)))
        # The server writes all its arguments into its log, the key among them.
        os.close(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        await asyncio.to_thread(self._temporary.mkdir, mode=0o700, parents=True, exist_ok=True)
        self._names = await asyncio.to_thread(SharedNames)
        command = [self._launch.python, *self._names.begin, "sglang.launch_server", "--config", str(self._settings)]
        self._process = process = start_guarded(
            command, self._launch.surroundings(self._temporary), self.log, deaf=False
        )
        self._exit = asyncio.create_task(_exit_code(process), name=f"{self.name} exit")
        client = SGLangClient(f"http://{LOOPBACK}:{self.port}", api_key=self.key)
        try:
            await until_there(client, self._answers, name=self.name, deadline_s=deadline_s)
        except BaseException:
            await self.close()
            raise
        await self._take_names_away(client, process.pid)
        return client

    async def _answers(self, client: SGLangClient) -> bool:
        """Raises WorkerDied when it has ended instead."""
        if self._process is not None and self._exit is not None and self._exit.done():
            lines = "\n".join(LOGS.last_lines(self.log))
            raise WorkerDied(
                f"the SGLang server {self.name} must start, got {exit_text(self._process.returncode)}. "
                f"Read {self.log}; it ends with:\n{lines}"
            )
        if self._process is not None:
            await asyncio.to_thread(self._look, self._process.pid)
        return await answers(client)

    async def _take_names_away(self, client: SGLangClient, session: int) -> None:
        """Of what all of a server's processes have open by its first answer: nothing stays there when it is killed."""
        with suppress(ServerError, PeerGone, DeadlineExceeded):
            await client.get("/v1/loads", deadline_s=_ASK_S)
        for name in await asyncio.to_thread(self._look, session):
            (FOLDER / name).unlink(missing_ok=True)

    def _look(self, session: int) -> set[str]:
        """What the processes of a session have open under a name that they do not take away. Whoever removes what is the server's
        knows it from now on: it is made long before the first answer, and a server that is killed removes nothing."""
        members, found = [member.pid for member in processes() if member.session == session], set[str]()
        for pid in members:
            with suppress(OSError):  # it ends, or is another user's
                found.update(
                    re.findall(rf"{FOLDER}/((?:sglang_loads_|sem\.)\S+)", Path(f"/proc/{pid}/maps").read_text())
                )
        if self._names is not None:
            self._names.saw(members, found)
        return found

    async def gone(self) -> str:
        assert self._exit is not None, "gone() is asked of a server that was started"
        return exit_text(await asyncio.shield(self._exit))

    def workers(self) -> Mapping[int, Stat]:
        return {} if self.pid is None else {process.pid: process for process in below(self.pid)}

    async def close(self) -> None:
        """Asks it to leave, then kills whatever is left of its session. May be called twice."""
        await self._end(self._grace_s)

    async def _end(self, grace_s: float) -> None:
        process, exited = self._process, self._exit
        if process is None or exited is None:
            return
        await asyncio.to_thread(self._look, process.pid)
        if grace_s and not exited.done():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with suppress(DeadlineExceeded):
                await wait_for(asyncio.shield(exited), name="end of sglang", peer=self.name, deadline_s=grace_s)
        # Its children may have left their parent's group, but not its session.
        # Dying takes the kernel a moment, and it tells nobody but the parent.
        async with waiting("death of sglang", peer=self.name, deadline_s=_DEATH_S):
            while await asyncio.to_thread(kill_session, process.pid):  # noqa: ASYNC110 - nothing tells of all of them
                await asyncio.sleep(0.01)
            await asyncio.shield(exited)
        self._process = None
        names, self._names = self._names, None
        if names is not None:
            await asyncio.to_thread(names.remove)
        self._settings.unlink(missing_ok=True)
        await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)


class AttachedServer:
    """A server that runs already, and is neither started nor ended here."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        self.name = url
        self._url = url
        self._key = key

    async def start(self, deadline_s: float) -> SGLangClient:
        client = SGLangClient(self._url, api_key=self._key)
        await until_there(client, answers, name=self.name, deadline_s=deadline_s)
        return client

    async def gone(self) -> str:
        """Never told: nothing says that it ended but its silence (`silence.py`)."""
        return await asyncio.get_running_loop().create_future()

    def workers(self) -> None:
        return

    async def close(self) -> None:
        return


async def until_there(
    client: SGLangClient, there: Callable[[SGLangClient], Awaitable[bool]], *, name: str, deadline_s: float
) -> None:
    """Returns when `there` says so; closes the client where it never does, or raises."""
    try:
        async with waiting("start of sglang", peer=name, deadline_s=deadline_s):
            while not await there(client):  # noqa: ASYNC110 - nothing tells when it is there
                await asyncio.sleep(_POLL_S)
    except BaseException:
        await client.__aexit__()
        raise


async def answers(client: SGLangClient) -> bool:
    """Whether the server has loaded its model and generates. Raises ServerError where it refuses the key."""
    try:
        await client.get("/health_generate", deadline_s=_ASK_S)
    except ServerError as error:
        if error.status in (401, 403):
            raise
        return False
    except (PeerGone, DeadlineExceeded):
        return False
    return True


async def first_of(works: Iterable[Awaitable[T]]) -> T:
    """What the first one to end says; the others are cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    await over(process.pid)
    return process.wait()


@contextmanager
def held_port() -> Iterator[int]:
    """A port of the loopback interface for a server that is started meanwhile, and that binds it with SO_REUSEADDR, as all do.

    It stays bound here and does not listen: the kernel lends it to nobody, and still lets a process have it that asks for it by
    number. A port that was only looked for may be another's in the seconds until a server has loaded its libraries.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((LOOPBACK, 0))
        yield held.getsockname()[1]
