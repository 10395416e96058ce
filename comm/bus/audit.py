"""What the journal says happened to every sample: admitted, put, committed, compared with each other, row by row.

Owns the ledger, a fold over the journal's events of its own: it shares no code with the index, so that a fault there shows here.
Events are taken at their word only where they are somebody's act (admitted, put, settled, committed); outcomes are derived:
the first P survivors of a committed step, in admission order, must have been trained, each row of each sample once by every role
that trains the step, after it was put.

    audit(run_dir / "journal", samples_per_group=8, groups_per_step=32)
        -> Audit(num_admitted=9600, num_trained=9600, num_lost=0, num_trained_twice=0, ...)

The coordinator folds as it goes, and every snapshot and checkpoint carries the ledger (`"audit"` in its state); so old journal
files are needed by nobody, and whoever reads begins with the newest one. A new attempt goes on with its checkpoint's ledger: what
happened beyond it was rolled back and counts no more, but for what was lost.

Invariant: a group is open until its step is committed, then it is in the counts alone. Numbers of groups ascend, so one that was
admitted and is not open is behind us, and a row of it that is trained was trained twice: the ledger has the size of the open
steps, however long the run.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rondo.comm.bus.journal import Event, files, read

OUTCOMES = ("trained", "filtered", "surplus", "failed", "quarantined")


@dataclass(frozen=True, slots=True)
class Audit:
    """All counts are of samples, but `num_leases_lost`, which is of prompt groups.

    lost: had to be trained by a committed step and was not, or not with all of its rows, or not by every role; trained twice:
    with any of them, by any role, or after its step was over; unexpected: rows trained without having been put.
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
    """Read the journal of a run. CorruptData when its last file was changed after it was written."""
    ledger = Ledger(samples_per_group, groups_per_step, max_data_failures, max_infra_failures)
    for newest in files(folder)[-1:]:
        count(read(newest), ledger)
    return ledger.totals()


def count(events: Iterable[Event], ledger: Ledger) -> Audit:
    for event in events:
        ledger.apply(event)
    return ledger.totals()


Span = list[int]
"""Group, part, first sample, how many."""


@dataclass(slots=True)
class _Open:
    """A prompt group whose step is not committed. Sets of samples are bits of a number."""

    step: int
    outcome: str = ""  # settled before its step was committed
    holder: str = ""
    epoch: int = -1
    data: int = 0  # failures
    infra: int = 0
    put: dict[int, int] = field(default_factory=dict)  # part -> samples that have it on the bus
    oldest: dict[int, int] = field(default_factory=dict)  # sample -> policy version of its oldest token
    room: dict[str, int] = field(default_factory=dict)  # reservation -> rows that its holder still has room for
    trained: dict[str, dict[int, int]] = field(default_factory=dict)  # role -> part -> samples

    def trained_by_any(self) -> int:
        return functools.reduce(operator.or_, map(_union, self.trained.values()), 0)

    def forget(self) -> None:
        """A new life of the whole run: memory and leases of the old one are gone."""
        self.holder = ""
        for held in (self.put, self.oldest, self.room, self.trained):
            held.clear()

    def dump(self) -> list[Any]:
        return [
            self.step, self.outcome, self.holder, self.epoch, self.data, self.infra, _texts(self.put),
            [*self.oldest.items()], self.room, {role: _texts(parts) for role, parts in self.trained.items()},
        ]  # fmt: skip

    @classmethod
    def load(cls, fields: list[Any]) -> _Open:
        step, outcome, holder, epoch, data, infra, put, oldest, room, trained = fields
        return cls(
            step, outcome, holder, epoch, data, infra, _bits(put), dict(oldest), dict(room),
            {role: _bits(parts) for role, parts in trained.items()},
        )  # fmt: skip


