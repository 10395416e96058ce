"""`rondo explain`: which role limits a run, whom the others wait for, and what to change, in words with the figures behind them;
before that, of a run that is over, what ended it (`death.py`).

Owns the judgement. Does not own the figures: steps come from `steps.py`, processor time from the timeline. `explain` is pure.

    step records + processor time + the settings that matter  ->  explain  ->  Explanation  ->  lines

Invariant: every finding names the figures that led to it; nothing is advised that the settings do not have.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rondo.launch.progress import at_work
from rondo.launch.report.death import ended
from rondo.launch.report.death import lines as death_lines
from rondo.launch.report.records import print_json
from rondo.launch.report.status import room_waited_for
from rondo.launch.report.steps import Step, read_steps
from rondo.launch.report.timeline import Figures, parse_steps, read_run
from rondo.launch.rundir import existing_run, read_json
from rondo.runtime.errors import ConfigError

_LITTLE = 0.1
"""Of a step: who waits less is not held up."""
_FULL = 0.85
"""Of a machine's cores."""
_UNNEEDED = {
    "teacher": "without distillation there is no teacher",
    "reference": "algorithm.kl_coef=0 needs no reference",
    "actor_fwd": "without actor_fwd, algorithm.old_log_probs='auto' takes log-probs that are there already",
}
"""How to do without a role."""
_APART = "put them into groups of their own (modes.hybrid or modes.fully_async), so that both work at once"
_SERVICES = ("supervisor", "nursery", "coordinator", "store")


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that findings look at. `processes` by role; `num_threads`: compute threads of all processes."""

    max_staleness: int = 1
    processes: Mapping[str, int] = field(default_factory=dict)
    num_threads: int = 0
    num_cores: int = 1
    spare_groups: int = 0
    prompts_per_step: int = 1
    reward_workers: int = 1
    beside_actor: frozenset[str] = frozenset()
    """Roles that live in the actor's processes, and compute on its thread."""

    @property
    def takes_turns(self) -> bool:
        """Actor and rollout live in one role group."""
        return "rollout" in self.beside_actor

    @classmethod
    def of(cls, settings: Mapping[str, Any], num_cores: int) -> Setup:
        """From config.resolved.json."""
        groups, rollout = settings["role_groups"], settings["rollout"]
        (of_actor,) = (group["roles"] for group in groups if "actor" in group["roles"])
        return cls(
            max_staleness=settings["max_staleness"],
            processes={role: each["replicas"] * each["processes"] for each in groups for role in each["roles"]},
            num_threads=sum(each["replicas"] * each["processes"] * each["threads"] for each in groups),
            num_cores=num_cores,
            spare_groups=rollout["spare_groups"],
            prompts_per_step=rollout["prompts_per_step"],
            reward_workers=settings["reward"]["num_workers"],
            beside_actor=frozenset(of_actor) - {"actor"},
        )


@dataclass(frozen=True, slots=True)
class Processor:
    """Cores kept busy, on average over the steps: `groups` by role group or service, `loops` by process: the part of it that
    its event loop takes, which is the runtime's own work and a role's light work. `delayed` by process: the share of its time
    for which it was ready to run and had no core, summed over its threads."""

    groups: Mapping[str, float] = field(default_factory=dict)
    loops: Mapping[str, float] = field(default_factory=dict)
    delayed: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.groups.values())

    @property
    def own(self) -> float:
        """What is no role's computation: services, and the roles' event loops."""
        services = sum(cores for name, cores in self.groups.items() if name in _SERVICES)
        return services + sum(cores for name, cores in self.loops.items() if name.rpartition(".")[0] not in _SERVICES)


