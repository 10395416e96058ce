"""A partition driven by hand: the fold, and choosers as the service makes them. No process, no memory, no clock."""

from __future__ import annotations

from typing import Any

import orjson

from rondo.comm.partitions.choosers import Ask, Picked
from rondo.comm.partitions.fold import Fold
from rondo.comm.partitions.runs import compress, expand
from rondo.comm.partitions.samplers import chooser
from rondo.comm.partitions.spec import Sampler, Sequential, Spec
from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import CLAIMED, DONE, READY, WAITING


class Hand:
    """Applies events and keeps them for replay."""

    def __init__(self, **spec: Any) -> None:
        self.partitions = Fold()
        self.events: list[dict[str, Any]] = []
        self.pos = 0
        self.emit("new", name="p", spec=Spec(**spec).dump())
        self.emit("ring", ring="r", bytes=1 << 40, member="m", rank=0)

    @property
    def table(self) -> Table:
        return self.partitions.tables[0]

    def emit(self, do: str, **fields: Any) -> None:
        event = orjson.loads(orjson.dumps({"event": do, "part": 0, **fields}))
        self.events.append(event)
        self.partitions.apply(event)

    def die(self, member: str) -> None:
        self.emit("dead", member=member, incarnation=1)

    def put(self, n: int, columns: tuple[str, ...] = ("x",), **said: Any) -> list[int]:
        """A record of `n` rows; their ids, where it made new ones."""
        num = self.table.next_record
        self.emit("put", ring="r", pos=self.pos, seq=num + 1, bytes=64, n=n, columns=list(columns), **said)
        self.pos += 64
        return [num << 20 | i for i in range(n)]

    def add(self, ids: list[int], *columns: str) -> None:
        self.put(len(ids), columns, to=compress(ids))

    def task(self, name: str = "t", sampler: Sampler | None = None, columns: tuple[str, ...] = ("x",)) -> None:
        self.emit("task", task=name, columns=list(columns), sampler=(sampler or Sequential()).dump())

    def pick(self, name: str = "t", ranks: int = 1, batch: int = 64, **ask: Any) -> Picked | None:
        task = self.table.tasks[name]
        if task.chooser is None:
            task.chooser = chooser(self.table, task)
        return task.chooser.pick(Ask(ranks, batch, **ask))

    def claim(
        self, name: str = "t", scope: str = "a.1", ranks: int = 1, batch: int = 64, **ask: Any
    ) -> list[list[int]]:
        """The rows of every rank, claimed as the scope's next batch; [] when nothing was picked."""
        picked = self.pick(name, ranks, batch, **ask)
        if picked is None:
            return []
        task = self.table.tasks[name]
        known = task.scopes.get(scope)
        mark = {"mark": task.chooser.mark} if task.chooser.mark != task.mark else {}
        self.emit(
            "claim", task=name, scope=scope, k=known.next if known else 0, rows=picked, peers=1,
            member=scope.partition(".")[0], **mark,
        )  # fmt: skip
        return [list(expand(part)) for part in picked]

    def ack(self, k: int, name: str = "t", scope: str = "a.1", rank: int = 0) -> None:
        self.emit("ack", task=name, scope=scope, k=k, rank=rank, peer=0)

    def replayed(self) -> Fold:
        again = Fold()
        for event in self.events:
            again.apply(event)
        return again

    def check(self) -> None:
        """What must hold at every moment."""
        table, shelf = self.table, self.table.shelf
        assert table.num_rows == sum(entry.live.count(1) for entry in table.entries.values())
        held = [
            id
            for task in table.tasks.values()
            for claim in task.claims.values()
            for rows in claim.held()
            for id in expand(rows)
        ]
        uses: dict[int, int] = {}
        for entry in table.entries.values():
            for i in range(entry.n):
                assert entry.uses[i] == entry.live[i] + held.count(entry.num << 20 | i)
                for source in {c[i] >> 20 for c in entry.columns.values() if c[i] >= 0} if entry.uses[i] else ():
                    uses[source] = uses.get(source, 0) + 1
        assert uses == {num: shelf.uses(num) for num in shelf.sources}
        assert shelf.live_bytes == 64 * len(uses)
        for task in table.tasks.values():
            states = b"".join(bytes(states) for states in task.states.values())
            assert [states.count(s) for s in (WAITING, READY, CLAIMED, DONE)] == task.counts[:4]
            claimed = [
                id
                for claim in task.claims.values()
                for rows, acked in zip(claim.rows, claim.acked, strict=True)
                if len(acked) < claim.peers
                for id in expand(rows)
            ]
            assert len(claimed) == len(set(claimed)) == task.counts[CLAIMED]
            for entry in table.entries.values():
                for i in range(entry.n):
                    whole = bool(entry.having(task.columns, [i]))
                    state = task.states[entry.num][i]
                    assert entry.live[i] != 1 or (state == WAITING) != whole
