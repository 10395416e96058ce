"""Check: everything that would stop a run, found before it starts. Starts nothing of the run and writes nothing.

Owns the rules that need more than the settings: this machine, the model's files, the data, the user's functions. Rules
between settings are the settings' own; what another machine would hold is `target.py`'s. What needs torch, transformers or
user code runs in a child process (`child.py`), so that the supervisor stays light and code that crashes takes only the
child with it.

    inspect(config) -> findings          `rondo check` prints them all
    inspect(config, target)              `rondo check --nodes 2 --devices 8 ...`: for other machines than this one
    inspect(config, probes=True)         `rondo check --probe`: and tries this machine (`probe.py`)
    judge(config, facts, memory)         the part without a child
    require(config, folder, nursery, say, modules) -> facts     `rondo train` raises ConfigError with every error, a line each
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import orjson
from pydantic import TypeAdapter

from rondo.comm.ring.litmus import litmus
from rondo.launch.alert.settings import why_not
from rondo.launch.check.child import ANSWER, QUESTION
from rondo.launch.check.data import DataProcess, is_made, look_at_order
from rondo.launch.check.estimate import routed_bytes
from rondo.launch.check.findings import Facts, Finding, Report, error, note, ok
from rondo.launch.check.given import look_at_given
from rondo.launch.check.jobs import run_jobs
from rondo.launch.check.probe import probe
from rondo.launch.check.sglang import context_of, look_at_sglang
from rondo.launch.check.target import (
    Target,
    group_bytes,
    judge_devices,
    judge_target,
    node_parts,
    segment_bytes,
    tell_hosts,
)
from rondo.launch.config import RunConfig, resolve
from rondo.launch.differences import check_files
from rondo.launch.groups import TRAINED
from rondo.launch.machine import folder_problem, num_cores, port_problem, show_bytes
from rondo.launch.progress import at_work
from rondo.launch.rundir import existing_run, owner
from rondo.launch.track.settings import missing
from rondo.roles.config import ListenConfig, SupervisedConfig
from rondo.roles.config.supervised import unread
from rondo.roles.engines.sglang.requirements import of_context
from rondo.roles.streams import media_bytes, row_bytes, sampled_bytes, turn_bytes
from rondo.runtime.admin.tls import server_context
from rondo.runtime.admin.tokens import read_token_file
from rondo.runtime.checkpoints import complete, verify
from rondo.runtime.config import AdminConfig
from rondo.runtime.errors import ConfigError, DeadlineExceeded, RondoError, WorkerDied
from rondo.runtime.memory.free import free_memory_bytes
from rondo.runtime.processes import process
from rondo.runtime.processes.janitor import swept_folder
from rondo.runtime.records.logs import LOGS
from rondo.runtime.supervision.launcher import Job
from rondo.runtime.supervision.nursery import Nursery

_CHILD_S, _EARLY_S = 600.0, 30.0
_LOADED = ("transformers.modeling_utils", "rondo.models.load", "rondo.launch.check.child")
"""What the child takes seconds to load; the run's processes use it too."""
_LAST_PORT = 65535
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "random_weights.json")


def require(
    config: RunConfig, folder: Path, nursery: Nursery, say: Callable[[str], None], modules: Sequence[str] = ()
) -> Facts:
    """Checks all; ConfigError with every error, a line each, and a line said for every note. A model that is built stays in
    `folder`, for the run, and what was loaded in `nursery`, which loads `modules` for it meanwhile."""
    seen = _look(config, folder, nursery, modules, traces=False)
    findings = [*seen.findings, *judge(config, seen.facts, free_memory_bytes())]
    errors = [finding.text for finding in findings if finding.level == "error"]
    if errors:
        raise ConfigError("\n".join(errors))
    for finding in findings:
        if finding.level == "note":
            say(f"note: {finding.text}")
    return seen.facts


