"""`rondo train`, with or without `--resume-or-start`, and `rondo resume`: a run from its directory to its summary.

Owns the order: check, listen, claim the directory, prepare the model, start supervisor, view and admin endpoint, and when all
of it has ended write the summary and the picture. Owns no rule: each piece knows its own. Invariant: once the supervisor has
started, nothing but its outcome decides the exit code; the rest only tells (`runtime/records/telling.py`).
"""

from __future__ import annotations

import asyncio
import functools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from rondo.comm.bus.serve import CONFIG as COORDINATOR_CONFIG
from rondo.launch import manifest
from rondo.launch.autoscale.routes import mount as mount_autoscaler
from rondo.launch.autoscale.watch import Autoscaler
from rondo.launch.check.check import require
from rondo.launch.check.estimate import routed_bytes
from rondo.launch.check.findings import Facts
from rondo.launch.code import FOLDER, as_kept, belonging_to, take
from rondo.launch.config import RunConfig, counted, override, resolve, unresolve
from rondo.launch.dashboard import behind
from rondo.launch.differences import accept, check_files, differences, refuse
from rondo.launch.elastic.room import PREPARED
from rondo.launch.elastic.routes import mount
from rondo.launch.elastic.scaler import Scaler
from rondo.launch.keeping import Keeper
from rondo.launch.manifest import parted
from rondo.launch.plan import coordinator_config, first_devices, group_specs, model_modules
from rondo.launch.preemption import watch, within_s
from rondo.launch.progress import at_work
from rondo.launch.provider import STACKS, TRACE, RunProvider, serve_trace
from rondo.launch.questions import Questions
from rondo.launch.report.answers import answers
from rondo.launch.report.plot import EXIT_UNDRAWN
from rondo.launch.report.steps import Records
from rondo.launch.report.summary import Summary, print_table, read, summarize, write
from rondo.launch.report.view import open_view, say
from rondo.launch.rundir import (
    ENVIRONMENT,
    PRIVATE,
    RunDir,
    checkpoint_of,
    existing_run,
    newest_run,
    owner,
    read_json,
    whole_to_go_on_from,
    write_json,
)
from rondo.launch.track.beside import Beside
from rondo.models.config import ModelConfig
from rondo.roles.data.fingerprints import FILE as FINGERPRINTS
from rondo.runtime.admin.endpoint import AdminServer, listen
from rondo.runtime.admin.openapi import QUERY
from rondo.runtime.checkpoints import goes_on_from, newest_complete, set_aside, verify, version_of
from rondo.runtime.errors import ConfigError, RondoError, shortage
from rondo.runtime.processes.guard import module_command
from rondo.runtime.records import timeline
from rondo.runtime.records.record import JsonLines
from rondo.runtime.records.telling import PROCESS, tell_every, telling
from rondo.runtime.section import Change, changes, references, show_value
from rondo.runtime.supervision.nursery import Nursery
from rondo.runtime.supervision.orders import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REQUEUE
from rondo.runtime.supervision.spec import GroupSpec, Outcome, SupervisorConfig, role_modules
from rondo.runtime.supervision.supervisor import Supervisor, stop_signals

_PLOT_LIMIT_S = 120.0
_STEPS_S = 2.0
MODEL, TEACHERS, JUDGES = "model", "teachers", "judges"
"""Where a model that a function builds lies in the run directory; each such teacher below, by its name; such a judge."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What the command line says beside the settings. `kill`: (role or service, step) pairs, for demonstrations."""

    config_path: Path
    kill: tuple[tuple[str, int], ...] = ()
    plain: bool = False
    """Plain lines, also on a terminal."""
    trains: bool = True
    """Whether it is a run to follow and to go on with: it is the latest, and there is something to go on from where it has a
    checkpoint."""


def main(
    config: RunConfig,
    options: TrainOptions,
    nursery: Nursery | None = None,
    *,
    groups: tuple[GroupSpec, ...] | None = None,
    before: Callable[[RunDir], None] | None = None,
) -> int:
    """Check `config` and run it in a new run directory. The exit code of the run; ConfigError when nothing was started.

    `nursery`: one that loads already; it ends with the run. `groups`: other role classes than the plan's, in the same places.
    `before` sees the directory before anything is started.
    """
    planned = groups or group_specs(config)
    with nursery or Nursery() as nursery, prepared(config, config.name, options, nursery, planned) as (run, admin):
        if before is not None:
            before(run)
        config = settings_of(run.path)
        return _run(config, run, options, admin, nursery, groups or group_specs(config), attempt=0)


