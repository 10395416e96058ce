"""A program that runs a Supervisor, as `rondo train` does, and prints every event and the outcome as lines of JSON."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import uvloop

from rondo.runtime.config import SupervisionConfig
from rondo.runtime.supervision.spec import GroupSpec, SupervisorConfig
from rondo.runtime.supervision.supervisor import Supervisor, stop_signals

ROLES = Path(__file__).with_name("tiny_roles.py")


def tell(record: dict[str, Any]) -> None:
    sys.stdout.buffer.write(orjson.dumps(record) + b"\n")
    sys.stdout.buffer.flush()


def main(text: str) -> int:
    given = orjson.loads(text)
    groups = tuple(
        GroupSpec(name, name.partition("-")[0], count, tuple(f"{ROLES}:{role}" for role in roles))
        for name, count, roles in given["groups"]
    )
    config = SupervisorConfig(
        run_dir=Path(given["run_dir"]),
        groups=groups,
        coordinator="tiny_coordinator",
        services=given["services"],
        limits=SupervisionConfig(**given["limits"]),
        modules=tuple(given["modules"]),
        kill=tuple((role, step) for role, step in given["kill"]),
    )
    for number in stop_signals():  # the last of many may come when the run is over
        signal.signal(number, lambda *_: None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(Supervisor(config, tell).run())
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    tell({"kind": "outcome", **asdict(outcome), "light": not {"torch", "transformers"} & set(sys.modules)})
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