def inspect(
    config: RunConfig,
    target: Target | None = None,
    nursery: Nursery | None = None,
    *,
    probes: bool = False,
    tell: Callable[[list[Finding]], object] = lambda _: None,
) -> list[Finding]:
    """Look at everything, for this machine or for those of `target`, and return what was found; never raises for it.

    `tell` is called with the errors of settings, machine and data that are found before a process loads torch or a model; they
    are among those returned. `nursery`: one that loads already; it ends with the look. probes: try this machine too.
    """
    with swept_folder("rondo-check-") as folder, nursery or Nursery() as nursery, DataProcess(config) as data:
        cheap = [*_rules(config), *(_machine(config) if target is None else ())]
        tell([finding for finding in cheap if finding.level == "error"])
        with contextlib.suppress(ConfigError):  # a crash, or rows that take long, which the child tells of
            tell([error(text) for text in data.errors(_EARLY_S)])
        seen = _look(config, folder, nursery, data=data, traces=True)
        tried = list(probe(config, seen.facts, folder, nursery)) if probes else []
    if target is None:
        return [*seen.findings, *judge(config, seen.facts, free_memory_bytes(), cheap), *tried]
    return [*seen.findings, *cheap, *_settings(config, seen.facts), *judge_target(config, target, seen.facts)]


def node_bytes(config: RunConfig, folder: Path) -> int:
    """Host memory of a machine that runs all of it, with the most replicas that there may be, by estimate. ConfigError with what
    would stop it on every machine."""
    with Nursery() as nursery:
        seen = _look(config, folder, nursery, traces=True)
    findings = [*seen.findings, *_rules(config), *_settings(config, seen.facts)]
    if errors := [finding.text for finding in findings if finding.level == "error"]:
        raise ConfigError("\n".join(errors))
    assert seen.facts.shape is not None
    counts = {group.name: config.most_replicas(group) * group.processes for group in config.role_groups}
    return sum(node_parts(config, seen.facts, seen.facts.shape, counts).values())


def judge(
    config: RunConfig, facts: Facts, memory: tuple[int, str], cheap: Sequence[Finding] | None = None
) -> list[Finding]:
    """Return what this machine and the facts say about the settings. `memory`: free bytes, and what limits them. `cheap`: what is
    known already of settings and machine without the facts."""
    return [
        *_settings(config, facts),
        *(cheap if cheap is not None else (*_rules(config), *_machine(config))),
        *_weights(facts),
        *_devices(config, facts),
        *tell_hosts(config, facts),
        *_memory(config, facts, *memory),
    ]


def _rules(config: RunConfig) -> Iterator[Finding]:
    """What the settings alone say, on every machine."""
    if config.own is not None:
        yield from _job(config, config.own)
    else:
        yield from _batch(config)
        yield from look_at_given(config)
        yield from _learning(config)
        yield from _compared(config)


def _machine(config: RunConfig) -> Iterator[Finding]:
    """What this machine says of the settings without loading anything."""
    yield from _host(config)
    yield from look_at_sglang(config) if config.job == "rl" else ()


