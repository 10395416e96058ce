"""Which rows the next batch of a task has, and where a reader goes on: decided from the state alone.

Owns the event that a plan becomes; not the waiting until there is enough (`coordinator.py`), and not the order of rows
(`samplers.py`).

    plan(table, task, who, reading, index)     -> a claim for all ranks, the end of the stream, or None: not enough yet

Invariant: batch k of a scope is planned once, for all its ranks and their peers; whoever asks again gets the same rows.
"""

from __future__ import annotations

from rondo.comm.bus.journal import Event
from rondo.comm.partitions.choosers import Ask
from rondo.comm.partitions.reading import Reading
from rondo.comm.partitions.samplers import chooser
from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import READY, WAITING, Runs, Task
from rondo.runtime.errors import Refused, SamplerFailed


def next_index(task: Task, name: str, reading: Reading) -> list[int]:
    """The first batch of the scope of this name that a reader has not acknowledged, and the pass that it belongs to."""
    scope = task.scopes.get(name)
    if scope is None:
        return [0, task.num_passes]
    unread = [
        k
        for (holder, k), claim in task.claims.items()
        if holder == name and reading.rank < len(claim.rows) and reading.peer not in claim.acked[reading.rank]
    ]
    index = min(unread, default=scope.next)
    return [index, scope.first_pass + sum(stop < index for stop in scope.stops)]


def planned(task: Task, name: str, reading: Reading, index: int) -> tuple[Runs | None] | None:
    """The reader's rows of a batch that is planned, (None,) where the stream ends; None for the next one to plan."""
    claim, scope = task.claims.get((name, index)), task.scopes.get(name)
    if claim is not None:
        if reading.ranks != len(claim.rows):
            raise Refused(f"every reader of a scope must name {len(claim.rows)} ranks, got {reading.ranks}.")
        return (claim.rows[reading.rank],)
    if scope is not None and index in scope.stops:
        return (None,)
    expected = scope.next if scope is not None else 0
    if index != expected:
        raise Refused(
            f"batch {index} of task {task.name} must be open or the next one ({expected}), got one that is "
            "acknowledged or too early. Begin the stream anew."
        )
    return None


def plan(
    table: Table, task: Task, member: str, name: str, reading: Reading, index: int, version: int | None
) -> Event | None:
    """The scope's next batch for all its ranks; None when there is not enough yet. `version`: the one that staleness counts back
    from, None: the newest that a row was put with."""
    now, over = reading.until == "now", table.ended and not task.counts[WAITING]
    version = table.newest_version if version is None else version
    event: Event = {"part": table.id, "task": task.name, "scope": name, "k": index, "member": member}
    if task.counts[READY]:
        try:
            asked = task.chooser = task.chooser or chooser(table, task)
            picked = asked.pick(Ask(reading.ranks, reading.batch, reading.partial or over or now, over, version))
        except SamplerFailed:
            task.chooser = None  # made anew when somebody asks again
            raise
        if picked is not None:
            mark = {"mark": asked.mark} if asked.mark != task.mark else {}
            return {**event, "event": "claim", "rows": picked, "peers": reading.peers, **mark}
    if now or (over and not task.may_come_back(name)):
        return {**event, "event": "stop"}
    return None
