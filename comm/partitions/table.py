"""One partition: its rows, what is known of each, and who has read them. The fold of its events.

Owns every change of a partition's state. Pure: no clock, no memory, no sampler's choice; a claim arrives as the rows that
were chosen. `entry.py` holds the rows of one record, `task.py` what one consumer has read, `shelf.py` the memory.

    put (new rows) -> add (columns) -> claim (by a task) -> ack -> clear (memory returns when no claim holds the row)

Invariants: the first visible value of a (row, column) wins, later ones are counted as refused; every event costs as much as
it touches, however many rows are held; equal events give equal `dump()`, and `load(dump())` is an equal table.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from rondo.comm.bus.journal import Event
from rondo.comm.partitions.entry import DEAD, HELD, LIVE, Entry, places_of
from rondo.comm.partitions.runs import ROW_BITS, ROW_MASK, Numbers, Run, compress, count, expand, number_of, row_id
from rondo.comm.partitions.shelf import Shelf, Source
from rondo.comm.partitions.spec import Spec
from rondo.comm.partitions.task import CLAIMED, DONE, GONE, READY, Claim, Task


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
        if "to" in event:
            uses = self._attach_runs(num, columns, event["to"])
        elif "keys" in event:
            uses = self._put_keys(num, columns, event)
        else:
            uses = 0 if self.ended else self._create(num, columns, event, bytearray([LIVE]) * n)
        self.num_refused += n - uses
        self.shelf.record(num, Source(event["ring"], event["pos"], event["seq"], event["bytes"]), uses)

    def _put_keys(self, num: int, columns: list[str], event: Event) -> int:
        """Rows by key: new keys make rows, known ones get columns. `add` makes no rows."""
        keys, fresh = event["keys"], not event.get("add") and not self.ended
        live = bytearray(len(keys))
        known: list[tuple[int, int]] = []
        for i, key in enumerate(keys):
            at = self.keys.get(key, -1)
            if at >= 0:
                known.append((at, i))
            elif fresh:
                self.keys[key] = row_id(num, i)
                live[i] = LIVE
        if len(known) == len(keys) and len(runs := compress([at for at, _ in known])) == 1:
            return self._attach_runs(num, columns, runs)
        # A key that stands twice in one put meets its own record: what comes second is refused like any other.
        uses = self._create(num, columns, event, live) if any(live) else 0
        touched = [(at, i) for at, i in known if at >> ROW_BITS != num]
        return uses + self._attach(num, columns, touched)

    def _create(self, num: int, columns: list[str], event: Event, live: bytearray) -> int:
        entry = self.entries[num] = Entry(num, event["n"], columns, live)
        entry.keys, entry.groups = event.get("keys"), event.get("groups")
        entry.versions, entry.tokens = event.get("versions"), event.get("tokens")
        entry.tags, entry.done = event.get("tags"), event.get("done", {})
        versions = entry.versions if isinstance(entry.versions, list) else [entry.versions]
        self.newest_version = max(self.newest_version, *(version or 0 for version in versions))
        if entry.tags is not None:
            for i in range(entry.n):
                self._index_tags(row_id(num, i), entry.tag(i)) if live[i] else None
        self._mark(entry)
        self.num_rows += entry.num_live
        self.num_put += entry.num_live
        for task in self.tasks.values():
            task.admit(entry)
        return entry.num_live

    def _attach_runs(self, num: int, columns: list[str], runs: Sequence[Run]) -> int:
        """Columns for rows by id, in the order of the record's rows."""
        if len(runs) == 1:
            entry = self.entries.get(runs[0][0] >> ROW_BITS)
            whole = entry is not None and runs[0][1] == entry.n == entry.num_live and not runs[0][0] & ROW_MASK
            if entry is not None and whole and not any(name in entry.columns for name in columns):
                for name in columns:
                    entry.put_whole(name, num)
                self._mark(entry)
                self._completed(entry, range(entry.n), columns)
                return entry.n
        return self._attach(num, columns, [(id, j) for j, id in enumerate(expand(runs))])

    def _attach(self, num: int, columns: list[str], pairs: Iterable[tuple[int, int]]) -> int:
        """Columns for (row id, row of the record); how many rows took at least one."""
        touched: dict[int, list[int]] = {}
        for id, j in pairs:
            entry, i = self.entries.get(id >> ROW_BITS), id & ROW_MASK
            if entry is None or i >= entry.n or entry.live[i] != LIVE:
                continue
            place = row_id(num, j)
            if sum([entry.put(name, i, place) for name in columns]):
                touched.setdefault(entry.num, []).append(i)
        for record, places in touched.items():
            entry = self.entries[record]
            self._mark(entry, places)
            self._completed(entry, places, columns)
        return sum(map(len, touched.values()))

    def _completed(self, entry: Entry, places: range | list[int], columns: list[str]) -> None:
        for task in self.tasks.values():
            if any(name in task.columns for name in columns):
                task.complete(entry, places)

    def on_tag(self, event: Event) -> None:
        """Tags are merged into those of the rows; a value of None takes one away."""
        for id in expand(event["rows"]):
            entry, i = self.entries.get(id >> ROW_BITS), id & ROW_MASK
            if entry is None or entry.live[i] != LIVE:
                continue
            old = entry.tag(i)
            merged = {name: value for name, value in {**old, **event["tags"]}.items() if value is not None}
            if not isinstance(entry.tags, list):
                entry.tags = [entry.tags] * entry.n
            self._unindex_tags(id, old)
            entry.tags[i] = merged
            self._index_tags(id, merged)
            self._mark(entry, [i])

    def on_clear(self, event: Event) -> None:
        for run in event["rows"]:
            self._clear(run)

    def _clear(self, run: Run) -> None:
        """Rows are gone for everyone; the memory of those that a claim holds returns when it ends."""
        record, first, end = places_of(run[0], run[1])
        entry = self.entries.get(record)
        if entry is None:
            return
        for start, length in compress([row_id(record, i) for i in range(first, end) if entry.live[i] == LIVE]):
            i0 = start & ROW_MASK
            for i in range(i0, i0 + length):
                if entry.keys is not None:
                    del self.keys[entry.keys[i]]
                    number = number_of(entry.keys[i])
                    if number is not None:
                        self.cleared.add(number)
                if entry.tags is not None:
                    self._unindex_tags(row_id(record, i), entry.tag(i))
            self.num_rows -= length
            entry.num_live -= length
            held = [i for i in range(i0, i0 + length) if self._held(record, i)] if self._any_claims() else []
            for i in held:
                entry.live[i] = HELD
            entry.num_held += len(held)
            free = [i for i in range(i0, i0 + length) if entry.live[i] == LIVE] if held else range(i0, i0 + length)
            for task in self.tasks.values():
                for part in compress([row_id(record, i) for i in free]) if held else [[start, length]]:
                    task.move(part, GONE)
                for i in held:
                    if task.states[record][i] != CLAIMED:
                        task.move([row_id(record, i), 1], GONE)
            self._free(entry, free)
        for task in self.tasks.values():
            task.news = True

    def _any_claims(self) -> bool:
        return any(task.claims for task in self.tasks.values())

    def _held(self, record: int, i: int) -> bool:
        return any(task.states[record][i] == CLAIMED for task in self.tasks.values())

    def _free(self, entry: Entry, places: range | list[int]) -> None:
        """Rows that nobody sees or reads give their memory back."""
        common = entry.common_sources()
        if common is not None:
            for i in places:
                entry.live[i] = DEAD
            for source in common:
                self.shelf.unuse(source, len(places)) if places else None
        else:
            for i in places:
                entry.live[i] = DEAD
                for source in entry.sources(i):
                    self.shelf.unuse(source, 1)
        if not entry.num_live and not entry.num_held:
            del self.entries[entry.num]
            for task in self.tasks.values():
                task.forget(entry.num)

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
        task.claims[event["scope"], event["k"]] = Claim(rows, event["peers"], task.num_passes, [[] for _ in rows])
        for run in (run for part in rows for run in part):
            task.move(run, CLAIMED)

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
            task.news = True
        if all(len(acked) == claim.peers for acked in claim.acked):
            del task.claims[at]

    def on_dead(self, member: str) -> None:
        """A reader's incarnation is proved dead: what it has not acknowledged comes again, to whoever asks."""
        for task in self.tasks.values():
            for at, claim in list(task.claims.items()):
                if task.scopes[at[0]].member != member:
                    continue
                for rows, acked in zip(claim.rows, claim.acked, strict=True):
                    if len(acked) < claim.peers:
                        task.num_returned += count(rows)
                        self._settle(task, rows, READY)
                del task.claims[at]
            for name in [name for name, scope in task.scopes.items() if scope.member == member]:
                del task.scopes[name]
            task.news = True

    def _settle(self, task: Task, rows: Iterable[Run], state: int) -> None:
        """Claimed rows of a task become done, or ready again; those cleared meanwhile are gone."""
        for run in rows:
            record, first, end = places_of(run[0], run[1])
            entry = self.entries[record]
            held = [i for i in range(first, end) if entry.live[i] == HELD] if entry.num_held else []
            if not held:
                task.move(run, state)
            else:
                left = [i for i in range(first, end) if entry.live[i] != HELD]
                for part in compress([row_id(record, i) for i in left]):
                    task.move(part, state)
                for part in compress([row_id(record, i) for i in held]):
                    task.move(part, GONE)
                free = [i for i in held if not self._held(record, i)]
                entry.num_held -= len(free)
                self._free(entry, free)
            if state == DONE and task.name in self.spec.clear_after and record in self.entries:
                self._clear_read(entry, first, end)

    def _clear_read(self, entry: Entry, first: int, end: int) -> None:
        states = [self.tasks[name].states[entry.num] for name in self.spec.clear_after if name in self.tasks]
        if len(states) < len(self.spec.clear_after):
            return
        read = [i for i in range(first, end) if entry.live[i] == LIVE and all(s[i] == DONE for s in states)]
        for run in compress([row_id(entry.num, i) for i in read]):
            self._clear(run)

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

    def live(self, id: int) -> bool:
        entry, i = self.entries.get(id >> ROW_BITS), id & ROW_MASK
        return entry is not None and i < entry.n and entry.live[i] == LIVE

    def entry(self, id: int) -> Entry:
        return self.entries[id >> ROW_BITS]

    def changes(self, since: int, limit: int) -> tuple[list[int], int, bool]:
        """Rows by their latest change after `since`, oldest first: row ids, the cursor to go on from, whether that is all."""
        found: list[int] = []
        cursor = since
        for at in range(bisect_right(self._changes, (since, 1 << 62)), len(self._changes)):
            if len(found) >= limit:
                return found, cursor, False
            cursor, num = self._changes[at]
            entry = self.entries.get(num)
            if entry is not None:
                found += [
                    row_id(num, i)
                    for i in range(entry.n)
                    if entry.changed(i) == cursor and entry.live[i] == LIVE
                ]  # fmt: skip
        return found, max(cursor, self._change), True

    def with_tags(self, tags: dict[str, Any], since: int) -> tuple[list[int], int, bool]:
        """Rows that have all these tags and changed after `since`, by id, as `changes` gives them."""
        sets = sorted((self.tagged.get(_tag(*item), {}) for item in tags.items()), key=len)
        found = (id for id in sorted(sets[0]) if all(id in others for others in sets[1:]))
        return [id for id in found if self.entry(id).changed(id & ROW_MASK) > since], self._change, True

    def _mark(self, entry: Entry, places: list[int] | None = None) -> None:
        self._change += 1
        entry.mark(self._change, places)
        self._changes.append((self._change, entry.num))
        if len(self._changes) > 2 * self._kept + 1024:
            self._changes = self._log()
            self._kept = len(self._changes)

    def _log(self) -> list[tuple[int, int]]:
        """The log of changes as it follows from the rows alone."""
        pairs = set()
        for entry in self.entries.values():
            changes = entry.change if isinstance(entry.change, list) else [entry.change]
            pairs |= {(change, entry.num) for change in changes}
        return sorted(pairs)

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
            table.num_rows += entry.num_live
            for i in (i for i in range(entry.n) if entry.live[i] == LIVE):
                if entry.keys is not None:
                    table.keys[entry.keys[i]] = row_id(entry.num, i)
                if entry.tags is not None:
                    table._index_tags(row_id(entry.num, i), entry.tag(i))
        table.tasks = {fields["name"]: Task.load(fields) for fields in state["tasks"]}
        table.next_record, table.ended_by = state["next_record"], list(state["ended_by"])
        table.num_put, table.num_refused = state["num_put"], state["num_refused"]
        table.newest_version = state["newest_version"]
        table._change, table._changes = state["change"], table._log()
        table.cleared = Numbers(state["cleared"])
        return table


def _tag(name: str, value: Any) -> str:
    return f"{name}={orjson.dumps(value).decode()}"
