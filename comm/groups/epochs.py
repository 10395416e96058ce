"""Epochs: which processes form a named group now. A pure agreement; it is told what members ask for and who died.

Owns the number and the members of every group's epoch, and when one is over. Does not own sockets, clocks or tensors:
`meeting.py` answers members with it, `groups.py` makes the group.

    forming:  every member of the spec asked, each with its living incarnation  ->  epoch n + 1 is announced, the same to all
    over:     a member died, or left (it asks for a later epoch)                ->  the others are told, and ask again

Numbers only rise, also when this agreement was lost and begins anew: a member says which epoch it knows, and the next one is
higher than any that was named. Invariants: an epoch has exactly one life (incarnation) of each member; a life that is dead or
replaced is in no later epoch, and is refused when it asks.

    epochs = Epochs()
    epochs.ask(spec, "actor-0/0", incarnation=1, after=0)
    epochs.ask(spec, "rollout-0/0", incarnation=3, after=0)
    epochs.answer("weights", "actor-0/0", 1, after=0)      # Epoch("weights", 1, (Life("actor-0", 0, 1), ...))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rondo.runtime.errors import ConfigError, Refused

BACKENDS = ("gloo", "nccl", "pynccl", "nccl4py")


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A process group as its members know it. `members` are "group/rank", for instance "rollout-0/1", in rank order.

    `timeout_s` is the deadline of an operation that names none. The same text in every member, or the meeting refuses.
    """

    name: str
    members: tuple[str, ...]
    backend: str = "gloo"
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(
                f"backend of group {self.name!r} must be one of {', '.join(BACKENDS)}, got {self.backend!r}."
            )
        if len(self.members) < 2 or len(set(self.members)) < len(self.members):
            raise ConfigError(
                f"members of group {self.name!r} must be two or more different ones, got {', '.join(self.members)!r}."
            )
        for member in self.members:
            split(member)
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s of group {self.name!r} must be above 0, got {self.timeout_s:g}.")


class Life(NamedTuple):
    """One member in one of its lives."""

    group: str
    rank: int
    incarnation: int

    @property
    def member(self) -> str:
        return f"{self.group}/{self.rank}"


@dataclass(frozen=True, slots=True)
class Epoch:
    """What is announced: the lives that form group `name` under `number`, in rank order."""

    name: str
    number: int
    lives: tuple[Life, ...]


@dataclass(frozen=True, slots=True)
class Over:
    """Why an epoch is over, and which members are not coming back to it (none when a living member left it)."""

    why: str
    missing: tuple[str, ...] = ()


@dataclass(slots=True)
class _Group:
    spec: GroupSpec
    number: int = 0
    epoch: Epoch | None = None  # None while nobody has told a fresh agreement of the epoch that lives
    over: Over | None = None
    asked: dict[str, int] = field(default_factory=dict)  # member -> incarnation


