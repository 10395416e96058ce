"""Who holds which published weights: the slots of the slab, as a pure fold.

Owns slot states, holders and proved versions; not the bytes (`slab.py`) and not the lease rule (`accounts.py`).

Invariant: the publisher writes only a slot that nobody holds and that is not the newest complete one; a dead holder's hold
ends with its proved death; a member serves only a version that it has proved by checksum.

    free -> writing(version) -> ready(version, checksum) -> free again when a newer one is ready, nobody holds it and it
                                                            is not pinned: kept for an evaluation of its version
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

_ENGINE = re.compile(r"(.*)/rollout\.\d+")


@dataclass(slots=True)
class Slot:
    state: str = "free"  # free | writing | ready
    version: int = -1
    checksum: int = 0
    holders: set[str] = field(
        default_factory=set
    )  # readers, "group/role.rank"; one incarnation of a group lives at a time


class Versions:
    """The slab's ledger. `newest` is the newest slot that is ready, or None before the first publication."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [Slot() for _ in range(num_slots)]
        self.proved: dict[str, int] = {}  # reader -> version
        self.pins: dict[str, int] = {}  # evaluation's label -> the slot that is kept for it

    @property
    def newest(self) -> int | None:
        ready = [i for i, slot in enumerate(self.slots) if slot.state == "ready"]
        return max(ready, key=lambda i: self.slots[i].version, default=None)

    def num_engines(self, besides: Collection[str] = ()) -> int:
        """Engines that generate for the run under weights that they have proved, `besides` those of some members."""
        engines = (_ENGINE.fullmatch(reader) for reader in self.proved)
        return sum(found is not None and found[1] not in besides for found in engines)

    @property
    def coming(self) -> int | None:
        """The slot that is being written, if any."""
        return next((i for i, slot in enumerate(self.slots) if slot.state == "writing"), None)

    def writable(self) -> int | None:
        """A slot that may be written now, or None while every other one is held or pinned."""
        kept = {self.newest, *self.pins.values()}
        candidates = [i for i, slot in enumerate(self.slots) if not slot.holders and i not in kept]
        return min(candidates, key=lambda i: (self.slots[i].state != "free", self.slots[i].version), default=None)

    def begin(self, slot: int, version: int) -> None:
        if 0 <= slot < len(self.slots):
            self.slots[slot] = Slot("writing", version)

    def publish(self, slot: int, version: int, checksum: int) -> None:
        """Complete what `begin` began. Repeated, it leaves those who hold the slot by now their hold."""
        if 0 <= slot < len(self.slots):
            self.slots[slot] = Slot("ready", version, checksum, self.slots[slot].holders)

    def hold(self, slot: int, reader: str) -> None:
        if 0 <= slot < len(self.slots):
            self.slots[slot].holders.add(reader)

    def prove(self, reader: str, version: int) -> None:
        """`reader` verified and installed `version`; its hold on any slot ends."""
        self.proved[reader] = version
        self.let_go(reader)

    def let_go(self, reader: str) -> None:
        """`reader` reads nothing any more, whether or not it got anywhere; what it serves stays as it was."""
        for slot in self.slots:
            slot.holders.discard(reader)

    def forget(self, member: str) -> None:
        """Every role of `member` is proved dead: what they held is free again."""
        self.proved = {reader: version for reader, version in self.proved.items() if not _of(reader, member)}
        for slot in self.slots:
            slot.holders = {reader for reader in slot.holders if not _of(reader, member)}

    def abort_writes(self) -> None:
        """The publisher is proved dead: what it was writing was never ready."""
        for i, slot in enumerate(self.slots):
            if slot.state == "writing":
                self.slots[i] = Slot()

    def dump(self) -> dict[str, Any]:
        slots = [[slot.state, slot.version, slot.checksum, sorted(slot.holders)] for slot in self.slots]
        return {"slots": slots, "proved": dict(self.proved), "pins": dict(self.pins)}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Versions:
        versions = cls(len(state["slots"]))
        versions.slots = [Slot(kind, version, checksum, set(held)) for kind, version, checksum, held in state["slots"]]
        versions.proved, versions.pins = dict(state["proved"]), dict(state["pins"])
        return versions


def engine_reader(rank: int) -> str:
    """Who proves the weights of the engine on this rank of a replica."""
    return f"rollout.{rank}"


def _of(reader: str, member: str) -> bool:
    return reader.partition("/")[0] == member


EVALUATION_READER = "evaluation.0"
"""Who holds the weights that a replica evaluates beside the training."""
