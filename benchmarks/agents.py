"""Agents by the thousand: whether slow tools leave slots idle, what a turn costs beside engine and tool, and what a kill costs.

    rondo bench agents [--steps 5] [--slots 256] [--undisturbed]

A whole run of `benchmarks/agents_run.py`: two rollout replicas, whose engine waits in the place of computing, and tools of 0.1
to 30 s (log-normal). Roles, chat template, tools' processes, bus, journal and kept samples are real. Once undisturbed, and once
with a replica and a process of its pools, of tools or of rewards, killed by SIGKILL.

- slots used: of all slot seconds from the moment at which all slots were taken, to the last lease that was given: while work
  waits.
- a turn's overhead: processor time of the rollout process a turn, all of it, between the same moments; and what the waiting
  engine and the waiting tool take of that (`engine_cpu_us`): drawing and making answers, timers, slots. This is measured first,
  with as many episodes that do nothing but ask both, in a process without a rollout.
- memory an episode: what the process takes more at its most than before its first one, over the episodes that it had open then.
- lost and twice: from the journal, at the end of the run.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from uvloop import new_event_loop

from benchmarks.agents_run import alone
from benchmarks.chaos_run import ChaosRun

CONFIG = Path(__file__).with_name("agents_run.py")
_LIMIT_S = 900.0


def told(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """What each life of a replica has counted, by its file's name."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for path in sorted(run_dir.glob("agents.*.jsonl"))
    }


def figures_of(lines: list[dict[str, Any]]) -> dict[str, float] | None:
    """Of one life; None where its slots were never all taken."""
    full = next((i for i, line in enumerate(lines) if line["running"] == line["num_slots"]), None)
    if full is None:
        return None
    last = next(i for i, line in enumerate(lines) if line["leases"] == lines[-1]["leases"])
    if last - full < 10:
        return None
    begin, end = lines[full], lines[last]
    turns = end["turns"] - begin["turns"]
    most = max(lines, key=lambda line: line["open"])
    return {
        "seconds": end["at"] - begin["at"],
        "slots": (end["slot_s"] - begin["slot_s"]) / (end["at"] - begin["at"]) / begin["num_slots"],
        "turn_cpu_us": (end["cpu_s"] - begin["cpu_s"]) / turns * 1e6,
        "turns": turns,
        "tool_s": (end["tool_s"] - begin["tool_s"]) / turns,
        "open": most["open"],
        "episode_kb": (most["rss"] - lines[0]["rss"]) / most["open"] / 1e3,
    }


def played(options: argparse.Namespace, *, kills: bool) -> dict[str, Any]:
    sets = [f"num_steps={options.steps}", f"rollout.num_slots={options.slots}"]
    with (
        tempfile.TemporaryDirectory(prefix="rondo-bench-") as name,
        ChaosRun(Path(name), sets, config=CONFIG) as run,
    ):
        if kills:
            run.until(lambda line: line.kind == "step", _LIMIT_S)
            rollout = run.victim("rollout")
            worker = run.victim("reward_worker")
            run.hit(worker, "sigkill")
            run.until(lambda line: line.kind == "step", _LIMIT_S)
            run.hit(rollout, "sigkill")
        try:
            run.until(lambda line: False, _LIMIT_S)
        except RuntimeError:  # its end
            code = run.wait()
        summary = json.loads((run.run_dir / "summary.json").read_bytes())
        lives = {name: found for name, lines in told(run.run_dir).items() if (found := figures_of(lines))}
    for life, found in lives.items():
        print(f"{life:36} {json.dumps({name: round(value, 3) for name, value in found.items()})}")
    kept = ("samples_admitted", "samples_trained", "samples_lost", "samples_trained_twice", "restarts")
    print(f"exit {code}, {json.dumps({name: summary.get(name) for name in kept})}", flush=True)
    return {"lives": lives, "code": code, **{name: summary.get(name) for name in kept}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--steps", type=int, default=5, help="with more the last ones wait for the trainer, not for slots"
    )
    parser.add_argument("--slots", type=int, default=256, help="of each of the two replicas")
    parser.add_argument("--undisturbed", action="store_true", help="without the run with kills")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="rondo-bench-") as folder,
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        engine_cpu_us = runner.run(alone(Path(folder), options.slots, 4 * options.slots, 10.0))
    calm = played(options, kills=False)
    lives = list(calm["lives"].values())
    found: dict[str, Any] = {
        "episodes_open": sum(life["open"] for life in lives),
        "slots_used": round(statistics.mean(life["slots"] for life in lives), 4),
        "tool_s_per_turn": round(statistics.mean(life["tool_s"] for life in lives), 3),
        "turns": sum(life["turns"] for life in lives),
        "turn_cpu_us": round(statistics.mean(life["turn_cpu_us"] for life in lives), 1),
        "engine_cpu_us": round(engine_cpu_us, 1),
        "episode_kb": round(statistics.mean(life["episode_kb"] for life in lives), 1),
        "episodes": calm["samples_trained"],
        "lost": calm["samples_lost"],
        "twice": calm["samples_trained_twice"],
    }
    if not options.undisturbed:
        killed = played(options, kills=True)
        found |= {
            "killed_episodes": killed["samples_trained"],
            "killed_lost": killed["samples_lost"],
            "killed_twice": killed["samples_trained_twice"],
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