@dataclass(frozen=True, slots=True)
class Finding:
    """What is so, why, and what to change. `subject` is a role, or "processors", "runtime"."""

    subject: str
    text: str
    why: tuple[str, ...] = ()
    change: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleShare:
    """A role over all its processes: shares of their time."""

    num_processes: int
    busy: float
    waits: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Averages over steps `first` to `last` but for `num_left_out`, in which the trainer waited for roles to start: `starts`,
    seconds by role. `trainer` in seconds a step. The first finding says what limits the run."""

    first: int
    last: int
    step_s: float
    trainer: Mapping[str, float]
    longest_s: float
    roles: Mapping[str, RoleShare]
    processor: Processor
    findings: tuple[Finding, ...]
    num_left_out: int = 0
    starts: Mapping[str, float] = field(default_factory=dict)


def explain(steps: Sequence[Step], setup: Setup, processor: Processor) -> Explanation:
    """What `steps`, at least one, say about the run."""
    first, last = steps[0].step, steps[-1].step
    starts = {n: s for n, s in _sum(step.trainer for step in steps).items() if n.startswith("start of ") and s}
    steady = [step for step in steps if not any(step.trainer.get(name) for name in starts)]
    num_left_out = len(steps) - len(steady) if steady else 0
    steps = steady or steps
    num = len(steps)
    step_s = sum(step.step_s for step in steps) / num
    names = sorted({name for step in steps for name in step.trainer})
    trainer = {name: sum(step.trainer.get(name, 0.0) for step in steps) / num for name in names}
    trainer = dict(sorted(trainer.items(), key=lambda item: -item[1]))
    longest_s = sum(step.longest_s for step in steps) / num
    roles = {name: _share(name, steps) for name in sorted({name for step in steps for name in step.roles})}
    found = [_limit(step_s, trainer, longest_s, roles, setup)]
    found += [finding for finding in (_processors(setup, processor), _runtime(processor)) if finding is not None]
    starts = {name.removeprefix("start of "): seconds for name, seconds in starts.items()}
    return Explanation(first, last, step_s, trainer, longest_s, roles, processor, tuple(found), num_left_out, starts)


def _share(role: str, steps: Sequence[Step]) -> RoleShare:
    uses = [(step.step_s, step.roles[role]) for step in steps if role in step.roles]
    time_s = sum(step_s * use.num_processes for step_s, use in uses)
    waits = {whom: seconds / time_s for whom, seconds in _sum(use.waits_s for _, use in uses).items()}
    if role == "actor":  # its own parts tell whom it waits for
        total = sum(step.step_s for step in steps)
        for whom, seconds in waits_of(_sum(step.trainer for step in steps)).items():
            waits[whom] = seconds / total
    return RoleShare(max(use.num_processes for _, use in uses), sum(use.busy_s for _, use in uses) / time_s, waits)


def waits_of(trainer: Mapping[str, float]) -> dict[str, float]:
    """For whom the trainer waited, longest first, in seconds."""
    waits = {n.removeprefix("wait for "): seconds for n, seconds in trainer.items() if n.startswith("wait for ")}
    return dict(sorted(waits.items(), key=lambda item: -item[1]))


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


# ---- what limits the run --------------------------------------------------------------------------------------------


def _limit(
    step_s: float, trainer: Mapping[str, float], longest_s: float, roles: Mapping[str, RoleShare], setup: Setup
) -> Finding:
    waits = waits_of(trainer)
    waited = sum(waits.values())
    idle = roles["rollout"].waits.get("actor", 0.0) if "rollout" in roles else 0.0
    if waited < _LITTLE * step_s:
        return _actor_limits(step_s, trainer, waited, idle, setup)
    whom, seconds = next(iter(waits.items()))
    why = [f"the trainer waits {_of(waited, step_s)} of a step: " + ", ".join(_each(waits, step_s))]
    if whom in ("rollout", "weights") and idle >= _LITTLE:
        why.append(f"rollout waits for the trainer's next version {idle:.0%} of the time")
        # Twice the rollout takes away half of what it works; where that is more, it is what limits, though it waits a little.
        if whom == "weights" or idle >= roles["rollout"].busy / 2:
            return Finding(
                "turns", "actor and rollout take turns: each waits for the other.", tuple(why), _turns(setup)
            )
    if whom in setup.beside_actor:
        return _one_thread(whom, why, roles, setup)
    if whom == "rollout":
        why.append(
            f"of its wait for rollout {_of(longest_s, seconds)} is for the last tenth of the step's prompt groups: "
            "its longest trajectories"
        )
        change = _quicker_rollout(longest_s / seconds, setup)
        if idle >= _LITTLE:
            change += tuple(
                advice for advice in _turns(setup) if not any(c.startswith("max_staleness") for c in change)
            )
        return Finding("rollout", "rollout limits this run.", tuple(why), change)
    if whom in roles:
        why.append(f"{whom} is at work {roles[whom].busy:.0%} of the time")
    text, change = _others(whom, setup)
    return Finding(whom, text, tuple(why), change)


def _actor_limits(step_s: float, trainer: Mapping[str, float], waited: float, idle: float, setup: Setup) -> Finding:
    train = trainer.get("train", 0.0)
    why = [f"it trains {_of(train, step_s)} of a step and waits {_of(waited, step_s)}"]
    change = ["give it more: " + _more_of_the_actor(setup)]
    for name, advice in (
        ("save", "save less often: a greater train.save_every"),
        ("commit", "commits copy weights and optimizer: train.hot_snapshot=False spares that, but a death costs more"),
        ("publish", "publication holds it up: check bus.weight_slots, and that rollout proves versions in time"),
        ("report", "records are slow: look at the supervisor's share of a core"),
    ):
        if trainer.get(name, 0.0) >= _LITTLE * step_s:
            why.append(f"{name} takes {_of(trainer[name], step_s)} of a step")
            change.append(advice)
    if idle >= 2 * _LITTLE:
        why.append(f"rollout waits for the trainer's next version {idle:.0%} of the time")
        if not setup.takes_turns:  # else it has what the actor has
            change.append("rollout needs less than it has: move its threads, cores or devices to the actor")
    return Finding("actor", "actor limits this run: the others keep up with the trainer.", tuple(why), tuple(change))


def _more_of_the_actor(setup: Setup) -> str:
    """As the mode that made the groups names it."""
    more = setup.processes.get("actor", 1) + 1
    if setup.takes_turns:
        return f"processes={more}, threads, or a device; or groups of their own (modes.hybrid), so that it need not generate too"
    prefix = "" if "reference" in setup.beside_actor or "advantages" in setup.beside_actor else "actor_"
    return f"{prefix}processes={more}, {prefix}threads, or a device"


def _one_thread(whom: str, why: list[str], roles: Mapping[str, RoleShare], setup: Setup) -> Finding:
    """The trainer waits for a role that computes on its own thread."""
    here = ["actor", *sorted(setup.beside_actor & roles.keys())]
    at_work = sorted(((roles[name].busy, name) for name in here if name in roles), reverse=True)
    why.append("at work on the thread that they share: " + ", ".join(f"{name} {busy:.0%}" for busy, name in at_work))
    change = ["more threads or a device for that process"]
    if whom == "rollout":
        change.append(_APART)
    else:
        change.append(f"put {whom} into a group of its own (modes.fully_async), where cores or devices are free for it")
        change += [_UNNEEDED[whom]] if whom in _UNNEEDED else []
    return Finding(
        whom,
        f"{whom} and the trainer share one process: what one computes, the other waits for.",
        tuple(why),
        tuple(change),
    )


def _turns(setup: Setup) -> tuple[str, ...]:
    if setup.takes_turns:
        return (_APART,)
    now = setup.max_staleness
    return (f"max_staleness={now + 1} (now {now}): samples may be one version older, and generation goes on meanwhile",)


def _quicker_rollout(tail: float, setup: Setup) -> tuple[str, ...]:
    change = [f"rollout_replicas={setup.processes.get('rollout', 1) + 1}, or more rollout_threads, rollout.num_slots"]
    if tail >= 3 * _LITTLE:
        spare = setup.spare_groups + max(1, setup.prompts_per_step // 10)
        change.insert(
            0,
            f"rollout.spare_groups={spare} (now {setup.spare_groups}): a step need not wait for its slowest prompt groups",
        )
        change.insert(1, f"max_staleness={setup.max_staleness + 1} (now {setup.max_staleness}): others fill the gap")
    return tuple(change)


def _others(whom: str, setup: Setup) -> tuple[str, tuple[str, ...]]:
    """What it means that the trainer waits for `whom` longest, and what to change."""
    now, workers, staleness = setup.processes.get(whom, 1), setup.reward_workers, setup.max_staleness
    if whom in _UNNEEDED:
        return f"{whom} limits this run.", (f"{whom}_replicas={now + 1}, or {whom}_threads", _UNNEEDED[whom])
    return {
        "reward": ("rewards limit this run.", (f"reward.num_workers={2 * workers} (now {workers}), or a quicker one",)),
        "weights": (
            "publication limits this run: new weights arrive late at rollout.",
            (f"max_staleness={staleness + 1} (now {staleness})",),
        ),
        "coordinator": (
            "messages limit this run: rows are there, but rounds come late.",
            ("fewer, larger rounds: a greater train.micro_batch_tokens",),
        ),
    }.get(whom, (f"{whom} limits this run.", (f"more replicas of {whom} (now {now})",)))


def _processors(setup: Setup, processor: Processor) -> Finding | None:
    delayed = sorted(processor.delayed.items(), key=lambda item: -item[1])
    if processor.total < _FULL * setup.num_cores:
        if not delayed or delayed[0][1] < 2 * _LITTLE:
            return None
        shares = ", ".join(f"{name} {share:.0%}" for name, share in delayed if share >= _LITTLE)
        waited = f"of the time these were ready to run and had no core: {shares}"
        others = f"the run itself keeps only {processor.total:.2f} of {setup.num_cores} cores busy"
        return Finding(
            "processors", "other programs take the processors.", (waited, others), ("cores of its own for this run",)
        )
    change = ["a machine with more cores: what one role gains here, another loses"]
    if setup.num_threads > setup.num_cores:
        change.insert(
            0,
            f"fewer threads: all processes together have {setup.num_threads} compute threads on {setup.num_cores} cores",
        )
    why = (f"all processes together keep {processor.total:.2f} of {setup.num_cores} cores busy",)
    return Finding("processors", "the processors are full.", why, tuple(change))


def _runtime(processor: Processor) -> Finding | None:
    if not processor.total or processor.own < 2 * _LITTLE * processor.total:
        return None
    why = (f"event loops and services take {processor.own:.2f} of the {processor.total:.2f} cores that are busy",)
    change = ("fewer, larger messages: a greater train.micro_batch_tokens, more samples_per_prompt",)
    return Finding("runtime", "what moves samples costs much beside what computes.", why, change)


def _of(seconds: float, whole: float) -> str:
    return f"{seconds:.3f} s ({seconds / whole:.0%})" if whole else f"{seconds:.3f} s"


def _each(waits: Mapping[str, float], step_s: float) -> list[str]:
    shown = [f"{_of(seconds, step_s)} for {whom}" for whom, seconds in waits.items() if seconds >= 0.01 * step_s]
    return shown or [f"{_of(seconds, step_s)} for {whom}" for whom, seconds in list(waits.items())[:1]]


# ---- processor time -------------------------------------------------------------------------------------------------


def processor_of(figures: Sequence[Figures], begin: float, end: float) -> Processor:
    """Cores busy from `begin` to `end`, seconds since the epoch, from what the timeline noted every few seconds."""
    loops: dict[str, float] = {}
    delayed: dict[str, float] = {}
    for process in sorted({f.process for f in figures if f.name == "cpu"}):
        rates = _rates([f for f in figures if f.name == "cpu" and f.process == process], begin, end)
        if "loop" in rates:
            loops[process] = rates["loop"]
        if "delayed" in rates:
            delayed[process] = max(0.0, rates["delayed"])
    groups = _rates([f for f in figures if f.name == "cores"], begin, end)
    return Processor(dict(sorted(groups.items(), key=lambda item: -item[1])), loops, delayed)


def _rates(figures: Sequence[Figures], begin: float, end: float) -> dict[str, float]:
    """Growth a second of each value of one process, newest incarnation."""
    newest = max((f.incarnation for f in figures), default=0)
    looks = sorted((f for f in figures if f.incarnation == newest), key=lambda f: f.at)
    # Looks are seconds apart: the nearest ones around the steps, so that none is guessed.
    first = max((i for i, f in enumerate(looks) if f.at <= begin * 1e9), default=0)
    last = min((i for i, f in enumerate(looks) if f.at >= end * 1e9), default=len(looks) - 1)
    if last <= first:
        return {}
    elapsed = (looks[last].at - looks[first].at) / 1e9
    grown: dict[str, float] = {}
    for before, after in itertools.pairwise(looks[first : last + 1]):
        for name, value in after.values.items():  # a thread that ends takes its delay out of the sum
            grown[name] = grown.get(name, 0.0) + max(0.0, value - before.values.get(name, 0.0))
    return {name: value / elapsed for name, value in grown.items()}


# ---- in words -------------------------------------------------------------------------------------------------------


def lines(run: str, found: Explanation) -> list[str]:
    """The explanation as text."""
    text = [f"run {run}: steps {found.first} to {found.last}, {found.step_s:.3f} s a step"]
    if found.starts:
        starts = ", ".join(f"{role} {seconds:.1f} s" for role, seconds in found.starts.items())
        left_out = f" (steps left out below: {found.num_left_out})" if found.num_left_out else ""
        text.append(f"the trainer waited for roles to start, at first or again: {starts}{left_out}")
    text.append("")
    for finding in found.findings:
        text += [finding.text, *(f"  because {why}" for why in finding.why)]
        text += [f"  change  {change}" for change in finding.change] + [""]
    text.append("a step of the trainer")
    text += [f"  {name:<24}{_of(s, found.step_s)}" for name, s in found.trainer.items() if s >= 0.0005]
    text.append(f"  {'(longest trajectories)':<24}{_of(found.longest_s, found.step_s)}")
    text += ["", f"{'role':<16}{'processes':<11}{'at work':<9}waits for"]
    for name, role in found.roles.items():
        waits = sorted(role.waits.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{whom} {share:.0%}" for whom, share in waits if share >= 0.005) or "nobody"
        text.append(f"{name:<16}{role.num_processes:<11}{role.busy:<9.0%}{shown}")
    if found.processor.groups:
        text += ["", "cores at work"]
        text.append("  " + "  ".join(f"{name} {cores:.3f}" for name, cores in found.processor.groups.items()))
        loops = {n: c for n, c in found.processor.loops.items() if n.rpartition(".")[0] not in _SERVICES}
        text.append("  of these the event loops: " + "  ".join(f"{name} {cores:.3f}" for name, cores in loops.items()))
        text.append(f"  event loops, coordinator, supervisor and store together: {found.processor.own:.3f} of a core")
    return text


def show(path: Path, steps: str | None = None, *, as_json: bool = False) -> int:
    """`rondo explain RUN`: of a run that is over what ended it, of one that goes on which disk must have room; then how it went.
    ConfigError for one that goes on and has no timeline, or has not trained a step yet."""
    run = existing_run(path)
    first, last = parse_steps(steps)
    with at_work(f"looks for what ended {run.name}"):
        death = ended(run) if steps is None else None
    short_of = room_waited_for(run) if death is None and steps is None else []
    if not as_json:
        for line in short_of if death is None else death_lines(run.name, death):
            print(line)
    with at_work(f"reads what {run.name} did"):
        try:
            spans, figures = read_run(run)
        except ConfigError:
            if death is None:
                raise
            spans, figures = [], []
        told = read_steps(run, spans)
    if death is not None and not told:  # nothing went on for long enough to be judged
        if as_json:
            print_json({"ended": asdict(death)})
        return 0
    chosen = [s for s in told if (first is None or s.step >= first) and (last is None or s.step < last)]
    if not told:
        raise ConfigError(
            f"RUN must have trained a step to be explained, got none in {run}. Wait for its first commit: `rondo status`"
        )
    if not chosen:
        raise ConfigError(f"--steps must name steps of the run, got {steps}. It has {told[0].step} to {told[-1].step}")
    if steps is None and len(chosen) > 2:
        chosen = chosen[1:]  # the first one waits for everything that starts
    settings = read_json(run / "config.resolved.json")
    machine = read_json(run / "environment.json")
    processor = processor_of(figures, chosen[0].start, chosen[-1].start + chosen[-1].step_s)
    found = explain(chosen, Setup.of(settings, machine["num_cores"]), processor)
    if as_json:
        data = ({} if death is None else {"ended": asdict(death)}) | ({"waits_for_room": short_of} if short_of else {})
        print_json(data | asdict(found))
    else:
        print("\n".join(lines(run.name, found)))
    return 0
