"""RoleGroup: which roles share processes, how many processes, and how often.

Owns the description of one role group. Does not own the list as a whole: `config.py` checks that a list makes a run,
`modes.py` makes the usual lists.

    RoleGroup(name="rollout", roles=("rollout",), replicas=2)   ->   rollout-0, rollout-1
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rondo.runtime.section import Section

RoleName = Literal["rollout", "actor", "actor_fwd", "reference", "teacher", "genrm", "scorer", "advantages", "critic"]

TRAINED: tuple[RoleName, ...] = ("actor", "critic")
"""Roles with a model that they train."""


class RoleGroup(Section):
    """The processes that one torchrun starts, `replicas` times."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=24)
    """Names its processes: rollout-0, rollout-1."""
    roles: tuple[RoleName, ...] = Field(min_length=1)
    """What each of its processes does."""
    replicas: int = Field(1, ge=1)
    """Equal groups beside each other; only for roles that keep no state."""
    processes: int = Field(1, ge=1)
    """Ranks of one replica."""
    threads: int = Field(1, ge=1)
    """Compute threads of a process."""
    devices: int = Field(0, ge=0)
    """Accelerators of a process: 0 computes on the CPU. More than 1 only where SGLang servers generate, which share them."""

    def refused(self) -> Iterator[str]:
        if len(set(self.roles)) < len(self.roles):
            yield f"role_groups[{self.name}].roles must name each role once, got {', '.join(self.roles)}"
        if (trained := next((role for role in TRAINED if role in self.roles), None)) and self.replicas > 1:
            yield (
                f"role_groups[{self.name}].replicas must be 1 for the group that holds the {trained}, got {self.replicas}. "
                f"Use processes={self.replicas} to train on more ranks"
            )
        if "rollout" in self.roles and "actor" not in self.roles and self.processes > 1:
            yield (
                f"role_groups[{self.name}].processes must be 1 for a group that generates and does not train, got "
                f"{self.processes}. Use replicas={self.processes}, which come and go alone"
            )
        if self.devices > 1 and self.roles not in (("rollout",), ("genrm",)):
            yield (
                f"role_groups[{self.name}].devices must be 0 or 1 for a group of {', '.join(self.roles)}, got {self.devices}. "
                f"Use processes={self.devices}"
            )

    def replica_names(self) -> tuple[str, ...]:
        """The names of the groups that run: "rollout-0", "rollout-1"."""
        return tuple(f"{self.name}-{index}" for index in range(self.replicas))
