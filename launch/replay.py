"""`rondo replay RUN --step K`: a step trained again, from the samples that it was trained on.

Owns which checkpoint it starts from, the settings of that run, and the comparison. Does not own training on kept samples
(`debug.train_only`, `roles/sampling/given.py`), nor going on from a checkpoint, which every run does that finds one.

    RUN/checkpoints/step_000040  --linked-->  RUN-replay/checkpoints/step_000040 --steps 40 to K, samples of RUN--> compared in K

Invariant: RUN is read and never written. What is compared is what came out: metrics of training, and the weights; of
deterministic runs also what the loss was given. Where the run was deterministic all of it is equal to the bit; else what differs
is said.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rondo.launch import train
from rondo.launch.config import RunConfig, resolve, unresolve
from rondo.launch.plan import group_specs
from rondo.launch.progress import at_work
from rondo.launch.report.compare import Comparison, compare, lines
from rondo.launch.report.records import print_json, read_records
from rondo.launch.report.view import say
from rondo.launch.rundir import checkpoint_of, existing_run, owner
from rondo.roles.training.parts import linked
from rondo.roles.training.trained_samples import steps_of
from rondo.runtime.checkpoints import complete, folder_of, goes_on_from, resets, version_of
from rondo.runtime.errors import ConfigError
from rondo.runtime.supervision.nursery import Nursery
from rondo.runtime.supervision.orders import EXIT_DONE, EXIT_FAILED

_WEIGHTS = (train.MODEL, train.TEACHERS, "reference")
"""Folders of weights that a run makes before its first step, or its warm-up leaves."""


def main(path: Path, *, step: int, plain: bool, as_json: bool) -> int:
    """0 where everything is equal, 1 where something differs or the replay failed, 130 where it was stopped. ConfigError where
    nothing was started."""
    run = existing_run(path)
    before = train.settings_of(run)
    begun = _begun(run, before, step)
    train.work_where_it_began(run)
    say(f"steps {begun} to {step} of {run.name} are trained again, from {f'version {begun}' if begun else 'the start'}")
    settings = settings_of(before, run, begun, step)
    options = train.TrainOptions(run / "config.py", plain=plain, trains=False)
    specs = group_specs(settings)
    with (
        Nursery() as nursery,
        train.prepared(settings, f"{run.name}-replay", options, nursery, specs, num_steps=step + 1) as (made, admin),
    ):
        if begun:
            _link(run, made.path, begun)
        outcome = train.supervised(train.settings_of(made.path), made, options, admin, nursery, specs, attempt=0)
    say(f"run directory: {made.path}")
    return train.ended(outcome) or tell(run, made.path, step, as_json=as_json)


def tell(run: Path, replayed: Path, step: int, *, as_json: bool) -> int:
    """Prints how `step` came out: 0 where all is equal, else 1."""
    with at_work(f"compares step {step}"):
        found = compare(run, replayed, only=step)
        sums = [_checksums(each, step + 1) for each in (run, replayed)]
    equal = found.metrics.step is None and not found.bits and sums[0] == sums[1] != {}
    if as_json:
        print_json(asdict(found) | {"step": step, "equal": equal, "checksums": sums})
    else:
        text = lines((run.name, replayed.name), found)
        print("\n".join([_verdict(step, equal, found), *text, _weights(step + 1, *sums)]))
    return EXIT_DONE if equal else EXIT_FAILED


def _begun(run: Path, before: RunConfig, step: int) -> int:
    """The version to begin with: of the newest whole checkpoint before `step`, or 0. ConfigError where `step` cannot be had."""
    if owner(run) is not None:
        raise ConfigError(f"RUN must be over, got {run.name}, which goes on. Wait for its end, or stop it")
    if before.job != "rl":
        raise ConfigError(f"RUN must be of job rl, which alone keeps samples, got {before.job}. Name another run")
    if before.debug.rollout_only:
        raise ConfigError(f"RUN must have trained, got {run.name} of debug.rollout_only. Name another run")
    if not before.samples.whole_steps:
        raise ConfigError(
            f"RUN must have kept all samples of its steps (samples.keep 1 without samples.rewards), got {before.samples.keep:g} "
            f"and {before.samples.rewards} of {run.name}. Train with --set samples.keep=1"
        )
    versions = {0, *(version_of(each) for each in complete(run / "checkpoints"))}
    spans: list[list[int]] = []  # first and last of steps that follow each other from a checkpoint on
    for each in steps_of(run):
        if spans and spans[-1][1] == each - 1:
            spans[-1][1] = each
        elif each in versions:
            spans.append([each, each])
    if not any(first <= step <= last for first, last in spans):
        known = ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in spans)
        raise ConfigError(
            f"--step must be one that samples lead to from a checkpoint of {run.name}, or from its start, got {step}. "
            f"{f'These are steps {known}' if known else 'There is none'}"
        )
    return max(each for each in versions if each <= step)


def settings_of(before: RunConfig, run: Path, begun: int, step: int) -> RunConfig:
    """Those of the run, with its samples in the place of generated ones and without what chooses, watches, evaluates or saves on
    the way."""
    tree = resolve(before)
    tree["train"] |= {"save_every": None, "best": None, "after_save": None}
    tree["rollout"] |= {"filter": None, "keep": None, "spare_groups": 0, "straggler_deadline_s": None}
    tree |= {
        "debug": {"train_only": str(run), "steps": [begun, step + 1]}, "evaluation": None, "trackers": [], "alerts": None,
        "autoscale": None, "preemption": {}, "admin": {},
    }  # fmt: skip
    try:
        return unresolve(tree, "the settings of a replay")
    except ConfigError as error:
        raise ConfigError(
            f"RUN must be one whose steps can be trained without a rollout, got {run.name}: {error}"
        ) from error


def _link(run: Path, made: Path, version: int) -> None:
    """The checkpoint, and weights that do not change, so that the new run goes on from there."""
    source = folder_of(run / "checkpoints", version)
    checkpoint_of(source)
    for folder in (source, *(run / name for name in _WEIGHTS)):
        if folder.is_dir():
            shutil.rmtree(target := made / folder.relative_to(run), ignore_errors=True)
            shutil.copytree(folder, target, copy_function=linked)
    goes_on_from(made, version, reset=version in resets(run))


def _checksums(run: Path, version: int) -> Mapping[str, int]:
    """Of the weights of each role, as they were committed last; empty where the run did not tell."""
    found: Mapping[str, int] = {}
    for record in read_records(run / "events.jsonl"):
        if record["kind"] == "committed" and record.get("version") == version:
            found = record.get("checksums", {})
    return found


def _verdict(step: int, equal: bool, found: Comparison) -> str:
    if equal:
        return f"step {step} came out equal, to the bit"
    if found.bits is not None:
        return f"step {step} came out otherwise, and both runs are deterministic"
    return (
        f"step {step} came out otherwise. The run was not deterministic: which rows are computed together, how many threads sum "
        "them and which weights old log-probs are under may change; with --set deterministic=True they do not"
    )


def _weights(version: int, ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    a, b = (", ".join(f"{role} {each:08x}" for role, each in of.items()) or "not told" for of in (ours, theirs))
    return f"weights of version {version}: {f'equal, {a}' if a == b else f'{a} | {b}'}"
