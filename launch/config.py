"""RunConfig: everything a run is told, as one validated, frozen tree; and how a config module becomes one.

Owns `RunConfig`, `load` and the JSON form. Does not own the sections, which live beside the code that uses them, nor
what needs the machine or the data to be looked at: `check/` does that.

    # quickstart.py                            load("quickstart.py", ["train.lr=1e-5", "role_groups.0.replicas=2"])
    config = RunConfig(name="quickstart", ...)

Every mistake is one line, `<field> must <rule>, got <value>. <what to do>`, and no traceback; an error inside the module
comes with file and line. The JSON form holds plain values only, so `unresolve(resolve(config)) == config`.
"""

from __future__ import annotations

import ast
import json
import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Field, ValidationError

from rondo.launch.alert.settings import AlertsConfig
from rondo.launch.autoscale.decide import AutoscaleConfig
from rondo.launch.groups import RoleGroup, RoleName
from rondo.launch.track.settings import TrackerConfig
from rondo.roles.config import OF_RUN, JobConfig
from rondo.roles.config.supervised import answers_are_not_measured
from rondo.runtime.config import AdminConfig, PreemptionConfig
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import confirm, load_file
from rondo.runtime.section import (
    FREE,
    FunctionRef,
    Section,
    explain,
    keeping_errors,
    nearest,
    nearest_field,
    parts_of,
    references,
    sections,
    show_value,
)  # fmt: skip


