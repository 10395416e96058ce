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
        RoleGroup(
            name="rollout",
            roles=("rollout",),
            replicas=rollout_replicas,
            threads=rollout_threads,
            devices=rollout_devices,
        ),
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
    groups = [
        RoleGroup(
            name="rollout",
            roles=("rollout",),
            replicas=rollout_replicas,
            threads=rollout_threads,
            devices=rollout_devices,
        ),
        RoleGroup(
            name="actor", roles=("actor",), processes=actor_processes, threads=actor_threads, devices=actor_devices
        ),
        RoleGroup(name="advantages", roles=("advantages",), replicas=advantages_replicas),
    ]
    scoring: tuple[tuple[RoleName, int, int, int], ...] = (
        ("reference", reference_replicas, reference_threads, reference_devices),
        ("actor_fwd", actor_fwd_replicas, actor_fwd_threads, actor_fwd_devices),
    )
    for name, replicas, threads, devices in scoring:
        if replicas:
            groups.append(RoleGroup(name=name, roles=(name,), replicas=replicas, threads=threads, devices=devices))
    return tuple(groups)


def _scoring(reference: bool, actor_fwd: bool) -> tuple[RoleName, ...]:
    chosen: list[RoleName] = []
    if reference:
        chosen.append("reference")
    if actor_fwd:
        chosen.append("actor_fwd")
    return tuple(chosen)