def _settings(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """What settings and model say together, on every machine."""
    if config.own is None:
        yield from _ring(config, sampled_bytes(config, routed := routed_bytes(config, facts.shape)))
        yield from _column_ring(config, routed)
        yield from _model(config, facts)
    if facts.num_parameters is not None:
        yield ok(f"the model has {facts.num_parameters:,} parameters and takes {facts.max_positions} positions")


def inspect_run(path: Path) -> list[Finding]:
    """What `rondo resume` and others find of the run at `path`: the files that it goes on with, and every checkpoint."""
    run, findings = existing_run(path), []
    try:
        check_files(run)
        findings.append(ok("every file that a resume reads first is whole"))
    except ConfigError as wrong:
        findings.append(error(str(wrong)))
    for folder in complete(run / "checkpoints"):
        try:
            told = "is whole" if verify(folder) else "is of an older release and has no digests: nobody can tell"
            findings.append(ok(f"{folder.name} {told}"))
        except RondoError as wrong:
            findings.append(error(str(wrong)))
    return findings


def memory_order() -> Finding:
    """Tries what the ring stands on: two processes, shared memory, doorbells. Part of `rondo check` only, since it says
    something about the machine and not about a run."""
    found = litmus()
    if found.ok:
        return ok(f"shared memory keeps its order and loses no wake-up in {found.num_rounds} rounds")
    return error(
        "shared memory must keep its order and lose no wake-up, "
        f"got {found.lost} lost, {found.torn} torn, {found.unseen} unseen in {found.num_rounds} rounds. "
        "Do not train on this machine"
    )


def _job(config: RunConfig, own: SupervisedConfig) -> Iterator[Finding]:
    """Of one without rollouts."""
    trains = config.group_of("actor")
    assert trains is not None
    yield ok(
        f"a step trains {own.batch_size} rows on {trains.processes} process(es), in {config.train.dtype}, at most "
        f"{own.micro_batch_tokens} tokens at once"
    )
    if names := unread(config, measures=config.group_of("rollout") is not None):
        yield note(
            f"job {config.job!r} goes by {config.job} and what train says of the model, and not by {', '.join(names)}. Leave "
            f"them out, unless they are of a run with job 'rl', and set what is meant in {config.job}"
        )
    if own.batch_size < trains.processes:
        yield note(
            f"{config.job}.batch_size {own.batch_size} leaves some of {trains.processes} processes without a row, which "
            "compute as long. Raise it, or lower the group's processes"
        )


def _batch(config: RunConfig) -> Iterator[Finding]:
    """Every rank that trains must get a sample in every step."""
    rollout = config.rollout
    num_samples = rollout.prompts_per_step * rollout.samples_per_prompt
    for role in TRAINED:
        group = config.group_of(role)
        if group is None:
            continue
        if num_samples < group.processes:
            yield error(
                "rollout.prompts_per_step * rollout.samples_per_prompt must be at least the processes that train, "
                f"{group.processes} in {group.name!r}, got {rollout.prompts_per_step} * {rollout.samples_per_prompt} = "
                f"{num_samples}. Raise rollout.prompts_per_step, or lower the group's processes"
            )
            continue
        if num_samples % group.processes:
            yield note(f"{num_samples} samples a step over {group.processes} processes: some get one more than others")
        whom = "" if role == "actor" else f" the {role} on"
        yield ok(f"a step trains{whom} {num_samples} samples on {group.processes} process(es), in {config.train.dtype}")


def _learning(config: RunConfig) -> Iterator[Finding]:
    """What ratios compare with and why, and what is drawn otherwise than it is trained."""
    rollout, train, loss = config.rollout, config.train, config.loss()
    source = config.old_log_probs(has_actor_fwd=config.group_of("actor_fwd") is not None)
    old = {"self": "the trainer's own", "actor_fwd": "those of actor_fwd", "rollout": "the engine's"}[source]
    if config.algorithm.old_log_probs != "auto":
        why = f"algorithm.old_log_probs is {source!r}"
    elif config.computes_alike:
        why = "the embedded engine and the trainer both compute in float32"
    else:
        engine = "the embedded engine" if rollout.sglang is None else "SGLang"
        why = f"{engine} in {config.model.dtype} and the trainer in {train.dtype} do not give equal log-probs"
    later = train.num_mini_batches - 1 if source == "self" else 0
    cost = (
        f", by a forward more for {later} of {later + 1} mini-batches, before the first optimizer step" if later else ""
    )
    bounds = f"within {loss.tis_low:g} and {loss.tis_high}" if loss.tis_high is not None else ""
    weight = f"the loss is weighted with pi_old / pi_engine {bounds}" if bounds else "the loss has no importance weight"
    yield ok(f"old log-probs are {old}{cost}, and {weight}: {why}")
    if config.measures_drift:
        yield ok(
            "every sample has a forward more before the first gradient of its step: algorithm.policy_loss "
            f"{loss.policy_loss!r} is made with how far the whole step is from the policy that sampled"
        )
    if rollout.top_p < 1 or rollout.top_k > 0:
        cut = f"rollout.top_p {rollout.top_p:g}" if rollout.top_p < 1 else f"rollout.top_k {rollout.top_k}"
        yield note(
            f"{cut} draws from a part of the vocabulary, and the loss takes log-probs of the whole: the policy that is trained "
            "is not the one that sampled, tokens that are cut off are never corrected, and ratios do not tell. Remove it (a "
            "lower rollout.temperature counts in both), and set it in evaluation alone"
        )


def _ring(config: RunConfig, routed: int) -> Iterator[Finding]:
    """A rollout ring must hold at least one prompt group of the greatest length, with its media; `routed`: bytes of each token's
    experts."""
    samples, row, media = config.rollout.samples_per_prompt, row_bytes(config, routed), media_bytes(config)
    needed = group_bytes(config, routed)
    if needed > config.bus.ring_bytes:
        beside = f" and media of up to {media}" if media else ""
        most = {"media.max_group_bytes": media, "media.max_turn_bytes": samples * turn_bytes(config)}
        way = f", or lower {max(most, key=lambda name: most[name])}" if media else ""
        yield error(
            f"bus.ring_bytes must hold one prompt group, {samples} samples of up to {row} bytes{beside} = {needed}, "
            f"got {config.bus.ring_bytes}. Raise bus.ring_bytes to {needed} or more{way}"
        )


def _column_ring(config: RunConfig, routed: int) -> Iterator[Finding]:
    """The ring of a process that records routes must hold those of a micro-batch; `routed`: bytes of each token's."""
    if config.train.router_replay != "r2" or config.group_of("actor_fwd") is None:
        return
    needed = config.train.micro_batch_tokens * (routed + 8)
    if needed > config.bus.column_ring_bytes:
        yield error(
            "bus.column_ring_bytes must hold what actor_fwd puts of a micro-batch, with train.router_replay 'r2' "
            f"train.micro_batch_tokens x {routed + 8} = {needed}, got {config.bus.column_ring_bytes}. Raise it to {2 * needed}"
        )


def _compared(config: RunConfig) -> Iterator[Finding]:
    """What a teacher tells of a micro-batch lies in its column ring."""
    taught, room = config.distillation, config.bus.column_ring_bytes
    needed = 0 if taught is None else 2 * 4 * taught.num_compared * config.train.micro_batch_tokens
    if needed > room:
        yield note(
            f"bus.column_ring_bytes {show_bytes(room)} may not hold what a teacher tells of a micro-batch, up to "
            f"{show_bytes(needed)} with distillation.top_k {taught.top_k if taught is not None else 0}: it would score one step "
            "after the other. Raise it, or lower distillation.top_k or train.micro_batch_tokens"
        )


def _host(config: RunConfig) -> Iterator[Finding]:
    """Folder, name, port, token and cores of this machine."""
    path = config.run_dir / config.name
    problem = folder_problem(config.run_dir) or folder_problem(path)
    if problem is not None:
        yield error(f"run_dir must be a folder to write to, got {config.run_dir}: {problem}. Choose another")
    if config.name == "latest":
        yield error("name must not be 'latest', which is the link to the newest run, got it. Choose another")
    elif (pid := owner(path)) not in (None, os.getpid()):  # a run that resumes has claimed it
        yield error(
            f"the run directory {path} must have no other owner, got a live run with pid {pid}. "
            f"Stop it with `rondo stop {path}`, or choose another name with --set name=..."
        )
    yield from (error(line) for each in config.trackers if (line := missing(each.name)) is not None)
    if config.alerts is not None and (line := why_not(config.alerts)) is not None:
        yield error(line)
    if (notice := config.preemption.file) is not None and notice.exists():
        yield error(
            f"preemption.file must not be there before a notice, got {notice}, at which a run leaves at once. Remove it"
        )
    admin = config.admin
    yield from _secrets(admin, "admin")
    yield from _endpoint(config)
    problem = port_problem(admin.host, admin.port)
    if problem is not None:
        setting = "admin.port must be free" if admin.port else "admin.host must be an address of this machine"
        yield error(
            f"{setting}, got {admin.host}:{admin.port} ({problem}). "
            "Set admin.port=0 for a free port on admin.host='127.0.0.1'"
        )
    # Advantages take milliseconds a step; a device computes for its process.
    busy = [group for group in config.role_groups if group.roles != ("advantages",) and not group.devices]
    threads = sum(group.replicas * group.processes * group.threads for group in busy)
    if threads > num_cores():
        yield note(
            f"{threads} compute threads share {num_cores()} cores. Lower processes, replicas or threads of the groups "
            "unless some of them mostly wait"
        )


def _secrets(of: AdminConfig | ListenConfig, section: str) -> Iterator[Finding]:
    """The token and the certificate of a server."""
    for read in (
        lambda: of.token_file and read_token_file(of.token_file, f"{section}.token_file"),
        lambda: server_context(of.tls_cert, of.tls_key, (f"{section}.tls_cert", f"{section}.tls_key")),
    ):
        try:
            read()
        except ConfigError as wrong:
            yield error(str(wrong))


def _endpoint(config: RunConfig) -> Iterator[Finding]:
    """The ports, the tokens and the certificates of the servers for agents."""
    rollout, agent = config.group_of("rollout"), config.rollout.agent
    for place in (config.rollout.endpoint, None if agent is None else agent.elsewhere):
        if place is None or rollout is None:
            continue
        yield from _secrets(place, place.section)
        ports = range(place.port, place.port + rollout.replicas * rollout.processes) if place.port else (0,)
        for port in ports:
            problem = "there is no such port" if port > _LAST_PORT else port_problem(place.host, port)
            if problem is not None:
                yield error(
                    f"{place.section}.port must be free, one port a replica, got {place.host}:{port} ({problem}). "
                    f"Set {place.section}.port=0 for free ones"
                )


def _model(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """The longest samples, of training and of evaluation, must fit the model's positions, of which a server of SGLang leaves some
    free."""
    rollout, evaluation, most = config.rollout, config.evaluation, facts.max_positions
    if most is not None and rollout.sglang is not None and rollout.sglang.python is not None:
        most = of_context(context_of(rollout.sglang, most)).whole
    of = "the model's positions" if most == facts.max_positions else "what SGLang takes of the model's positions"
    lengths = {"rollout": rollout.max_new_tokens}
    for name, each in evaluation.named_sets().items() if evaluation is not None else ():
        section = "evaluation" if each is evaluation else f"evaluation.sets.{name}"
        lengths |= {section: each.max_new_tokens} if each.max_new_tokens is not None else {}
    for section, length in lengths.items():
        prompt = rollout.max_prompt_tokens
        if most is not None and prompt + length > most:
            yield error(
                f"rollout.max_prompt_tokens + {section}.max_new_tokens must be at most {of}, {most}, "
                f"got {prompt} + {length} = {prompt + length}. Lower one of them"
            )


def _weights(facts: Facts) -> Iterator[Finding]:
    """A run needs weights, where a check for other machines needs the model's config alone."""
    folder = Path(facts.model_path or "")
    if facts.model_path and folder.is_dir() and not any(any(folder.glob(name)) for name in _WEIGHTS):
        yield error(
            f"model.path must be a folder with weights, got {facts.model_path} without {' and '.join(_WEIGHTS[:2])}. Download "
            "them, or name the folder that has them"
        )


def _devices(config: RunConfig, facts: Facts) -> Iterator[Finding]:
    """Every process that asks for a device must get one of its own."""
    wanted = {g.name: g.replicas * g.processes * g.devices for g in config.role_groups if g.devices}
    if wanted and facts.num_devices is not None and sum(wanted.values()) > facts.num_devices:
        shown = " + ".join(f"{name} {count}" for name, count in wanted.items())
        yield error(
            f"role_groups must ask for at most the devices of this machine, {facts.num_devices}, got {shown} = "
            f"{sum(wanted.values())}. Lower processes or replicas, or set devices=0 to compute on the CPU; "
            "a run on several machines cannot be started"
        )
    elif facts.shape is not None and facts.device_bytes is not None:
        yield from judge_devices(config, facts, facts.device_bytes)


def _memory(config: RunConfig, facts: Facts, limit: int, whose: str) -> Iterator[Finding]:
    """All shared memory must fit beside each other."""
    if facts.num_parameters is None or facts.num_tensors is None:
        return
    parts = segment_bytes(config, facts.num_parameters, facts.num_tensors, facts.shape)
    needed = sum(parts.values())
    shown = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
    if needed > limit:
        yield error(
            f"shared memory must fit into what is free of {whose}'s memory, {show_bytes(limit)}, got {show_bytes(needed)} "
            f"({shown}). "
            "Lower bus.ring_bytes, set train.hot_snapshot=False, end what else runs here, or use a machine with more memory"
        )
    else:
        yield ok(f"shared memory takes {show_bytes(needed)} of {show_bytes(limit)} that are free ({shown})")


def _look(
    config: RunConfig,
    folder: Path,
    nursery: Nursery,
    modules: Sequence[str] = (),
    *,
    data: DataProcess | None = None,
    traces: bool,
) -> Report:
    """Return what other processes find: the child, and `data`, by default one that is started where functions make rows. traces:
    memory, also where there is plenty."""
    with contextlib.ExitStack() as stack:
        if data is None and is_made(config):
            data = stack.enter_context(DataProcess(config))
        report = _in_child(config, folder, nursery, modules, traces=traces)
        if data is not None and is_made(config) and (found := report.facts.fingerprints) is not None:
            report.look(lambda: look_at_order(found, data), "data")
    return report


def _in_child(config: RunConfig, folder: Path, nursery: Nursery, modules: Sequence[str], *, traces: bool) -> Report:
    """Runs `child.py`; its crash is a finding like any other. A model that is built is written into `folder`."""
    (folder / QUESTION).write_bytes(orjson.dumps({"config": resolve(config), "traces": traces}))
    job = Job("rondo.launch.check.child:main", (str(folder),), dict(os.environ), folder / "check.log")

    def place(_: int) -> tuple[Path, Mapping[str, str]]:
        return folder / "nursery.log", os.environ

    process.set_child_subreaper()
    nursery.belong(place, _LOADED)
    try:
        with at_work("looks at settings, data, model and rewards"):
            [code] = run_jobs(nursery, [job], "check", _CHILD_S, begun=lambda: nursery.belong(place, modules))
    except DeadlineExceeded:
        text = f"looking at model, data and reward must end within {_CHILD_S:g} s, got no end. See what they wait for"
        return Report([error(text)])
    except WorkerDied as died:
        return Report([error(str(died))])
    if code != 0:
        last = LOGS.last_lines(job.log, num_lines=5)
        text = (
            f"looking at model, data and reward must end with exit code 0, got {code}: "
            f"{' | '.join(last) or 'no output'}. Run the functions that the settings name by themselves"
        )
        return Report([error(text)])
    report = TypeAdapter(Report).validate_json((folder / ANSWER).read_bytes())
    # Demonstrations can come from the rows that are trained on: what is wrong with those is told once.
    report.findings = list(dict.fromkeys(report.findings))
    return report