class RunConfig(JobConfig):
    """A whole run: the job that the roles do, where they run, and what watches them."""

    role_groups: Annotated[tuple[RoleGroup, ...], FREE] = Field(min_length=1)
    """Role groups: which roles share processes, how many of them, on what (`rondo.launch.modes` has functions that list them)."""
    roles: dict[RoleName, FunctionRef] = Field(default_factory=dict)
    """Classes in the place of ours, by the name of their role, most often derived from them."""
    run_dir: Annotated[Path, OF_RUN] = Path("runs")
    """The folder that holds run directories; relative to where the run is started."""
    admin: Annotated[AdminConfig, FREE] = AdminConfig()
    preemption: Annotated[PreemptionConfig, FREE] = PreemptionConfig()
    autoscale: Annotated[AutoscaleConfig | None, FREE] = None
    """Changes the number of rollout replicas while the run goes on; None leaves it alone."""
    alerts: Annotated[AlertsConfig | None, FREE] = None
    """Who is told at once of a start, an end, a crash or a stall."""
    trackers: Annotated[tuple[TrackerConfig, ...], FREE] = ()
    """Services that are told of the run's figures, by name or with settings of theirs."""

    def group_of(self, role: str) -> RoleGroup | None:
        """The group that holds a role, or None."""
        return next((group for group in self.role_groups if role in group.roles), None)

    def most_replicas(self, group: RoleGroup) -> int:
        """Of a group, at any moment of the run."""
        return (
            self.autoscale.max_replicas if self.autoscale is not None and "rollout" in group.roles else group.replicas
        )

    def _on_devices(self, role: str) -> bool:
        group = self.group_of(role)
        return group is not None and group.devices > 0

    def derive(self) -> None:
        super().derive()
        if self.job != "rl" and self.group_of("actor") is not None:
            stay = {"actor"} if self.evaluation is None or self.job == "reward_model" else {"actor", "rollout"}
            kept = (
                (each, tuple(role for role in ("rollout", "actor") if role in stay.intersection(each.roles)))
                for each in self.role_groups
            )
            groups = tuple(each.model_copy(update={"roles": roles}) for each, roles in kept if roles)
            self.__dict__.update(role_groups=groups, roles={})
        # Where generation and training take turns the data are on-policy unless asked otherwise. The field stays
        # "not set", so that `override` derives it anew when the groups change.
        if "max_staleness" not in self.model_fields_set and self.group_of("actor") is self.group_of("rollout"):
            self.__dict__["max_staleness"] = 0

    def refused(self) -> Iterator[str]:
        yield from super().refused()
        if self.job == "rl":
            yield from self._weights_meet_no_samples()
        yield from self._groups_make_no_run()
        for name in (names := [each.name for each in self.trackers]):
            if names.count(name) > 1:
                yield f"trackers must have different names, got {name!r} twice. Remove one"
        if self.job != "rl":
            yield from self._groups_are_not_deterministic() if self.deterministic else ()
            yield from self._answers_are_not_measured()
            return
        yield from self._roles_are_not_used()
        yield from self._servers_have_other_devices()
        yield from self._replicas_are_not_scaled()
        if self.deterministic:
            yield from self._groups_are_not_deterministic()

    def _weights_meet_no_samples(self) -> Iterator[str]:
        # A lease of step k begins under k - max_staleness or later, and k + 1 needs the whole step: in between, a sample
        # sees max_staleness new versions at most.
        rollout, most = self.rollout, self.max_staleness
        if most == 0 and (rollout.on_new_weights != "continue" or rollout.mask_old_tokens):
            name = "mask_old_tokens" if rollout.mask_old_tokens else "on_new_weights"
            yield (
                f"rollout.{name} must not be set with max_staleness 0, where no sample ever sees new weights, "
                f"got {getattr(rollout, name)!r}. Raise max_staleness, or remove it"
            )
        if rollout.max_interruptions is not None and rollout.max_interruptions >= most:
            yield (
                "rollout.max_interruptions must be less than max_staleness, since a sample sees at most that many new versions, "
                f"got {rollout.max_interruptions} and {most}. Lower it, or remove it"
            )

    def _groups_make_no_run(self) -> Iterator[str]:
        names = [group.name for group in self.role_groups]
        for name in names:
            if names.count(name) > 1:
                yield f"role_groups must have different names, got {name!r} twice. Rename one of them"
        for role in {role for group in self.role_groups for role in group.roles}:
            homes = [group.name for group in self.role_groups if role in group.roles]
            if len(homes) > 1:
                yield (
                    f"role_groups must hold each role once, got {role!r} in {' and '.join(homes)}. "
                    "Use replicas for more of the same"
                )
        for role in self.roles:
            if self.group_of(role) is None:
                yield (
                    f"roles must name roles of the run, got {role!r}, which no group holds. Add it to a group, or remove it"
                )
        for role in ("rollout", "actor", "advantages") if self.job == "rl" else ("actor",):
            if self.group_of(role) is None:
                yield (
                    f"role_groups must hold the role {role!r}, got {', '.join(names)} without it. "
                    "Use one of rondo.launch.modes: colocate(), hybrid(), fully_async(), or trainer() for a job without rollouts"
                )

        meshes = {"actor": self.train.mesh} | ({"critic": self.critic.mesh} if self.critic is not None else {})
        for trained, mesh in meshes.items():
            trains = self.group_of(trained)
            try:
                if trains is not None:
                    mesh.shape(trains.processes)
            except ConfigError as error:
                text = str(error)
                yield (
                    text
                    if trained == "actor"
                    else text.replace("train.mesh", "critic.mesh").replace("actor's", "critic's")
                )

    def _answers_are_not_measured(self) -> Iterator[str]:
        """Of a job without rollouts."""
        if (measures := self.group_of("rollout")) is None:
            return
        yield from answers_are_not_measured(self)
        if "actor" not in measures.roles and measures.replicas * measures.processes > 1:
            yield (
                f"role_groups[{measures.name}] must have one process with job {self.job!r}, which measures the answers of one "
                f"version after the other, got {measures.replicas} x {measures.processes}. Set replicas and processes to 1"
            )

    def _roles_are_not_used(self) -> Iterator[str]:
        algorithm, reference, actor_fwd = self.algorithm, self.group_of("reference"), self.group_of("actor_fwd")
        needed = algorithm.needs_reference
        if needed and reference is None and not self.computes_reference:
            yield (
                "role_groups must hold the role 'reference' when algorithm.kl_coef is not 0, "
                f"got kl_coef {algorithm.kl_coef:g} without it. Add the role to the groups, or set algorithm.kl_coef=0"
            )
        if reference is not None and self.computes_reference:
            yield (
                "role_groups must not hold the role 'reference' with train.lora, where it is the base without its adapters, "
                f"which the trainer has, got it in {reference.name!r}. Remove the role"
            )
        if reference is not None and not needed:
            yield (
                "role_groups must not hold the role 'reference' when algorithm.kl_coef is 0, "
                f"got it in {reference.name!r}. Remove the role, or set algorithm.kl_coef above 0"
            )
        teacher = self.group_of("teacher")
        if (self.distillation is None) != (teacher is None):
            yield (
                "role_groups must hold the role 'teacher' with distillation, and without it must not, got "
                + (f"it in {teacher.name!r}" if teacher is not None else "distillation without it")
                + ". Add one, or remove the other"
            )
        yield from self._judge_is_placed()
        critic = self.group_of("critic")
        if algorithm.needs_critic and critic is None:
            yield (
                f"role_groups must hold the role 'critic' with algorithm.name {algorithm.name!r}, whose advantages are made of "
                "its values, got none. Add it (critic=True in modes.colocate and hybrid, critic_processes in fully_async)"
            )
        if critic is not None and not algorithm.needs_critic:
            yield (
                f"role_groups must not hold the role 'critic' with algorithm.name {algorithm.name!r}, which has no values, got "
                f"it in {critic.name!r}. Remove the role, or set algorithm.name to 'ppo'"
            )
        source = self.old_log_probs(has_actor_fwd=actor_fwd is not None)
        asks = self.distillation is not None and self.distillation.asks_policy
        if asks and actor_fwd is None:
            yield (
                "role_groups must hold the role 'actor_fwd' with distillation.support 'student' or 'union', since it finds the "
                "policy's likeliest tokens, got none. Add the role, or set distillation.support to 'teacher'"
            )
        if actor_fwd is not None and source != "actor_fwd" and not asks:
            reason = (
                "when max_staleness is 0 and train.num_mini_batches is 1, where the trainer's own log-probs are the "
                "old ones"
                if algorithm.old_log_probs == "auto"
                else f"when algorithm.old_log_probs is {algorithm.old_log_probs!r}"
            )
            yield (
                f"role_groups must not hold the role 'actor_fwd' {reason}, got it in {actor_fwd.name!r}. "
                "Remove the role, or set algorithm.old_log_probs='actor_fwd'"
            )

        train = self.train
        later = train.passes > 1 or (source == "self" and train.num_mini_batches > 1)
        if train.router_replay == "r2" and actor_fwd is None and not later:
            yield (
                "train.router_replay must not be 'r2' where a row goes through one forward alone, its loss's own, got it without "
                "the role 'actor_fwd' and with train.passes 1. Add the role to the groups, raise train.passes, or set "
                "train.router_replay to 'r3' or 'off'"
            )

    def _judge_is_placed(self) -> Iterator[str]:
        served = {name for name, judge in self.judges.items() if judge.model is not None}
        for role in ("genrm", "scorer"):
            if (role in served) != ((group := self.group_of(role)) is not None):
                yield (
                    f"role_groups must hold the role {role!r} with {role}.model, which it serves, and without it must not, got "
                    + (f"it in {group.name!r}" if group is not None else f"{role}.model without it")
                    + f". Add one ({role}=True in modes.colocate, {role}_replicas in hybrid and fully_async), or remove the other"
                )
        judge, group = self.genrm, self.group_of("genrm")
        if judge is None or group is None:
            return
        if judge.sglang is not None and (judge.sglang.python is None or group.roles != ("genrm",)):
            yield (
                "genrm.sglang must have python, and the role 'genrm' in a group of its own, whose devices its server takes, got "
                f"{judge.sglang.python!r} and the roles {', '.join(group.roles)}. Set it, or place the role elsewhere"
            )
        takes = 1 if judge.sglang is None else judge.sglang.tensor_parallel
        if group.roles == ("genrm",) and group.devices not in (0, takes):
            yield (
                f"role_groups[{group.name}].devices must be 0, or the {takes} that a process of the judge takes (genrm.sglang."
                f"tensor_parallel; 1 without sglang), got {group.devices}. Change one of them"
            )

    def _servers_have_other_devices(self) -> Iterator[str]:
        sglang = self.rollout.sglang
        source = self.group_of("rollout")
        if source is not None:
            servers = (
                1 if sglang is None else 1 if sglang.router is not None else len(sglang.urls) or sglang.num_servers
            )
            if (most := source.replicas * source.processes * servers) < self.rollout.min_engines:
                yield (
                    f"rollout.min_engines must be at most {most}, the engines that the run begins with, got "
                    f"{self.rollout.min_engines}. Lower it, or have more replicas or servers"
                )
        for what in ("processes", "replicas"):  # each would give the same servers its weights
            if sglang is not None and sglang.urls and source is not None and (num := getattr(source, what)) > 1:
                yield (
                    f"role_groups[{source.name}].{what} must be 1 for a group that generates with rollout.sglang.urls, got "
                    f"{num}. One process keeps all of them busy: put rollout into a group of its own (modes.hybrid) with one "
                    "replica, or set rollout.sglang.python instead, with which each process starts a server of its own"
                )
        takes = 1 if sglang is None else sglang.num_devices
        for group in self.role_groups:
            if "rollout" not in group.roles:
                continue
            if sglang is not None and sglang.weights == "distributed" and group.devices and not sglang.urls:
                yield (
                    "rollout.sglang.weights must be 'tensor' or 'disk' for servers that are started on devices, since NCCL takes "
                    "none twice and their replica computes on the first one, got 'distributed'. Change it"
                )
            if group.devices in (0, takes):
                continue
            if sglang is None:
                yield (
                    f"role_groups[{group.name}].devices must be 0 or 1 without rollout.sglang, got {group.devices}. "
                    f"Use replicas={group.devices} to generate on more devices"
                )
            if group.roles == ("rollout",):
                yield (
                    f"role_groups[{group.name}].devices must be 0, or the {takes} that the SGLang servers of a replica take "
                    f"(num_servers x tensor_parallel; with urls none, or 1 for weights 'distributed'), got {group.devices}. "
                    "Change one of them"
                )
        trains = self.group_of("actor")
        turns = trains is self.group_of("rollout") and self.max_staleness == 0
        if self.train.release_memory and not turns:
            yield (
                "train.release_memory must not be True where the trainer and what generates work at the same time (rollout and "
                "actor in groups of their own, or max_staleness above 0), got True. Remove it, or use modes.colocate() with "
                "max_staleness 0"
            )
        if self.train.release_memory and self.rollout.endpoint is not None:
            yield (
                "train.release_memory must not be True with rollout.endpoint, which is asked at any time, got True. Remove one"
            )
        if sglang is None or trains is None:
            return
        if sglang.release_memory and not turns:
            yield (
                "rollout.sglang.release_memory must not be True where servers generate while the trainer trains (rollout and "
                "actor in groups of their own, or max_staleness above 0), got True. Remove it, or use modes.colocate() with "
                "max_staleness 0"
            )
        takes = 0 if sglang.urls else sglang.num_servers * sglang.tensor_parallel
        if "rollout" in trains.roles and trains.devices and takes > 1:
            yield (
                "rollout.sglang.num_servers x tensor_parallel must be 1 where the server shares the trainer's device "
                f"(role_groups[{trains.name}] holds both), got {takes}. Use modes.hybrid() to generate on more devices"
            )

    def _replicas_are_not_scaled(self) -> Iterator[str]:
        rules, group = self.autoscale, self.group_of("rollout")
        if rules is None or group is None:
            return
        if "actor" in group.roles:
            yield (
                "autoscale must not be set where rollout shares its processes with the actor, got it with "
                f"role_groups[{group.name}]. Put rollout into a group of its own (modes.hybrid or modes.fully_async), or "
                "remove autoscale"
            )
        elif not rules.min_replicas <= group.replicas <= rules.max_replicas:
            yield (
                f"role_groups[{group.name}].replicas must lie within autoscale.min_replicas and autoscale.max_replicas, "
                f"{rules.min_replicas} to {rules.max_replicas}, got {group.replicas}. Change one of them"
            )

    def _groups_are_not_deterministic(self) -> Iterator[str]:
        for group in self.role_groups:
            if group.threads > 1:
                yield (
                    f"role_groups[{group.name}].threads must be 1 with deterministic=True, since threads share sums by their "
                    f"number, got {group.threads}. Set it to 1, or set deterministic=False"
                )
            if group.devices:
                yield (
                    f"role_groups[{group.name}].devices must be 0 with deterministic=True, which is proved on the CPU alone, "
                    f"got {group.devices}. Set it to 0, or set deterministic=False"
                )
        for name in ("filter", "keep"):
            if getattr(self.rollout, name) is None or not self.max_staleness:
                continue
            yield (
                f"rollout.{name} must be None with deterministic=True and max_staleness above 0, where which prompt replaces a "
                f"filtered one depends on time, got {getattr(self.rollout, name)!r} and {self.max_staleness}. Set max_staleness=0"
            )