class Ledger:
    """The fold. `apply` takes any event, and those that say nothing of samples change nothing."""

    def __init__(
        self, samples_per_group: int, groups_per_step: int, max_data_failures: int = 2, max_infra_failures: int = 5
    ) -> None:
        self.n, self.groups_per_step = samples_per_group, groups_per_step
        self.limits = {"data": max_data_failures, "infra": max_infra_failures}
        self.next_group = 0
        self.open: dict[int, _Open] = {}  # in admission order
        self.steps: dict[int, list[int]] = {}  # step that is not committed -> its groups, in admission order
        self.prepared: dict[
            str, tuple[str, list[Span]]
        ] = {}  # role -> member, rows it has trained for the next version
        self.counts: Counter[str] = (
            Counter()
        )  # of samples; of prompt groups: `leases_lost`, and outcomes of those behind us
        self.staleness: Counter[int] = Counter()

    def apply(self, event: Event) -> None:
        act = getattr(self, "on_" + event["event"], None)
        if act is not None:
            act(event)

    def on_snapshot(self, event: Event) -> None:
        if "audit" in event["state"]:
            self._load(event["state"]["audit"])

    def on_attempt(self, event: Event) -> None:
        self.prepared.clear()
        for group in self.open.values():
            if not group.outcome:
                group.forget()

    def roll_back(self, state: dict[str, Any]) -> None:
        """Be as a checkpoint with this state of the index was; what was lost stays lost. Without a checkpoint the state
        has no ledger, and is that of a new run."""
        faults = {name: self.counts[name] for name in ("lost", "unexpected", "leases_lost")}
        self._load(state.get("audit") or Ledger(self.n, self.groups_per_step).dump())
        for name, num in faults.items():
            self.counts[name] = max(num, self.counts[name])

    def on_admit(self, event: Event) -> None:
        if event["group"] >= self.next_group:
            self.open[event["group"]] = _Open(event["step"])
            self.steps.setdefault(event["step"], []).append(event["group"])
            self.next_group = event["group"] + 1
            self.counts["admitted"] += self.n

    def on_grant(self, event: Event) -> None:
        group = self.open.get(event["group"])
        if group is not None and not group.outcome:
            group.holder, group.epoch = event["member"], event["epoch"]
            group.room[f"group.{event['group']}.{event['epoch']}"] = len(event["entries"])

    def on_put(self, event: Event) -> None:
        if "info" not in event:
            return
        before = {id: _union(self.open[id].put) for id, *_ in event["spans"] if id in self.open}
        row = 0  # of the record
        for id, part, first, num in event["spans"]:
            group, samples = self._held(id, event["epoch"]), self._samples(first, num)
            if group is not None and samples:
                samples &= ~before[id]
                group.put[part] = group.put.get(part, 0) | samples
                versions = event["info"][3][row : row + num]
                if not group.oldest and samples.bit_count() == num and min(versions) >= 0:
                    group.oldest = dict(zip(range(first, first + num), versions, strict=True))
                    versions = ()
                for sample, version in enumerate(versions, first):
                    # A row of an environment alone has no version.
                    if 0 <= version < group.oldest.get(sample, version + 1) and samples >> sample & 1:
                        group.oldest[sample] = version
            row += num
        for id in before:
            if _union(self.open[id].put) == (1 << self.n) - 1:
                self.open[id].holder = ""
        self._use_room(event["spans"][0][0], event)

    def _use_room(self, id: int, event: Event) -> None:
        """A holder whose samples, put twice, have used up the room of those that are missing has failed."""
        group = self.open.get(id)
        if group is None:
            return
        left = group.room.pop(event["reservation"], 0) - event["entries"]
        if left > 0:
            group.room[event["reservation"]] = left
        else:
            self._fail(id, event["epoch"], "data")

    def on_abandon(self, event: Event) -> None:
        if event["group"] in self.open:
            self.open[event["group"]].room.pop(f"group.{event['group']}.{event['epoch']}", None)

    def on_lose(self, event: Event) -> None:
        self._fail(event["group"], event["epoch"], "infra")

    def on_error(self, event: Event) -> None:
        self._fail(event["group"], event["epoch"], "data")

    def on_dead(self, event: Event) -> None:
        self.prepared = {role: each for role, each in self.prepared.items() if each[0] != event["member"]}
        for id, group in self.open.items():
            if group.holder == event["member"]:
                self._fail(id, group.epoch, "" if event.get("asked") else "infra")

    def on_settle(self, event: Event) -> None:
        group = self._held(event["group"], event["epoch"])
        if group is not None:  # else too late: the lease was lost, or the group is complete
            group.outcome, group.holder = group.outcome or event["outcome"], ""

    def on_prepared(self, event: Event) -> None:
        self.prepared[event["role"]] = event["member"], event["spans"]

    def on_commit(self, event: Event) -> None:
        step = event["version"] - 1
        reports = {role: spans for role, (_, spans) in self.prepared.items()} | {event["role"]: event["spans"]}
        self.prepared.clear()
        roles = [role for role, spans in reports.items() if spans]
        everyone = (1 << self.n) - 1
        before: dict[int, int] = {}  # group -> samples that were trained, in part at least, before this commit
        twice: dict[int, int] = {}
        for role in roles:
            for id, part, first, num in reports[role]:
                group, samples = self.open.get(id), self._samples(first, num)
                if group is None and id < self.next_group:
                    twice[id] = twice.get(id, 0) | samples
                    continue
                if group is None or not samples:
                    self.counts["unexpected"] += num
                    continue
                before.setdefault(id, group.trained_by_any())
                parts = group.trained.setdefault(role, {})
                twice[id] = twice.get(id, 0) | parts.get(part, 0) & samples
                parts[part] = parts.get(part, 0) | samples
                self.counts["unexpected"] += (samples & ~group.put.get(part, 0)).bit_count()
        self.counts["twice"] += sum(samples.bit_count() for samples in twice.values())
        for id, samples in before.items():
            new, oldest = self.open[id].trained_by_any() & ~samples, self.open[id].oldest
            self.counts["trained"] += new.bit_count()
            chosen = (v for sample, v in oldest.items() if new >> sample & 1) if new != everyone else oldest.values()
            for version, num in Counter(chosen).items():
                self.staleness[step - version] += num
        self._close(step, roles)

    def _close(self, step: int, roles: list[str]) -> None:
        """Count the groups of a step that was committed; they are behind us."""
        mine = {id: self.open[id] for id in self.steps.pop(step, ())}
        for place, group in enumerate(group for group in mine.values() if not group.outcome):
            missing = self._num_missing(group, roles)
            if place >= self.groups_per_step and missing == self.n:
                group.outcome = "surplus"
            else:
                self.counts["lost"] += missing
                group.outcome = "trained"
        for id, group in mine.items():
            self.counts["put"] += _union(group.put).bit_count()
            self.counts[group.outcome + "_groups"] += 1
            del self.open[id]

    def _num_missing(self, group: _Open, roles: list[str]) -> int:
        """Samples that not every role has trained with all of their rows, of which each has one at least."""
        whole = everyone = (1 << self.n) - 1 if roles else 0
        for role in roles:
            for part, samples in (group.put | {0: everyone}).items():
                whole &= group.trained.get(role, {}).get(part, 0) | ~samples
        return self.n - whole.bit_count()

    def _samples(self, first: int, num: int) -> int:
        """Bits of a span's samples; none where a group has no such sample (media are nobody's)."""
        return ((1 << num) - 1) << first if 0 <= first <= first + num <= self.n else 0

    def _held(self, id: int, epoch: int) -> _Open | None:
        """The group, where somebody holds a lease on it of this epoch."""
        group = self.open.get(id)
        return group if group is not None and group.holder and group.epoch == epoch else None

    def _fail(self, id: int, epoch: int, kind: str) -> None:
        group = self._held(id, epoch)
        if group is None:
            return
        group.holder = ""
        if not kind:  # it was moved
            return
        self.counts["leases_lost"] += 1
        setattr(group, kind, getattr(group, kind) + 1)
        if getattr(group, kind) > self.limits[kind]:
            group.outcome = "quarantined"

    def totals(self) -> Audit:
        counts, open_ = self.counts, self.open.values()
        ended = Counter(group.outcome for group in open_)
        outcomes = {name: self.n * (counts[name + "_groups"] + ended[name]) for name in OUTCOMES}
        return Audit(
            num_admitted=counts["admitted"],
            num_put=counts["put"] + sum(_union(group.put).bit_count() for group in open_),
            num_trained=counts["trained"],
            num_lost=counts["lost"],
            num_trained_twice=counts["twice"],
            num_unexpected=counts["unexpected"],
            num_leases_lost=counts["leases_lost"],
            outcomes=outcomes | {"trained": counts["trained"]},
            staleness=dict(sorted(self.staleness.items())),
        )

    def dump(self) -> dict[str, Any]:
        """The whole ledger as plain JSON, for the snapshot or checkpoint of this moment."""
        return {
            "next_group": self.next_group,
            "open": [[id, *group.dump()] for id, group in self.open.items()],
            "prepared": self.prepared,
            "counts": self.counts,
            "staleness": [*self.staleness.items()],
        }

    def _load(self, fields: dict[str, Any]) -> None:
        self.next_group = fields["next_group"]
        self.open, self.steps = {id: _Open.load(group) for id, *group in fields["open"]}, {}
        for id, group in self.open.items():
            self.steps.setdefault(group.step, []).append(id)
        self.prepared = {role: (member, spans) for role, (member, spans) in fields["prepared"].items()}
        self.counts, self.staleness = Counter(fields["counts"]), Counter(dict(fields["staleness"]))


def _union(parts: dict[int, int]) -> int:
    return functools.reduce(operator.or_, parts.values(), 0)


def _texts(parts: dict[int, int]) -> list[list[Any]]:
    """Sets of samples as JSON has them, whose numbers have 64 bits."""
    return [[part, f"{samples:x}"] for part, samples in parts.items()]


def _bits(texts: list[list[Any]]) -> dict[int, int]:
    return {part: int(samples, 16) for part, samples in texts}
