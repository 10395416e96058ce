"""A worker process without torchrun around it: the test stands where the supervisor stands."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rondo.runtime.actors.actor import Actor, endpoint, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import Refused
from rondo.runtime.memory.segments import Registration, SegmentServer
from rondo.runtime.supervision.heartbeat import Beat, ask_to_leave, read_beats, segment_bytes, segment_name

TOKEN = "a-token-of-the-run"
PATIENCE_S = 120.0

ROLES = """
import asyncio, os, time
from rondo.runtime.errors import ConfigError, Fatal, Stopping

class Base:
    def __init__(self, ctx): self.ctx = ctx

class Polite(Base):
    async def run(self):
        await self.ctx.ready()
        await self.ctx.stopping.wait()
        print("saved", flush=True)

class Waiting(Base):
    async def run(self):
        raise ExceptionGroup("follower", [Stopping("weights must be there, got none")])

class HangingCollective(Base):
    async def run(self):
        hanging = asyncio.ensure_future(self.ctx.compute(time.sleep, 600))
        await self.ctx.ready()
        raise ValueError("the pot is empty")

class Hopeless(Base):
    async def run(self):
        raise ExceptionGroup("opening", [ExceptionGroup("data", [Fatal("data.path must name files that exist, got 'a'")])])

class Misled(Base):
    async def run(self):
        raise ConfigError("model.path must have all weights, got none of layer 3")

class MisledFromTheStart(Base):
    def __init__(self, ctx):
        raise ConfigError("model.path must have all weights, got none of layer 3")

class Busy(Base):
    async def run(self):
        with self.ctx.section("compile", self.ctx.load_s):
            self.spinning, self.loop = asyncio.Event(), asyncio.get_running_loop()
            computing = asyncio.ensure_future(self.ctx.compute(self.spin))
            await self.spinning.wait()
            self.ctx.progress()
            await self.ctx.ready()
            await computing

    def spin(self):
        self.loop.call_soon_threadsafe(self.spinning.set)
        while not os.path.exists(os.environ["SPIN_UNTIL"]): pass
"""


class Supervisor(Actor):
    """Hears what a worker says."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()

    @endpoint
    async def ready(self, group: str, incarnation: int, rank: int) -> None:
        self.heard.put_nowait(("ready", group, incarnation, rank))

    @endpoint
    async def report(self, source: str, kind: str, data: dict[str, Any]) -> None:
        self.heard.put_nowait((source, kind, data))

    async def next(self) -> tuple[Any, ...]:
        return await asyncio.wait_for(self.heard.get(), PATIENCE_S)


