"""What the admin endpoint shows, from answers such as workers and coordinator give."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from rondo.launch import provider as module
from rondo.launch.provider import RunProvider, serve_trace
from rondo.runtime.admin.endpoint import prometheus_lines
from rondo.runtime.admin.guard import TurnedDown
from rondo.runtime.errors import ConfigError, DeadlineExceeded
from rondo.runtime.processes.process import start_time
from rondo.runtime.supervision.orders import State
from rondo.runtime.supervision.supervisor import Supervisor

LEASE = {"name": "call lease", "waiter": "rollout-0.0", "peer": "coordinator", "seconds": 1.5}


class Answers:
    """An `ActorRef` whose coordinator waits for nobody and whose only worker waits for a lease. `asked`: who was asked."""

    asked: ClassVar[set[str]] = set()

    def __init__(self, address: str, *, token: str, peer: str) -> None:
        self.peer = peer

    async def call(self, method: str, *, deadline_s: float) -> Any:
        self.asked.add(self.peer)
        if method == "stats":
            return {"version": 2, "attempt": 0}
        return {"waiter": self.peer, "waits": [LEASE] if self.peer == "rollout-0.0" else [], "totals": {}}


async def test_waits_are_listed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ActorRef", Answers)
    services = [SimpleNamespace(name=name, num_ranks=1, service=True) for name in ("store", "coordinator")]
    groups = [*services, SimpleNamespace(name="rollout-0", num_ranks=1, service=False)]
    supervisor = SimpleNamespace(snapshot=lambda: SimpleNamespace(groups=groups))
    provider = RunProvider(cast(Supervisor, supervisor), tmp_path, "t" * 32, tmp_path)
    await provider._ask_all()
    assert provider.waits() == [LEASE]
    assert provider.bus() == {"version": 2, "attempt": 0}
    assert Answers.asked == {"coordinator", "rollout-0.0"}  # nobody listens under another name


@pytest.mark.parametrize("state", [State.ENDING, State.WAITING, State.STARTING, State.READY])
async def test_a_run_is_not_ready_while_a_service_is_away(tmp_path: Path, state: State) -> None:
    groups = [SimpleNamespace(state=State.DONE, passing=False), SimpleNamespace(state=state, passing=False)]
    groups.append(SimpleNamespace(state=State.STARTING, passing=True))  # it came while the run goes on
    supervisor = SimpleNamespace(snapshot=lambda: SimpleNamespace(groups=groups, phase="running"))
    provider = RunProvider(cast(Supervisor, supervisor), tmp_path, "t" * 32, tmp_path)
    assert provider.health()["ready"] is (state is State.READY)


async def test_a_run_with_fewer_engines_than_it_must_have_is_not_ready_and_says_so(tmp_path: Path) -> None:
    groups = [SimpleNamespace(name="rollout-0", state=State.READY, restarts=0, rss_bytes=0, passing=False)]
    supervisor = SimpleNamespace(snapshot=lambda: SimpleNamespace(groups=groups, phase="running"))
    provider = RunProvider(cast(Supervisor, supervisor), tmp_path, "t" * 32, tmp_path)
    provider._bus = {"engines": {"healthy": 1, "of": 3, "least": 2, "below": "1 of 3 engines are healthy, 2 must be"}}
    health = provider.health()
    assert (health["ready"], health["healthy"], health["failing"]) == (
        False,
        True,
        "1 of 3 engines are healthy, 2 must be",
    )
    metrics = "\n".join(prometheus_lines(provider.metrics()))
    assert "rondo_engines 3" in metrics and "rondo_engines_healthy 1" in metrics


def test_figures_of_the_critic_are_metrics_beside_those_of_the_step(tmp_path: Path) -> None:
    supervisor = cast(Supervisor, SimpleNamespace(snapshot=lambda: SimpleNamespace(groups=[])))
    provider = RunProvider(supervisor, tmp_path, "t" * 32, tmp_path)
    provider.on_event(
        {"kind": "metrics", "source": "critic-0", "critic": {"step": 2, "loss": 9.0, "explained_variance": 0.5}}
    )
    provider.on_event({"kind": "metrics", "step": 1, "reward_mean": 0.25, "loss": 1.0})
    lines = list(prometheus_lines(provider.metrics()))
    assert {"rondo_step 1", "rondo_loss 1", "rondo_critic_loss 9", "rondo_critic_explained_variance 0.5"} <= set(lines)


def test_a_crowd_that_asks_at_once_has_the_processes_looked_at_once(tmp_path: Path) -> None:
    looks, now = [0], [100.0]

    def snapshot() -> SimpleNamespace:
        looks[0] += 1
        return SimpleNamespace(groups=[], phase="running")

    supervisor = cast(Supervisor, SimpleNamespace(snapshot=snapshot))
    provider = RunProvider(supervisor, tmp_path, "t" * 32, tmp_path, clock=lambda: now[0])
    for _ in range(100):
        assert provider.health()["healthy"] and provider.roles() == [] and len(list(provider.metrics())) == 4
    assert looks == [1]
    now[0] += 1.0
    assert provider.health()["ready"] and looks == [2]


def test_the_newest_samples_are_read_from_the_end_of_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "samples").mkdir()
    lines = [b'{"n":%d}\n' % n for n in range(50)]
    (tmp_path / "samples" / "step_000001.jsonl").write_bytes(b"".join(lines))
    provider = RunProvider(cast(Supervisor, SimpleNamespace()), tmp_path, "t" * 32, tmp_path)
    assert [row["n"] for row in provider.samples()] == list(range(30, 50))
    monkeypatch.setattr(module, "_SAMPLES_BYTES", 25)  # two whole lines and a part of one
    assert [row["n"] for row in provider.samples()] == [48, 49]


async def test_one_trace_is_made_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def read_run(run: Path) -> Any:
        assert goes_on.wait(120)
        raise ConfigError("no spans")

    monkeypatch.setattr(module, "read_run", read_run)
    handler, request = serve_trace(tmp_path), cast(Any, {module.QUERY: module.Steps()})
    first = asyncio.ensure_future(handler(request))
    await asyncio.sleep(0)
    with pytest.raises(TurnedDown) as caught:
        await handler(request)
    assert caught.value.status == 503 and caught.value.headers == {"Retry-After": "1"}
    goes_on.set()
    with pytest.raises(ConfigError):
        await first
    with pytest.raises(ConfigError):  # there is room again
        await handler(request)


async def test_stacks_come_from_the_process_and_a_worker_that_is_held_up_writes_them_to_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_up = subprocess.Popen(["sleep", "60"])  # noqa: ASYNC220 - it is at once
    workers = {0: SimpleNamespace(pid=held_up.pid, start_time=start_time(held_up.pid))}
    lives = {"actor-0": SimpleNamespace(workers=workers), "coordinator": SimpleNamespace(workers={})}
    groups = [SimpleNamespace(name="actor-0"), SimpleNamespace(name="coordinator")]
    states = dict.fromkeys(lives, State.READY)
    running = cast(Supervisor, SimpleNamespace(_lives=lives, _state=states.__getitem__))

    class Stands(Answers):
        async def call(self, method: str, *, deadline_s: float) -> Any:
            if self.peer == "actor-0.0":
                raise DeadlineExceeded("call rondo.stacks", "admin", self.peer, deadline_s)
            return f"{method} of {self.peer}"

    monkeypatch.setattr(module, "ActorRef", Stands)
    supervisor = SimpleNamespace(
        snapshot=lambda: SimpleNamespace(groups=groups), write_stacks=partial(Supervisor.write_stacks, running)
    )
    provider = RunProvider(cast(Supervisor, supervisor), tmp_path, "t" * 32, tmp_path)
    try:
        states["actor-0"] = State.STARTING  # has no handler yet: the signal would end it
        with pytest.raises(DeadlineExceeded):
            await provider.stacks("actor-0.0")
        states["actor-0"] = State.READY
        workers[0].start_time -= 1  # the worker is gone, and its pid another process's
        with pytest.raises(DeadlineExceeded):
            await provider.stacks("actor-0.0")
        assert held_up.poll() is None
        workers[0].start_time += 1
        assert (await provider.stacks("coordinator"))["stacks"] == "rondo.stacks of coordinator"
        with pytest.raises(
            TurnedDown, match=r"actor-0.0 must answer within 5 s, got nothing\. Its stacks are at the end of"
        ):
            await provider.stacks("actor-0.0")
        assert held_up.wait(60) == -signal.SIGUSR2
        with pytest.raises(
            ConfigError, match=r"process must be a role group's GROUP\.RANK or coordinator, got 'other\.0'"
        ):
            await provider.stacks("other.0")
    finally:
        held_up.kill()
        held_up.wait()