def load(path: Path | str, sets: Sequence[str] = ()) -> RunConfig:
    """The `config` that a module builds, with `--set` changes. ConfigError tells all that is wrong, a line each."""
    config = load_module(path, RunConfig)
    config = override(config, sets) if sets else config
    named = {
        "model.path": config.model.path,
        "critic.path": config.critic.path if config.critic is not None else None,
        **{f"{name}.path": data.path for name, data in config.named_data().items()},
    }
    for setting, value in named.items():
        beside = Path(path).parent / (value or "")
        if value is not None and not Path(value).exists() and beside.exists():
            raise ConfigError(
                f"{setting} must be a path from the folder that the run is started in, {Path.cwd()}, got {value!r}, which lies "
                f"beside {path}. Start it there, or name {beside.resolve()}"
            )
    return config


def load_module(path: Path | str, kind: type[Section]) -> Any:
    """The object named `config` in the module at `path`, which must be a `kind`."""
    path = Path(path)
    if path.is_dir() or path.suffix != ".py":
        raise ConfigError(
            f"CONFIG must be a Python file, got {path}. Name a config module such as examples/quickstart.py"
        )
    if not path.is_file():
        raise ConfigError(f"CONFIG must be a file that exists, got {path}. {_similar_file(path)}")
    file, mistakes = str(path.resolve()), dict[str, None]()

    def keep(section: type[Section], error: Exception) -> bool:
        """Keep the mistakes of a section. What sections say together holds only where each is right."""
        if isinstance(error, ValidationError):
            mistakes.update(dict.fromkeys(_mistakes(error, file, path, kind, together=not mistakes)))
        return bool(mistakes) and section is not kind

    try:
        with keeping_errors(keep):
            module = load_file(file)
    except ConfigError:
        raise
    except SyntaxError as error:
        shown = path if error.filename == file else error.filename
        raise ConfigError(
            f"CONFIG must be valid Python, got {error.msg} ({shown}:{error.lineno}). Correct it"
        ) from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # whatever user code raises, sys.exit too, is told as one line
        if mistakes:
            raise ConfigError("\n".join(mistakes)) from error
        if isinstance(error, ValidationError) and (item := error.errors()[0])["type"] == "frozen_instance":
            name, line = item["loc"][0], _where(error, file, path).rpartition(" ")[2]
            raise ConfigError(
                f"{error.title}.{name} must not be assigned, since settings do not change, got {show_value(item['input'])} "
                f"({line}). Write `config = config.model_copy(update={{{name!r}: ...}})`, or give --set"
            ) from error
        raise ConfigError(
            f"CONFIG must import without errors, got {type(error).__name__}: {error} ({_where(error, file, path)}). "
            "Correct the module"
        ) from error
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    config = getattr(module, "config", None)
    if not isinstance(config, kind):
        got = "no such name" if config is None else f"type {type(config).__name__}"
        raise ConfigError(f"{path} must define `config = {kind.__name__}(...)`, got {got}. Add it at the top level")
    try:  # what model_copy(update=...) made has not been validated
        config = kind.model_validate(_tree(config))
    except ValidationError as error:
        raise explain(error, str(path)) from error
    for setting, reference in references(config):
        confirm(reference, setting)
    return config


