"""A program that runs a Supervisor, as `rondo train` does, and prints every event and the outcome as lines of JSON.

An hour passes at once for whom a file of the run directory says so, so that nobody else is near any limit: `silent` names a group
and its incarnation, which is judged as if it had not beaten for so long; with `stands` nothing has moved for so long, once.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import uvloop

from rondo.runtime.actors.actor import endpoint
from rondo.runtime.config import SupervisionConfig
from rondo.runtime.records import ledger
from rondo.runtime.supervision import machine, supervisor
from rondo.runtime.supervision.heartbeat import Beat
from rondo.runtime.supervision.life import Life
from rondo.runtime.supervision.machine import Supervision
from rondo.runtime.supervision.orders import Action
from rondo.runtime.supervision.spec import GroupSpec, SupervisorConfig
from rondo.runtime.supervision.standstill import Standstill
from rondo.runtime.supervision.supervisor import Supervisor, stop_signals

ROLES = Path(__file__).with_name("tiny_roles.py")
HOUR_S = 3600.0
run_dir = Path()


class Judging(Supervision):
    def _judge(self, life: Life, beats: Sequence[Beat], now: float) -> list[Action]:
        silent = run_dir / "silent"
        if silent.exists() and silent.read_text() == f"{life.child.name} {life.incarnation}":
            life.registered = {rank: at - HOUR_S for rank, at in life.registered.items()}
            beats = [replace(beat, beat_s=beat.beat_s - HOUR_S) for beat in beats]
        return super()._judge(life, beats, now)


class Watching(Standstill):
    _hours = 1

    def watch(self, now: float, beats: Mapping[str, Sequence[Beat]], *, all_up: bool) -> list[Action]:
        found = super().watch(now, beats, all_up=all_up)
        if not found and self._hours and (run_dir / "stands").exists():
            self._moved_at -= HOUR_S
            found = super().watch(now, beats, all_up=all_up)
            self._hours -= bool(found)
        return found


class Looking(Supervisor):
    @endpoint
    async def looked(self) -> None:
        """Returns behind the next look at memory and processor time."""
        at = self._ledger._sampled_at
        while self._ledger._sampled_at == at:  # noqa: ASYNC110 - it rings no bell
            await asyncio.sleep(0.05)


def tell(record: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(record) + b"\n")
    sys.stdout.buffer.flush()


def main(text: str) -> int:
    global run_dir
    given = orjson.loads(text)
    run_dir = Path(given["run_dir"])
    machine.Standstill, supervisor.Supervision = Watching, Judging  # type: ignore[misc]
    supervisor._ANSWER_S, ledger._SAMPLE_S = 60.0, 0.0
    groups = tuple(
        GroupSpec(name, name.partition("-")[0], count, tuple(f"{ROLES}:{role}" for role in roles))
        for name, count, roles in given["groups"]
    )
    config = SupervisorConfig(
        run_dir=run_dir,
        groups=groups,
        coordinator="tiny_coordinator",
        limits=SupervisionConfig(**given["limits"]),
        modules=tuple(given["modules"]),
        kill=tuple((role, step) for role, step in given["kill"]),
    )
    for number in stop_signals():  # the last of many may come when the run is over
        signal.signal(number, lambda *_: None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(Looking(config, tell).run())
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    tell({"kind": "outcome", **asdict(outcome), "light": not {"torch", "transformers"} & set(sys.modules)})
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
