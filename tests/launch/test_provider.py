"""What the admin endpoint shows, from answers such as workers and coordinator give."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rondo.launch import provider as module
from rondo.launch.provider import RunProvider
from rondo.runtime.admin.endpoint import prometheus_lines
from rondo.runtime.supervision.orders import State
from rondo.runtime.supervision.supervisor import Supervisor

LEASE = {"name": "call lease", "waiter": "rollout-0.0", "peer": "coordinator", "seconds": 1.5}


class Answers:
    """An `ActorRef` whose coordinator waits for nobody and whose only worker waits for a lease."""

    def __init__(self, address: str, *, token: str, peer: str) -> None:
        self.peer = peer

    async def call(self, method: str, *, deadline_s: float) -> Any:
        if method == "stats":
            return {"version": 2, "attempt": 0}
        return {"waiter": self.peer, "waits": [LEASE] if self.peer == "rollout-0.0" else [], "totals": {}}


async def test_waits_are_listed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ActorRef", Answers)
    group = SimpleNamespace(name="rollout-0", num_ranks=1)
    supervisor = SimpleNamespace(snapshot=lambda: SimpleNamespace(groups=[group]))
    provider = RunProvider(cast(Supervisor, supervisor), tmp_path, "t" * 32, tmp_path)
    await provider._ask_all()
    assert provider.waits() == [LEASE]
    assert provider.bus() == {"version": 2, "attempt": 0}


@pytest.mark.parametrize("state", [State.ENDING, State.WAITING, State.STARTING, State.READY])
async def test_a_run_is_not_ready_while_a_service_is_away(tmp_path: Path, state: State) -> None:
    groups = [SimpleNamespace(state=State.DONE), SimpleNamespace(state=state)]
    supervisor = SimpleNamespace(snapshot=lambda: SimpleNamespace(groups=groups, phase="running"))
    provider = RunProvider(cast(Supervisor, supervisor), tmp_path, "t" * 32, tmp_path)
    assert provider.health()["ready"] is (state is State.READY)


async def test_partitions_are_in_the_metrics_by_name_and_task(tmp_path: Path) -> None:
    supervisor = SimpleNamespace(snapshot=lambda: SimpleNamespace(groups=[]))
    provider = RunProvider(cast(Supervisor, supervisor), tmp_path, "t" * 32, tmp_path)
    provider._bus = {"partitions": {"replay": {"rows": 7, "live_bytes": 640, "tasks": {"critic": {"ready": 3}}}}}
    lines = list(prometheus_lines(provider.metrics()))
    assert 'rondo_partition_rows{partition="replay"} 7' in lines
    assert 'rondo_partition_live_bytes{partition="replay"} 640' in lines
    assert 'rondo_partition_ready_rows{task="replay/critic"} 3' in lines
