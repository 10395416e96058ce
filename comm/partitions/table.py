"""One partition: its rows, what is known of each, and who has read them. The fold of its events.

Owns every change of a partition's state. Pure: no clock, no memory, no sampler's choice; a claim arrives as the rows that
were chosen. `entry.py` holds the rows of one record, `task.py` what one consumer has read, `shelf.py` the memory.

    put (new rows) -> add (columns) -> claim (by a task) -> ack -> clear (memory returns when no claim holds the row)

Invariants: the first visible value of a (row, column) wins, later ones are counted as refused; every event costs as much as
it touches, however many rows are held; equal events give equal `dump()`, and `load(dump())` is an equal table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from rondo.comm.bus.journal import Event
from rondo.comm.partitions.entry import Entry
from rondo.comm.partitions.runs import ROW_BITS, ROW_MASK, Numbers, Run, count, expand, number_of, row_id
from rondo.comm.partitions.shelf import Shelf, Source
from rondo.comm.partitions.spec import Spec
from rondo.comm.partitions.task import CLAIMED, DONE, GONE, READY, WAITING, Claim, Task


class Table:
    def __init__(self, id: int, name: str, spec: Spec) -> None:
        self.id = id
        self.name = name
        self.spec = spec
        self.shelf = Shelf()
        self.entries: dict[int, Entry] = {}
        self.keys: dict[str, int] = {}
        self.tagged: dict[str, dict[int, None]] = {}
        self.tasks: dict[str, Task] = {}
        self.next_record = 0
        self.num_rows = 0
        self.num_put = 0  # rows ever
        self.num_refused = 0  # rows of puts that changed nothing
        self.newest_version = 0  # that a row was put with
        self.ended_by: list[str] = []
        self.cleared = Numbers()  # keys that are numbers, of rows that were cleared: an order waits for none of them
        self._change = 0
        self._changes: list[tuple[int, int]] = []  # (change, record), growing; stale pairs are skipped
        self._kept = 0  # its length after the last time that those were taken out

    @property
    def ended(self) -> bool:
        return len(self.ended_by) >= self.spec.num_producers

    # ---- rows -------------------------------------------------------------------------------------------------------

    def on_put(self, event: Event) -> None:
        """A record became visible: new rows, further columns of rows that are there, or both."""
        num, n, columns = self.next_record, event["n"], event["columns"]
        self.next_record += 1
        ids = list(expand(event["to"])) if "to" in event else self._named(num, event)
        live = bytearray([id == row_id(num, i) for i, id in enumerate(ids)])
        uses = self._create(Entry(num, columns, live, event)) if any(live) else 0
        # A key that stands twice in one put meets its own record: what comes second is refused like any other.
        uses += self._give(num, columns, ids) if uses < n else 0
        self.num_refused += n - uses
        self.shelf.record(num, Source(event["ring"], event["pos"], event["seq"], event["bytes"]), uses)

    def _named(self, num: int, event: Event) -> list[int]:
        """The rows that a put means, by its keys: new ones are its own, -1 where there is none and none comes."""
        fresh = not event.get("add") and not self.ended
        if "keys" not in event:
            return [row_id(num, i) if fresh else -1 for i in range(event["n"])]
        found = []
        for i, key in enumerate(event["keys"]):
            if fresh:
                found.append(self.keys.setdefault(key, row_id(num, i)))
            else:
                found.append(self.keys.get(key, -1))
        return found

    def _create(self, entry: Entry) -> int:
        self.entries[entry.num] = entry
        self.newest_version = max([self.newest_version, *filter(None, entry.values("versions", range(entry.n)))])
        rows = [i for i, live in enumerate(entry.live) if live]
        if "tags" in entry.said:
            for i in rows:
                self._index_tags(row_id(entry.num, i), entry.value("tags", i))
        self._mark(entry, rows)
        self.num_rows += len(rows)
        self.num_put += len(rows)
        for task in self.tasks.values():
            task.admit(entry)
        return len(rows)

    def _give(self, num: int, columns: list[str], ids: Iterable[int]) -> int:
        """Columns of a record for rows of others, in its order; how many rows took at least one."""
        given: dict[int, list[tuple[int, int]]] = {}
        for j, id in enumerate(ids):
            given.setdefault(id >> ROW_BITS, []).append((id & ROW_MASK, row_id(num, j)))
        uses = 0
        for record, pairs in given.items():
            entry = self.entries.get(record)
            if entry is None or record == num:
                continue
            pairs = [(i, place) for i, place in pairs if i < entry.n and entry.live[i]]
            rows, places = [i for i, _ in pairs], [place for _, place in pairs]
            taken = sorted({i for name in columns for i in entry.give(name, rows, places)})
            uses += len(taken)
            if taken:
                self._mark(entry, taken)
            for task in self.tasks.values():
                if taken and any(name in task.columns for name in columns):
                    task.complete(entry, taken)
        return uses

    def on_tag(self, event: Event) -> None:
        """Tags are merged into those of the rows; a value of None takes one away."""
        for entry, rows in self.parts(event["rows"]):
            if not isinstance(entry.said.get("tags"), list):
                entry.said["tags"] = entry.values("tags", range(entry.n))
            live = [i for i in rows if entry.live[i]]
            for i in live:
                old = entry.value("tags", i)
                merged = {name: value for name, value in {**old, **event["tags"]}.items() if value is not None}
                self._unindex_tags(row_id(entry.num, i), old)
                entry.said["tags"][i] = merged
                self._index_tags(row_id(entry.num, i), merged)
            self._mark(entry, live)

    def on_clear(self, event: Event) -> None:
        for entry, rows in self.parts(event["rows"]):
            self._clear(entry, [i for i in rows if entry.live[i]])

    def _clear(self, entry: Entry, rows: list[int]) -> None:
        """Rows are gone for everyone; the memory of those that a claim holds returns when it ends."""
        if not rows:
            return
        for i in rows:
            entry.live[i] = False
            if "keys" in entry.said:
                key = entry.said["keys"][i]
                del self.keys[key]
                number = number_of(key)
                if number is not None:
                    self.cleared.add(number)
            if "tags" in entry.said:
                self._unindex_tags(row_id(entry.num, i), entry.value("tags", i))
        self.num_rows -= len(rows)
        for task in self.tasks.values():
            task.move(entry.num, rows, (WAITING, READY, DONE), GONE)
            task.news = True
        self._unuse(entry, rows)

    def _unuse(self, entry: Entry, rows: Sequence[int]) -> None:
        """Each is needed once less; rows that nobody sees or reads give their memory back."""
        free = []
        for i in rows:
            entry.uses[i] -= 1
            if not entry.uses[i]:
                free.append(i)
        for record, uses in entry.records(free).items() if free else ():
            self.shelf.unuse(record, uses)
        entry.num_used -= len(free)
        if not entry.num_used:
            del self.entries[entry.num]
            for task in self.tasks.values():
                del task.states[entry.num]

    # ---- tasks ------------------------------------------------------------------------------------------------------

    def on_task(self, event: Event) -> None:
        task = self.tasks[event["task"]] = Task(event["task"], event["columns"], event["sampler"])
        for entry in self.entries.values():
            task.admit(entry)

    def on_claim(self, event: Event) -> None:
        """Batch `k` of a scope: rows for each of its ranks."""
        task, rows = self.tasks[event["task"]], event["rows"]
        scope = task.scope(event["scope"], event["member"])
        scope.next, task.mark = event["k"] + 1, event.get("mark", task.mark)
        claim = Claim(rows, event["peers"], task.num_passes, [[] for _ in rows])
        task.claims[event["scope"], event["k"]] = claim
        self._hold(claim)
        for entry, part in self.parts(run for runs in rows for run in runs):
            task.move(entry.num, part, (READY,), CLAIMED)

    def _hold(self, claim: Claim) -> None:
        for entry, rows in self.parts(run for runs in claim.held() for run in runs):
            for i in rows:
                entry.num_used += not entry.uses[i]
                entry.uses[i] += 1

    def on_stop(self, event: Event) -> None:
        """The stream of a scope ends at index `k`, for all its ranks."""
        scope = self.tasks[event["task"]].scope(event["scope"], event["member"])
        scope.next = event["k"] + 1
        scope.stops.append(event["k"])

    def on_ack(self, event: Event) -> None:
        task, at = self.tasks[event["task"]], (event["scope"], event["k"])
        claim = task.claims.get(at)
        if claim is None or event["peer"] in claim.acked[event["rank"]]:
            return
        claim.acked[event["rank"]].append(event["peer"])
        if len(claim.acked[event["rank"]]) == claim.peers:
            rows = claim.rows[event["rank"]]
            task.num_acked += count(rows)
            again = claim.of_pass != task.num_passes  # read for the pass before: this pass has not had it yet
            self._settle(task, rows, READY if again else DONE)
        if not claim.held():
            del task.claims[at]

    def on_dead(self, member: str) -> None:
        """A reader's incarnation is proved dead: what it has not acknowledged comes again, to whoever asks."""
        for task in self.tasks.values():
            dead = {name for name, scope in task.scopes.items() if scope.member == member}
            for at in [at for at in task.claims if at[0] in dead]:
                for rows in task.claims.pop(at).held():
                    task.num_returned += count(rows)
                    self._settle(task, rows, READY)
            for name in dead:
                del task.scopes[name]
            task.news = True

    def _settle(self, task: Task, runs: Iterable[Run], state: int) -> None:
        """Claimed rows of a task become done, or ready again; those cleared meanwhile are gone."""
        task.news = True
        for entry, rows in self.parts(runs):
            live = [i for i in rows if entry.live[i]]
            task.move(entry.num, live, (CLAIMED,), state)
            task.move(entry.num, rows, (CLAIMED,), GONE)
            self._unuse(entry, rows)
            if state == DONE and task.name in self.spec.clear_after and set(self.spec.clear_after) <= self.tasks.keys():
                read = [self.tasks[name].states for name in self.spec.clear_after]
                self._clear(entry, [i for i in live if all(states[entry.num][i] == DONE for states in read)])

    def on_reset(self, event: Event) -> None:
        task = self.tasks[event["task"]]
        if event["to"] > task.num_passes:
            task.again(event["to"])

    def on_end(self, event: Event) -> None:
        if event["who"] not in self.ended_by:
            self.ended_by.append(event["who"])
        for task in self.tasks.values():
            task.news = True

    def on_ring(self, event: Event) -> None:
        self.shelf.add(event["ring"], event["bytes"], event["member"], event["rank"])

    def on_unring(self, event: Event) -> None:
        self.shelf.remove(event["ring"])

    # ---- questions --------------------------------------------------------------------------------------------------

    def parts(self, runs: Iterable[Run]) -> Iterator[tuple[Entry, range]]:
        """The same rows as (entry, places in it), one a run; those of records that are gone are left out."""
        for start, length in runs:
            entry, i = self.entries.get(start >> ROW_BITS), start & ROW_MASK
            if entry is not None:
                yield entry, range(i, i + length)

    def find(self, row: int | str) -> int:
        """The id of a row by its key or id, -1 when it is not there."""
        id = self.keys.get(row, -1) if isinstance(row, str) else row
        entry, i = self.entries.get(id >> ROW_BITS), id & ROW_MASK
        return id if entry is not None and i < entry.n and entry.live[i] else -1

    def entry(self, id: int) -> Entry:
        return self.entries[id >> ROW_BITS]

    def changes(self, since: int, limit: int) -> tuple[list[int], int]:
        """Rows by their latest change after `since`, oldest first: row ids, and the cursor to go on from."""
        found: list[int] = []
        cursor = since
        for at in range(bisect_right(self._changes, (since, 1 << 62)), len(self._changes)):
            if len(found) >= limit:
                return found, cursor
            cursor, num = self._changes[at]
            entry = self.entries.get(num)
            if entry is not None:
                found += [row_id(num, i) for i, change in enumerate(entry.change) if change == cursor and entry.live[i]]
        return found, max(cursor, self._change)

    def with_tags(self, tags: dict[str, Any], since: int) -> tuple[list[int], int]:
        """Rows that have all these tags and changed after `since`, by id, as `changes` gives them."""
        sets = sorted((self.tagged.get(_tag(*item), {}) for item in tags.items()), key=len)
        found = (id for id in sorted(sets[0]) if all(id in others for others in sets[1:]))
        return [id for id in found if self.entry(id).change[id & ROW_MASK] > since], self._change

    def _mark(self, entry: Entry, rows: Iterable[int]) -> None:
        self._change += 1
        for i in rows:
            entry.change[i] = self._change
        self._changes.append((self._change, entry.num))
        if len(self._changes) > 2 * self._kept + 1024:
            self._changes = self._log()
            self._kept = len(self._changes)

    def _log(self) -> list[tuple[int, int]]:
        """The log of changes as it follows from the rows alone."""
        return sorted({(change, entry.num) for entry in self.entries.values() for change in entry.change})

    def _index_tags(self, id: int, tags: dict[str, Any]) -> None:
        for item in tags.items():
            self.tagged.setdefault(_tag(*item), {})[id] = None

    def _unindex_tags(self, id: int, tags: dict[str, Any]) -> None:
        for item in tags.items():
            ids = self.tagged[_tag(*item)]
            del ids[id]
            if not ids:
                del self.tagged[_tag(*item)]

    # ---- persistence ------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        return {
            "id": self.id, "name": self.name, "spec": self.spec.dump(), "shelf": self.shelf.dump(),
            "entries": [entry.dump() for entry in self.entries.values()],
            "tasks": [task.dump() for task in self.tasks.values()], "next_record": self.next_record,
            "num_put": self.num_put, "num_refused": self.num_refused, "ended_by": list(self.ended_by),
            "newest_version": self.newest_version,
            "change": self._change, "cleared": self.cleared.runs(),
        }  # fmt: skip

    @classmethod
    def load(cls, state: dict[str, Any]) -> Table:
        table = cls(state["id"], state["name"], Spec.load(state["spec"]))
        table.shelf = Shelf.load(state["shelf"])
        for fields in state["entries"]:
            entry = Entry.load(fields)
            table.entries[entry.num] = entry
            table.num_rows += sum(entry.live)
            for i in (i for i, live in enumerate(entry.live) if live):
                if "keys" in entry.said:
                    table.keys[entry.said["keys"][i]] = row_id(entry.num, i)
                table._index_tags(row_id(entry.num, i), entry.value("tags", i))
        table.tasks = {fields["name"]: Task.load(fields) for fields in state["tasks"]}
        for task in table.tasks.values():
            for claim in task.claims.values():
                table._hold(claim)
        for name in ("next_record", "num_put", "num_refused", "newest_version"):
            setattr(table, name, state[name])
        table.ended_by, table.cleared = list(state["ended_by"]), Numbers(state["cleared"])
        table._change, table._changes = state["change"], table._log()
        return table


def _tag(name: str, value: Any) -> str:
    return f"{name}={orjson.dumps(value).decode()}"