def resume_or_start(config: RunConfig, options: TrainOptions, nursery: Nursery) -> int:
    """Go on with the newest run of `config`'s name, with the settings it has, where it has a whole checkpoint; else start one.

    0 at once where it is done, so that a batch job may be queued again at any moment. ConfigError where it is alive."""
    newest = newest_run(config.run_dir, config.name)
    if newest is None:
        say(f"run {config.name} starts: there is none of that name in {config.run_dir}")
        return main(config, options, nursery)
    newest = existing_run(newest)
    summary = read(newest)
    if owner(newest) is None and summary is not None and summary.exit_code == 0:
        say(
            f"run {newest.name} is done after step {summary.steps}: there is nothing to go on with. `rondo train` starts "
            f"another, and `rondo resume {newest} --set num_steps=...` adds steps to it"
        )
        return 0
    if owner(newest) is None and newest_complete(newest / "checkpoints") is None:
        say(f"run {config.name} starts anew: {newest.name} has no whole checkpoint to go on from")
        return main(config, options, nursery)
    nursery.close()  # it works where this command was given, and not where the run began
    return resume(newest, options=options)


def resume(
    path: Path,
    sets: Sequence[str] = (),
    *,
    options: TrainOptions | None = None,
    accept_changes: bool = False,
    reset_optimizer: bool = False,
    checkpoint: str | None = None,
) -> int:
    """Go on with the run at `path` from its newest whole checkpoint, or an older one by its name, under the next attempt. `sets`:
    settings that are other ones from there on. reset_optimizer: with the weights alone, as if the optimizer and its schedule
    began there.

    ConfigError when data, packages or code are not those that the run has, or settings change what is learnt, unless
    `accept_changes`; and for settings that cannot change.
    """
    with RunDir.claim(path) as run, Nursery() as nursery:
        found = whole_to_go_on_from(run.path, say) if checkpoint is None else checkpoint_of(run.path, checkpoint)[1]
        if found is None:
            raise ConfigError(
                f"RUN must have a whole checkpoint to go on from, got none in {run.checkpoints}. "
                "Start it again with `rondo train`; set train.save_every to have checkpoints earlier."
            )
        if not verify(found, ()):
            say(f"{found.name} is of an older release and has no digests: its files are taken as they are")
        config = settings_of(run.path)
        check_files(run.path)
        work_where_it_began(run.path)
        _compare(config, run, accept_changes=accept_changes)
        config = settings_of(run.path)  # other rows that were accepted make other steps
        if sets:
            config = _changed(config, run, sets, nursery, version_of(found), accept_changes=accept_changes)
        with listen(config.admin) as admin:
            for newer in set_aside(run.checkpoints, version_of(found)):
                say(f"set aside: {newer}")
            goes_on_from(run.path, version_of(found), reset=reset_optimizer)
            say(f"run {run.path.name} goes on from {found.name}{' with a fresh optimizer' * reset_optimizer}")
            options = options or TrainOptions(run.path / "config.py")
            return _run(config, run, options, admin, nursery, group_specs(config), attempt=run.next_attempt())


def settings_of(run: Path) -> RunConfig:
    """As its processes use them: functions are those of the run's own code."""
    return belonging_to(unresolve(read_json(run / "config.resolved.json")), run)


def _compare(config: RunConfig, run: RunDir, *, accept_changes: bool) -> None:
    """Tells what is not as it was when the run began; refuses to go on with what changes it, or takes it for the run's."""
    found = differences(run.path, config)
    for note in found.notes:
        say(note)
    if not accept_changes:
        refuse(found)
    elif found.changes:
        for change in found.changes:
            say(f"accepted: {change}")
        accept(run.path, config, found)
        manifest.write(run.path)


def work_where_it_began(run: Path) -> None:
    """The settings' relative paths count from there."""
    cwd = read_json(run / "environment.json")["cwd"]
    try:
        os.chdir(cwd)
    except OSError as error:
        raise ConfigError(
            f"the folder that the run was started in must be there, got {cwd}: {error.strerror}. Its settings may name files "
            f'from there: make it again, or set "cwd" in {run / "environment.json"} to where they lie now'
        ) from error


