"""All partitions of a run: which there are, and which event goes to which table. A part of the index's fold.

Owns names, ids and rings of partitions as a whole; everything inside one is its table's (`table.py`). Events carry the
partition's id, which is never used again: what comes late for a dropped one meets nobody.

    {"event": "part", "do": "new", "part": 3, "name": "eval", "spec": {...}}
    {"event": "part", "do": "put", "part": 3, "ring": "part/3/0", "pos": 0, "seq": 1, "bytes": 8192, "n": 64, "columns": [...]}
    {"event": "part", "do": "drop", "part": 3}

Invariant: dropping takes the table out in one step, whatever it holds; its memory returns with its rings.
"""

from __future__ import annotations

from typing import Any

from rondo.comm.bus.journal import Event
from rondo.comm.bus.spans import num_rows
from rondo.comm.partitions.spec import Spec
from rondo.comm.partitions.table import Table
from rondo.comm.ring.records import Descriptor
from rondo.comm.ring.ring import RecordRef


class Partitions:
    def __init__(self) -> None:
        self.tables: dict[int, Table] = {}
        self.names: dict[str, int] = {}
        self.next_id = 0
        self.dropped: list[Table] = []  # taken out; the service gives their memory back bit by bit

    def apply(self, event: Event) -> None:
        do, id = event["do"], event["part"]
        if do == "new":
            self.tables[id] = Table(id, event["name"], Spec.load(event["spec"]))
            self.names[event["name"]] = id
            self.next_id = id + 1
        elif do == "drop":
            table = self.tables.pop(id, None)
            if table is not None:
                del self.names[table.name]
                for old in self.dropped:  # in a replay nobody takes them away: their rings are what is left to know
                    old.entries.clear()
                    old.tasks.clear()
                self.dropped.append(table)
        elif id in self.tables:
            getattr(self.tables[id], "on_" + do)(event)

    def on_dead(self, member: str) -> None:
        for table in self.tables.values():
            table.on_dead(member)

    def forget_all(self) -> None:
        """A new attempt of the run: rings and readers of the old one are gone. Ids go on."""
        self.tables.clear()
        self.names.clear()

    def files(self) -> list[str]:
        """The rings that are files."""
        tables = (*self.tables.values(), *self.dropped)
        return [name for table in tables for name, ring in table.shelf.rings.items() if ring.spilled]

    def dump(self) -> dict[str, Any]:
        return {"tables": [table.dump() for table in self.tables.values()], "next_id": self.next_id}

    @classmethod
    def load(cls, state: dict[str, Any]) -> Partitions:
        partitions = cls()
        partitions.next_id = state["next_id"]
        for fields in state["tables"]:
            table = Table.load(fields)
            partitions.tables[table.id] = table
            partitions.names[table.name] = table.id
        return partitions


_SAID = ("part", "keys", "groups", "versions", "tokens", "tags", "done", "to", "add")


def put_event(ref: RecordRef, descriptor: Descriptor) -> Event:
    """The event of a record whose producer wrote it for a partition: its `meta` says which, and what was said of its rows."""
    meta = descriptor.meta
    return {
        "event": "part", "do": "put", "ring": ref.ring, "pos": ref.pos, "seq": ref.seq, "bytes": ref.num_bytes,
        "n": num_rows(descriptor.spans), "columns": [column.name for column in descriptor.columns],
        **{name: meta[name] for name in _SAID if name in meta},
    }  # fmt: skip