def _tree(value: Any) -> Any:
    """Return the fields of sections that are set, those too that they do not have, as nested dicts."""
    if isinstance(value, Section):
        return {name: _tree(each) for name, each in value.__dict__.items() if name in value.model_fields_set}
    if isinstance(value, dict):
        return {name: _tree(each) for name, each in value.items()}
    return tuple(map(_tree, value)) if isinstance(value, tuple) else value


def override(config: RunConfig, sets: Sequence[str]) -> RunConfig:
    """A copy of `config` with `path=value` changes (`_parse` says what a value is)."""
    return unresolve(_tree(config), "the --set options", sets)


def counted(config: RunConfig, num_rows: int | None) -> RunConfig:
    """The settings with the steps that a job by epochs has, once its rows to train on are counted."""
    own = config.own
    if own is None or own.epochs is None or num_rows is None:
        return config
    return config.model_copy(update={"num_steps": own.num_steps(num_rows)})


def resolve(config: RunConfig) -> dict[str, Any]:
    """All settings as JSON-able values, defaults filled in."""
    return config.model_dump(mode="json")


def unresolve(tree: dict[str, Any], source: str = "config.resolved.json", sets: Sequence[str] = ()) -> RunConfig:
    """The config of a JSON form, with `path=value` changes. ConfigError when it does not fit this version's settings."""
    for text in sets:
        _apply(tree, RunConfig, text)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise explain(error, source) from error