def _changed(
    config: RunConfig, run: RunDir, sets: Sequence[str], nursery: Nursery, version: int, *, accept_changes: bool
) -> RunConfig:
    """The run's settings with the changes `sets`, from `version` on, written down for its processes and in the run's
    environment.json. ConfigError for changes that are not accepted, or never can be."""
    changed = override(config, sets)
    found = list(changes(config, changed))
    if config.own is not None and any(text.partition("=")[0].strip() == "num_steps" for text in sets):
        raise ConfigError(
            f"num_steps must be left to {config.job}.steps or {config.job}.epochs with job {config.job!r}, got it. Set that one"
        )
    if not found:
        return config
    _refuse(found, changed, references(config), run.path, sets, accept_changes=accept_changes)
    before, after = ({role for group in each.role_groups for role in group.roles} for each in (config, changed))
    if before != after:
        raise ConfigError(
            f"role_groups must hold the roles that the run had, {', '.join(sorted(before))}, got {', '.join(sorted(after))}. "
            "Its checkpoint knows these alone"
        )
    with tempfile.TemporaryDirectory(prefix="rondo-check-") as folder:
        here = changed.model_copy(update={"name": run.path.name, "run_dir": run.path.parent})
        facts = require(here, Path(folder), nursery, say)
    assert facts.num_rows is not None and facts.fingerprints is not None
    changed = counted(changed, facts.num_rows)
    if changed.num_steps < version:
        raise ConfigError(
            f"num_steps must be at least the {version} steps that are trained, got {changed.num_steps}. Raise it, or go back "
            "with --checkpoint"
        )
    prepared = read_json(run.path / PREPARED)
    write_json(run.path / PREPARED, prepared | {"first_devices": first_devices(changed.role_groups)})
    rules = coordinator_config(changed, facts.num_rows, routed_bytes(changed, facts.shape))
    write_json(run.path / COORDINATOR_CONFIG, rules)
    write_json(run.path / FINGERPRINTS, read_json(run.path / FINGERPRINTS) | facts.fingerprints)
    told = read_json(run.path / ENVIRONMENT)
    was, now = resolve(as_kept(config, run.path)), resolve(as_kept(changed, run.path))
    made = {"time": time.time(), "version": version, "settings": {name: pair for name, *pair in parted(was, now)}}
    write_json(run.path / ENVIRONMENT, told | {"changes": [*told.get("changes", ()), made]}, PRIVATE)
    run.write_settings(now)
    manifest.write(run.path)
    for change in found:
        say(f"changed from step {version} on: {change}")
    return changed


def _refuse(
    found: Sequence[Change],
    config: RunConfig,
    before: Sequence[tuple[str, str]],
    run: Path,
    sets: Sequence[str],
    *,
    accept_changes: bool,
) -> None:
    """ConfigError for changes `found` that a run cannot have, or has only with `accept_changes`. `before`: the references to
    functions in the settings that it has."""
    another = "start another run with `rondo train`, from its weights by model.path and `rondo export`"
    if stays := [each for each in found if each.on_resume.kind == "fixed"]:
        raise ConfigError(
            "\n".join(
                f"{each.path} must stay {show_value(each.was)} in a run that goes on, since {each.on_resume.why}, got "
                f"{show_value(each.now)}. Leave it out, or {another}"
                for each in stays
            )
        )
    trained = ("train", "critic") if config.own is None else (config.job,)
    for path, reference in [each for each in references(config) if each not in before]:
        file = reference.partition(":")[0]
        if file.endswith(".py") and run / FOLDER not in Path(file).absolute().parents:
            raise ConfigError(
                f"{path} must be a function of the run's own code, {run / FOLDER}, or of a package, got {reference!r}. Put the "
                f"file there, or {another}"
            )
    falls = [name for name in trained if getattr(getattr(config, name), "schedule", "constant") != "constant"]
    learnt = [each for each in found if each.on_resume.kind == "learnt" or (falls and each.on_resume.kind == "length")]
    if learnt and not accept_changes:
        lines = "".join(f"\n  {each}" for each in learnt)
        why = "" if not falls else f" (the learning rate of {' and '.join(falls)} falls until the last step)"
        command = " ".join(shlex.quote(text) for each in sets for text in ("--set", each))
        raise ConfigError(
            f"settings must not change what a run learns without being accepted, got {len(learnt)}{why}:{lines}\n"
            f"Go on with them: `rondo resume {run} {command} --accept-changes`; or leave them out, or {another}"
        )


