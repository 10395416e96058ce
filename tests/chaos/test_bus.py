"""The bus with real processes under a nemesis: nothing lost, nothing twice, and the run goes on.

RONDO_CHAOS_ACTS: how often a process is killed or stopped (75, about a minute; more by hand). RONDO_CHAOS_SEED chooses the acts.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rondo.comm.bus.audit import Audit, audit
from rondo.comm.bus.journal import Event, encode, files, read
from rondo.comm.ring.spans import rows_of
from rondo.runtime.actors.actor import serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.memory.segments import SegmentServer
from rondo.runtime.waits import wait_for
from tests.chaos.total_queue import Verdict, judge
from tests.chaos.worker import MEMBERS, NUM_ROWS, RESTS, SHORT, TOKEN, TRAIN, N, P
from tests.comm.memory import ROOT
from tests.comm.served import Roster
from tests.strength import strength

NUM_ACTS = int(os.environ.get("RONDO_CHAOS_ACTS", strength(quick=40, full=75)))
SEED = int(os.environ.get("RONDO_CHAOS_SEED", "1"))
NAMES = ("coordinator", *MEMBERS)
LEAST_STEPS = 25
"""In which rings are full and rows rest, also where a busy machine made a few of them under all acts."""


class Nemesis:
    """The supervisor's part of a run, and the acts against it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.roster = folder, Roster()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.lives: Counter[str] = Counter()
        self.ref = ActorRef(f"unix:{folder}/coordinator.sock", token=TOKEN, peer="coordinator")

    def start(self, name: str) -> None:
        self.lives[name] += 1
        if name != "coordinator":
            self.roster.alive[name] = self.lives[name]
        call = f"from tests.chaos.worker import main; main({str(self.folder)!r}, {name!r}, {self.lives[name]}, {SEED})"
        environment = {**os.environ, "RONDO_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen([sys.executable, "-c", call], cwd=ROOT, env=environment, stderr=log)

    async def kill(self, name: str) -> None:
        self.processes[name].kill()
        await asyncio.to_thread(self.processes[name].wait)
        if name != "coordinator":
            del self.roster.alive[name]
            self.roster.dead.append([name, self.lives[name]])
            await self.ref.call("member_dead", name, self.lives[name], retry=True)
        self.start(name)

    async def stop_for(self, name: str, seconds: float) -> None:
        self.processes[name].send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.processes[name].send_signal(signal.SIGCONT)

    def check(self) -> None:
        for name, process in self.processes.items():
            log = (self.folder / f"{name}.log").read_text()
            assert process.poll() is None, f"{name} ended by itself:\n{log[-4000:]}"

    async def committed(self, version: int) -> None:
        """Until this version is committed, however the coordinator fares."""
        while (found := (await self.ref.call("stats", retry=True))["version"]) is None or found < version:
            self.check()
            await asyncio.sleep(0.05)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.ref.close()


def facts(
    folder: Path,
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]], dict[int, int], int]:
    told: dict[str, list[tuple[int, int]]] = {"attempt": [], "ack": []}
    for line in (folder / "puts").read_text().splitlines():
        kind, rows = json.loads(line)
        told[kind] += [(group, sample) for group, sample in rows]
    step_of: dict[int, int] = {}
    taken: list[tuple[int, int]] = []
    version = 0
    for event in (event for path in files(folder / "journal") for event in read(path)):
        if event["event"] == "admit":
            step_of[event["group"]] = event["step"]
        elif event["event"] == "commit":
            taken += [(group, sample) for group, sample, _ in rows_of(event["spans"])]
            version = event["version"]
    return told["attempt"], told["ack"], taken, step_of, version


async def chaos(folder: Path, num_acts: int) -> tuple[Verdict, Any, int, Counter[str]]:
    chance = random.Random(SEED)
    segments = SegmentServer(folder / "handover.sock", TOKEN, lambda _: None)
    segments.start()
    nemesis = Nemesis(folder)
    supervisor = await serve(nemesis.roster, f"unix:{folder}/supervisor.sock", token=TOKEN, name="supervisor")
    acts: Counter[str] = Counter()
    try:
        for name in NAMES:
            nemesis.start(name)
        await wait_for(nemesis.committed(1), name="first commit", peer="bus", deadline_s=120)
        for _ in range(num_acts):
            await asyncio.sleep(chance.uniform(0.02, 0.3))
            nemesis.check()
            victim = chance.choice(NAMES)
            if chance.random() < 0.6:
                await wait_for(nemesis.kill(victim), name="kill", peer=victim, deadline_s=120)
                acts["kill"] += 1
            else:
                # Mostly for a moment; sometimes for longer than a lease lasts.
                await nemesis.stop_for(victim, chance.uniform(0.02, 2.5 if chance.random() < 0.25 else 0.4))
                acts["stop"] += 1
        stats = await nemesis.ref.call("stats", retry=True)
        after = max((stats["version"] or 0) + 5, LEAST_STEPS)
        await wait_for(nemesis.committed(after), name="steps after the chaos", peer="bus", deadline_s=300)
    finally:
        nemesis.end()
        await supervisor.close()
        segments.close()
    found = facts(folder)
    return judge(*found), audit(folder / "journal", N, P, max_infra_failures=10**6), found[-1], acts


