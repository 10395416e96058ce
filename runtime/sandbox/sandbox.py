"""Sandbox: runs a command that nobody vouches for, with files, standard input, limits and a deadline.

Owns who runs it: this machine (`jail.py`), a container by a command of the user's, or a server by URL; and the deadline, the
memory of all its processes together, and how much of its output is kept. Does not own what is run, or what that is worth.

    ran = await sandbox().run({"main.py": b"print(6 * 7)"}, ["python", "main.py"])
    ran.output, ran.exit, ran.why                                     # "42\\n", 0, None

Invariant: whatever the command does, `run` returns soon after `deadline_s`, and nothing that it started is alive then: all of it
lives below a subreaper, and in namespaces that end with their first process.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import logging
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal

from rondo.runtime.errors import ConfigError, Refused
from rondo.runtime.processes.guard import module_command
from rondo.runtime.processes.process import below, memory_bytes, when_over
from rondo.runtime.processes.subreaper import END

Why = Literal["deadline", "memory", "output"]
_LOOK_S = 0.1
"""How often a command's memory is looked at."""
_CHUNK = 1 << 16
_log = logging.getLogger(__name__)


class SandboxFailed(Refused):
    """The sandbox did not run a command: no fault of the command's."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one command, and all that it starts: together, but for `disk_bytes`, which without namespaces is a file's."""

    deadline_s: float = 10.0
    memory_bytes: int = 1 << 30
    num_processes: int = 64
    """Threads count too."""
    output_bytes: int = 1 << 20
    """Of standard output, and of standard error."""
    disk_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of a command. `exit`: its code, -9 for SIGKILL; `why` it was ended before its time, None where it was not."""

    output: str
    errors: str
    exit: int
    why: Why | None = None


@dataclass(frozen=True, slots=True)
class Sandbox:
    """By settings as those of `SandboxConfig`, which are JSON."""

    isolation: Literal["namespaces", "limits"] | None = None
    command: Sequence[str] = ()
    url: str | None = None
    paths: Sequence[str] = ()
    limits: Mapping[str, Any] = field(default_factory=dict)

    async def run(
        self, files: Mapping[str, bytes], command: Sequence[str], stdin: bytes = b"", limits: Limits | None = None
    ) -> Ran:
        """Runs `command` in a folder with these files. Raises SandboxFailed where nothing could run it."""
        limits = Limits(**self.limits) if limits is None else limits
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ConfigError(f"files must have names below the sandbox's folder, got {name!r}. Rename it")
        if self.url is not None:
            return await _on_server(self.url, files, command, stdin, limits)
        if self.command:
            return await _in_container(self.command, files, command, stdin, limits)
        return await self._here(await self.isolates(), files, command, stdin, limits)

    async def isolates(self) -> str:
        """The isolation that commands have on this machine, tried once in a process. SandboxFailed for none."""
        key = (self.isolation, tuple(self.paths))
        if key not in _tried:
            said = []
            for isolation in ("namespaces", "limits") if self.isolation is None else (self.isolation,):
                try:
                    ran = await self._here(isolation, {}, ["python", "-c", ""], b"", Limits(deadline_s=60.0))
                except SandboxFailed as error:
                    said.append(f"{isolation}: {error}")
                else:
                    if ran.exit == 0:
                        _tried[key] = isolation
                        break
                    said.append(f"{isolation}: python ends with {ran.exit} ({ran.errors[-200:].strip()})")
            else:
                raise SandboxFailed(
                    f"sandbox must run commands on this machine, got {'; '.join(said)}. Set sandbox.command or sandbox.url, or "
                    "sandbox.isolation to 'limits'"
                )
            if said:
                _log.warning("sandbox isolation=%s why=%s", isolation, "; ".join(said))
        return _tried[key]

    async def _here(
        self, isolation: str, files: Mapping[str, bytes], command: Sequence[str], stdin: bytes, limits: Limits
    ) -> Ran:
        spec = {
            **asdict(limits), "isolation": isolation, "command": list(command), "paths": list(self.paths),
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
        }  # fmt: skip
        async with contextlib.AsyncExitStack() as stack:
            if isolation == "limits":
                spec["folder"] = await stack.enter_async_context(_folder({}))
            told = stack.enter_context(_memory(json.dumps(spec).encode()))
            line = module_command("rondo.runtime.sandbox.jail", str(os.getpid()), str(told.fileno()))
            ran = await _watched(line, stdin, limits, (told.fileno(),))
            found = os.pread(told.fileno(), 1 << 16, 0)
        said = json.loads(found or b"{}")
        if "error" in said:
            raise SandboxFailed(said["error"])
        if "isolation" in said and ran.why is None:  # what the jail was told: it never read it
            raise SandboxFailed(f"its process ended with {ran.exit}: {ran.errors[-500:].strip()}")
        return ran


_tried: dict[tuple[Any, ...], str] = {}
_settings: dict[str, Any] = {}


def use(settings: Mapping[str, Any]) -> None:
    """From now on `sandbox` is by these, in this process."""
    _settings.clear()
    _settings.update(settings)
    sandbox.cache_clear()


def used() -> dict[str, Any]:
    """The settings of `use`, which other processes of this one's are given."""
    return dict(_settings)


@functools.cache
def sandbox() -> Sandbox:
    """The run's, in the process of a reward or a tool."""
    return Sandbox(**_settings)


