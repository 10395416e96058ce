"""From settings to what the supervisor starts and what the coordinator holds to. Starts nothing, and reads a config.json at most.

Owns the translation only; settings are `config.py`'s, processes the supervisor's, rules of the bus the index's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import orjson

from rondo.comm.bus.accounts import Rules
from rondo.comm.bus.curriculum import Rests
from rondo.comm.bus.transitions import CoordinatorConfig
from rondo.launch.config import RunConfig
from rondo.launch.groups import TRAINED, RoleGroup
from rondo.roles.streams import base_columns, media_bytes, row_bytes, sampled_bytes, streams_of
from rondo.runtime.supervision.spec import GroupSpec

ROLE_CLASSES: Mapping[str, str] = {
    "rollout": "rondo.roles.rollout:RolloutRole",
    "actor": "rondo.roles.actor:ActorRole",
    "actor_fwd": "rondo.roles.forward:ActorForwardRole",
    "reference": "rondo.roles.forward:ReferenceRole",
    "teacher": "rondo.roles.teacher:TeacherRole",
    "genrm": "rondo.roles.genrm:GenrmRole",
    "scorer": "rondo.roles.scorer:ScorerRole",
    "advantages": "rondo.roles.advantages:AdvantagesRole",
    "critic": "rondo.roles.critic:CriticRole",
}
JOB_CLASSES = {"actor": "rondo.roles.supervised:SupervisedRole", "rollout": "rondo.roles.evaluate:AnswersRole"}
"""Of a job without rollouts: what trains, and what measures its answers."""


def group_specs(config: RunConfig) -> tuple[GroupSpec, ...]:
    """One torchrun for each replica of each role group."""
    return tuple(spec_of(config, group, name) for group in config.role_groups for name in group.replica_names())


def spec_of(config: RunConfig, group: RoleGroup, name: str) -> GroupSpec:
    """One replica of a role group."""
    classes = ROLE_CLASSES if config.job == "rl" else JOB_CLASSES
    return GroupSpec(
        name=name,
        role=group.name,
        num_processes=group.processes,
        roles=tuple(config.roles.get(role, classes[role]) for role in group.roles),
        threads=group.threads,
        role_names=group.roles,
        saves=not set(TRAINED).isdisjoint(group.roles) and config.train.hot_snapshot,
    )


def model_modules(path: Path) -> tuple[str, ...]:
    """Where transformers has the classes of the model at `path`, for all processes to share; none where that is no folder."""
    config = path / "config.json"
    if not config.is_file():
        return ()
    kind = str(orjson.loads(config.read_bytes()).get("model_type", "")).replace("-", "_")
    return (f"transformers.models.{kind}.modeling_{kind}",) if kind else ()


def first_devices(groups: Iterable[RoleGroup]) -> dict[str, int]:
    """Replica -> the accelerator of its first process; the next ones have those after it. Nobody shares one. Replicas that
    compute on the CPU are left out."""
    found: dict[str, int] = {}
    free = 0
    for group in groups:
        for name in group.replica_names() if group.devices else ():
            found[name] = free
            free += group.processes * group.devices
    return found


def coordinator_config(config: RunConfig, num_rows: int, routed_bytes: int = 0) -> CoordinatorConfig:
    """The rules of this run, which `CoordinatorConfig.load` reads back from their JSON. num_rows: rows to train on, which
    `num_passes` turns into the end of the data; routed_bytes: of the experts of a token."""
    roles = {role for group in config.role_groups for role in group.roles}
    rollout, passes = config.rollout, config.data.num_passes
    evaluation = config.evaluation if config.job == "rl" else None  # else the trainer says what is due
    actor, source = config.group_of("actor"), config.group_of("rollout")
    assert actor is not None
    rules = Rules(
        num_steps=config.num_steps,
        groups_per_step=rollout.prompts_per_step,
        samples_per_group=rollout.samples_per_prompt,
        max_staleness=config.max_staleness,
        base_columns=base_columns(config),
        streams=streams_of(config, roles, routed_bytes),
        row_bytes=row_bytes(config, sampled_bytes(config, routed_bytes)),
        media_bytes=media_bytes(config),
        num_slots=config.num_weight_slots,
        spare_groups=rollout.spare_groups,
        max_consecutive_filtered=rollout.max_consecutive_filtered,
        max_consecutive_failed=rollout.max_consecutive_failed,
        max_data_failures=config.reward.max_failures,
        max_infra_failures=config.bus.max_infra_failures,
        num_positions=None if passes is None else passes * num_rows,
        looks=config.data.leaves_out,
        rests=None
        if (of := config.data.curriculum) is None
        else Rests(of.rest_steps, of.solved, of.hopeless, of.solved_from),
    )
    return CoordinatorConfig(
        rules=rules,
        publisher=actor.replica_names()[0],
        rollout_ring_bytes=config.bus.ring_bytes,
        column_ring_bytes=config.bus.column_ring_bytes,
        rollout_groups=source.replica_names() if source is not None else (),
        ranks={name: group.processes for group in config.role_groups for name in group.replica_names()},
        lease_deadline_s=rollout.lease_deadline_s,
        straggler_deadline_s=rollout.straggler_deadline_s,
        evaluate_start=evaluation is not None and evaluation.at_start,
        evaluate_end=evaluation is not None and evaluation.at_end,
        evaluate_every=evaluation.every if evaluation is not None else None,
        num_pinned=config.num_pinned,
        min_engines=rollout.min_engines if source is not None else 0,
        min_engines_deadline_s=rollout.min_engines_deadline_s,
        below_min_engines=rollout.below_min_engines,
    )
