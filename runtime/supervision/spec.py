"""Spec: what the supervisor is given, and what it gives back. Frozen data, no behaviour.

    GroupSpec("actor-0", "actor", 2, ...)       a role group: processes of one torchrun, each with the same role classes

Everything that the supervisor starts finds itself through the environment variables named here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rondo.runtime.errors import ConfigError
from rondo.runtime.supervision.orders import ChildView

if TYPE_CHECKING:
    from rondo.runtime.config import SupervisionConfig

RT_DIR = "RONDO_RT_DIR"
"""The run's private directory of sockets and its token; gone with the run."""
RUN_DIR = "RONDO_RUN_DIR"
GROUP = "RONDO_GROUP"
INCARNATION = "RONDO_INCARNATION"
ATTEMPT = "RONDO_ATTEMPT"
STORE = "RONDO_STORE"
"""host:port of the run's TCPStore."""
LOAD_S = "RONDO_LOAD_S"
"""The longest that a worker may load."""

STORE_NAME = "store"
COORDINATOR_NAME = "coordinator"

_NAME = re.compile(r"[a-z][a-z0-9_]*(-\d+)?")


@dataclass(frozen=True)
class GroupSpec:
    """One role group. `roles` name its classes, "package.module:Class" or "/path/file.py:Class"; every rank runs all."""

    name: str
    role: str
    num_processes: int
    roles: tuple[str, ...]
    threads: int = 1
    role_names: tuple[str, ...] = ()
    """The names of what it runs, where they differ from `role`: `kill` finds a group by any of them."""
    saves: bool = False
    """Whether it finds the committed version in memory when it starts again: a stop lets it come up, and save that."""


@dataclass(frozen=True)
class SupervisorConfig:
    """A run on one node. ConfigError for names that cannot be told apart."""

    run_dir: Path
    groups: tuple[GroupSpec, ...]
    coordinator: str
    """Its module, run as a plain process, which answers as an actor at `coordinator.sock` and calls the supervisor's `ready`."""
    limits: SupervisionConfig
    attempt: int = 0
    """The first attempt of this supervisor's life; a resumed run goes on counting."""
    can_restart_globally: Callable[[], bool] = lambda: True
    """Whether there is a whole checkpoint to begin another attempt from; asked at each escalation and at the end of a stop."""
    find_state: Callable[[], bool] = lambda: True
    """Chooses the whole checkpoint that another attempt begins from, once nothing runs any more; False where there is none."""
    finds_state: bool = True
    """Whether role groups that all start again together find what they had: state in memory that outlives them, or none."""
    modules: tuple[str, ...] = ()
    """What role groups import, beside their role classes of rondo: loaded once, and shared by all that is forked."""
    notice_s: float | None = None
    """After a notice (SIGUSR1, or as it is told) everything is gone within so long; None: it is a stop as any other."""
    kill: tuple[tuple[str, int], ...] = ()
    """Faults on purpose: (role, group or service; step): SIGKILLed once, when that many steps are committed."""

    def __post_init__(self) -> None:
        names = [STORE_NAME, COORDINATOR_NAME, *(group.name for group in self.groups)]
        for name in names:
            if names.count(name) > 1 or not _NAME.fullmatch(name):
                raise ConfigError(f"names of role groups must differ and look like 'actor-0', got {name!r}")
        if not self.groups:
            raise ConfigError("a run must have at least one role group, got none")

    def loaded(self) -> tuple[str, ...]:
        """The modules that all processes share."""
        return tuple(dict.fromkeys([*role_modules(self.groups), *self.modules]))


def role_modules(groups: Iterable[GroupSpec]) -> tuple[str, ...]:
    """Where the role classes are that many processes have. A user's own are loaded by the processes that use them."""
    roles = (role.partition(":")[0] for group in groups for role in group.roles)
    return tuple(dict.fromkeys(name for name in roles if name.startswith("rondo.")))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView(ChildView):
    """A role group or service with its processes. `pids` are its workers', `rss_bytes` all its processes' together."""

    role: str
    pids: tuple[int, ...]
    rss_bytes: int
    progress: int
    section: str


@dataclass(frozen=True, slots=True)
class SupervisorView:
    """The run at one moment."""

    attempt: int
    phase: str
    num_global_restarts: int
    groups: tuple[GroupView, ...]
    segment_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. 0 done, 75 stopped and can be resumed, 1 failed with `first_cause`, 2 with one that no restart mends."""

    exit_code: int
    first_cause: str | None
    restarts: Mapping[str, int]
    """Restarts of each role group and service that had any."""
    recovery_s: Mapping[str, float]
    """Seconds from a death to all ranks ready again; the slowest of each role."""
    wall_s: float
    attempt: int
    memory_bytes: Mapping[str, int]
    """Resident memory of each role group and service, the most that was seen."""
    cores: Mapping[str, float]
    """Processor time over wall time of the supervisor and of each role group and service: cores that it kept busy."""
    cpu_share: float
    """Processor time of all processes over wall time times cores, 0 to 1."""
    untold: Mapping[str, int] = field(default_factory=dict)
    """What workers could not write down for people to read, and how often: "rollout-0 samples"."""
