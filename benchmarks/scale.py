"""Scale: replicas come and leave under load, again and again, while somebody is killed in the middle of it.

    rondo bench scale [--rounds N] [--quiet N]

One quick start without its warm-up, with small steps. Each round is rollout 1 -> 3 -> 1 and reference 1 -> 2 -> 1, over the admin
endpoint; in the first `--quiet` rounds nobody is killed. In the others somebody is in the middle of each of the four changes, by
turns: a replica that comes or leaves, one that stays, the coordinator, the trainer.

serve_s: from the request until every new replica serves proved weights; gone_s: until those that leave are gone. pause_s: how
much longer than usual (the median step of the whole run) the longest step took, of those that ended during a change. lost,
twice: samples, by the journal, over the whole run. struck: kills that found their victim alive. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_run import PATIENCE_S, ChaosRun, Line, left_behind
from rondo.launch.report.status import ask
from rondo.launch.rundir import supervisor_record

SMALL = (
    "num_steps=1000000", "sft=null", "evaluation=null", "data.held_out=0", "rollout.prompts_per_step=8",
    "rollout.num_slots=64", "train.save_every=500", "train.keep_checkpoints=1", "supervision.max_restarts=1000",
    "supervision.max_global_restarts=0", "supervision.max_backoff_s=0",
)  # fmt: skip
CHANGES = (
    ("rollout", "scale_out", 3),
    ("rollout", "scale_in", 1),
    ("reference", "scale_out", 2),
    ("reference", "scale_in", 1),
)
VICTIMS = ("passing", "staying", "coordinator", "actor")
OVER = ("ACTIVE", "PARTIAL", "COMPLETED", "FAILED", "CANCELLED")


@dataclass
class Change:
    """One change of the number of replicas. Times in seconds; `begun` and `ended` since the epoch."""

    role: str
    action: str
    victim: str
    begun: float = 0.0
    ended: float = 0.0
    status: str = ""
    struck: bool = False
    steps: list[float] = field(default_factory=list)

    @property
    def took_s(self) -> float:
        return self.ended - self.begun


def changed(run: ChaosRun, role: str, action: str, target: int, victim: str) -> Change:
    """One change, from its request to its end, and two steps behind that."""
    change = Change(role, action, victim)
    record = supervisor_record(run.run_dir)
    assert record is not None
    run.steps(2)
    run.skip()
    change.begun = time.time()
    asked = ask(record, f"/{role}/{action}", {"num_replicas": target, "reason": "bench"})
    assert asked["status"] == "PENDING", asked
    deadline = time.monotonic() + PATIENCE_S
    while True:
        if victim and not change.struck:
            change.struck = strikes(run, asked, victim)
        found = ask(record, f"/{role}/scale/{asked['request_id']}")
        if found["status"] in OVER:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"a request must end within {PATIENCE_S:g} s, got {found}")
        time.sleep(0.05)
    change.ended, change.status = time.time(), found["status"]
    run.steps(2)
    return change


def strikes(run: ChaosRun, asked: dict[str, Any], victim: str) -> bool:
    """Kills somebody in the middle of a change, where he is there by now."""
    passing = asked["selected_engines"][0]
    run.pump()
    registered = [line for line in run.lines if line.is_of("registered", passing)]
    if not registered:  # in the middle is when the first one that comes has said who it is
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        staying = f"{asked['role']}-0" if victim == "staying" else "actor-0"
        group = {"passing": passing, "coordinator": "coordinator"}.get(victim, staying)
        pid = [line.told["pid"] for line in run.lines if line.is_of("registered", group)][-1]
        psutil.Process(int(pid)).kill()
        return True
    return False


def step_gaps(lines: list[Line], begun: float = 0.0, ended: float = float("inf")) -> list[float]:
    """Seconds between steps that were told one after the other, of those that ended then."""
    times = [line.at for line in lines if line.kind == "step"]
    return [b - a for a, b in itertools.pairwise(times) if begun <= b <= ended]


def figures(changes: list[Change], run: ChaosRun) -> dict[str, Any]:
    usual = statistics.median(step_gaps(run.lines))
    found: dict[str, Any] = {"usual_step_s": usual}
    for role, action, _ in CHANGES:
        for quiet in (True, False):
            mine = [c for c in changes if (c.role, c.action, c.victim == "") == (role, action, quiet)]
            if not mine:
                continue
            name = "serve_s" if action == "scale_out" else "gone_s"
            pauses = [max(step_gaps(run.lines, c.begun, c.ended + usual), default=usual) - usual for c in mine]
            found[f"{role} {action} {'quiet' if quiet else 'killed'}"] = {
                name: statistics.median(c.took_s for c in mine), f"worst_{name}": max(c.took_s for c in mine),
                "pause_s": statistics.median(pauses), "worst_pause_s": max(pauses), "times": len(mine),
                "struck": sum(c.struck for c in mine), "ended_as": sorted({c.status for c in mine}),
            }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="in which somebody is killed")
    parser.add_argument("--quiet", type=int, default=3, help="before them, in which nobody is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rondo-scale-") as name, ChaosRun(Path(name), SMALL) as run:
        run.steps(3)
        changes: list[Change] = []
        victims = itertools.cycle(VICTIMS)
        for number in range(options.quiet + options.rounds):
            for role, action, target in CHANGES:
                change = changed(run, role, action, target, "" if number < options.quiet else next(victims))
                changes.append(change)
                told = f"{change.took_s:.1f} s" + (f", {change.victim} killed" if change.struck else "")
                print(f"round {number}: {role} {action} {target}: {change.status} after {told}", flush=True)
            next(victims)  # another one for each change than in the round before
        summary = run.stop()
        found = figures(changes, run) | {
            "rounds": len(changes) // len(CHANGES), "samples": summary["samples_trained"],
            "lost": summary["samples_lost"], "twice": summary["samples_trained_twice"], "exit_code": summary["code"],
            "restarts": summary["restarts"], "left_behind": left_behind(Path(name)),
        }  # fmt: skip
    print(json.dumps(rounded(found)))


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
