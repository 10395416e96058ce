"""A soak: one run of the quick start in which something dies every half minute, against runs in which nothing does.

    rondo bench soak [--minutes 20] [--every 30] [--seeds 0 1 2 3 4] [--steps 300] [--cells FOLDER]

Every `--every` seconds one of the run's processes gets SIGKILL: a worker, its torchrun, root or proxy, the coordinator, the
store, the nursery, the janitor, a reward's process; of the kinds that live, one that was killed least. Limits on restarts are
raised, and printed. The run is stopped after `--minutes`, and must have saved.

    reward      by tenths of the first `--steps` steps: of the soak; of runs with other seeds in which nothing dies, their mean
                and the interval in which 95 of 100 such runs lie. The verdict is on the mean over all these steps
    accounts    samples admitted, trained, lost, trained twice, by the journal; every step told
    leftover    processes of the run, its folder in the temporary directory, names in /dev/shm
    growth      of anonymous memory, descriptors and threads, kind by kind: a line fitted to all lives of its processes, each
                with a level of its own, and the error of its slope; of memory from the first minute on, of the others over the
                last third of each life. Flat is what grows by no more than twice its error; by less than 10 % of its memory in
                an hour, or 8 MB, whichever is more; by less than one descriptor or thread in an hour; and threads whose highest
                number is within a default pool, which fills as it is needed, of their lowest

Undisturbed runs are kept, and a rerun does those that are missing. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_run import ChaosRun, left_behind
from rondo.launch.report.records import step_records

LIMITS = ("supervision.max_restarts=1000", "supervision.max_global_restarts=0", "supervision.max_backoff_s=2")
SETTLED_S, SAMPLE_S = 60.0, 2.0
HOUR_S = 3600.0
T_975 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's quantile for 1, 2, ... degrees of freedom."""
FLAT = {"memory": 0.1, "descriptors": 1.0, "threads": 1.0}
"""Of the memory that it has; of descriptors and threads in numbers; an hour."""
FLOOR_BYTES = 8e6
"""An hour: Python takes memory by arenas of 1 MiB, and two of them in a life of a quarter of an hour tell of no leak."""
POOL = min(32, (os.cpu_count() or 1) + 4)
"""Threads of the pool that every event loop of Python has."""
Sample = tuple[float, float, float, float]
"""Age of the process in seconds, bytes of anonymous memory, descriptors, threads."""


# ---- what is measured of processes ------------------------------------------------------------------------------------


class Looks:
    """What each process of a run has, from time to time, by what it is."""

    def __init__(self) -> None:
        self.lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)

    def look(self, processes: dict[str, list[psutil.Process]]) -> None:
        for kind, living in processes.items():
            for process in living:
                with contextlib.suppress(psutil.Error), process.oneshot():
                    age = time.time() - process.create_time()
                    held = anonymous_bytes(process.pid), process.num_fds(), process.num_threads()
                    self.lives[kind, process.pid].append((age, *map(float, held)))

    def growth(self) -> dict[str, dict[str, Any]]:
        """kind -> what -> level, growth in an hour, its error, and whether that is flat."""
        found: dict[str, dict[str, Any]] = {}
        for kind in sorted({kind for kind, _ in self.lives}):
            lives = [[s for s in life if s[0] >= SETTLED_S] for (name, _), life in self.lives.items() if name == kind]
            for at, what in enumerate(FLAT, start=1):
                begin = 0.0 if what == "memory" else 2 / 3
                fitted = fit([[(s[0], s[at]) for s in life[int(begin * len(life)) :]] for life in lives])
                if fitted is not None:
                    level, slope, error = fitted[0], fitted[1] * HOUR_S, fitted[2] * HOUR_S
                    most = max(FLAT[what] * level, FLOOR_BYTES) if what == "memory" else FLAT[what]
                    numbers = [sample[at] for life in lives for sample in life]
                    filling = what == "threads" and max(numbers) - min(numbers) <= POOL
                    told = {"level": level, "an_hour": slope, "error": error, "highest": max(numbers)}
                    told["flat"] = filling or slope <= max(most, 2 * error)
                    found.setdefault(kind, {})[what] = told
        return found


def anonymous_bytes(pid: int) -> int:
    """Of a process's own memory what is there, also what it still shares with that which it was forked of; without rings."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    raise psutil.NoSuchProcess(pid)


def fit(lives: Iterable[Sequence[tuple[float, float]]]) -> tuple[float, float, float] | None:
    """(mean level, slope, its standard error) of one line through lives that have levels of their own; None of too few points."""
    points, levels, num_lives = [], [], 0
    for life in lives:
        if len(life) > 2:
            num_lives += 1
            middle, level = (statistics.fmean(each) for each in zip(*life, strict=True))
            points += [(x - middle, y - level) for x, y in life]
            levels += [y for _, y in life]
    spread = sum(x * x for x, _ in points)
    if len(points) < num_lives + 3 or spread == 0:
        return None
    slope = sum(x * y for x, y in points) / spread
    rest = sum((y - slope * x) ** 2 for x, y in points) / (len(points) - num_lives - 1)
    return statistics.fmean(levels), slope, math.sqrt(rest / spread)


# ---- rewards --------------------------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where another run like these lies, 95 of 100 times."""
    wide = T_975[len(values) - 2] * statistics.stdev(values) * math.sqrt(1 + 1 / len(values))
    return statistics.fmean(values) - wide, statistics.fmean(values) + wide


def tenths(rewards: Sequence[float]) -> list[float]:
    size = len(rewards) // 10
    return [statistics.fmean(rewards[at * size : (at + 1) * size]) for at in range(10)]