def _run(
    config: RunConfig,
    run: RunDir,
    options: TrainOptions,
    admin: socket.socket,
    nursery: Nursery,
    groups: tuple[GroupSpec, ...],
    *,
    attempt: int,
) -> int:
    started, asked = time.time(), _keep_stops()
    outcome = supervised(config, run, options, admin, nursery, groups, attempt=attempt, asked=asked)
    with telling("steps"):
        Records(run.path).advance(final=True)
    with telling("summary"):
        _sum_up(run.path, outcome, time.time() - started, started)
    newest = newest_complete(run.checkpoints)
    for made in ("hf", "adapter"):
        if newest is not None and (newest / made).is_dir():
            say(f"result: {newest / made}")
    say(f"run directory: {run.path}")
    if outcome.exit_code == EXIT_REQUEUE:
        say(f"stopped before the end: `rondo resume {run.path}` goes on")
    return outcome.exit_code


def supervised(
    config: RunConfig,
    run: RunDir,
    options: TrainOptions,
    admin: socket.socket,
    nursery: Nursery,
    groups: tuple[GroupSpec, ...],
    *,
    attempt: int,
    asked: list[str] | None = None,
) -> Outcome:
    """Everything of a run from its first process to its last. `asked`: stops that came before, and those that come after."""
    timeline.begin(run.path, "supervisor", incarnation=attempt, attempt=attempt)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcome = runner.run(
            _supervise(config, run, options, admin, nursery, attempt, groups, [] if asked is None else asked)
        )
    timeline.end()
    return outcome


def ended(outcome: Outcome) -> int:
    """The exit code of a command whose run leaves nothing to go on with: 130 where it was stopped; what it failed of is told."""
    if outcome.first_cause is not None:
        print(outcome.first_cause, file=sys.stderr)
    return EXIT_INTERRUPTED if outcome.exit_code == EXIT_REQUEUE else outcome.exit_code


def _sum_up(run: Path, outcome: Outcome, wall_s: float, started: float) -> None:
    """The run's result: on the disk as far as it can be, and on stdout in any case."""
    told = {"wall_s": wall_s, "restarts": _by_role(outcome.restarts), "untold": {**outcome.untold, **PROCESS.counts()}}
    ending = asdict(outcome) | told
    summary = Summary(name=run.resolve().name, steps=0, **ending)  # without figures, where the files make none
    with telling("figures of the summary"):
        summary = summarize(run, started=started, **ending)
    with telling("summary.json"):
        write(run, summary)
    with telling("curves.png"):
        _plot(run)
    with telling("stdout"):
        print_table(summary)
    with telling("answers"):
        for line in answers(run):
            say(line)


def _keep_stops() -> list[str]:
    """Signals that ask for a stop, from now on: those from before a supervisor listens are for it, and those that come while the
    summary is written and all is cleared up end nothing any more, until the command is over (`cli.py`)."""
    asked: list[str] = []
    for each in stop_signals():
        signal.signal(each, lambda number, frame: asked.append(signal.Signals(number).name))
    return asked


@contextmanager
def prepared(
    config: RunConfig,
    name: str,
    options: TrainOptions,
    nursery: Nursery,
    groups: tuple[GroupSpec, ...],
    num_steps: int | None = None,
) -> Iterator[tuple[RunDir, socket.socket]]:
    """A new run directory with all that its processes read, once every check has passed, and the socket of its admin endpoint.
    The folder that a model was built in is gone before anything starts, so that a killed run leaves none."""
    with ExitStack() as stack:
        with tempfile.TemporaryDirectory(prefix="rondo-model-") as folder, ThreadPoolExecutor(1) as beside:
            # Checked is what will run: the copy, from its first moment on.
            taken = take(config, options.config_path, Path(folder) / FOLDER)
            around = beside.submit(RunDir.surroundings)  # while other processes load and look
            facts = require(taken, Path(folder), nursery, say, role_modules(groups))
            admin = stack.enter_context(listen(config.admin))
            kept = resolve(as_kept(counted(taken, facts.num_rows), Path(folder)))
            code = Path(folder) / FOLDER
            told = around.result()
            run = stack.enter_context(RunDir.create(config.run_dir, name, kept, code, told, latest=options.trains))
            _prepare(counted(config, facts.num_rows), run, facts, num_steps)
        yield run, admin


