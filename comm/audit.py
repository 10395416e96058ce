"""What the journal says happened to every sample: admitted, put, committed, compared with each other, row by row.

Owns reading journals after the fact, and nothing that runs; shares no code with the index, so that a fault there shows here.
Events are taken at their word only where they are somebody's act (admitted, put, settled, committed); outcomes are derived:
the first P survivors of a committed step, in admission order, must have been trained, each row of each sample once by every role
that trains the step, after it was put.

    audit(run_dir / "journal", samples_per_group=8, groups_per_step=32)
        -> Audit(num_admitted=9600, num_trained=9600, num_lost=0, num_trained_twice=0, ...)

A later attempt begins with the snapshot of a checkpoint: what happened beyond it was rolled back and counts no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rondo.comm.journal import Event, files, read
from rondo.runtime.errors import CorruptData

OUTCOMES = ("trained", "filtered", "surplus", "failed", "quarantined")


@dataclass(frozen=True, slots=True)
class Audit:
    """All counts are of samples, but `num_leases_lost`, which is of prompt groups.

    lost: had to be trained by a committed step and was not, or not with all of its rows, or not by every role; trained twice:
    with any of them, by any role; unexpected: rows trained without having been put.
    """

    num_admitted: int
    num_put: int
    num_trained: int
    num_lost: int
    num_trained_twice: int
    num_unexpected: int
    num_leases_lost: int
    outcomes: dict[str, int] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    """Policy versions between a sample's step and its oldest token -> samples trained so."""


def audit(
    folder: Path,
    samples_per_group: int,
    groups_per_step: int,
    *,
    max_data_failures: int = 2,
    max_infra_failures: int = 5,
) -> Audit:
    """Read all journal files of a run. CorruptData when the last one was changed after it was written; from an earlier one, which
    a power failure may have torn and a checkpoint replaced, what is whole is taken."""
    ledger = _Ledger(samples_per_group, groups_per_step, max_data_failures, max_infra_failures)
    return count(_events(files(folder)), ledger)


def _events(paths: Sequence[Path]) -> Iterator[Event]:
    for path in paths:
        try:
            yield from read(path)
        except CorruptData:
            if path == paths[-1]:
                raise


def count(events: Iterable[Event], ledger: _Ledger) -> Audit:
    snapshot: Event | None = None
    for event in events:
        if event["event"] == "attempt" and snapshot is not None:
            ledger.roll_back(snapshot["state"])
        snapshot = event if event["event"] == "snapshot" else None
        act = getattr(ledger, "on_" + event["event"], None)
        if act is not None:
            act(event)
    return ledger.totals()


Sample = tuple[int, int]
"""Group, sample."""
Row = tuple[int, int, int]
"""Group, sample, part."""