def _apply(tree: dict[str, Any], root: type[BaseModel], text: str) -> None:
    """Writes one `path=value` into the nested settings."""
    path, equals, raw = text.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set must look like path=value, got {text!r}. For example: --set train.lr=1e-6")
    node: Any = tree
    kind: Any = root
    for index, name in enumerate(names):
        shown = ".".join(names[: index + 1])
        key: Any = name if isinstance(node, dict) else _index(name, node, shown)
        kind = _kind_of(name, kind, root, shown)
        if index == len(names) - 1:
            node[key] = _parse(raw.strip(), kind)
            return
        child = node[key] if isinstance(node, list) else node.get(key)
        if child is None and (kind is Any or any(_has_names(part) for part in parts_of(kind))):
            child = {}
        if isinstance(child, tuple):
            child = list(child)
        if not isinstance(child, dict | list):
            got = "none in it" if child is None else repr(child)
            raise ConfigError(f"{shown} must be a section to have fields, got {got}. Set {shown} itself")
        node[key] = child
        node = child


def _index(name: str, node: list[Any], shown: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", name) or int(name) >= len(node):
        named = [f"{i} is {each['name']}" for i, each in enumerate(node) if isinstance(each, dict) and "name" in each]
        known = f": {', '.join(named)}" if named else ""
        raise ConfigError(f"--set {shown} must end in an index below {len(node)}, got {name!r}. Count from 0{known}")
    return int(name)


def _kind_of(name: str, kind: Any, root: type[BaseModel], shown: str) -> Any:
    """The type of what has that name in something of type `kind`. ConfigError for a section without it."""
    for part in parts_of(kind):
        if isinstance(part, type) and issubclass(part, BaseModel):
            if name not in part.model_fields:
                hint = nearest_field(name, part, root)
                raise ConfigError(f"{shown} must be a field of {part.__name__}, got an unknown name. {hint}")
            return part.model_fields[name].annotation
        if get_origin(part) in (dict, tuple):
            return get_args(part)[get_origin(part) is dict]
    return Any


def _has_names(kind: Any) -> bool:
    return get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel))


