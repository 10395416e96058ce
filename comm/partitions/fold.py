"""All partitions and who uses them: which there are, who lives, and which event goes to which table.

Owns names and ids of partitions, and the members; everything inside a partition is its table's (`table.py`). Events carry the
partition's id, which is never used again: what comes late for a dropped one meets nobody.

    {"event": "new", "part": 3, "name": "eval", "spec": {...}}
    {"event": "put", "part": 3, "ring": "part/3/0", "pos": 0, "seq": 1, "bytes": 8192, "n": 64, "columns": [...]}
    {"event": "dead", "member": "scorer", "incarnation": 1}
    {"event": "drop", "part": 3}

Invariants: dropping takes the table out in one step, whatever it holds; its memory returns with its rings. Equal events give
equal `dump()`, and `load(dump())` is equal.
"""

from __future__ import annotations

from typing import Any

from rondo.comm.bus.journal import Event
from rondo.comm.partitions.memory import FILE
from rondo.comm.partitions.spec import Spec
from rondo.comm.partitions.table import Table
from rondo.comm.ring.records import Descriptor
from rondo.comm.ring.ring import RecordRef
from rondo.comm.ring.spans import num_rows
from rondo.runtime import formats


class Fold:
    def __init__(self) -> None:
        self.tables: dict[int, Table] = {}
        self.names: dict[str, int] = {}
        self.next_id = 0
        self.members: dict[str, list[int]] = {}  # name -> [incarnation, 1 if alive]
        self.dropped: list[Table] = []  # taken out; the service gives their memory back bit by bit
        self.touched: dict[int, Table] = {}  # by events since somebody looked

    def apply(self, event: Event) -> None:
        do = event["event"]
        if do == "snapshot":
            self.__dict__.update(Fold.load(event["state"]).__dict__)
        elif do == "started":
            self.members[event["member"]] = [event["incarnation"], 1]
        elif do == "dead":
            self.members[event["member"]] = [event["incarnation"], 0]
            for table in self.tables.values():
                table.on_dead(event["member"])
            self.touched |= self.tables
        elif do == "new":
            self.tables[event["part"]] = Table(event["part"], event["name"], Spec.load(event["spec"]))
            self.names[event["name"]] = event["part"]
            self.next_id = event["part"] + 1
        elif do == "drop":
            self._drop(event["part"])
        elif event["part"] in self.tables:
            table = self.touched[event["part"]] = self.tables[event["part"]]
            getattr(table, "on_" + do)(event)

    def _drop(self, part: int) -> None:
        table = self.tables.pop(part, None)
        self.touched.pop(part, None)
        if table is not None:
            del self.names[table.name]
            for old in self.dropped:  # in a replay nobody takes them away: their rings are what is left to know
                old.entries.clear()
                old.tasks.clear()
            self.dropped.append(table)

    def lives(self, member: str, incarnation: int | None = None) -> bool:
        """Whether this incarnation of a member lives, or its newest one."""
        newest, alive = self.members.get(member, (-1, 0))
        return bool(alive) and incarnation in (None, newest)

    def files(self) -> list[str]:
        """The rings that are files."""
        tables = (*self.tables.values(), *self.dropped)
        return [name for table in tables for name in table.shelf.rings if name.startswith(FILE)]

    def dump(self) -> dict[str, Any]:
        tables = [table.dump() for table in self.tables.values()]
        members = {name: list(life) for name, life in self.members.items()}
        return {**formats.stamp(formats.JOURNAL), "tables": tables, "next_id": self.next_id, "members": members}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Fold:
        fold = cls()
        fold.next_id = state["next_id"]
        fold.members = {name: list(life) for name, life in state["members"].items()}
        for fields in state["tables"]:
            table = Table.load(fields)
            fold.tables[table.id] = table
            fold.names[table.name] = table.id
        return fold


_SAID = ("part", "keys", "groups", "versions", "tokens", "tags", "done", "to", "add")


def put_event(ref: RecordRef, descriptor: Descriptor) -> Event:
    """The event of a record whose producer wrote it for a partition: its `meta` says which, and what was said of its rows."""
    meta = descriptor.meta
    return {
        "event": "put", "ring": ref.ring, "pos": ref.pos, "seq": ref.seq, "bytes": ref.num_bytes,
        "n": num_rows(descriptor.spans), "columns": list(descriptor.make.names),
        **{name: meta[name] for name in _SAID if name in meta},
    }  # fmt: skip
