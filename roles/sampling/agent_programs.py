"""Programs of somebody else that make samples: each is told its sample by its environment, and ends with all that it started.

Owns a program's process, what it is given, its folder, how long it may take, and what it says of its sample. Does not own who
answers its calls: the replica that starts it (`agents.py`), or one that runs elsewhere (`rondo agents`).

    played = await play(("python", "agent.py"), told, "http://127.0.0.1:41233", folder, limit_s=600, ends=session.ends)

Invariant: when `play` is over nothing that the program has started is alive, and its folder is gone. It loads neither torch nor
transformers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from rondo.runtime.errors import ConfigError
from rondo.runtime.processes.guard import module_command
from rondo.runtime.processes.process import exit_text, when_over
from rondo.runtime.processes.subreaper import END
from rondo.runtime.waits import happens

_GRACE_S = 2.0
"""A program whose session is over may put its things away for so long."""
_WORDS, _CHUNK, _PAUSE_S = 2048, 1 << 16, 0.05
"""Bytes of a program's last words; what it writes to standard error is read so many at a time, with a pause behind each."""
_MAX_OUTPUT = 1 << 20
OVER = {"over": True}
"""What is posted of a sample that is over and has no worth of its own: `reward.function` is asked then."""


@dataclass(frozen=True, slots=True)
class Told:
    """A sample to make: `session` and `key` open it, `row` is JSON by the names of its columns, `limits` are its budgets."""

    session: str
    key: str
    model: str
    row: Any
    limits: Mapping[str, Any]
    evaluates: bool


class Played(NamedTuple):
    """How a program ended. `error` says what was wrong, None for nothing; `output` is what it wrote, None for nothing."""

    error: str | None
    output: Any = None
    late: bool = False


async def play(
    command: tuple[str, ...], told: Told, url: str, folder: Path | None, *, limit_s: float, ends: asyncio.Event,
    over: Callable[[], bool] = lambda: False,
) -> Played:  # fmt: skip
    """Runs the program of one sample, whose calls `url` answers, in a folder of its own below `folder`. `ends` is set by whoever
    knows that its session is over, and by its end; `over` says whether it is: then it has a moment, and its end says nothing."""
    place = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="agent-", dir=folder))
    try:
        process = _Process(command, _environment(told, url, place), ends)
        try:
            late = not await happens(ends, limit_s)
            if over():
                await happens(process.over, _GRACE_S)
        finally:
            ended, words = await process.close()
        if over():
            return Played(None)
        if late or ended != 0:
            rule = f"end within {limit_s:g} s, got no end" if late else f"end with 0, got {exit_text(ended)}"
            return Played(f"agent.command must {rule}. Its last words: {words or 'none'}", late=late)
        try:
            return Played(None, await asyncio.to_thread(_output, place / "output.json"))
        except ConfigError as wrong:
            return Played(str(wrong))
    finally:
        await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)


def _environment(told: Told, url: str, folder: Path) -> dict[str, str]:
    """The environment of a process: this one's, and where it finds what."""
    (folder / "row.json").write_bytes(orjson.dumps(told.row))
    host = url.partition("://")[2].partition("/")[0].rpartition(":")[0].strip("[]")
    near = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), host)))
    return {
        **os.environ, "no_proxy": near, "NO_PROXY": near, "TMPDIR": str(folder), "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": told.key, "OPENAI_MODEL": told.model, "RONDO_SESSION": told.session,
        "RONDO_REWARD_URL": reward_url(url, told.session), "RONDO_ROW": str(folder / "row.json"),
        "RONDO_OUTPUT": str(folder / "output.json"), "RONDO_EVALUATES": str(int(told.evaluates)),
        "RONDO_LIMITS": orjson.dumps(told.limits).decode(),
    }  # fmt: skip


def reward_url(url: str, session: str) -> str:
    """Where the worth of a session is posted, or what went wrong in it; so it ends."""
    return f"{url}/sessions/{session}/reward"


class _Process:
    """One program, below a subreaper, in a group of its own. `ends` is set at its end, too."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str], ends: asyncio.Event) -> None:
        line = module_command("rondo.runtime.processes.command", str(os.getpid()), *command)
        self._process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            process_group=0,
            env=environment,
        )
        self.over, self._ends, self._words = asyncio.Event(), ends, b""
        assert self._process.stderr is not None
        self._told = self._process.stderr.fileno()
        os.set_blocking(self._told, False)
        when_over(self._process.pid, self._ended)
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.Handle = self._loop.call_soon(self._loop.add_reader, self._told, self._hear)

    def _ended(self) -> None:
        self.over.set()
        self._ends.set()

    def _hear(self) -> None:
        """One that says much waits for us, and not the loop for it."""
        self._loop.remove_reader(self._told)
        if self._read():
            self._later = self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._told, self._hear)

    def _read(self) -> bool:
        with suppress(BlockingIOError):
            said = os.read(self._told, _CHUNK)
            self._words = (self._words + said)[-_WORDS:]
            return bool(said)
        return False

    async def close(self) -> tuple[int, str]:
        """Kills it with all that it started, and waits for their end: how it ended, and its last words."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, END)
            os.kill(self._process.pid, signal.SIGCONT)
        await self.over.wait()
        code = self._process.wait()  # it has ended: this only collects it
        self._loop.remove_reader(self._told)
        self._later.cancel()
        while self._read():  # as much as a pipe holds
            pass
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code, self._words.decode(errors="replace").strip()


def _output(path: Path) -> Any:
    """What a program has written there; None for nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"RONDO_OUTPUT must be a file of JSON, got {error.strerror}. Write one") from error
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_OUTPUT:
            raise ConfigError(
                f"RONDO_OUTPUT must be a file of at most {_MAX_OUTPUT} bytes, got something else. Write less"
            )
        try:
            return orjson.loads(file.read())
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"RONDO_OUTPUT must be a file of JSON, got {error}. Write one") from error
