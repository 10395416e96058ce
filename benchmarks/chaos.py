"""Chaos: every kind of process of a run has every kind of fault; how soon it is seen and made good, and what it costs.

    rondo bench chaos [--role actor ...] [--fault sigkill ...] [--kills 10] [--cells FOLDER] [--again] [--sglang-python PYTHON]

The run is the quick start without its warm-up, with small steps, and limits that are printed; for the critic with PPO. A role's
faults strike one after another in one run, each when three steps have passed since the one before; the first, SIGKILL, ten times
(median and worst).

    sigkill     of a worker, a service, a reward's process, the engine's server, SGLang's scheduler within it, the nursery
    sigstop     the whole process stands
    exception   in the middle of its computation; of a service, out of what its event loop waits for
    hang        pause(2) in C code, without the interpreter's lock, in the middle of its computation while its loop beats on; of
                actor and reference one of two ranks, so that the other one stands in a collective. Services hang on their loop
    oom         it eats memory in a control group that has no more, until the kernel kills it; without one, MemoryError
    disk_full   the run directory lies on a disk of its own, which is full when the process is killed, and for seconds more

detect_s: from the fault until the supervisor (of a reward: the pool; of a server: the rollout) says that it died; of the
nursery, which is asked for nothing while nobody starts, until there is another, once a role was killed that needs it.
back_s: from there until it is ready again, imports included; of the store, until all role groups are; of a reward's process,
until the next step. lost, twice: samples, by the journal, in the run that the fault struck in. steps_repeated: whole steps that
were told a second time before the next fault.

Each cell is kept in a file of its own, and a rerun does those that are missing. The last line is one JSON object: the cells that
were asked for, and of all others those that lie in `benchmarks/results/chaos.json`, where they were measured on such a machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos_run import ENGINES, PATIENCE_S, ChaosRun, fill_for, forget_groups, left_behind, small_disk
from rondo.launch.bench import machine

RESULTS = Path(__file__).parent / "results" / "chaos.json"
ROLES = {
    "rollout": "benchmarks.chaos_roles:Rollout",
    "actor": "benchmarks.chaos_roles:Actor",
    "actor_fwd": "benchmarks.chaos_roles:ActorForward",
    "reference": "benchmarks.chaos_roles:Reference",
    "advantages": "benchmarks.chaos_roles:Advantages",
    "critic": "benchmarks.chaos_roles:Critic",
}
"""The role classes of the run, which fail where they are told to."""
LIGHT = ("advantages", "coordinator", "reward_worker")
VICTIMS = (*ROLES, "coordinator", "reward_worker", *ENGINES, "store", "nursery")
FAULTS = ("sigkill", "exception", "oom", "sigstop", "hang", "disk_full")
SILENCE_S, WORK_S, REWARD_S, FORK_S, UPDATE_S = 8.0, 10.0, 3.0, 30.0, 20.0
SMALL = (
    "num_steps=1000000", "sft=null", "evaluation=null", "data.held_out=0", "rollout.prompts_per_step=8",
    "rollout.num_slots=64", "train.save_every=500", "train.keep_checkpoints=1",
)  # fmt: skip
LIMITS = (
    f"supervision.silence_s={SILENCE_S}", f"supervision.work_floor_s={WORK_S}", "supervision.work_ceiling_s=120",
    f"reward.deadline_s={REWARD_S}", f"rollout.sglang.silent_deadline_s={SILENCE_S}",
    f"rollout.sglang.update_deadline_s={UPDATE_S}",
    "supervision.max_restarts=1000", "supervision.max_global_restarts=0", "supervision.max_backoff_s=0",
)  # fmt: skip
DISK_BYTES = 96 << 20
FULL_S = 5.0
SEEN_S, LIGHT_BACK_S = 1.0, 5.0
Cell = dict[str, Any]


def seconds_limit(role: str, fault: str) -> float:
    """Within which a fault is to be seen: an exit at once, a hang by its own limit, and a moment for ticks and stacks."""
    if fault not in ("sigstop", "hang") and role != "scheduler":  # of which nobody is told that it died
        return SEEN_S
    of = {"reward_worker": REWARD_S, "nursery": FORK_S}
    if role == "scheduler" and fault == "hang":  # which may begin in an update, whose own limit then comes first
        return UPDATE_S + SILENCE_S + 3.0
    worked = fault == "hang" and role in ROLES and role != "advantages"
    return of.get(role, WORK_S * 2 if worked else SILENCE_S) + 3.0


def roles_of(role: str) -> dict[str, str]:
    """The roles of the run in which faults of `role` strike."""
    others = {"actor_fwd", "reference"} if role == "critic" else {"critic"}
    return {name: ROLES[name] for name in ROLES if name not in others}


def settings(role: str, kind: str) -> list[str]:
    ppo = {"role_groups": [{"name": name, "roles": [name]} for name in roles_of(role)], "algorithm": {"name": "ppo"}}
    limits = [each for each in LIMITS if role in ENGINES or "sglang" not in each]
    two = {"actor": "role_groups.1.processes=2", "reference": "role_groups.3.processes=2"}
    critic = [f"{name}={json.dumps(value)}" for name, value in ppo.items()] if role == "critic" else []
    return [
        *SMALL, *limits, *critic, f"roles={json.dumps(roles_of(role))}", *([two[role]] if kind == "ranks" else []),
    ]  # fmt: skip


def kind_of(role: str, fault: str) -> str:
    """Which cells share a run."""
    if fault == "disk_full":
        return "disk"
    return "ranks" if fault == "hang" and role in ("actor", "reference") else "plain"


# ---- one fault ------------------------------------------------------------------------------------------------------------


def struck(run: ChaosRun, role: str, fault: str, disk: Path) -> Cell:
    """One fault from its beginning to the third step behind it."""
    run.steps(3)
    if fault == "disk_full":
        fill_for(disk, FULL_S)
    run.skip()
    before, victim = len(run.lines), run.victim(role)
    at, how = run.hit(victim, fault)
    if role == "nursery":
        seen, back = of_nursery(run, victim)
    elif role == "reward_worker":
        seen, back = of_reward(run, victim)
    elif role in ENGINES:
        seen = run.until(lambda line: line.kind == "sglang_gone").at
        back = run.until(lambda line: line.kind == "sglang_back").at
    else:
        group = role if role in ("coordinator", "store") else f"{role}-0"
        died = run.until(lambda line: line.is_of("died", group))
        how, seen = how or died.told.get("cause", ""), died.at
        waited = {group} if role != "store" else {"store", *(f"{name}-0" for name in roles_of(role))}
        while waited:
            ready = run.until(lambda line: line.kind == "ready" and line.group in waited)
            waited.discard(ready.group)
        back = ready.at
    run.pump()
    run.steps(3)
    old, new = (
        [line.step for line in lines if line.kind == "step"] for lines in (run.lines[:before], run.lines[before:])
    )
    repeated = len(new) - len(set(new) - set(old))
    return {"detect_s": seen - at, "back_s": back - seen, "steps_repeated": repeated, "how": how}


def of_nursery(run: ChaosRun, victim: psutil.Process) -> tuple[float, float]:
    """Who asks it next is a role that was killed: when there is another nursery, and when that role is there."""
    run.victim("advantages").kill()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(LookupError, psutil.Error):
            if run.victim("nursery").pid != victim.pid:
                break
        if time.monotonic() > deadline:
            raise TimeoutError(f"a nursery that died must be replaced within {PATIENCE_S:g} s, got none")
        time.sleep(0.02)
    seen = time.time()
    return seen, run.until(lambda line: line.is_of("ready", "advantages-0")).at


def of_reward(run: ChaosRun, victim: psutil.Process) -> tuple[float, float]:
    deadline = time.monotonic() + PATIENCE_S
    while victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            raise TimeoutError("a reward's process that hangs must be ended, got one that is there")
        time.sleep(0.01)
    seen = time.time()
    run.skip()
    return seen, run.until(lambda line: line.kind == "step").at


# ---- cells ----------------------------------------------------------------------------------------------------------------


def cells(role: str, kind: str, faults: Sequence[str], python: str, kills: int) -> Iterator[tuple[str, Cell]]:
    """(fault, cell) of one role, in one run. What the run says of samples is in each of them."""
    found: dict[str, Cell] = {}
    with contextlib.ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="rondo-chaos-")))
        disk = ends.enter_context(small_disk(DISK_BYTES)) if kind == "disk" else folder
        run = ends.enter_context(ChaosRun(disk, settings(role, kind), engine=python if role in ENGINES else None))
        for fault in faults:
            times = [struck(run, role, fault, disk) for _ in range(kills if fault == "sigkill" else 1)]
            found[fault] = {
                "detect_s": statistics.median(each["detect_s"] for each in times),
                "back_s": statistics.median(each["back_s"] for each in times),
                "steps_repeated": max(each["steps_repeated"] for each in times),
                "how": times[-1]["how"], "times": len(times),
                "worst_detect_s": max(each["detect_s"] for each in times),
                "worst_back_s": max(each["back_s"] for each in times),
            }  # fmt: skip
        summary = run.stop()
        run.end()
        left = left_behind(disk)
        forget_groups()
    for fault, cell in found.items():
        cell |= {"lost": summary["samples_lost"], "twice": summary["samples_trained_twice"]}
        cell |= {"exit_code": summary["code"], "left_behind": left, "limit_s": seconds_limit(role, fault)}
        yield fault, {name: round(value, 3) if isinstance(value, float) else value for name, value in cell.items()}


def fallen(role: str, fault: str, cell: Cell) -> list[str]:
    """What a cell does not keep of what is promised."""
    if "error" in cell:
        return [cell["error"]]
    worst: Any = cell.get("worst_detect_s", cell["detect_s"])
    back: Any = cell.get("worst_back_s", cell["back_s"])
    found = []
    if worst > cell["limit_s"] and fault != "disk_full":
        found.append(f"seen after {worst:.2f} s, limit {cell['limit_s']:g} s")
    if role in LIGHT and back > LIGHT_BACK_S and fault != "disk_full":
        found.append(f"back after {back:.2f} s, limit {LIGHT_BACK_S:g} s")
    found += [f"{cell[name]} {name}" for name in ("lost", "twice", "left_behind") if cell[name]]
    if cell["steps_repeated"] > 1:
        found.append(f"{cell['steps_repeated']} steps repeated")
    return [*found, *([f"exit code {cell['exit_code']}"] if cell["exit_code"] != 75 else [])]


def known(folder: Path) -> dict[str, dict[str, Cell]]:
    found: dict[str, dict[str, Cell]] = {}
    for role in VICTIMS:
        for fault in FAULTS:
            path = folder / f"{role}.{fault}.json"
            if path.exists():
                found.setdefault(role, {})[fault] = json.loads(path.read_bytes())
    return found


def merged(results: Path, of: dict[str, Any], done: dict[str, dict[str, Cell]]) -> dict[str, dict[str, Cell]]:
    """The cells of `results` with those of `done` in their place, each with its load; none of another machine than `of`."""
    before = json.loads(results.read_bytes()) if results.exists() else {}
    same = before and all(before[name] == of[name] for name in ("processor", "cores"))
    old = before["figures"]["roles"] if same else {}
    found: dict[str, dict[str, Cell]] = {}
    for role in VICTIMS:
        for fault in FAULTS:
            if fault in done.get(role, ()):
                found.setdefault(role, {})[fault] = {"load": of["load_before"][0], **done[role][fault]}
            elif fault in old.get(role, ()):
                found.setdefault(role, {})[fault] = {"load": before["load_before"][0], **old[role][fault]}
    return found


def show(matrix: dict[str, dict[str, Cell]]) -> None:
    print("seen after + back after that, s\n" + f"{'role':<15}" + "".join(f"{fault:>17}" for fault in FAULTS))
    for role, row in matrix.items():
        told = []
        for fault in FAULTS:
            cell = row.get(fault, {})
            told.append(
                f"{cell['detect_s']:.2f} + {cell['back_s']:.2f}" if "back_s" in cell else "failed" if cell else "-"
            )
        print(f"{role:<15}" + "".join(f"{each:>17}" for each in told))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", nargs="*", choices=VICTIMS, default=list(VICTIMS))
    parser.add_argument("--fault", nargs="*", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--kills", type=int, default=10, help="how often a role gets SIGKILL")
    parser.add_argument("--cells", type=Path, default=Path("runs/chaos"), help="where each cell is kept")
    parser.add_argument("--again", action="store_true", help="do cells that are there already once more")
    venv = os.environ.get("SGLANG_VENV")
    parser.add_argument(
        "--sglang-python", default=f"{venv}/bin/python" if venv else "",
        help="a Python with SGLang (default: that of SGLANG_VENV); without, our own server in its dialect",
    )  # fmt: skip
    options = parser.parse_args()
    options.cells.mkdir(parents=True, exist_ok=True)
    about = machine()
    print(f"limits: {' '.join(LIMITS)}", flush=True)
    for role in options.role:
        if role == "scheduler" and not options.sglang_python:  # our own server has none
            continue
        there = set() if options.again else set(known(options.cells).get(role, ()))
        wanted = [fault for fault in FAULTS if fault in options.fault and fault not in there]
        for kind in dict.fromkeys(kind_of(role, fault) for fault in wanted):
            together = [fault for fault in wanted if kind_of(role, fault) == kind]
            try:
                done = dict(cells(role, kind, together, options.sglang_python, options.kills))
            except Exception as error:  # noqa: BLE001 - that a run failed is a finding, not the benchmark's end
                done = {fault: {"error": f"{type(error).__name__}: {error}"} for fault in together}
            for fault, cell in done.items():
                cell["load"] = round(os.getloadavg()[0], 1)
                (options.cells / f"{role}.{fault}.json").write_text(json.dumps(cell))
                print(
                    f"{role:<15}{fault:<11}{'; '.join(fallen(role, fault, cell)) or 'good'}  {json.dumps(cell)}",
                    flush=True,
                )
    asked = {
        role: {fault: cell for fault, cell in row.items() if fault in options.fault}
        for role, row in known(options.cells).items()
        if role in options.role
    }
    matrix = merged(RESULTS, about, asked)
    show(matrix)
    judged = {
        f"{role} {fault}": fallen(role, fault, cell) for role, row in matrix.items() for fault, cell in row.items()
    }
    bad = {name: wrong for name, wrong in judged.items() if wrong}
    print(json.dumps({"roles": matrix, "fallen": bad, "limits": list(LIMITS), "command": "rondo bench chaos"}))


if __name__ == "__main__":
    main()