def _prepare(config: RunConfig, run: RunDir, facts: Facts, num_steps: int | None) -> None:
    """What roles and coordinator read: where the model's files are, and the rules of the bus. num_steps: other than the settings
    say."""

    def lies(path: str, model: ModelConfig | None, place: str) -> str:
        """Where a model's files are from now on: one that a function has built comes along."""
        if model is None or model.recipe is None:
            return path
        (run.path / place).parent.mkdir(exist_ok=True)
        shutil.move(path, run.path / place)
        return place

    assert facts.model_path is not None and facts.num_rows is not None
    taught = config.distillation.named() if config.distillation is not None else {}
    found = {
        "model_path": lies(facts.model_path, config.model, MODEL),
        "teachers": {n: lies(path, taught[n].model, f"{TEACHERS}/{n}") for n, path in facts.teacher_paths.items()},
        "judges": {n: lies(path, config.judges[n].model, f"{JUDGES}/{n}") for n, path in facts.judge_paths.items()},
        "first_devices": first_devices(config.role_groups), "num_devices": facts.num_devices,
    }  # fmt: skip
    write_json(run.path / PREPARED, found)
    rules = coordinator_config(config, facts.num_rows, routed_bytes(config, facts.shape))
    if num_steps is not None:
        starts = rules.evaluate_start or not num_steps
        rules = replace(rules, rules=replace(rules.rules, num_steps=num_steps), evaluate_start=starts)
    write_json(run.path / FINGERPRINTS, facts.fingerprints)
    write_json(run.path / COORDINATOR_CONFIG, rules)
    manifest.write(run.path)


async def _supervise(
    config: RunConfig,
    run: RunDir,
    options: TrainOptions,
    listening: socket.socket,
    nursery: Nursery,
    attempt: int,
    groups: tuple[GroupSpec, ...],
    asked: list[str],
) -> Outcome:
    """Supervisor, view and admin endpoint beside each other, until the supervisor has ended everything. `asked`: stops so far."""
    begun: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
    listeners: list[Callable[[dict[str, Any]], None]] = []

    def on_event(record: dict[str, Any]) -> None:
        if record["kind"] == "started" and not begun.done():
            begun.set_result(Path(record["rt_dir"]))
        for listener in listeners:
            with telling("events as they come"):
                listener(record)

    supervisor = Supervisor(_supervisor_config(config, run, options, attempt, groups), on_event, nursery)
    view = open_view(run.path.name, config.num_steps, lambda: supervisor.snapshot().groups, plain=options.plain)
    listeners.append(view.on_event)
    running = asyncio.create_task(supervisor.run())
    waited: list[asyncio.Future[Any]] = [running, begun]
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not begun.done():
        try:
            return await running
        except OSError as error:
            return _broken(error, attempt)
    if asked:
        supervisor.request_stop(asked[0], notice=signal.SIGUSR1.name in asked)
    rt_dir = begun.result()
    loop = asyncio.get_running_loop()

    def tell(kind: str, data: Mapping[str, Any]) -> None:
        """From any thread."""
        with JsonLines(run.path / "events.jsonl") as events:
            loop.call_soon_threadsafe(on_event, events.write({"kind": kind, "source": "supervisor", **data}))

    every = config.evaluation.every if config.evaluation is not None else None
    every = config.own.evaluate_every if config.own is not None else every
    keeper = Keeper(run.path, config.train, tell, evaluates_every=every, load_s=config.supervision.load_s)
    listeners.append(keeper.on_event)
    keeping = asyncio.create_task(keeper.run())
    beside = [asyncio.create_task(view.run()), asyncio.create_task(_tell_steps(run.path))]
    programs: dict[str, str] = {each.name: "rondo.launch.track.follow" for each in config.trackers}
    programs |= {"alerts": "rondo.launch.alert.follow"} if config.alerts is not None else {}
    trackers = Beside(run.path, programs, tell)
    tracking = asyncio.create_task(trackers.run())
    if config.preemption.file is not None:
        noticed = functools.partial(supervisor.request_stop, notice=True)
        beside.append(asyncio.create_task(watch(config.preemption.file, noticed)))
    admin: AdminServer | None = None
    with view:
        with telling("admin endpoint"):
            token = (rt_dir / "token").read_text()
            provider = RunProvider(supervisor, rt_dir, token, run.path)
            listeners.append(provider.on_event)
            beside.append(asyncio.create_task(provider.poll()))
            admin = AdminServer(config.admin, provider, token=token, audit=functools.partial(tell, "asked"))
            Questions(config, provider.ref, lambda: supervisor.snapshot().groups).mount(admin)
            admin.route("GET", "/timeline", serve_trace(run.path), scope="read", operation=TRACE)
            admin.route(
                "GET",
                "/stacks",
                lambda request: provider.stacks(request[QUERY].process),
                scope="content",
                operation=STACKS,
            )
            fixed = groups != group_specs(config)
            scaler = Scaler(supervisor, config, run.path, tell, provider.proved, provider.ref, fixed=fixed)
            beside.append(asyncio.create_task(scaler.run()))
            scales = None
            if config.autoscale is not None and not fixed:
                scales = Autoscaler(config.autoscale, scaler, tell)
                listeners.append(scales.on_event)
                beside.append(asyncio.create_task(scales.run()))
            mount_autoscaler(admin, scaler, scales)
            mount(admin, scaler, tuple(role for group in config.role_groups for role in group.roles))
            behind.mount(admin, run.path)
            await admin.start(listening)
            say(f"run directory: {run.path}  admin: {admin.url}")
            run.write_supervisor(
                rt_dir=rt_dir, admin_host=config.admin.host, admin_port=admin.port, token_path=rt_dir / "token",
                admin_cert=config.admin.tls_cert,
            )  # fmt: skip
        try:
            outcome = await running
            if outcome.exit_code in (0, 75):
                num_asked = len(asked)
                await keeper.finish(keeping, lambda: len(asked) > num_asked or time.monotonic() > supervisor.leave_by)
            num_asked = len(asked)
            with telling("trackers"):
                await trackers.finish(
                    tracking, lambda: len(asked) > num_asked or time.monotonic() > supervisor.leave_by
                )
            return outcome
        except Exception as error:  # noqa: BLE001  # the run has its summary all the same
            return _broken(error, attempt)
        finally:
            for task in (*beside, keeping, tracking):
                task.cancel()
            await asyncio.gather(*beside, keeping, tracking, return_exceptions=True)
            if admin is not None:
                with telling("admin endpoint"):
                    await admin.close()


