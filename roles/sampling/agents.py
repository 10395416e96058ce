"""Agents: programs of somebody else that make the samples of a run, by the settings `rollout.agent`.

Owns the process of each sample: what it is given, how long it may take, how it ends, and what its sample is worth. Does not own
what it is answered and what becomes of that (`agent_sessions.py`, `roles/serve/`).

    row.json -> command, below a subreaper -> calls of /v1/chat/completions -> rows
                  its end: exit, POST .../reward, or deadline_s      worth: that POST, the output file, or reward.function

Invariant: when a sample is handed in, nothing that its program has started is alive, and its folder is gone. A program that fails
or is late fails its own sample, with its last words; an error of the engine is the group's, which is made again. While a program
lives the lease of its group lasts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from rondo.roles.config import JobConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.engines.engine import Engine
from rondo.roles.engines.stops import Stops
from rondo.roles.sampling.agent_sessions import Session, Sessions, Worth
from rondo.roles.sampling.environments import EnvironmentStats
from rondo.roles.sampling.episode import Limits, Made, unsaid
from rondo.roles.sampling.workflow import Client, Context
from rondo.roles.serve.app import listening
from rondo.roles.serve.prompt_work import PromptWork, prompt_work
from rondo.roles.serve.service import Service
from rondo.runtime.errors import ConfigError
from rondo.runtime.processes.process import exit_text, when_over
from rondo.runtime.processes.subreaper import END
from rondo.runtime.values import as_json

OpenWork = Callable[[str], AbstractAsyncContextManager[PromptWork]]
_GRACE_S = 2.0
"""A program whose session is over may put its things away for so long."""
_WORDS, _CHUNK, _PAUSE_S = 2048, 1 << 16, 0.05
"""Bytes of a program's last words; what it writes to standard error is read so many at a time, with a pause behind each."""
_MAX_OUTPUT = 1 << 20


def check_command(config: JobConfig) -> None:
    """ConfigError for a command that is not there."""
    agent = config.rollout.agent
    if agent is not None and shutil.which(agent.command[0]) is None:
        raise ConfigError(
            f"rollout.agent.command must begin with a program that can be run, got {agent.command[0]!r}. Correct it"
        )


