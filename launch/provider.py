"""What the admin endpoint shows of a run: the supervisor's snapshot, and what workers and coordinator answered last.

Owns the polling of other processes, every few seconds and with a deadline, so that showing never waits for anybody. Owns no
number itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from pydantic import Field

from rondo.launch.metrics.descriptions import numbers
from rondo.launch.metrics.exposition import Newest, families
from rondo.launch.report.records import is_step, last_records
from rondo.launch.report.timeline import chrome_trace, newest_steps, parse_steps, read_run, spans_of_steps
from rondo.runtime.actors.broadcast import Broadcast
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.admin.endpoint import Family
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.admin.openapi import QUERY, Operation
from rondo.runtime.admin.server import Handler
from rondo.runtime.errors import ConfigError, DeadlineExceeded, RondoError
from rondo.runtime.records.telling import tell_every
from rondo.runtime.section import Section
from rondo.runtime.supervision.machine import State
from rondo.runtime.supervision.spec import COORDINATOR_NAME, SupervisorView
from rondo.runtime.supervision.supervisor import Supervisor

_PERIOD_S = 2.0
_ANSWER_S = 1.0
_STACKS_S = 5.0
_NUM_SAMPLES = 20
_SAMPLES_BYTES = 1 << 20
_FRESH_S = 0.25
_NUM_STEPS = 10


class RunProvider:
    """The `Provider` of a live run. `poll` runs beside the supervisor; `on_event` takes its records."""

    def __init__(
        self,
        supervisor: Supervisor,
        rt_dir: Path,
        token: str,
        run_dir: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supervisor = supervisor
        self._rt_dir, self._token = rt_dir, token
        self._run_dir = run_dir
        self._broadcast = Broadcast()
        self._refs: dict[str, ActorRef] = {}
        self._waits: list[dict[str, Any]] = []
        self._bus: dict[str, Any] = {}
        self._last_step: dict[str, Any] = {}
        self._newest = Newest()
        self._judged: dict[tuple[str, str], Mapping[str, Any]] = {}
        """(who judges, rollout process) -> what that said last of it."""
        self._clock = clock
        self._seen: SupervisorView | None = None
        self._seen_at = 0.0

    async def poll(self) -> None:
        """Ask every process what it waits for, and the coordinator for its counters, until cancelled."""
        try:
            await tell_every("polls", _PERIOD_S, self._ask_all)
        finally:
            for ref in self._refs.values():
                ref.close()
            self._broadcast.close()

    async def _ask_all(self) -> None:
        groups = self._snapshot().groups
        workers = [f"{group.name}.{rank}" for group in groups if not group.service for rank in range(group.num_ranks)]
        answers = await asyncio.gather(*(self._ask(name, "rondo.waits") for name in [COORDINATOR_NAME, *workers]))
        self._waits = [wait for answer in answers if answer is not None for wait in answer["waits"]]
        self._bus = await self._ask(COORDINATOR_NAME, "stats") or self._bus

    async def _ask(self, name: str, method: str) -> Any:
        """A process's answer, or None from one that is starting, stopping or busy."""
        try:
            return await self.ref(name).call(method, deadline_s=_ANSWER_S)
        except (RondoError, OSError):
            return None

    def ref(self, name: str) -> ActorRef:
        """The coordinator, or a worker by "GROUP.RANK"."""
        if name not in self._refs:
            self._refs[name] = ActorRef(f"unix:{self._rt_dir}/{name}.sock", token=self._token, peer=name)
        return self._refs[name]

    def on_event(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "metrics":
            self._newest.add(record)
        for name in {"genrm", "scorer"} & record.keys():
            self._judged[name, record["source"]] = record[name]
        if is_step(record):
            self._last_step = dict(record)
        self._broadcast.publish(dict(record))

    def _snapshot(self) -> SupervisorView:
        """The run now, or a moment ago: it is taken from what the system knows of all its processes, and a crowd may ask."""
        now = self._clock()
        if self._seen is None or now - self._seen_at > _FRESH_S:
            self._seen, self._seen_at = self._supervisor.snapshot(), now
        return self._seen

    # ---- the Provider's methods -------------------------------------------------------------------------------------

    def health(self) -> Mapping[str, Any]:
        seen = self._snapshot()
        groups = seen.groups
        below = self._bus.get("engines", {}).get("below", "")
        ready = all(each.state in (State.READY, State.DONE) for each in groups if not each.passing) and not below
        return {"ready": ready, "healthy": seen.phase != "failing"} | {
            "step": self._last_step.get("step"), "version": self._last_step.get("version", self._bus.get("version")),
            "attempt": self._bus.get("attempt"),
        } | self._judge() | ({"failing": failing} if (failing := self._bus.get("failing") or below) else {})  # fmt: skip

    def _judge(self) -> dict[str, float]:
        """What all rollout processes together say of the judge and of the scorer, as `GenrmStats` has it; nothing without one."""
        found = dict[str, float]()
        for (judge, _), told in self._judged.items():
            for name, value in told.items():
                name = f"{'judge' if judge == 'genrm' else judge}_{name}"
                found[name] = found.get(name, 0) + value
        return found

    def roles(self) -> Any:
        return [asdict(group) for group in self._snapshot().groups]

    def waits(self) -> Any:
        return self._waits

    def bus(self) -> Any:
        return self._bus

    def weights(self) -> Any:
        return {"committed": self._bus.get("version"), "proved": self.proved()}

    def proved(self) -> Mapping[str, int]:
        """Reader of weights, "<replica>/<role>.<rank>" -> the newest version that it has proved."""
        return self._bus.get("proved", {})

    def samples(self) -> Any:
        """The newest samples that were written for people to read."""
        files = sorted((self._run_dir / "samples").glob("step_*.jsonl"))
        return last_records(files[-1], _SAMPLES_BYTES, _NUM_SAMPLES) if files else []

    def metrics(self) -> Iterable[Family]:
        groups, bus = self._snapshot().groups, self._bus
        now = {
            "restarts": {group.name: group.restarts for group in groups},
            "memory_bytes": {group.name: group.rss_bytes for group in groups},
            "groups": bus.get("groups", {}), "groups_failed_in_a_row": bus.get("failed_in_a_row", 0),
            "refused_rows": bus.get("refused_rows", 0), "engines": bus.get("engines", {}).get("of", 0),
            "engines_healthy": bus.get("engines", {}).get("healthy", 0),
            "ring_used_bytes": {name: ring["used"] for name, ring in bus.get("rings", {}).items()},
        }  # fmt: skip
        told = self._newest.told({group.name for group in groups})
        return families([*told, *(("", path, value) for path, value in numbers(now))])

    async def stacks(self, name: str) -> dict[str, Any]:
        """Where a process stands, as it says itself: "GROUP.RANK", or the coordinator. A worker whose loop is held up
        writes its threads' stacks to its log, and is told as late."""
        groups = {group.name for group in self._snapshot().groups}
        if (COORDINATOR_NAME if name == COORDINATOR_NAME else name.rpartition(".")[0]) not in groups:
            raise ConfigError(
                f"process must be a role group's GROUP.RANK or {COORDINATOR_NAME}, got {name!r}. See /roles"
            )
        try:
            return {"process": name, "stacks": await self.ref(name).call("rondo.stacks", deadline_s=_STACKS_S)}
        except DeadlineExceeded:
            group, _, rank = name.rpartition(".")
            if not rank.isdecimal() or not self._supervisor.write_stacks(group, int(rank)):
                raise
            words = f"{name} must answer within {_STACKS_S:g} s, got nothing. Its stacks are at the end of its log"
            raise TurnedDown(503, words) from None

    def subscribe(self) -> AsyncIterator[dict[str, Any]]:
        return self._broadcast.subscribe()

    def stop(self, reason: str, *, quick: bool) -> None:
        self._supervisor.request_stop(reason, quick=quick)


class Steps(Section):
    """A:B, as `rondo timeline --steps`; by default the newest ones."""

    steps: str | None = Field(None, pattern="^[0-9]{0,9}(:[0-9]{0,9})?$")


class StacksOf(Section):
    """`process`: a worker, "actor-0.0", or "coordinator"."""

    process: str = Field(pattern="^[A-Za-z0-9_-]{1,100}([.][0-9]{1,6})?$")


STACKS = Operation("Where the threads and tasks of a process stand.", dict[str, Any], query=StacksOf)


TRACE = Operation("The Chrome trace of steps.", dict[str, Any], query=Steps)


def serve_trace(run_dir: Path) -> Handler:
    """GET /timeline?steps=A:B: the Chrome trace of these steps, of the newest ones where none are named."""

    def trace(steps: str | None) -> bytes:
        spans, figures = read_run(run_dir)
        chosen = newest_steps(spans, _NUM_STEPS) if steps is None else parse_steps(steps)
        return orjson.dumps(chrome_trace(spans_of_steps(spans, *chosen), figures))

    turn = asyncio.Lock()

    async def handler(request: web.Request) -> web.StreamResponse:
        if turn.locked():  # reading a whole run takes a core, which the run may need
            raise TurnedDown(503, "one trace must be made at a time, got another. Ask again", {"Retry-After": "1"})
        async with turn:
            body = await asyncio.to_thread(trace, request[QUERY].steps)
        return web.Response(body=body, content_type="application/json")

    return handler
