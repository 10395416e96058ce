"""Modes: functions that list role groups. A mode is nothing else; any other list of groups is as good.

    colocate()                        one group with every role: generation and training take turns
    hybrid(rollout_replicas=2)        rollout replicas, and one group with everything that trains and scores
    fully_async(rollout_replicas=2)   a group each
    trainer(processes=8)              one group that trains, for a job without rollouts

A role is listed only where asked for: a reference is needed only where a KL coefficient is not 0, `actor_fwd` only where old
log-probs cannot be the trainer's own, a teacher only with `distillation`, `genrm` only for a judge that the run serves, `scorer`
for a reward model, a critic where advantages are made of its values. Each function returns the groups that
`RunConfig(role_groups=...)` takes.
"""

from __future__ import annotations

from rondo.launch.groups import RoleGroup, RoleName


def colocate(
    *,
    processes: int = 1,
    threads: int = 1,
    devices: int = 0,
    reference: bool = False,
    actor_fwd: bool = False,
    teacher: bool = False,
    genrm: bool = False,
    scorer: bool = False,
    critic: bool = False,
) -> tuple[RoleGroup, ...]:
    """Processes that hold every role each: all generate, then all train their part of the step together."""
    beside = _beside(reference, actor_fwd, teacher, critic)
    judges: dict[RoleName, bool] = {"genrm": genrm, "scorer": scorer}
    judging = (role for role, is_wanted in judges.items() if is_wanted)
    roles: tuple[RoleName, ...] = ("rollout", "actor", "advantages", *beside, *judging)
    return (RoleGroup(name="actor", roles=roles, processes=processes, threads=threads, devices=devices),)


def hybrid(
    *,
    rollout_replicas: int = 1,
    rollout_threads: int = 1,
    rollout_devices: int = 0,
    processes: int = 1,
    threads: int = 1,
    devices: int = 0,
    reference: bool = False,
    actor_fwd: bool = False,
    teacher: bool = False,
    genrm_replicas: int = 0,
    genrm_threads: int = 1,
    genrm_devices: int = 0,
    scorer_replicas: int = 0,
    scorer_processes: int = 1,
    scorer_threads: int = 1,
    scorer_devices: int = 0,
    critic: bool = False,
) -> tuple[RoleGroup, ...]:
    """Rollout replicas, and those of a judge and a reward model, beside one group that trains and, while it waits, scores."""
    roles: tuple[RoleName, ...] = ("actor", "advantages", *_beside(reference, actor_fwd, teacher, critic))
    return (
        _replicas("rollout", rollout_replicas, rollout_threads, rollout_devices),
        RoleGroup(name="actor", roles=roles, processes=processes, threads=threads, devices=devices),
        *((_replicas("genrm", genrm_replicas, genrm_threads, genrm_devices),) if genrm_replicas else ()),
        *(
            (_replicas("scorer", scorer_replicas, scorer_threads, scorer_devices, scorer_processes),)
            if scorer_replicas
            else ()
        ),
    )


def fully_async(
    *,
    rollout_replicas: int = 1,
    rollout_threads: int = 1,
    rollout_devices: int = 0,
    actor_processes: int = 1,
    actor_threads: int = 1,
    actor_devices: int = 0,
    advantages_replicas: int = 1,
    reference_replicas: int = 0,
    reference_threads: int = 1,
    reference_devices: int = 0,
    actor_fwd_replicas: int = 0,
    actor_fwd_threads: int = 1,
    actor_fwd_devices: int = 0,
    teacher_replicas: int = 0,
    teacher_processes: int = 1,
    teacher_threads: int = 1,
    teacher_devices: int = 0,
    genrm_replicas: int = 0,
    genrm_threads: int = 1,
    genrm_devices: int = 0,
    scorer_replicas: int = 0,
    scorer_processes: int = 1,
    scorer_threads: int = 1,
    scorer_devices: int = 0,
    critic_processes: int = 0,
    critic_threads: int = 1,
    critic_devices: int = 0,
) -> tuple[RoleGroup, ...]:
    """A group for each role; 0 replicas leave a scoring role out, 0 processes the critic."""
    others: tuple[tuple[RoleName, int, int, int, int], ...] = (
        ("reference", reference_replicas, reference_threads, reference_devices, 1),
        ("actor_fwd", actor_fwd_replicas, actor_fwd_threads, actor_fwd_devices, 1),
        ("teacher", teacher_replicas, teacher_threads, teacher_devices, teacher_processes),
        ("genrm", genrm_replicas, genrm_threads, genrm_devices, 1),
        ("scorer", scorer_replicas, scorer_threads, scorer_devices, scorer_processes),
        ("critic", 1 if critic_processes else 0, critic_threads, critic_devices, critic_processes),
    )
    return (
        _replicas("rollout", rollout_replicas, rollout_threads, rollout_devices),
        _replicas("actor", 1, actor_threads, actor_devices, actor_processes),
        _replicas("advantages", advantages_replicas),
        *(_replicas(*role) for role in others if role[1]),
    )


def trainer(
    *, processes: int = 1, threads: int = 1, devices: int = 0, rollout: bool = False, rollout_devices: int = 0
) -> tuple[RoleGroup, ...]:
    """Processes that train and do nothing else, for a `job` without rollouts. rollout: and one beside them that measures their
    answers, by `evaluation`."""
    measures = (_replicas("rollout", 1, 1, rollout_devices),) if rollout else ()
    return (*measures, _replicas("actor", 1, threads, devices, processes))


def _replicas(role: RoleName, replicas: int, threads: int = 1, devices: int = 0, processes: int = 1) -> RoleGroup:
    return RoleGroup(name=role, roles=(role,), replicas=replicas, processes=processes, threads=threads, devices=devices)


def _beside(reference: bool, actor_fwd: bool, teacher: bool, critic: bool) -> tuple[RoleName, ...]:
    wanted: dict[RoleName, bool] = {
        "reference": reference,
        "actor_fwd": actor_fwd,
        "teacher": teacher,
        "critic": critic,
    }
    return tuple(role for role, is_wanted in wanted.items() if is_wanted)