def _parse(raw: str, kind: Any) -> Any:
    """A value of the command line: a Python literal or JSON, else text; text with quotes or without. A field that takes nothing
    but text has other literals as they are written, too."""
    for read in (ast.literal_eval, json.loads):
        try:
            value = read(raw)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        return raw if value is not None and not isinstance(value, str) and set(parts_of(kind)) == {str} else value
    return raw


def _mistakes(error: ValidationError, file: str, path: Path, kind: type[Section], *, together: bool) -> list[str]:
    """Return a line for each mistake of a section of the module, with its place in the settings. together: also for what its
    fields say together."""
    lines = [frame.lineno for frame in traceback.extract_stack() if frame.filename == file]
    where = f"{path}:{lines[-1]}" if lines else str(path)
    places = [place for place, owner in sections(kind) if owner.__name__ == error.title] or [error.title]
    told = str(explain(error, where, places[0], kind, together=together)).split("\n")
    # Which of several places is meant is told by the line.
    return [line if len(places) == 1 or where in line else f"{line} ({where})" for line in told if line]


def _where(error: BaseException, file: str, path: Path) -> str:
    """`file:line` of the last step inside the config module, else of the last step at all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    last = frames[-1] if frames else None
    if last is not None and last.filename == file:
        return f"{path}:{own[-1].lineno}" if own else str(path)
    inside = f", called from {path}:{own[-1].lineno}" if own else ""
    return f"{last.filename}:{last.lineno}{inside}" if last is not None else str(path)


def _similar_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"There is no folder {path.parent}"
    return nearest(path.name, [file.name for file in path.parent.glob("*.py")])


def changed(config: RunConfig) -> list[tuple[str, Any]]:
    """The settings that differ from their defaults, as (path, value), in the order of the tree."""
    found: list[tuple[str, Any]] = []

    def walk(section: BaseModel, prefix: str) -> None:
        for name, field in type(section).model_fields.items():
            value, path = getattr(section, name), f"{prefix}{name}"
            if isinstance(value, BaseModel):
                walk(value, f"{path}.")
            elif isinstance(value, tuple) and value and all(isinstance(item, BaseModel) for item in value):
                for index, item in enumerate(value):
                    walk(item, f"{path}.{index}.")
            elif field.is_required() or value != field.get_default(call_default_factory=True):
                found.append((path, value))

    walk(config, "")
    return found
