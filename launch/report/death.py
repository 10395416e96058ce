"""What ended a run, in words, with the lines that show it: the first half of `rondo explain` of a run that is over.

Owns the judgement. Does not own what is judged: events, logs and the kernel's own log are read, and nothing is asked of anybody.
`judge` is pure.

    events of the last supervisor, logs, this machine's kernel  ->  judge  ->  Death  ->  lines

Invariant: every death comes with lines of the run's files, and what nobody can know (who sent a SIGKILL) is not claimed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.machine import said_by
from rondo.launch.report.records import read_records
from rondo.launch.rundir import owner
from rondo.runtime.checkpoints import newest_complete
from rondo.runtime.processes.place import place
from rondo.runtime.records.record import last_lines
from rondo.runtime.supervision.orders import EXIT_DONE, EXIT_REQUEUE

_NUM_LINES = 400
_SHOWN = 6
_CAUSE = re.compile(
    r"(?P<group>[\w-]+)(?: rank \d+)? of incarnation (?P<number>\d+)(?: \(pid (?P<pid>\d+)\))?: (?P<what>.*)", re.S
)
_STOPS = {
    "SIGINT": "by Ctrl-C, or SIGINT from elsewhere",
    "SIGHUP": "because its terminal was closed (SIGHUP); `nohup`, tmux or a batch job outlive one",
    "SIGTERM": "by SIGTERM: whoever manages it (systemd, Kubernetes, `scancel`, `kill`) asked it to end",
}
_SIGNS = (
    ("device memory", r"OutOfMemoryError|(CUDA|HIP) out of memory", "the memory of a device is full",
     "lower train.micro_batch_tokens or rollout.num_slots, shard over more processes; `rondo check` traces what fits"),
    ("collective", r"NCCL error|nccl\w*Error|Watchdog caught collective|Connection closed by peer \[",
     "a collective between processes broke or hung",
     "look at who died or stood first (lines above); `rondo check CONFIG.py --probe` measures each pair"),
    ("device", r"CUDA error|device-side assert|CUDNN_STATUS|CUBLAS_STATUS|uncorrectable ECC|\bXid\b",
     "a device, or a kernel on it, failed",
     "CUDA_LAUNCH_BLOCKING=1 names the kernel; `rondo check CONFIG.py --probe` looks at the devices"),
    ("disk full", r"No space left on device|Disk quota exceeded|wait 'room on the disk'", "there was no room left on a disk",
     "make room (`df -h`), or set run_dir elsewhere; train.keep_checkpoints keeps fewer"),
    ("memory", r"\bMemoryError\b|Cannot allocate memory|std::bad_alloc|can't allocate memory",
     "there was no memory left on the machine",
     "fewer processes or slots, a lower bus.ring_bytes, or a machine with more"),
    ("sglang", r"Scheduler hit an exception|Received sigquit from a child process|SGLang server .*(died|ended|must)",
     "an SGLang server crashed", "see its log below; start it by hand with the same options"),
    ("deadline", r"DeadlineExceeded: |must end within [\d.e+]+ s, got no end", "a wait came to its deadline",
     "look at what the one that was waited for was doing then: its log, and `rondo timeline`"),
)  # fmt: skip
"""(kind, how a line of a log shows it, in words, what to do), the most telling first."""
_STANDS = r"silent for|over its limit|not up within|no progress|over supervision\.save_s|held in the kernel"
_LAST = re.compile(
    r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Gone|Exceeded|Refused|Changed|Fatal|Broken|Data|Space)\b"
)


@dataclass(frozen=True, slots=True)
class Death:
    """`kind` in a word or two, `text` in words, the `lines` that show it ("FILE: line"), and what to `change`."""

    kind: str
    text: str
    lines: tuple[str, ...] = ()
    change: tuple[str, ...] = ()


def ended(run: Path) -> Death | None:
    """What ended the run at `run`; None where it lives, or has come to its end."""
    if owner(run) is not None:
        return None
    events: list[dict[str, Any]] = []
    for record in read_records(run / "events.jsonl"):
        if "kind" not in record:
            continue
        if record["kind"] == "started":
            events.clear()
        events.append(record)
    death = judge(events, lambda group, number: _log(run, group, number), _kernel(events), place())
    if death is None or death.kind == "no start":
        return death
    back = f"`rondo resume {run}`" if newest_complete(run / "checkpoints") else None
    return Death(death.kind, death.text, death.lines, death.change + ((f"then go on: {back}",) if back else ()))


def judge(
    events: Sequence[Mapping[str, Any]],
    log: Callable[[str, int], tuple[str, Sequence[str]]],
    kernel: Sequence[str] = (),
    here: Mapping[str, Any] | None = None,
) -> Death | None:
    """From the events since the last supervisor began, its processes' logs ((group, incarnation) -> name and lines), the kernel's
    lines about processes that it ended, and the machine that this is."""
    if not events or events[0]["kind"] != "started":
        return Death(
            "no start", "the run ended before its first process: the terminal or the batch job's log says why."
        )
    finished = _last(events, "finished")
    if finished is None:
        return _leader(events, kernel, here or {})
    if finished["exit_code"] == EXIT_DONE:
        return None
    asked = next((each for each in events if each["kind"] == "stopping"), None)
    if asked is None and finished["exit_code"] == EXIT_REQUEUE:  # on a full disk it was not written down
        asked = {"kind": "stopping", "reason": "who asked is not written down"}
    failed = _last(events, "failed")
    if asked is not None:
        return _stopped(events, asked, failed, saved=finished["exit_code"] == EXIT_REQUEUE)
    if failed is None:
        return Death("supervisor", "the supervisor itself failed: the terminal has its traceback.", _shown(events[-1:]))
    return _failed(events, failed, log, kernel)


def _stopped(
    events: Sequence[Mapping[str, Any]], asked: Mapping[str, Any], failed: Mapping[str, Any] | None, *, saved: bool
) -> Death:
    reason = asked["reason"]
    notice = reason == "SIGUSR1" or reason.startswith("notice in ")
    how = _STOPS.get(reason, f"on request: {reason}")
    if notice:
        how = f"because its machine was to be taken away ({reason}): the limit of a batch job, or a preemption"
    at_once = _last(events, "stop_now")
    left = "it saved and left" if saved else "it had nothing to go on from, or did not save in time"
    left += ", at once" if at_once is not None else ""
    told = [each for each in (asked, at_once, failed, _last(events, "checkpoint")) if each is not None]
    change = () if saved else ("a longer notice, or a train.save_every, leaves a checkpoint in any case",)
    return Death("preemption" if notice else "stop", f"the run was stopped {how}; {left}.", _shown(told), change)


def _leader(events: Sequence[Mapping[str, Any]], kernel: Sequence[str], here: Mapping[str, Any]) -> Death:
    """Nobody wrote down an end: the process that does was gone."""
    began, last = events[0], events[-1]
    pid, was = began["pid"], began.get("place", {})
    seen = [*_shown([began, last]), *_of_pid(kernel, pid)]
    job = (
        (f"ask the batch system: `sacct -j {was['slurm_job']} --format=State,ExitCode,MaxRSS,Reason`",)
        if was.get("slurm_job")
        else ()
    )
    if _of_pid(kernel, pid):
        return Death(
            "memory", f"the kernel killed the run's leader (pid {pid}), because memory was full.", tuple(seen), _MORE
        )
    if was.get("host") and was["host"] == here.get("host") and was.get("boot_id") != here.get("boot_id"):
        text = f"the machine ({was['host']}) went down while the run was on it: it has been started again since."
        return Death("node loss", text, (*seen, f"boot id then {was['boot_id']}, now {here.get('boot_id')}"), job)
    asked = _last(events, "stopping")
    why = f" while it was being stopped ({asked['reason']})" if asked is not None else ""
    text = f"the run's leader (pid {pid}) was gone without a word{why}: SIGKILL, a batch system's limit, or its node's end."
    if was.get("host") and was["host"] != here.get("host"):
        job = (f"look at {was['host']}, where it was: is it up, and what does `dmesg` say there?", *job)
    return Death(
        "leader killed", text, tuple(seen), (*job, "see `dmesg`, the batch job's log, and who else uses the machine")
    )


_MORE = (
    "fewer processes, slots or workers, a lower bus.ring_bytes, or more memory (of the batch job: --mem)",
    "`rondo check` estimates what the run takes, and memory_bytes of summary.json what it took",
)


def _failed(
    events: Sequence[Mapping[str, Any]],
    failed: Mapping[str, Any],
    log: Callable[[str, int], tuple[str, Sequence[str]]],
    kernel: Sequence[str],
) -> Death:
    found = _CAUSE.match(failed["cause"])
    if found is None:
        return Death("failure", f"the run failed: {failed['why']}.", _shown([failed]))
    group, number, told = found["group"], int(found["number"]), found["what"].splitlines()
    what = told[0] if len(told) == 1 else f"{told[0]} ... {told[-1]}"
    deaths = [each for each in events if each["kind"] in ("died", "global_restart")]
    limit = f" It was not started again: {failed['why']}." if "is beyond" in failed["why"] else ""
    pid = int(found["pid"] or 0)
    name, lines = log(group, number)
    base = [*_shown([each for each in deaths if each.get("group", group) == group][:3]), *_shown([failed])]
    registered = (each["pid"] for each in events if each["kind"] == "registered" and each["group"] == group)
    if killed := [line for each in (pid, *registered) for line in _of_pid(kernel, each)]:
        text = f"the kernel killed a process of {group}, because memory was full; the run saw: {what}.{limit}"
        return Death("memory", text, (*dict.fromkeys(killed), *base), _MORE)
    if what == "killed by SIGKILL":
        return _killed(events, group, base, limit)
    if found["what"] == failed["why"]:  # told by a role itself, as something that no restart mends
        kind = "not finite" if re.search(r"must be finite|not finite", what) else "given up"
        kind = next((sign for sign, pattern, *_ in _SIGNS if re.search(pattern, what)), kind)
        return Death(kind, f"{group} ended the run, for what no restart mends: {what}", (*_shown([failed]), *told[1:]))
    for kind, pattern, words, advice in _SIGNS:
        if at := [line for line in lines if re.search(pattern, line)]:
            shown = [f"{name}: {line.strip()}" for line in [*at[-2:], *_traceback(lines)[-1:]]]
            return Death(kind, f"{group} died ({what}): {words}.{limit}", (*dict.fromkeys(shown), *base), (advice,))
    if re.search(_STANDS, what):
        shown = [f"{name}: {line}" for line in _stack(lines)]
        advice = f"the stacks of that moment are in {name}, who waited for whom in dumps/; `supervision` has the limits"
        return Death("stood still", f"{group} stood still, and was ended: {what}.{limit}", (*base, *shown), (advice,))
    if what.startswith("killed by "):
        shown = [f"{name}: {line}" for line in _stack(lines)]
        more = ("SIGBUS: shared memory is full (`df /dev/shm`)",) if "SIGBUS" in what else ()
        change = ("the first frames name the library; try its other version, or without it", *more)
        return Death("crash", f"{group} crashed in compiled code ({what}).{limit}", (*shown, *base), change)
    if raised := _traceback(lines):
        shown = [f"{name}: {line}" for line in raised[-_SHOWN:]]
        return Death(
            "exception",
            f"{group} raised {raised[-1].strip()}.{limit}",
            (*shown, *base),
            (f"the whole traceback: {name}",),
        )
    shown = [f"{name}: {line}" for line in lines[-_SHOWN:]]
    return Death("failure", f"{group} died: {what}.{limit}", (*base, *shown))


def _killed(events: Sequence[Mapping[str, Any]], group: str, base: Sequence[str], limit: str) -> Death:
    """SIGKILL, and no word of the kernel's about it."""
    meant = [each for each in events if each["kind"] == "killed_on_purpose" and each["group"] == group]
    if meant:
        return Death("on purpose", f"{group} was killed on purpose (`--kill`).{limit}", (*_shown(meant), *base))
    counts = [each["oom_kills"] for each in events if each.get("oom_kills") is not None]
    text = f"{group} got a SIGKILL that the run did not send"
    if counts and counts[-1] > counts[0]:
        text += f", and the kernel killed {counts[-1] - counts[0]} for memory meanwhile.{limit}"
        seen = f"oom_kill of /proc/vmstat: {counts[0]} when the run began, {counts[-1]} when {group} died"
        return Death("memory", text, (seen, *base), _MORE)
    text += f": by hand, by a batch system, or for memory, without a sign of it.{limit}"
    return Death("killed", text, tuple(base), ("`dmesg` of that machine tells whether memory was full", *_MORE[1:]))


