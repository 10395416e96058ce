"""Orders: the words between the supervision machine and its shell.

Owns what is supervised (`Child`), the states it passes through, a failure as it is reported (`Cause`), and what
the machine tells the shell to do (`Action`). Frozen data; `supervision.py` decides, `supervisor.py` acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Strategy(Enum):
    """What the failure of a child leads to."""

    ONE_FOR_ONE = "one_for_one"
    """It starts again, alone."""
    ONE_FOR_ALL = "one_for_all"
    """All role groups end too; when all are gone, it starts again, and they with it. Other services go on."""
    ESCALATE = "escalate"
    """A global restart: role groups would not find their state again."""


class State(Enum):
    WAITING = "waiting"
    """Not running: before its start, or in back-off."""
    STARTING = "starting"
    """Its processes are being started; not all ranks are ready."""
    READY = "ready"
    DRAINING = "draining"
    """Gets nothing new, and ends by itself when it has done what it has; killed at its deadline."""
    LEAVING = "leaving"
    """Asked to save and end."""
    ENDING = "ending"
    """Being killed; ends when all its processes are proved gone."""
    DONE = "done"
    """Ended by itself, as it should."""
    ENDED = "ended"
    """Ended by us."""


class Phase(Enum):
    RUNNING = "running"
    RESTARTING = "restarting"
    """A global restart: everything is being killed, then starts again."""
    STOPPING = "stopping"
    """Role groups save and leave."""
    CLOSING = "closing"
    """Role groups are gone; services leave."""
    FAILING = "failing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Child:
    """What is supervised. Services serve the role groups: they leave after them, and the run is done without them."""

    name: str
    num_ranks: int = 1
    service: bool = False
    strategy: Strategy = Strategy.ONE_FOR_ONE
    saves: bool = False
    """Finds what it has to save again when it starts: at a stop it comes up for that."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A failure as it is reported. `last_lines` are the end of the failed process's log."""

    child: str
    incarnation: int
    what: str
    rank: int | None = None
    pid: int | None = None
    last_lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        rank = f" rank {self.rank}" if self.rank is not None else ""
        pid = f" (pid {self.pid})" if self.pid is not None else ""
        head = f"{self.child}{rank} of incarnation {self.incarnation}{pid}: {self.what}"
        return "\n".join([head, *(f"    {line}" for line in self.last_lines)])


# What the shell is told to do.


@dataclass(frozen=True, slots=True)
class Start:
    child: str
    incarnation: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM to the processes: save and leave."""

    child: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to all its processes; `gone` follows when that is proved. `dump`: their stacks go to the log before."""

    child: str
    incarnation: int
    dump: bool = False


@dataclass(frozen=True, slots=True)
class TellDead:
    """The coordinator is to know that every process of this incarnation is gone. `left`: and that no other one follows."""

    child: str
    incarnation: int
    left: bool = False


@dataclass(frozen=True, slots=True)
class TellDraining:
    """The coordinator is to give this incarnation nothing more, and to tell it to end when it has done what it has; or else,
    where `stays`, to take that back."""

    child: str
    incarnation: int
    stays: bool = False


@dataclass(frozen=True, slots=True)
class Clear:
    """A new attempt begins: shared memory and messages of the old one are dropped."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """All stacks and waits are written down."""


@dataclass(frozen=True, slots=True)
class Note:
    """An event for the record."""

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finish:
    exit_code: int


Action = Start | Terminate | Kill | TellDead | TellDraining | Clear | DumpStacks | Note | Finish

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_REQUEUE, EXIT_INTERRUPTED = 0, 1, 2, 75, 130


@dataclass(frozen=True, slots=True)
class ChildView:
    """A child at one moment."""

    name: str
    state: State
    incarnation: int
    num_ranks: int
    num_registered: int
    num_ready: int
    restarts: int
    service: bool
    passing: bool = False
    """It came into a running run and is not up yet, or was asked to leave: the run goes on without it."""