async def _in_container(
    template: Sequence[str], files: Mapping[str, bytes], command: Sequence[str], stdin: bytes, limits: Limits
) -> Ran:
    async with _folder(files) as folder:
        told = {
            "folder": folder, "memory_mb": str(limits.memory_bytes >> 20), "num_processes": str(limits.num_processes),
            "deadline_s": f"{limits.deadline_s:g}",
        }  # fmt: skip
        words = [
            functools.reduce(lambda word, each: word.replace(f"{{{each}}}", told[each]), told, word)
            for word in template
        ]
        line = module_command("rondo.runtime.processes.command", str(os.getpid()), *words, *command)
        return await _watched(line, stdin, limits, (), cwd=folder)


async def _on_server(url: str, files: Mapping[str, bytes], command: Sequence[str], stdin: bytes, limits: Limits) -> Ran:
    """In the words of SandboxFusion (bytedance/SandboxFusion, POST /run_code)."""
    import aiohttp

    asked = {
        "code": shlex.join(command), "language": "bash", "stdin": stdin.decode(errors="replace"),
        "run_timeout": limits.deadline_s, "memory_limit_MB": limits.memory_bytes >> 20,
        "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }  # fmt: skip
    timeout = aiohttp.ClientTimeout(total=2 * limits.deadline_s + 30)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url}/run_code", json=asked) as answer,
        ):
            answer.raise_for_status()
            body = await answer.content.read(16 * limits.output_bytes + (1 << 20))
        said = json.loads(body)
        ran = said.get("run_result")
        if said["status"] == "SandboxError" or ran is None:
            raise SandboxFailed(f"sandbox.url must run commands, got {said.get('message')!r}. See the server's log")
        late = ran["status"] == "TimeLimitExceeded"
        texts = [ran.get(name) or "" for name in ("stdout", "stderr")]
        why: Why | None = "deadline" if late else "output" if max(map(len, texts)) > limits.output_bytes else None
        output, errors = (text[: limits.output_bytes] for text in texts)
        code = ran.get("return_code")
        return Ran(output, errors, -signal.SIGKILL if late or code is None else code, why)
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SandboxFailed(
            f"sandbox.url must answer as SandboxFusion, got {type(error).__name__}: {error}. See it"
        ) from error


@contextlib.contextmanager
def _memory(content: bytes) -> Iterator[IO[bytes]]:
    """A file in memory, which nobody waits to write or to read."""
    with os.fdopen(os.memfd_create("sandbox"), "w+b") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        yield file


@contextlib.asynccontextmanager
async def _folder(files: Mapping[str, bytes]) -> AsyncIterator[str]:
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        await asyncio.to_thread(_write, Path(folder), files)
        yield folder
    finally:
        await asyncio.to_thread(_remove, folder)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _remove(folder: str) -> None:
    """With what was closed to its owner, or is nested deeper than Python walks."""
    for command in ("chmod", "-R", "u+rwx", folder), ("rm", "-rf", folder):
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


async def _watched(
    line: Sequence[str], stdin: bytes, limits: Limits, descriptors: Sequence[int], cwd: str | None = None
) -> Ran:
    """Runs a line that begins with a subreaper, until it ends or has to."""
    process = _started(line, stdin, descriptors, cwd)
    over, told = asyncio.Event(), asyncio.Event()

    def ended() -> None:
        over.set()
        told.set()

    stop = when_over(process.pid, ended)
    assert process.stdout is not None and process.stderr is not None
    kept = [_Kept(pipe, limits.output_bytes, told) for pipe in (process.stdout, process.stderr)]
    until, why = time.monotonic() + limits.deadline_s, None
    try:
        while why is None and not over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(told.wait(), max(0.0, min(_LOOK_S, until - time.monotonic())))
            why = None if over.is_set() else _why(process.pid, limits, until, kept)
    finally:
        with contextlib.suppress(ProcessLookupError):
            if not over.is_set():
                os.kill(process.pid, END)
                os.kill(process.pid, signal.SIGCONT)
        await over.wait()
        stop()
        code = process.wait()  # it has ended: this only collects it
        for each in kept:
            each.close()
    if why is None and any(each.is_full for each in kept):
        why = "output"
    output, errors = (bytes(each.data).decode(errors="replace") for each in kept)
    return Ran(output, errors, code, why)


def _started(line: Sequence[str], stdin: bytes, descriptors: Sequence[int], cwd: str | None) -> subprocess.Popen[bytes]:
    with _memory(stdin) as given:
        return subprocess.Popen(
            line, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0, pass_fds=descriptors, cwd=cwd,
        )  # fmt: skip


def _why(pid: int, limits: Limits, until: float, kept: Sequence[_Kept]) -> Why | None:
    """Why a command has to end now."""
    if time.monotonic() >= until:
        return "deadline"
    if any(each.is_full for each in kept):
        return "output"
    found, most = below(pid), limits.memory_bytes
    # The sum of RSS is never the smaller one, and costs far less to read.
    over = sum(process.rss_bytes for process in found) > most and memory_bytes(found) > most
    return "memory" if over else None


class _Kept:
    """The beginning of what a pipe says. `told` is set when that is too much."""

    def __init__(self, pipe: IO[bytes], most: int, told: asyncio.Event) -> None:
        self.data, self.is_full = bytearray(), False
        self._pipe, self._most, self._told = pipe, most, told
        os.set_blocking(pipe.fileno(), False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pipe.fileno(), self._hear)

    def _hear(self) -> bool:
        """Whether there may be more."""
        try:
            said = os.read(self._pipe.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        self.data += said[: self._most - len(self.data)]
        if len(self.data) == self._most:
            self.is_full = True
            self._told.set()
        if not said or self.is_full:
            self._loop.remove_reader(self._pipe.fileno())
        return bool(said) and not self.is_full

    def close(self) -> None:
        while not self.is_full and self._hear():  # as much as a pipe holds
            pass
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