def _broken(error: Exception, attempt: int) -> Outcome:
    """How a run ended whose supervisor failed: for want of something, or by a mistake of ours, which is told whole."""
    if shortage(error) is None:
        traceback.print_exception(error)
    return Outcome(EXIT_FAILED, f"supervisor: {shortage(error) or repr(error)}", {}, {}, 0.0, attempt, {}, {}, 0.0)


async def _tell_steps(run: Path) -> None:
    """Writes down, while the run lasts, who waited for whom in each step."""
    with telling("steps"):
        records = Records(run)
        await tell_every("steps", _STEPS_S, functools.partial(asyncio.to_thread, records.advance))


def _supervisor_config(
    config: RunConfig, run: RunDir, options: TrainOptions, attempt: int, groups: tuple[GroupSpec, ...]
) -> SupervisorConfig:
    path = Path(read_json(run.path / PREPARED)["model_path"])
    return SupervisorConfig(
        run_dir=run.path,
        groups=groups,
        coordinator="rondo.comm.bus.serve",
        attempt=attempt,
        limits=config.supervision,
        modules=model_modules(path if config.model.recipe is None else run.path / path),
        notice_s=within_s(config.preemption.grace_s),
        kill=options.kill,
        finds_state=config.train.hot_snapshot,
        can_restart_globally=lambda: not options.trains or newest_complete(run.checkpoints) is not None,
        find_state=lambda: not options.trains or _falls_back(run.path),
    )


def _falls_back(run: Path) -> bool:
    """Whether a run in which nothing works any more has a whole checkpoint, from which it then goes on."""

    def tell(text: str) -> None:
        say(text)
        with JsonLines(run / "events.jsonl") as events:
            events.write({"kind": "checkpoint_set_aside", "source": "supervisor", "why": text})

    found = whole_to_go_on_from(run, tell)
    if found is not None:
        goes_on_from(run, version_of(found))
    return found is not None


def _by_role(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts of "actor-0", "rollout-1" or "coordinator" by what they are replicas of."""
    roles: dict[str, int] = {}
    for name, count in counts.items():
        role = name.rpartition("-")[0] or name
        roles[role] = roles.get(role, 0) + count
    return roles


def _plot(run: Path) -> None:
    """Draw the curves; a run is worth its summary also without a picture."""
    command = module_command("rondo.launch.report.plot", str(run))
    with at_work("draws the curves"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PLOT_LIMIT_S, check=False)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    if done.returncode not in (0, EXIT_UNDRAWN):
        raise RondoError(lines[-1])
    say(done.stdout.strip() or lines[-1])