class _Ledger:
    def __init__(self, n: int, groups_per_step: int, max_data_failures: int, max_infra_failures: int) -> None:
        self.n, self.groups_per_step = n, groups_per_step
        self.limits = {"data": max_data_failures, "infra": max_infra_failures}
        self.steps: dict[int, list[int]] = {}  # step -> groups in admission order
        self.put: dict[int, dict[int, int]] = {}  # group -> sample that was on the bus -> its parts
        self.trained: Counter[tuple[str, Row]] = Counter()  # by role
        self.prepared: dict[
            str, tuple[str, list[Row]]
        ] = {}  # role -> (member, what it has trained for the next version)
        self.ended: dict[int, str] = {}  # group -> outcome, or "lost"
        self.failures: Counter[tuple[int, str]] = Counter()
        self.holder: dict[int, tuple[str, int]] = {}  # running group -> (member, epoch)
        self.promised: dict[str, int] = {}  # reservation -> rows that its holder still has room for
        self.num_lost = self.num_unexpected = self.num_leases_lost = 0
        self.num_committed_steps = 0
        self.oldest: dict[Sample, int] = {}  # policy version of its oldest token
        self.ages: dict[Sample, int] = {}

    def on_admit(self, event: Event) -> None:
        self.steps.setdefault(event["step"], []).append(event["group"])

    def on_grant(self, event: Event) -> None:
        self.holder[event["group"]] = (event["member"], event["epoch"])
        self.promised[f"group.{event['group']}.{event['epoch']}"] = len(event["entries"])

    def on_put(self, event: Event) -> None:
        if "info" not in event:
            return
        rows = _rows(event)
        there = {group: set(self.put.get(group, ())) for group, *_ in event["spans"]}
        for (group, sample, part), *info in zip(rows, *event["info"], strict=True):
            held = group in self.holder and self.holder[group][1] == event["epoch"]
            if held and sample >= 0 and sample not in there[group]:
                parts = self.put.setdefault(group, {})
                parts[sample] = max(parts.get(sample, 0), part + 1)
                if info[3] >= 0:  # a row of an environment alone has no version
                    self.oldest[group, sample] = min(info[3], self.oldest.get((group, sample), info[3]))
        for group in there:
            if len(self.put.get(group, ())) == self.n:
                self.holder.pop(group, None)
        self._use_room(event["reservation"], event["entries"])
        if event["reservation"] not in self.promised:
            # Samples put twice have used up the room of those that are missing.
            self._fail(rows[0][0], event["epoch"], "data")

    def on_abandon(self, event: Event) -> None:
        self.promised.pop(f"group.{event['group']}.{event['epoch']}", None)

    def on_lose(self, event: Event) -> None:
        self._fail(event["group"], event["epoch"], "infra")

    def on_error(self, event: Event) -> None:
        self._fail(event["group"], event["epoch"], "data")

    def on_dead(self, event: Event) -> None:
        self.prepared = {role: each for role, each in self.prepared.items() if each[0] != event["member"]}
        for group, (member, epoch) in list(self.holder.items()):
            if member == event["member"]:
                self._fail(group, epoch, "infra")

    def on_settle(self, event: Event) -> None:
        if self.holder.get(event["group"], ("", -1))[1] != event["epoch"]:
            return  # too late: the lease was lost, or the group is complete
        self.ended.setdefault(event["group"], event["outcome"])
        self.holder.pop(event["group"], None)

    def on_prepared(self, event: Event) -> None:
        self.prepared[event["role"]] = event["member"], _rows(event)

    def on_commit(self, event: Event) -> None:
        step = event["version"] - 1
        reports = {role: rows for role, (_, rows) in self.prepared.items()} | {event["role"]: _rows(event)}
        self.prepared.clear()
        roles = [role for role, rows in reports.items() if rows]
        for role in roles:
            rows = reports[role]
            self.trained.update((role, row) for row in rows)
            self.ages |= {row[:2]: step - self.oldest[row[:2]] for row in rows if row[:2] in self.oldest}
            self.num_unexpected += sum(part >= self._num_parts(group, sample) for group, sample, part in rows)
        survivors = [group for group in self.steps.get(step, ()) if group not in self.ended]
        for place, group in enumerate(survivors):
            missing = sum(not self._is_trained(group, sample, roles) for sample in range(self.n))
            if place >= self.groups_per_step and missing == self.n:
                self.ended[group] = "surplus"
            else:
                self.num_lost += missing
                self.ended[group] = "trained"
        self.num_committed_steps = max(self.num_committed_steps, event["version"])

    def _num_parts(self, group: int, sample: int) -> int:
        return self.put.get(group, {}).get(sample, 0)

    def _is_trained(self, group: int, sample: int, roles: list[str]) -> bool:
        rows = [(group, sample, part) for part in range(max(1, self._num_parts(group, sample)))]
        return bool(roles) and all((role, row) in self.trained for role in roles for row in rows)

    def _use_room(self, reservation: str, num_rows: int) -> None:
        left = self.promised.get(reservation, 0) - num_rows
        if left > 0:
            self.promised[reservation] = left
        else:
            self.promised.pop(reservation, None)

    def _fail(self, group: int, epoch: int, kind: str) -> None:
        if self.holder.get(group, ("", -1))[1] != epoch:
            return
        del self.holder[group]
        self.failures[group, kind] += 1
        self.num_leases_lost += 1
        if self.failures[group, kind] > self.limits[kind]:
            self.ended[group] = "quarantined"

    def roll_back(self, state: dict[str, Any]) -> None:
        """Forget what a checkpoint does not know: groups admitted after it, and what became of those it left open."""
        version = state["version"] if state["version"] is not None else 0
        waiting = {group["id"]: group for group in state["groups"] if group["state"] in ("waiting", "running", "ready")}
        self.steps = {
            step: [group for group in groups if group < state["next_group"]] for step, groups in self.steps.items()
        }
        known = {group for groups in self.steps.values() for group in groups} - waiting.keys()
        self.put = {group: samples for group, samples in self.put.items() if group in known}
        self.oldest = {sample: version for sample, version in self.oldest.items() if sample[0] in known}
        self.ages = {sample: age for sample, age in self.ages.items() if sample[0] in known}
        self.trained = Counter({each: times for each, times in self.trained.items() if each[1][0] in known})
        self.prepared.clear()
        self.ended = {group: outcome for group, outcome in self.ended.items() if group in known}
        self.holder.clear()
        self.promised.clear()
        self.failures.clear()
        for group, fields in waiting.items():
            self.failures[group, "data"] = fields["data_failures"]
            self.failures[group, "infra"] = fields["infra_failures"]
        self.num_committed_steps = version

    def totals(self) -> Audit:
        trained = len({row[:2] for _, row in self.trained})
        outcomes = {name: self.n * sum(outcome == name for outcome in self.ended.values()) for name in OUTCOMES}
        return Audit(
            num_admitted=self.n * sum(len(groups) for groups in self.steps.values()),
            num_put=sum(len(samples) for samples in self.put.values()),
            num_trained=trained,
            num_lost=self.num_lost,
            num_trained_twice=len({row[:2] for (_, row), times in self.trained.items() if times > 1}),
            num_unexpected=self.num_unexpected,
            num_leases_lost=self.num_leases_lost,
            outcomes=outcomes | {"trained": trained},
            staleness=dict(sorted(Counter(self.ages.values()).items())),
        )


def _rows(event: Event) -> list[Row]:
    return [(group, first + i, part) for group, part, first, count in event["spans"] for i in range(count)]
