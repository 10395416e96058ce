"""A whole run under a nemesis that kills any of its processes at any moment: torchruns, workers, coordinator, store, janitor,
nursery and reward workers, while they load, warm up, step, publish and save. The run goes on until all were, makes so many steps
more as if nothing had happened, and is stopped.

RONDO_CHAOS_KILLS: how many (3; 20 in `make test-long`). RONDO_CHAOS_SEED chooses victims and moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

import orjson
import psutil

from tests.e2e.runs import TINY, Running, command, finish, left_behind, read_until, start
from tests.strength import strength

KILLS = int(os.environ.get("RONDO_CHAOS_KILLS", strength(quick=3, full=20)))
SEED = int(os.environ.get("RONDO_CHAOS_SEED", "1"))
STEPS_AFTER = strength(quick=8, full=100)
APART_S = strength(quick=4, full=15)
"""The longest from one kill to the next; the shortest is none."""


def living(run: Running, run_dir: Path) -> dict[str, list[psutil.Process]]:
    """The processes of a run, by what they are."""
    events = [orjson.loads(line) for line in (run_dir / "events.jsonl").read_bytes().splitlines()]
    known = {event["janitor_pid"]: "janitor" for event in events if event["kind"] == "started"}
    known |= {event["pid"]: f"root of {event['group']}" for event in events if event["kind"] == "starting"}
    known |= {event["pid"]: f"worker of {event['group']}" for event in events if event["kind"] == "registered"}
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                kind = known.get(process.pid) or f"child of {known.get(process.ppid(), 'the supervisor')}"
                found.setdefault(kind, []).append(process)
    return found


def kill_at_random(run: Running, run_dir: Path, chance: random.Random) -> list[str]:
    """SIGKILLs processes until there were enough; what they were, in order. Of the kinds that live, one that was killed least
    comes next."""
    killed: list[str] = []
    times: Counter[str] = Counter()
    while len(killed) < KILLS:
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(chance.uniform(0.0, APART_S))
            break  # it has failed
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = living(run, run_dir)
            kind = min(sorted(processes), key=lambda name: (times[name], chance.random()))
            chance.choice(processes[kind]).send_signal(signal.SIGKILL)
            times[kind] += 1
            killed.append(kind)
    return killed


def test_any_process_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    limits = ("supervision.max_restarts=100", "supervision.max_global_restarts=0")
    run = start(command(tmp_path, sets=(*TINY, "num_steps=1000000", "train.save_every=20", *limits)), tmp_path)
    run_dir = tmp_path / "quickstart"
    read_until(run, "run directory:")
    killed = kill_at_random(run, run_dir, random.Random(SEED))
    told = []
    while not run.lines.empty():  # of before
        told.append(run.lines.get())
    for _ in range(STEPS_AFTER if told[-1:] != [None] else 0):
        told.append(read_until(run, " step="))
    run.send_signal(signal.SIGTERM)
    ended = finish(run, run_dir)
    assert ended.code == 75 and len(killed) == KILLS, f"killed {killed}\n{told}\n{ended.output}"
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["steps"] >= STEPS_AFTER and summary["attempt"] == 0
    assert left_behind(tmp_path) == []