class Agents:
    """The workflow of a run with `rollout.agent`, called while it is `serving`; all methods belong to one event loop, on the main
    thread. `folder` holds what processes are given, a folder for each."""

    def __init__(self, config: JobConfig, model_path: str, folder: Path) -> None:
        assert config.rollout.agent is not None
        check_command(config)
        self._config, self._settings, self._folder = config, config.rollout.agent, folder
        self._model_path = model_path
        self._places = asyncio.Semaphore(self._settings.max_processes)
        self._stats = EnvironmentStats()
        self._url = ""
        self._sessions: Sessions | None = None

    @asynccontextmanager
    async def serving(
        self, engine: Engine, tokenizer: Any, stops: Stops, open_work: OpenWork = prompt_work
    ) -> AsyncIterator[None]:
        """Answers programs while the body lasts, each by its session's key."""
        config, rollout = self._config, self._config.rollout
        self._sessions = sessions = Sessions(
            engine, stops=stops.texts, components=config.reward.components, other_sampling=self._settings.other_sampling
        )
        others = ("tools", "continue_final_message")
        template_args = {name: each for name, each in config.data.chat_template_args.items() if name not in others}
        sets = [] if config.evaluation is None else config.evaluation.named_sets().values()
        longest = max([rollout.max_new_tokens, *(each.max_new_tokens or 0 for each in sets)])
        async with open_work(self._model_path) as work:
            service = Service(
                sessions, tokenizer, work, config.name, model_path=self._model_path, stop_token_ids=stops.ids,
                max_length=rollout.max_prompt_tokens + longest, control=False, trajectories=sessions.trajectories,
                samples=sessions, template_args=template_args,
            )  # fmt: skip
            async with listening(service, (), "127.0.0.1", 0, drain_s=_GRACE_S) as self._url:
                yield

    def stats(self) -> dict[str, EnvironmentStats]:
        """Of the programs that were started."""
        return {"agent": self._stats}

    async def __call__(self, row: Row, client: Client, context: Context) -> None:
        """Makes the samples of a row, each by a process of its own."""
        if context.media is not None:
            raise RowError(f"{row.name}: rollout.agent must have rows of text, got media. Leave the row out")
        async with asyncio.TaskGroup() as tasks:
            for number in context.missing:
                tasks.create_task(self._make(number, row, client, context))

    async def _make(self, number: int, row: Row, client: Client, context: Context) -> None:
        assert self._sessions is not None
        with context.elsewhere():
            async with self._places:
                with self._sessions.opened(client, number, context.limits) as session:
                    error, told = await self._played(session, self._sessions, row, context)
                    rows = self._sessions.ended(session)
        if session.fault is not None:
            raise session.fault
        if not rows and not error:
            error = "the agent must be answered at least once, got no call that was"
        reward, details = (None, {}) if told is None or error else told
        context.done(Made(number, rows or (unsaid(context.prompt),), reward, error, details))

    async def _played(
        self, session: Session, sessions: Sessions, row: Row, context: Context
    ) -> tuple[str | None, Worth | None]:
        """What went wrong in the process of a session, and what it says it is worth."""
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="agent-", dir=self._folder))
        began, limit_s, late = time.monotonic(), self._settings.deadline_s, False
        error: str | None = None
        try:
            environment = self._environment(session, row, folder, context)
            process = _Process(self._settings.command, environment, session.ends)
            try:
                late = not await _happens(session.ends, limit_s)
                if session.worth is not None:
                    await _happens(process.over, _GRACE_S)
            finally:
                ended, words = await process.close()
            if session.worth is not None or session.fault is not None:
                return None, session.worth
            if late or ended != 0:
                rule = f"end within {limit_s:g} s, got no end" if late else f"end with 0, got {exit_text(ended)}"
                error = f"agent.command must {rule}. Its last words: {words or 'none'}"
            else:
                try:
                    given = await asyncio.to_thread(_output, folder / "output.json")
                    session.worth = None if given is None else sessions.worth_of(given)
                except ConfigError as wrong:
                    error = str(wrong)
            return error, session.worth
        finally:
            had, spent_s = self._stats, time.monotonic() - began
            failed = error is not None and not late
            self._stats = EnvironmentStats(
                had.steps + 1, had.seconds + spent_s, had.errors + failed, had.timeouts + late
            )
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _environment(self, session: Session, row: Row, folder: Path, context: Context) -> dict[str, str]:
        """The environment of a process: this one's, and where it finds what."""
        data, limits = self._config.data, session.limits
        named = {**row.metadata, data.prompt: row.prompt, **({} if data.label is None else {data.label: row.label})}
        (folder / "row.json").write_bytes(orjson.dumps(as_json(named)))
        near = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1")))
        told = {name: getattr(limits, name) for name in Limits.__slots__ if name not in ("max_s", "max_turn_bytes")}
        return {
            **os.environ, "no_proxy": near, "NO_PROXY": near, "TMPDIR": str(folder), "OPENAI_BASE_URL": f"{self._url}/v1",
            "OPENAI_API_KEY": session.key, "OPENAI_MODEL": self._config.name, "RONDO_SESSION": session.name,
            "RONDO_REWARD_URL": f"{self._url}/sessions/{session.name}/reward", "RONDO_ROW": str(folder / "row.json"),
            "RONDO_OUTPUT": str(folder / "output.json"), "RONDO_EVALUATES": str(int(context.evaluates)),
            "RONDO_LIMITS": orjson.dumps(told | {"deadline_s": self._settings.deadline_s}).decode(),
        }  # fmt: skip


class _Process:
    """One program, below a subreaper, in a group of its own. `ends` is set at its end, too."""

    def __init__(self, command: tuple[str, ...], environment: dict[str, str], ends: asyncio.Event) -> None:
        line = [sys.executable, "-P", "-m", "rondo.runtime.processes.command", str(os.getpid()), *command]
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


async def _happens(event: asyncio.Event, limit_s: float) -> bool:
    """Whether it does, before so long."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), limit_s)
    return event.is_set()


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
