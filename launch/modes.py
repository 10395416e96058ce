"""Modes: three functions that list role groups. A mode is nothing else; any other list of groups is as good.

    colocate()                        one group with every role: generation and training take turns
    hybrid(rollout_replicas=2)        rollout replicas, and one group with everything that trains and scores
    fully_async(rollout_replicas=2)   a group each

A role is listed only where asked for: a reference is needed only where a KL coefficient is not 0, `actor_fwd` only
where old log-probs cannot be the trainer's own. Each function returns the groups that `RunConfig(groups=...)` takes.
"""

from __future__ import annotations

from rondo.launch.groups import RoleGroup, RoleName


def colocate(
    *, processes: int = 1, threads: int = 1, devices: int = 0, reference: bool = False, actor_fwd: bool = False
) -> tuple[RoleGroup, ...]:
    """Processes that hold every role each: all generate, then all train their part of the step together."""
    roles: tuple[RoleName, ...] = ("rollout", "actor", "advantages", *_scoring(reference, actor_fwd))
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
) -> tuple[RoleGroup, ...]:
    """Rollout replicas beside one group that trains and, while it waits, scores."""
    roles: tuple[RoleName, ...] = ("actor", "advantages", *_scoring(reference, actor_fwd))
    return (
        _replicas("rollout", rollout_replicas, rollout_threads, rollout_devices),
        RoleGroup(name="actor", roles=roles, processes=processes, threads=threads, devices=devices),
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
) -> tuple[RoleGroup, ...]:
    """A group for each role; 0 replicas leave a scoring role out."""
    scoring: tuple[tuple[RoleName, int, int, int], ...] = (
        ("reference", reference_replicas, reference_threads, reference_devices),
        ("actor_fwd", actor_fwd_replicas, actor_fwd_threads, actor_fwd_devices),
    )
    return (
        _replicas("rollout", rollout_replicas, rollout_threads, rollout_devices),
        RoleGroup(
            name="actor", roles=("actor",), processes=actor_processes, threads=actor_threads, devices=actor_devices
        ),
        _replicas("advantages", advantages_replicas),
        *(_replicas(*role) for role in scoring if role[1]),
    )


def _replicas(role: RoleName, replicas: int, threads: int = 1, devices: int = 0) -> RoleGroup:
    return RoleGroup(name=role, roles=(role,), replicas=replicas, threads=threads, devices=devices)


def _scoring(reference: bool, actor_fwd: bool) -> tuple[RoleName, ...]:
    return (*(("reference",) if reference else ()), *(("actor_fwd",) if actor_fwd else ()))
