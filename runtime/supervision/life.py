"""Life: what the machine of supervision knows of one child. Data, and the questions that it answers of itself.

Owns no decision (`machine.py`).
"""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass, field

from rondo.runtime.supervision.orders import Action, Cause, Child, ChildView, Kill, State, Strategy

RUNS = frozenset({State.STARTING, State.READY, State.DRAINING, State.LEAVING})
COMING = frozenset({State.WAITING, State.STARTING})
OVER = frozenset({State.DONE, State.ENDED})


@dataclass(slots=True)
class Life:
    """A child's state. `registered` and `ready` are of the living incarnation: rank -> time, and ranks. While it drains, and from
    a stop on: `leave_by` is when it is killed. From a stop on `comes_up` says that it has to start before it can save."""

    child: Child
    incarnation: int
    state: State = State.WAITING
    due: float = 0.0
    started_at: float = 0.0
    ready_at: float | None = None
    leave_by: float = math.inf
    comes_up: bool = False
    died_at: float | None = None
    failed: bool = False
    removed: bool = False
    """Once it is gone, it is forgotten."""
    again: bool = False
    """Should it end, by itself or by us, it starts again, and nothing has failed."""
    kept: bool = False
    """It left to start again and saved nothing: its newest version is in its hot snapshot alone."""
    on_trial: bool = False
    """It came into a running run, and has never been ready: beyond its limit it is given up, and nothing escalates."""
    streak: int = 0
    num_restarts: int = 0
    registered: dict[int, float] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    restarts: collections.deque[tuple[float, Cause]] = field(default_factory=collections.deque)

    @property
    def serves_alone(self) -> bool:
        """Whether role groups go on without it until it is back."""
        return self.child.service and self.child.strategy is Strategy.ONE_FOR_ONE

    @property
    def all_registered(self) -> bool:
        return len(self.registered) == self.child.num_ranks


def view(life: Life) -> ChildView:
    child = life.child
    passing = life.on_trial or ((life.removed or life.again) and life.state is not State.READY)
    return ChildView(
        child.name, life.state, life.incarnation, child.num_ranks, len(life.registered), len(life.ready),
        life.num_restarts, child.service, passing,
    )  # fmt: skip


def kill(life: Life) -> list[Action]:
    if life.state not in RUNS:
        return []
    life.state = State.ENDING
    return [Kill(life.child.name, life.incarnation)]
