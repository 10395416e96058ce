"""What ended a run: told from the events and logs of runs that really ended so, cut to what was looked at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rondo.launch.report.death import ended, judge
from rondo.launch.report.explain import show
from tests.launch.dashboard.runs import SETTINGS, lines

HERE = {"host": "node7", "boot_id": "b-1", "slurm_job": None}
STARTED = {"kind": "started", "source": "supervisor", "pid": 18499, "place": HERE, "oom_kills": 12}
DIED = {
    "kind": "died",
    "group": "actor-0",
    "incarnation": 1,
    "rank": 0,
    "pid": 18519,
    "cause": "exit code 1",
    "oom_kills": 12,
}
WHY = "actor-0 is beyond 1 restarts in 600 s, after 0 global restarts"
FINISHED = {"kind": "finished", "source": "supervisor", "exit_code": 1, "wall_s": 0.9}
PURPOSE = {"kind": "killed_on_purpose", "source": "supervisor", "group": "actor-0", "step": 1}
KERNEL = "[14469.5] Memory cgroup out of memory: Killed process 18519 (actor-0.0) total-vm:1151652kB, anon-rss:366444kB"
RAISED = (
    "Traceback (most recent call last):",
    '  File "/work/runtime/worker/worker.py", line 79, in _run_to_end',
    "    await role.run()",
    '  File "/runs/x/code/mine.py", line 7, in mine',
    '    raise ValueError("the reward model forgot its numbers")',
    "ValueError: the reward model forgot its numbers",
)
STACK = (
    "Fatal Python error: Segmentation fault",
    "Thread 0x1 (most recent call first):",
    '  File "thread.py", line 81 in _worker',
    "Current thread 0x2 (most recent call first):",
    '  File "ctypes/__init__.py", line 519 in string_at',
)


def failed(cause: str, *more: dict[str, Any], died: bool = True, why: str = WHY) -> list[dict[str, Any]]:
    """The events of a run whose actor ended so."""
    text = f"actor-0 rank 0 of incarnation 1 (pid 18519): {cause}"
    end = [{"kind": "failed", "source": "supervisor", "why": why, "cause": text}, FINISHED]
    return [STARTED, *more, *([DIED | {"cause": cause}] if died else []), *end]


def stopped(reason: str, *more: dict[str, Any], code: int = 75) -> list[dict[str, Any]]:
    told = {"kind": "stopping", "source": "supervisor", "reason": reason, "grace_s": 20.0}
    return [STARTED, told, *more, FINISHED | {"exit_code": code}]


NAN = "the gradient of sft step 1 must be finite, got norm nan. Lower sft.lr"
REWARD = 'rewards failed in a row: Traceback (most recent call last):\n  File "mine.py", line 21, in reward\nValueError: no score'
WAITED = "rondo.runtime.errors.DeadlineExceeded: wait 'round' of 'actor-0.0' for 'coordinator' must end within 60 s, got no end"
NO_ROOM = "wait 'room on the disk' of 'actor-0.0' for '/runs: 9 bytes needed' must end within 60 s, got no end"
ENDS: dict[str, tuple[list[dict[str, Any]], Sequence[str], str, str]] = {
    "killed on purpose": (failed("killed by SIGKILL", PURPOSE), (), "on purpose", "killed_on_purpose"),
    "killed by nobody knows whom": (failed("killed by SIGKILL"), (), "killed", "killed by SIGKILL"),
    "a role raised": (failed("exit code 1"), RAISED, "exception", "ValueError: the reward model forgot its numbers"),
    "a crash in C": (failed("killed by SIGSEGV"), STACK, "crash", "line 519 in string_at"),
    "a full disk": (
        failed("exit code 1"),
        (*RAISED[:5], "OSError: [Errno 28] No space left on device"),
        "disk full",
        "Errno 28",
    ),
    "no room for a save": (failed(NO_ROOM, died=False, why=NO_ROOM), (), "disk full", "room on the disk"),
    "no memory": (
        failed("exit code 1"),
        (*RAISED[:5], "MemoryError: Unable to allocate 93.1 GiB"),
        "memory",
        "93.1 GiB",
    ),
    "a full device": (
        failed("exit code 1"),
        (*RAISED[:5], "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        "device memory",
        "Tried to allocate 2.00 GiB",
    ),
    "a broken device": (
        failed("killed by SIGABRT"),
        ("terminate called", "CUDA error: an illegal memory access was encountered"),
        "device",
        "illegal memory access",
    ),
    "a hung collective": (
        failed("killed by SIGABRT"),
        ("[rank1]:[E] [PG ID 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=13)",),
        "collective",
        "SeqNum=13",
    ),
    "a dead server of SGLang": (
        failed("exit code 1"),
        ("[2026-01-01] Scheduler hit an exception: Traceback (most recent call last):", *RAISED[1:]),
        "sglang",
        "Scheduler hit an exception",
    ),
    "a wait's deadline": (failed("exit code 1"), (*RAISED[:5], WAITED), "deadline", "for 'coordinator'"),
    "standing still": (failed("silent for 15.0 s, limit 15 s"), STACK[1:], "stood still", "silent for 15.0 s"),
    "over a section's limit": (failed("section 'train' is 3.1 s over its limit"), (), "stood still", "'train'"),
    "not finite": (failed(NAN, died=False, why=NAN), (), "not finite", "norm nan"),
    "another end without a restart": (failed("no gap", died=False, why="no gap"), (), "given up", "no gap"),
    "a reward that raises": (failed(REWARD, died=False, why=REWARD), (), "given up", "\nValueError: no score"),
    "the leader": ([STARTED, DIED], (), "leader killed", "started"),
    "a stop": (stopped("SIGTERM", {"kind": "checkpoint", "version": 3}), (), "stop", '"version":3'),
    "a stop at once": (
        stopped("rondo stop", {"kind": "stop_now", "reason": "rondo stop"}, code=1),
        (),
        "stop",
        "stop_now",
    ),
    "a batch system's notice": (stopped("SIGUSR1"), (), "preemption", "SIGUSR1"),
    "a notice in a file": (stopped("notice in /run/p: spot"), (), "preemption", "spot"),
    "nothing was started": ([], (), "no start", ""),
    "a mistake of the supervisor": ([STARTED, FINISHED], (), "supervisor", "finished"),
}


@pytest.mark.parametrize("end", ENDS)
def test_each_end_is_told_apart_with_a_line_that_shows_it(end: str) -> None:
    events, log, kind, shown = ENDS[end]
    death = judge(events, lambda group, number: (f"logs/attempt_0/{group}.{number}.log", log), (), HERE)
    assert death is not None
    assert death.kind == kind
    assert shown in "\n".join(death.lines)
    assert ("It was not started again: " + WHY in death.text) == any(each.get("why") == WHY for each in events)


def test_memory_is_blamed_where_the_kernel_says_so_or_counts_it_and_not_else() -> None:
    def told(events: list[dict[str, Any]], *kernel: str) -> tuple[str, str]:
        death = judge(events, lambda *_: ("log", ()), kernel, HERE)
        assert death is not None
        return death.kind, death.lines[0]

    events = failed("killed by SIGKILL")
    assert told(events, KERNEL) == ("memory", f"kernel: {KERNEL}")
    assert told(events, KERNEL.replace("18519", "185"))[0] == "killed"
    assert told([STARTED, DIED | {"cause": "killed by SIGKILL", "oom_kills": 14}, *events[2:]]) == (
        "memory",
        "oom_kill of /proc/vmstat: 12 when the run began, 14 when actor-0 died",
    )
    assert told([STARTED], KERNEL.replace("18519", "18499"))[0] == "memory"
    # As it happened: short of memory it stood still, was ended for that, and the kernel had killed it meanwhile.
    registered = {"kind": "registered", "group": "actor-0", "incarnation": 1, "rank": 0, "pid": 28414}
    silent = failed("silent for 15.1 s, limit 15 s", registered)
    assert told(silent, KERNEL.replace("18519", "28414"))[0] == "memory"
    assert told(silent)[0] == "stood still"


def test_a_leader_that_is_gone_went_with_its_machine_where_that_has_started_again() -> None:
    job = {**STARTED, "place": HERE | {"slurm_job": "4711"}}
    death = judge([job], lambda *_: ("log", ()), (), HERE | {"boot_id": "b-2"})
    assert death is not None and death.kind == "node loss"
    assert "sacct -j 4711" in death.change[0]
    elsewhere = judge([job], lambda *_: ("log", ()), (), {"host": "laptop", "boot_id": "b-3"})
    assert elsewhere is not None and elsewhere.kind == "leader killed"
    assert elsewhere.change[0].startswith("look at node7")


def test_a_run_that_came_to_its_end_has_no_death() -> None:
    assert judge([STARTED, FINISHED | {"exit_code": 0}], lambda *_: ("log", ())) is None


def test_explain_of_a_dead_run_says_what_ended_its_last_start(tmp_path: Path, capfdbinary: Any) -> None:
    run = tmp_path / "dead"
    lines(run / "events.jsonl", [*stopped("SIGTERM"), *failed("exit code 1")])
    (run / "config.resolved.json").write_text(json.dumps(SETTINGS))
    for attempt, log in ((0, ["OSError: [Errno 28] No space left on device"]), (1, RAISED)):
        path = run / f"logs/attempt_{attempt}/actor-0.1.log"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(log) + "\n")
    assert show(run) == 0
    told = capfdbinary.readouterr().out.decode()
    assert told.startswith("run dead is over: actor-0 raised ValueError: the reward model forgot its numbers.")
    assert '  logs/attempt_1/actor-0.1.log:   File "/runs/x/code/mine.py", line 7, in mine' in told
    assert show(run, as_json=True) == 0
    assert json.loads(capfdbinary.readouterr().out)["ended"]["kind"] == "exception"
    found = ended(run)
    assert found is not None and not any("resume" in each for each in found.change)