class Stand:
    """A run-time directory with the supervisor's two sockets; starts workers into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.supervisor = Supervisor()
        self.accepted = 4
        self.segments = SegmentServer(folder / "handover.sock", TOKEN, self._register)
        self._loop = asyncio.get_running_loop()
        (folder / "token").write_text(TOKEN)
        (folder / "roles.py").write_text(ROLES)

    def _register(self, registration: Registration) -> None:
        if registration.incarnation != self.accepted:
            raise Refused(f"incarnation must be {self.accepted}, got {registration.incarnation}")
        heard = ("registered", registration.group, registration.rank, registration.pid)
        self._loop.call_soon_threadsafe(self.supervisor.heard.put_nowait, heard)

    def beat(self) -> Beat:
        with self.segments.segment(segment_name("actor-0", 4), 0) as segment:
            return read_beats(segment.view(readonly=True))[1]

    def ask_to_leave(self) -> None:
        with self.segments.segment(segment_name("actor-0", 4), 0) as segment:
            ask_to_leave(segment.view())

    async def worker(self, role: str) -> asyncio.subprocess.Process:
        self.segments.segment(segment_name("actor-0", 4), segment_bytes(2)).close()
        environment = {
            **os.environ,
            "RONDO_RT_DIR": str(self.folder), "RONDO_RUN_DIR": str(self.folder), "RONDO_GROUP": "actor-0",
            "RONDO_INCARNATION": "4", "RONDO_ATTEMPT": "2", "RONDO_STORE": "127.0.0.1:1", "RONDO_LOAD_S": "777",
            "RONDO_PARENT_PID": str(os.getpid()), "SPIN_UNTIL": str(self.folder / "stop"),
            "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2",
        }  # fmt: skip
        reference = role if ":" in role else f"{self.folder}/roles.py:{role}"
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rondo.runtime.worker.worker", reference,
            env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


async def ended(worker: asyncio.subprocess.Process) -> tuple[int | None, str]:
    output, _ = await asyncio.wait_for(worker.communicate(), PATIENCE_S)
    return worker.returncode, output.decode()


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    made = Stand(tmp_path)
    made.segments.start()
    async with await serve(made.supervisor, f"unix:{tmp_path}/supervisor.sock", token=TOKEN, name="supervisor"):
        yield made
    made.segments.close()


async def test_asked_to_leave_the_role_saves_and_the_process_ends_with_zero(stand: Stand) -> None:
    worker = await stand.worker("Polite")
    assert await stand.supervisor.next() == ("registered", "actor-0", 1, worker.pid)
    assert await stand.supervisor.next() == ("ready", "actor-0", 4, 1)
    assert not stand.beat().left
    stand.ask_to_leave()
    worker.send_signal(signal.SIGTERM)
    assert await ended(worker) == (0, "saved\n")
    assert stand.beat().left


async def test_a_sigterm_that_does_not_come_from_the_supervisor_saves_nothing(stand: Stand) -> None:
    worker = await stand.worker("Polite")
    while (await stand.supervisor.next())[0] != "ready":
        pass
    worker.send_signal(signal.SIGTERM)
    with ActorRef(f"unix:{stand.folder}/actor-0.1.sock", token=TOKEN, peer="actor-0.1") as actor:
        await actor.call("rondo.ping", deadline_s=PATIENCE_S)  # its loop has heard the signal
        assert "in Polite.run" in await actor.call("rondo.stacks", deadline_s=PATIENCE_S)
    worker.kill()
    assert await ended(worker) == (-signal.SIGKILL, "")


async def test_a_role_whose_wait_a_stop_has_ended_has_left_as_it_should(stand: Stand) -> None:
    assert (await ended(await stand.worker("Waiting")))[0] == 0
    assert stand.beat().left


async def test_a_role_that_raises_ends_the_process_though_the_compute_thread_hangs(stand: Stand) -> None:
    worker = await stand.worker("HangingCollective")
    code, output = await ended(worker)
    assert code == 1
    assert "level=error" in output and 'group=actor-0 rank=1 incarnation=4 message="a role failed"' in output
    assert output.rstrip().endswith("ValueError: the pot is empty")
    assert not stand.beat().left


async def test_a_role_that_raises_what_no_restart_repairs_ends_the_run_with_that_as_its_cause(stand: Stand) -> None:
    code, output = await ended(await stand.worker("Hopeless"))
    assert (await stand.supervisor.next())[0] == "registered"
    cause = "data.path must name files that exist, got 'a'"
    assert await stand.supervisor.next() == ("actor-0", "fatal", {"cause": cause, "exit_code": 1})
    assert code == 1 and "a role failed" in output


@pytest.mark.parametrize("role", ["Misled", "MisledFromTheStart"])
async def test_a_setting_that_a_role_finds_wrong_ends_the_run_as_wrong_usage(stand: Stand, role: str) -> None:
    await ended(await stand.worker(role))
    assert (await stand.supervisor.next())[0] == "registered"
    told = {"cause": "model.path must have all weights, got none of layer 3", "exit_code": 2}
    assert await stand.supervisor.next() == ("actor-0", "fatal", told)


async def test_a_worker_registers_before_it_imports_its_role(stand: Stand) -> None:
    worker = await stand.worker("no.such.module:Role")
    assert (await stand.supervisor.next())[0] == "registered"
    code, output = await ended(worker)
    assert code == 1
    assert "a role class must name a function that can be imported, got 'no.such.module:Role'" in output


async def test_a_worker_whose_life_is_over_runs_nothing(stand: Stand) -> None:
    stand.accepted = 5
    code, output = await ended(await stand.worker("Polite"))
    assert code == 1 and "incarnation must be 5, got 4" in output
    assert stand.supervisor.heard.empty()


async def test_the_loop_beats_and_answers_while_the_compute_thread_is_busy(stand: Stand) -> None:
    worker = await stand.worker("Busy")
    assert (await stand.supervisor.next())[0] == "registered"
    assert (await stand.supervisor.next())[0] == "ready"
    with ActorRef(f"unix:{stand.folder}/actor-0.1.sock", token=TOKEN, peer="actor-0.1") as actor:
        told = await actor.call("rondo.ping", deadline_s=PATIENCE_S)
        stacks = await actor.call("rondo.stacks", deadline_s=PATIENCE_S)
    assert (told["pid"], told["waiter"]) == (worker.pid, "actor-0.1")
    assert "in spin" in stacks
    beat = stand.beat()
    assert (beat.section, beat.progress, beat.rank) == ("compile", 1, 1)
    assert round(beat.section_limit_s - beat.section_since_s, 2) == 777  # its limit
    while stand.beat().beat_s == beat.beat_s:  # noqa: ASYNC110  # shared words wake nobody
        await asyncio.sleep(0.01)
    (stand.folder / "stop").touch()
    assert (await ended(worker))[0] == 0


async def test_all_stacks_go_to_the_log_on_request(stand: Stand) -> None:
    worker = await stand.worker("Busy")
    while (await stand.supervisor.next())[0] != "ready":
        pass
    worker.send_signal(signal.SIGUSR2)
    assert worker.stdout is not None
    line = await asyncio.wait_for(worker.stdout.readuntil(b"in spin"), PATIENCE_S)
    assert b"most recent call first" in line
    worker.kill()
    await ended(worker)