def of_each_role(folder: Path) -> tuple[int, int]:
    """How many versions were committed with equal weights of both roles, and how often what one had prepared was withdrawn."""
    prepared: dict[str, int] = {}
    num_equal = num_withdrawn = 0
    for event in (event for path in files(folder / "journal") for event in read(path)):
        if event["event"] == "prepared":
            prepared[event["role"]] = event["checksum"]
        elif event["event"] == "dead":
            num_withdrawn += prepared.pop(event["member"].rsplit("-", 1)[0], None) is not None
        elif event["event"] == "commit":
            prepared[event["role"]] = event["checksum"]
            assert prepared.keys() == set(TRAIN) and len(set(prepared.values())) == 1, (event["version"], prepared)
            num_equal += 1
            prepared.clear()
    return num_equal, num_withdrawn


def rows_in_order(folder: Path, max_staleness: int = 1) -> Counter[str]:
    """How many rows were admitted, and left out for which reason: each in its order, and none that was to rest."""
    counts, at, next_number = Counter[str](), dict[int, tuple[int, int]](), 0
    judged: dict[int, list[int]] = {}  # row -> steps that trained it
    for event in (event for path in files(folder / "journal") for event in read(path)):
        if event["event"] == "left_out":
            reasons = Counter(event["filtered"]) + Counter(event["rested"])
            assert event["number"] == next_number + reasons.total()
            counts, next_number = counts + reasons, event["number"]
        elif event["event"] == "admit":
            step, row = at[event["group"]] = event["step"], event["row"]
            assert event["number"] == next_number and row == next_number % NUM_ROWS and row % SHORT
            assert not [was for was in judged.get(row, []) if max_staleness < step - was <= max_staleness + RESTS.steps]
            counts["admitted"], next_number = counts["admitted"] + 1, next_number + 1
        elif event["event"] == "commit":
            for step, row in {at[group] for group, *_ in event["spans"]}:
                judged.setdefault(row, []).append(step)
    return counts


def loses_a_row(commits: list[Event]) -> None:
    (group, _, first, count), *others = commits[1]["spans"]
    commits[1]["spans"] = [[group, 0, first + 1, count - 1], *others] if count > 1 else others


def trains_a_row_twice(commits: list[Event]) -> None:
    group, _, first, _ = commits[0]["spans"][0]
    commits[1]["spans"].append([group, 0, first, 1])


def planted(folder: Path, change: Callable[[list[Event]], None]) -> tuple[Verdict, Audit]:
    """What checker and audit say of this very run with a fault in its journal."""
    pages = {path: list(read(path)) for path in files(folder / "journal")}
    change([event for page in pages.values() for event in page if event["event"] == "commit" and event["spans"]])
    copy = folder / change.__name__
    (copy / "journal").mkdir(parents=True)
    (copy / "puts").write_bytes((folder / "puts").read_bytes())
    for path, page in pages.items():
        (copy / "journal" / path.name).write_bytes(b"".join(map(encode, page)))
    return judge(*facts(copy)), audit(copy / "journal", N, P, max_infra_failures=10**6)


async def test_no_sample_is_lost_or_trained_twice_whoever_is_killed_or_stopped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with tempfile.TemporaryDirectory(prefix="rondo-") as name:
        folder = Path(name)
        verdict, found, version, acts = await chaos(folder, NUM_ACTS)
        rings = [event for path in files(folder / "journal") for event in read(path) if event["event"] == "ring"]
        num_full = sum(ring["overflow"] for ring in rings)  # how often the oldest step found its ring full
        lost, twice = planted(folder, loses_a_row), planted(folder, trains_a_row_twice)
        num_equal, num_withdrawn = of_each_role(folder)
        rows = rows_in_order(folder)
    with capsys.disabled():
        print(
            f" [{dict(acts)}; {num_full} times a full ring; {version} steps, {verdict.num_attempted} attempted, "
            f"{verdict.num_acknowledged} acknowledged, {verdict.num_read} read, {len(verdict.recovered)} recovered, "
            f"{num_withdrawn} withdrawn]",
            end="",
        )
    assert verdict.good, verdict
    assert verdict.num_read == version * P * N and num_equal == version + 1
    assert (found.num_lost, found.num_trained_twice, found.num_unexpected) == (0, 0, 0)
    assert num_full > 0 and min(rows[each] for each in ("admitted", "short", "solved")) > 0
    assert (len(lost[0].lost), len(lost[0].duplicated), lost[1].num_lost) == (1, 0, 1), "a planted loss is found"
    assert (len(twice[0].lost), len(twice[0].duplicated), twice[1].num_trained_twice) == (0, 1, 1), "so is a duplicate"
