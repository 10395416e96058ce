"""Agents: programs of somebody else that make the samples of a run, by the settings `rollout.agent`.

Owns that each sample has its session, that somebody makes it, and what it is worth. Does not own the processes of programs
(`agent_programs.py`), nor what they are answered and what becomes of that (`agent_sessions.py`, `roles/serve/`).

    row -> agent.command, started here                      -> calls of /v1/chat/completions -> rows
    row -> POST /episodes of whoever runs elsewhere         its end: exit, POST .../reward, or deadline_s

Invariant: when a sample is handed in, nothing more of its session is answered. A program that fails or is late fails its own
sample, with its last words; an error of the engine is the group's, which is made again. While a program lives, or is waited for,
the lease of its group lasts.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from rondo.roles.config import AgentConfig, JobConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.engines.engine import Engine
from rondo.roles.engines.stops import Stops
from rondo.roles.rewards.pool import problem_of
from rondo.roles.sampling.agent_programs import Played, Told, play
from rondo.roles.sampling.agent_sessions import Session, Sessions, Worth
from rondo.roles.sampling.environments import EnvironmentStats
from rondo.roles.sampling.episode import Limits, Made, unsaid
from rondo.roles.sampling.workflow import Client, Context
from rondo.roles.serve.app import listening
from rondo.roles.serve.endpoint import to_others
from rondo.roles.serve.prompt_work import PromptWork, prompt_work
from rondo.roles.serve.service import Service
from rondo.runtime.errors import ConfigError, DeadlineExceeded
from rondo.runtime.values import as_json
from rondo.runtime.waits import wait_for
from rondo.runtime.worker.context import WorkerContext

OpenWork = Callable[[str], AbstractAsyncContextManager[PromptWork]]
FOLDER = "agents"
"""Of the run directory: where replicas say at which address samples are to be had."""
_DRAIN_S = 2.0


def check_command(agent: AgentConfig) -> None:
    """ConfigError for a program, or a script of Python's, that is not there."""
    if agent.command and shutil.which(agent.command[0]) is None:
        raise ConfigError(
            f"rollout.agent.command must begin with a program that can be run, got {agent.command[0]!r}. Correct it"
        )
    script = next((each for each in agent.command[1:] if not each.startswith("-")), "")
    is_python = Path(agent.command[0] if agent.command else "").name.startswith("python")
    if is_python and script.endswith(".py") and not Path(script).is_file():
        raise ConfigError(
            f"rollout.agent.command must name a script that exists, got {script!r} from {Path.cwd()}. Correct the path"
        )


class Agents:
    """The workflow of a run with `rollout.agent`, called while it is `serving`; all methods belong to one event loop, on the main
    thread. `folder` holds what processes are given, a folder for each."""

    replays = True
    """A program that begins again, as its group has another holder, is answered what it was, as far as it asks the same."""

    def __init__(self, config: JobConfig, model_path: str, folder: Path) -> None:
        assert config.rollout.agent is not None
        check_command(config.rollout.agent)
        self._config, self._settings, self._folder = config, config.rollout.agent, folder
        self._model_path = model_path
        self._places = asyncio.Semaphore(self._settings.max_processes)
        self._stats = EnvironmentStats()
        self._url = ""
        self._sessions: Sessions | None = None

    @asynccontextmanager
    async def serving(
        self, ctx: WorkerContext, engine: Engine, tokenizer: Any, stops: Stops, open_work: OpenWork = prompt_work
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
            elsewhere = self._settings.elsewhere
            if elsewhere is None:
                here = listening(service, (), "127.0.0.1", 0, drain_s=_DRAIN_S)
            else:
                here = to_others(ctx, elsewhere, service, folder=FOLDER, drain_s=_DRAIN_S)
            async with here as self._url:
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
        sessions, url = self._sessions, self._url
        assert sessions is not None
        with context.elsewhere():
            async with self._places:
                with sessions.opened(client, number, context.limits) as session:
                    told, began = await asyncio.to_thread(self._told, session, row, context), time.monotonic()
                    if self._settings.command:
                        played = await play(
                            self._settings.command,
                            told,
                            url,
                            self._folder,
                            limit_s=self._settings.deadline_s,
                            ends=session.ends,
                            over=lambda: session.told or session.fault is not None,
                        )
                    else:
                        played = await self._elsewhere(session, told, sessions)
                    error, worth = self._judged(session, played, sessions)
                    self._count(time.monotonic() - began, error, played.late)
                    rows = sessions.ended(session)
                    turns = sessions.turns(session) if rows else []
        if session.fault is not None:
            raise session.fault
        if not rows and not error:
            error = "the agent must be answered at least once, got no call that was"
        reward, details = (None, {}) if worth is None or error else worth
        context.done(Made(number, rows or (unsaid(context.prompt),), reward, error, details, turns))

    async def _elsewhere(self, session: Session, told: Told, sessions: Sessions) -> Played:
        """Waits for somebody to take the sample, and to say that it is over."""
        settings = self._settings
        try:
            taken = sessions.offer(told)
            await wait_for(
                taken, name="a sample to be taken", peer="agents elsewhere", deadline_s=settings.taken_deadline_s
            )
            peer, limit_s = f"the agent of {session.name}", settings.deadline_s
            await wait_for(session.ends.wait(), name="the end of a session", peer=peer, deadline_s=limit_s)
        except DeadlineExceeded as late:
            return Played(
                f"agent.elsewhere must have agents that take samples and end them, got none: {late}", late=True
            )
        return Played(session.error)

    def _judged(self, session: Session, played: Played, sessions: Sessions) -> tuple[str | None, Worth | None]:
        """What went wrong in a session, and what it says that it is worth."""
        if session.worth is not None or session.fault is not None or played.output is None:
            return played.error, session.worth
        try:
            session.worth = sessions.worth_of(played.output)
        except ConfigError as wrong:
            return str(wrong), None
        return None, session.worth

    def _count(self, spent_s: float, error: str | None, late: bool) -> None:
        had, failed = self._stats, error is not None and not late
        self._stats = EnvironmentStats(had.steps + 1, had.seconds + spent_s, had.errors + failed, had.timeouts + late)

    def _told(self, session: Session, row: Row, context: Context) -> Told:
        limits, named = session.limits, row.named(self._config.data)
        named = {name: value for name, value in named.items() if problem_of({name: value}) is None}
        told = {name: getattr(limits, name) for name in Limits.__slots__ if name not in ("max_s", "max_turn_bytes")}
        told["deadline_s"] = self._settings.deadline_s
        return Told(session.name, session.key, self._config.name, as_json(named), told, context.evaluates)