class Epochs:
    """The agreement. `ask` and `dead` are its events, the others are questions."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._living: dict[str, int] = {}  # role group -> its newest incarnation
        self._dead: dict[str, int] = {}

    # ---- events -----------------------------------------------------------------------------------------------------

    def ask(self, spec: GroupSpec, member: str, incarnation: int, after: int) -> None:
        """`member` wants into an epoch above `after`, the last one it knows (0: none). Asking twice changes nothing.

        Raises ConfigError when the spec is not the others', Refused when this life is over.
        """
        if member not in spec.members:
            raise ConfigError(
                f"a member of group {spec.name!r} must be one of {', '.join(spec.members)}, got {member!r}."
            )
        group = self._groups.setdefault(spec.name, _Group(spec))
        if group.spec != spec:
            raise ConfigError(f"group {spec.name!r} must be the same for all members, got {spec} beside {group.spec}.")
        self._fence(member, incarnation)
        if self.answer(spec.name, member, incarnation, after) is not None:
            return
        if after >= group.number:
            group.number = after
            if group.epoch is not None and group.epoch.number < after:
                group.epoch = None  # made by an agreement that is lost
            if group.over is None:
                group.over = Over(f"{member} left it")
        group.asked[member] = incarnation
        if all(group.asked.get(name, -1) == self._living.get(split(name)[0]) for name in spec.members):
            group.number += 1
            lives = (Life(*split(name), incarnation=group.asked[name]) for name in spec.members)
            group.epoch = Epoch(spec.name, group.number, tuple(lives))
            group.over = None
            group.asked.clear()

    def withdraw(self, name: str, member: str, incarnation: int) -> None:
        """`member` waits no longer: no epoch is announced that counts on it."""
        group = self._groups.get(name)
        if group is not None and group.asked.get(member) == incarnation:
            del group.asked[member]

    def restore(self, spec: GroupSpec, epoch: Epoch) -> None:
        """A member names the epoch that it is in, to an agreement that may have forgotten it."""
        group = self._groups.setdefault(spec.name, _Group(spec))
        if epoch.number < group.number or group.epoch is not None:
            return
        group.number, group.epoch, group.over = epoch.number, epoch, None
        for life in epoch.lives:
            self._living[life.group] = max(self._living.get(life.group, 0), life.incarnation)
            if life.incarnation <= self._dead.get(life.group, -1) or life.incarnation < self._living[life.group]:
                self._end(group, life.group, life.incarnation)

    def dead(self, group: str, incarnation: int) -> None:
        """Every process of this life of a role group is proved dead."""
        self._dead[group] = max(self._dead.get(group, -1), incarnation)
        for found in self._groups.values():
            self._end(found, group, incarnation)

    # ---- questions --------------------------------------------------------------------------------------------------

    def answer(self, name: str, member: str, incarnation: int, after: int) -> Epoch | None:
        """The epoch above `after` that this life is in and that is not over; None while it has to wait."""
        group = self._groups.get(name)
        if group is None or group.epoch is None or group.over is not None or group.epoch.number <= after:
            return None
        mine = any(life.member == member and life.incarnation == incarnation for life in group.epoch.lives)
        return group.epoch if mine else None

    def missing(self, name: str) -> tuple[str, ...]:
        """The members that the next epoch of a group waits for."""
        group = self._groups[name]
        return tuple(member for member in group.spec.members if member not in group.asked)

    def over(self, name: str, number: int) -> Over | None:
        """Why epoch `number` of a group is over; None while it is not."""
        group = self._groups.get(name)
        if group is None or number > group.number:
            return None
        if number < group.number:
            return Over(f"epoch {group.number} has replaced it")
        return group.over

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _fence(self, member: str, incarnation: int) -> None:
        role_group = split(member)[0]
        newest = max(self._living.get(role_group, 0), self._dead.get(role_group, -1) + 1)
        if incarnation < newest:
            raise Refused(
                f"incarnation of {member} must be {newest} or a later one, got {incarnation}. This life is over"
            )
        if incarnation > newest and role_group in self._living:
            self.dead(role_group, incarnation - 1)  # a life is replaced only after its death is proved
        self._living[role_group] = incarnation

    def _end(self, group: _Group, role_group: str, incarnation: int) -> None:
        mine = [member for member in group.spec.members if split(member)[0] == role_group]
        for member in mine:
            if group.asked.get(member, incarnation + 1) <= incarnation:
                del group.asked[member]
        if group.epoch is None or (group.over is not None and group.over.missing):
            return
        if any(life.group == role_group and life.incarnation <= incarnation for life in group.epoch.lives):
            group.over = Over(f"{role_group} (incarnation {incarnation}) is dead", tuple(mine))


def split(member: str) -> tuple[str, int]:
    """("rollout-0", 1) for "rollout-0/1"."""
    group, _, rank = member.rpartition("/")
    if not group or not rank.isdecimal():
        raise ConfigError(f"a member must be written group/rank, got {member!r}. Write for instance rollout-0/1")
    return group, int(rank)


def lives_of(rows: Sequence[Sequence[object]]) -> tuple[Life, ...]:
    """Lives as they came over a wire: [group, rank, incarnation] each."""
    return tuple(Life(str(group), int(str(rank)), int(str(incarnation))) for group, rank, incarnation in rows)