def lines(run: str, death: Death) -> list[str]:
    """The verdict as text."""
    shown = [f"  {line}" for line in death.lines]
    return [f"run {run} is over: {death.text}", *shown, *(f"  change  {each}" for each in death.change), ""]


def _last(events: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    return next((each for each in reversed(events) if each["kind"] == kind), None)


def _shown(events: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple("events.jsonl: " + orjson.dumps(each).decode()[:400] for each in events)


def _of_pid(kernel: Sequence[str], pid: int) -> list[str]:
    return [f"kernel: {line.strip()}" for line in kernel if re.search(rf"Killed process {pid}\b", line)]


def _traceback(lines: Sequence[str]) -> list[str]:
    """From the file that raised, to the error."""
    last = next((n for n in range(len(lines) - 1, -1, -1) if _LAST.match(lines[n])), None)
    if last is None or not any(line.startswith("Traceback ") for line in lines[:last]):
        return []
    first = next((n for n in range(last, -1, -1) if lines[n].lstrip().startswith("File ")), last)
    return list(lines[first : last + 1])


def _stack(lines: Sequence[str]) -> list[str]:
    """The first frames of the thread that ran, as `faulthandler` writes them."""
    starts = [n for n, line in enumerate(lines) if line.startswith("Current thread")]
    starts = starts or [n for n, line in enumerate(lines) if line.startswith("Thread 0x")]
    return [line.rstrip() for line in lines[starts[-1] : starts[-1] + _SHOWN]] if starts else []


def _log(run: Path, group: str, number: int) -> tuple[str, Sequence[str]]:
    """The newest attempt's log of that incarnation."""
    found = sorted((run / "logs").glob(f"attempt_*/{group}.{number}.log"), key=lambda path: path.stat().st_mtime)
    return (
        (str(found[-1].relative_to(run)), last_lines(found[-1], _NUM_LINES)) if found else (f"{group}.{number}.log", ())
    )


def _kernel(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """What this machine's kernel says it killed, where it is the run's, up since then, and lets us read it."""
    if not events or events[0].get("place", {}).get("boot_id") != place()["boot_id"]:
        return []
    return [line for line in (said_by(["dmesg"], 5.0) or "").splitlines() if "Killed process" in line]
