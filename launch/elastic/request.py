"""Request: one wish for another number of replicas, or for new ones in place of the old, from its first word to its end.

Owns the words of that: statuses, fields, and what is seen of a replica. Frozen data and no decision (`requests.py`). Fields and
statuses are those that users of Relax know, where there is one for it.

    out      PENDING -> CREATING -> HEALTH_CHECKING -> WEIGHT_SYNCING -> READY -> ACTIVE | PARTIAL
                   `------ engines that run already: CONNECTING ---^         `-> REMOVING -> FAILED | CANCELLED
    in       PENDING -> DRAINING -> REMOVING -> COMPLETED
                            `-> CREATING (who had left already) -> CANCELLED
    restart  PENDING -> DRAINING -> CREATING -> ... one replica after another -> COMPLETED | FAILED | CANCELLED
    at once  NOOP (it is so already), CONFLICT (another one is under way), REJECTED (it cannot be)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from rondo.runtime.supervision.orders import State

Action = Literal["scale_out", "scale_in", "restart"]
Policy = Literal["keep_partial", "rollback_all"]
"""Where some of the new replicas do not come up: keep those that do, or none."""


class Status(StrEnum):
    PENDING = "PENDING"
    CREATING = "CREATING"
    """Processes are being started."""
    CONNECTING = "CONNECTING"
    """Engines that run already are being attached."""
    HEALTH_CHECKING = "HEALTH_CHECKING"
    """Processes have said who they are, and load."""
    WEIGHT_SYNCING = "WEIGHT_SYNCING"
    """They have loaded; nobody is given work before it has proved the weights of the run."""
    READY = "READY"
    ACTIVE = "ACTIVE"
    PARTIAL = "PARTIAL"
    """As many as came up are there; the others are in `failed_engines`."""
    DRAINING = "DRAINING"
    """Replicas get nothing new and end what they have."""
    REMOVING = "REMOVING"
    """Replicas are being ended."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    """All is as it was before."""
    NOOP = "NOOP"
    CONFLICT = "CONFLICT"
    REJECTED = "REJECTED"


OVER = frozenset({
    Status.ACTIVE, Status.PARTIAL, Status.COMPLETED, Status.FAILED, Status.CANCELLED,
    Status.NOOP, Status.CONFLICT, Status.REJECTED,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Replica:
    """What is seen of one replica at a moment; one that was given up, or has left, is not seen. `loads`: a section of its start
    is open."""

    state: State
    incarnation: int = 1
    registered: bool = False
    loads: bool = False

    @property
    def serves(self) -> bool:
        return self.state is State.READY


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for. num_replicas: the total that there is to be then (of a restart: none). timeout_s: until new replicas are
    up, else they are given up; until those that leave have ended what they have, else it goes to others; of a restart, for each
    replica; None: as the settings say. idempotency_key: the same wish under the same key is one request."""

    role: str
    action: Action
    num_replicas: int = 0
    reason: str = ""
    timeout_s: float | None = None
    force: bool = False
    """Leave at once: what a replica has is given to others."""
    dry_run: bool = False
    policy: Policy = "keep_partial"
    engine_urls: tuple[str, ...] = ()
    idempotency_key: str | None = None
    model_name: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Wish):
    """One wish, and what has become of it. Times in seconds since the epoch. `engine_ids`: new replicas that are up;
    `selected_engines`: those that the wish is about."""

    request_id: str
    status: Status
    message: str = ""
    selected_engines: tuple[str, ...] = ()
    engine_ids: tuple[str, ...] = ()
    removed_engines: tuple[str, ...] = ()
    failed_engines: Mapping[str, str] = field(default_factory=dict)
    """Replica -> why."""
    error_message: str = ""
    weight_version: int | None = None
    """The oldest that the new replicas have proved, once they are up."""
    timeout_s: float = 0.0
    created_at: float = 0.0
    updated_at: float = 0.0

    @property
    def over(self) -> bool:
        return self.status in OVER