def rewards_of(run_dir: Path, num_steps: int) -> list[float]:
    return [record["reward_mean"] for record in step_records(run_dir / "metrics.jsonl")][:num_steps]


def undisturbed(seed: int, num_steps: int) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="rondo-soak-") as name:
        sets = [f"seed={seed}", f"num_steps={num_steps}", "evaluation=null", "data.held_out=0"]
        with ChaosRun(Path(name), sets) as run:
            with contextlib.suppress(RuntimeError):
                run.until(lambda line: False, limit_s=HOUR_S)
            if run.wait() != 0:
                raise RuntimeError(f"a run in which nothing dies must end with 0, got {run.returncode}")
            return rewards_of(run.run_dir, num_steps)


# ---- the soak -------------------------------------------------------------------------------------------------------------


def soak(seconds: float, every_s: float, num_steps: int, seed: int) -> dict[str, Any]:
    chance, killed, looks = random.Random(seed), Counter[str](), Looks()
    before = set(Path("/dev/shm").iterdir())
    with tempfile.TemporaryDirectory(prefix="rondo-soak-") as name:
        sets = [f"seed={seed}", "num_steps=1000000", "evaluation=null", "data.held_out=0", *LIMITS]
        with ChaosRun(Path(name), sets) as run:
            run.steps(1)
            rt_dir = next(Path(line.told["rt_dir"]) for line in run.lines if line.kind == "started")
            begun = time.monotonic()
            next_at = begun + every_s
            while time.monotonic() < begun + seconds:
                time.sleep(SAMPLE_S)
                run.skip()
                if run.poll() is not None:
                    raise RuntimeError(f"a run must outlive every death, got its end with {run.returncode}")
                processes = run.processes()
                looks.look(processes)
                if time.monotonic() >= next_at:
                    next_at += every_s
                    living = {kind: each for kind, each in processes.items() if kind != "supervisor"}
                    kind = min(sorted(living), key=lambda each: (killed[each], chance.random()))
                    with contextlib.suppress(psutil.NoSuchProcess):
                        chance.choice(living[kind]).kill()
                        killed[kind] += 1
                        print(f"{time.monotonic() - begun:7.0f} s  killed {kind}", flush=True)
            summary = run.stop()
            told = rewards_of(run.run_dir, 10**9)
        left = left_behind(Path(name))
    own = {str(pid) for _, pid in looks.lives}
    left += [str(each) for each in set(Path("/dev/shm").iterdir()) - before if own & set(each.name.split("_"))]
    left += [str(rt_dir)] if rt_dir.exists() else []
    names = (
        "samples_admitted",
        "samples_trained",
        "samples_lost",
        "samples_trained_twice",
        "steps",
        "restarts",
        "attempt",
    )
    return {
        "minutes": seconds / 60, "every_s": every_s, "killed": dict(killed), "code": summary["code"],
        **{each: summary[each] for each in names},
        "every_step_told": len(told) == summary["steps"], "left": left, "growth": looks.growth(),
        "rewards": told[:num_steps], "last_reward": statistics.fmean(told[-20:]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds from one death to the next")
    parser.add_argument(
        "--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4], help="of the runs in which nothing dies"
    )
    parser.add_argument("--seed", type=int, default=5, help="of the soak")
    parser.add_argument("--steps", type=int, default=300, help="whose rewards are compared")
    parser.add_argument("--cells", type=Path, default=Path("runs/soak"), help="where undisturbed runs are kept")
    options = parser.parse_args()
    options.cells.mkdir(parents=True, exist_ok=True)
    print(f"limits: {' '.join(LIMITS)}", flush=True)
    calm: list[list[float]] = []
    for seed in options.seeds:
        path = options.cells / f"{seed}.{options.steps}.json"
        if not path.exists():
            path.write_text(json.dumps(undisturbed(seed, options.steps)))
        calm.append(json.loads(path.read_bytes()))
        print(f"seed {seed}: {' '.join(f'{each:.2f}' for each in tenths(calm[-1]))}", flush=True)
    found = soak(60 * options.minutes, options.every, options.steps, options.seed)
    rewards = found.pop("rewards")
    compared = min(len(rewards), options.steps)
    low, high = interval([statistics.fmean(each[:compared]) for each in calm])
    found["reward"] = {"steps": compared, "soak": statistics.fmean(rewards), "low": low, "high": high}
    print(f"\n{'tenth':<8}{'soak':>8}{'mean':>8}{'low':>8}{'high':>8}")
    for number, (own, *others) in enumerate(
        zip(tenths(rewards), *(tenths(each[:compared]) for each in calm), strict=True)
    ):
        least, most = interval(others)
        print(f"{number:<8}{own:>8.3f}{statistics.fmean(others):>8.3f}{least:>8.3f}{most:>8.3f}")
    print(f"\n{'grows in an hour':<32}" + "".join(f"{what:>34}" for what in FLAT))
    for kind, row in found["growth"].items():
        unit = {"memory": 1e6}
        parts = [
            f"{each['an_hour'] / unit.get(what, 1):+.1f} ± {2 * each['error'] / unit.get(what, 1):.1f} of "
            f"{each['level'] / unit.get(what, 1):.1f}{'' if each['flat'] else ' GROWS'}"
            for what, each in row.items()
        ]
        print(f"{kind:<32}" + "".join(f"{part:>34}" for part in parts))
    found["bars_met"] = {
        "reward as undisturbed": found["reward"]["soak"] >= low,
        "nothing lost or twice": found["samples_lost"] == found["samples_trained_twice"] == 0,
        "every step told": found["every_step_told"], "nothing left": not found["left"], "stopped and saved": found["code"] == 75,
        "flat": all(each["flat"] for row in found["growth"].values() for each in row.values()),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
