"""The reward hub: agreement with its sources, rows a second, and what answers made to hold a checker up do to a pool of workers.

    rondo bench rewards [--answers 10000] [--workers 2] [--checkers math ifeval ifbench] [--seconds 1]

First each checker scores what its source says of responses (`rewards_cases.py`, `rewards_instructions.py`): every case that it
scores another way is printed, with why. Its rows a second are of these cases, by processor time of one core. Then as many hostile
answers (`rewards_hostile.py`, the same each time) go to each of `--checkers` through the pool that a run has, one a worker at a
time, with the rows of its cases in turn: told are those that hung until `reward.deadline_s`, that killed their worker, and that
raised; and the seconds of the slowest, by kind, from asking to the score. `ifbench` needs data of nltk (docs/rewards.md). The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import itertools
import json
import math
import time
from collections import Counter
from typing import Any

from benchmarks.rewards_cases import DIFFERS, PUBLISHED, Case
from benchmarks.rewards_hostile import hostile
from benchmarks.rewards_instructions import IFBENCH, IFEVAL
from rondo.roles.config.data import RewardConfig
from rondo.roles.rewards import hub
from rondo.roles.rewards.pool import RewardItem, RewardPool
from rondo.roles.rewards.scores import RewardError, checked

LOAD_S = 120.0
CASES = PUBLISHED | {"ifeval": IFEVAL, "ifbench": IFBENCH}


def as_published(name: str) -> dict[str, bool]:
    """Return the argument with which a reward scores as its source, where it has one."""
    return {"as_published": True} if "as_published" in inspect.signature(getattr(hub, name)).parameters else {}


def scored(name: str, case: Case) -> float:
    args = case.args | as_published(name)
    try:
        score, _ = checked(getattr(hub, name)(case.response, case.label, prompt="", metadata=case.metadata, **args))
    except RewardError:  # a label that no answer can equal
        return 0.0
    return float(score)


def agreement(name: str, seconds: float) -> dict[str, Any]:
    """Of one checker: how many cases there are, those that it scores another way than its source, and rows a second."""
    cases = CASES[name]
    differ = [case for case in cases if not math.isclose(scored(name, case), case.theirs, rel_tol=1e-6)]
    begun, rows = time.process_time(), 0
    while (took := time.process_time() - begun) < seconds:
        for case in cases:
            scored(name, case)
        rows += len(cases)
    for case in differ:
        why = DIFFERS.get(name, {}).get(case.response, "nobody knows why")
        print(
            f"  {name}: {case.response!r} for {case.label!r}: {scored(name, case):g}, its source {case.theirs:g}: {why}"
        )
    return {"cases": len(cases), "agree": len(cases) - len(differ), "differ": [case.response for case in differ],
            "rows_per_s": round(rows / took)}  # fmt: skip


async def survived(checker: str, answers: int, workers: int) -> dict[str, Any]:
    """What became of the hostile answers, and of the workers."""
    config = RewardConfig(function=checker, num_workers=workers)
    given = config.model_dump(include={"function", "per", "components", "by", "args", "num_workers", "deadline_s"})
    became, slowest, took = Counter[str](), dict[str, float](), list[float]()
    left, rows = hostile(answers), itertools.cycle([case.metadata for case in CASES[checker]])

    async def ask(pool: RewardPool) -> None:
        for kind, response, label in left:
            begun = time.perf_counter()
            [result] = await pool.score([RewardItem(response, label=label, metadata=next(rows))])
            took.append(time.perf_counter() - begun)
            slowest[kind] = max(slowest.get(kind, 0.0), took[-1])
            became["hung" if result.timed_out else "failed" if result.score is None else "scored"] += 1
            if result.score is None:
                print(f"  {kind}: {response[:80]!r}: {result.brief}", flush=True)

    async with RewardPool(load_deadline_s=LOAD_S, **given) as pool:
        begun = time.perf_counter()
        await asyncio.gather(*(ask(pool) for _ in range(workers)))
        whole_s = time.perf_counter() - begun
        restarts = pool.stats().num_restarts
    took.sort()
    crashed = restarts - became["hung"]  # whoever hangs is killed
    for kind, seconds in sorted(slowest.items(), key=lambda each: -each[1]):
        print(f"  {kind:18} slowest {seconds:6.3f} s")
    return {
        "answers": len(took), "checker": checker, "workers": workers, "deadline_s": config.deadline_s, "hung": became["hung"],
        "crashed": crashed, "raised": became["failed"] - crashed, "seconds": round(whole_s, 1),
        "median_ms": round(took[len(took) // 2] * 1e3, 2), "p99_s": round(took[len(took) * 99 // 100], 3),
        "slowest_s": round(took[-1], 3), "slowest_kind": max(slowest, key=lambda kind: slowest[kind]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--checkers", nargs="+", default=["math", "ifeval", "ifbench"], choices=CASES, metavar="NAME")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="processor time of the rows a second of each checker"
    )
    options = parser.parse_args()
    checkers = {}
    for name in CASES:
        found = checkers[name] = agreement(name, options.seconds)
        print(
            f"{name:16} {found['agree']:3} of {found['cases']:3} agree  {found['rows_per_s']:8,} rows/s a core",
            flush=True,
        )
    pools = [asyncio.run(survived(name, options.answers, options.workers)) for name in options.checkers]
    for pool in pools:
        print(", ".join(f"{name} {value}" for name, value in pool.items()))
    print(json.dumps({"checkers": checkers, "hostile": pools}))


if __name__ == "__main__":
    main()
