"""The index of the bus: what the journal's events make of every prompt group, its rows, their memory and the weights.

Owns the fold: state changes only in `apply(event)`. Pure: `plan_*` methods look at the state and propose events without changing
it; no clock, no memory, no sockets: those are the coordinator's. `accounts.py` holds which groups there are and what becomes of
them, `group.py` what was put of one, `rounds.py` the part that consumers see, `space.py` the room in rings, `versions.py` the
weights.

Where several roles are trained on the same steps, a version is committed when each has reported it (`prepared`).

Invariant: the first visible put of a (group, sample), of a column of one of its rows, and of a group's media, wins.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rondo.comm.bus.accounts import Accounts, Rules
from rondo.comm.bus.curriculum import Curriculum
from rondo.comm.bus.group import LIVE, NO_VERSION, REWARD, SETTLED, Group
from rondo.comm.bus.journal import Event
from rondo.comm.bus.rounds import Round, Rounds
from rondo.comm.bus.space import Space
from rondo.comm.bus.versions import Versions
from rondo.comm.ring.records import GROUP_BLOB
from rondo.comm.ring.spans import Span, whole_samples
from rondo.runtime import formats

_MOST_REASONS, _OTHER_REASONS = 64, "other reasons"
"""Reasons of a user's filters that are counted one by one."""
_OF_VERSIONS = {
    "publishing": ("begin", "slot", "version"),
    "published": ("publish", "slot", "version", "checksum"),
    "hold": ("hold", "slot", "reader"),
    "let_go": ("let_go", "reader"),
    "proved": ("prove", "reader", "version"),
}
"""Events that change versions alone: what is called of them, with which fields."""


class Index(Accounts):
    """The fold. `apply` is total and deterministic: equal events give equal `dump()`, and an event that means nothing any more,
    since its lease, its ring or its group is gone, changes nothing."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.attempt = 0
        self.trainable = tuple(stream.name for stream in rules.streams if stream.kind == "train")
        self.checksums: dict[str, int] = {}  # trainable role -> checksum of its weights at `version`
        self.prepared: dict[str, dict[str, Any]] = {}  # trainable role -> what it has reported of the next version
        self.left: int | None = None  # the first step that a trainable role was told to leave: the run is being stopped
        self.refused_rows = 0
        self.media_bytes = 0  # put as media, ever, refused ones included
        self.row_bytes = 0  # put as samples, likewise
        self.num_overflow = 0  # overflow rings ever made: names the next one
        self.staleness: dict[int, int] = {}  # versions between a sample's step and its oldest token -> samples trained
        self.members: dict[str, list[int]] = {}  # group name -> [incarnation, ranks, 1 if alive]
        self.evaluations: dict[str, Event] = {}
        self.evaluation_parts: dict[str, dict[str, Any]] = {}  # label without a result -> part -> what was found of it
        self.space = Space()
        self.versions = Versions(rules.num_slots)
        self.rounds = Rounds(rules.streams)
        self.curriculum = None if rules.rests is None else Curriculum(rules.rests, rules.max_staleness)
        self._freed: list[tuple[str, int]] = []
        self._filled: set[str] = set()

    # ---- the fold -------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        kind = event["event"]
        if kind in _OF_VERSIONS:
            method, *fields = _OF_VERSIONS[kind]
            getattr(self.versions, method)(*[event[name] for name in fields])
            return
        handler: Callable[[Event], None] = getattr(self, "_on_" + kind)
        handler(event)

    def freed(self) -> list[tuple[str, int]]:
        """Rings whose tail moved since the last call, with the new tail: the effect left to the coordinator."""
        freed, self._freed = self._freed, []
        return freed

    def news(self) -> tuple[list[tuple[str, int | None]], set[str]]:
        """Since the last call: streams, and steps of them, of which more may be planned; members one of whose groups is ready."""
        filled, self._filled = self._filled, set()
        needed, news = self.rules.groups_per_step, self.rounds.news()
        return [
            (name, step) for name, step in news if step is None or self.rounds.may_train(name, step, needed)
        ], filled

    def _on_snapshot(self, event: Event) -> None:
        self.__dict__.update(Index.load(self.rules, event["state"]).__dict__)

    def _on_attempt(self, event: Event) -> None:
        """A new life of the whole run: rings, leases, rows and published weights of the old one are gone."""
        self.attempt = event["attempt"]
        self.members.clear()
        self.space, self.versions = Space(), Versions(self.rules.num_slots)
        self.rounds = Rounds(self.rules.streams)
        self.prepared.clear()
        self.left = None
        self.evaluation_parts.clear()
        for group in self._outstanding():
            self._hold(group, None)
            self._move(group, "waiting")
            group.epoch += 1
            group.forget_puts()

    def _on_ring(self, event: Event) -> None:
        overflow = event.get("overflow", False)
        self.num_overflow += overflow
        self.space.add(event["ring"], event["bytes"], event["member"], overflow=overflow)

    def _on_ring_dropped(self, event: Event) -> None:
        if event["ring"] in self.space.rings:
            self.space.remove(event["ring"])

    def _on_started(self, event: Event) -> None:
        self.members[event["member"]] = [event["incarnation"], event["ranks"], 1]

    def _on_dead(self, event: Event) -> None:
        """A whole incarnation is proved dead: nobody reads or writes for it any more. `asked`: it was to leave, so its death says
        nothing against the groups that it had; `left`: no other incarnation follows."""
        name = event["member"]
        if self.members.get(name, [None])[0] != event["incarnation"]:
            return
        self.members[name][2] = 0
        for group in self._outstanding():
            if group.state == "running" and group.holder == name:
                self._lose(group, f"{name} died", blames="" if event.get("asked") else "infra")
        for ring in self.space.rings.values():
            if ring.owner == name:
                for reservation in list(ring.reserved):
                    self.space.release(reservation)
        self.versions.forget(name)
        self.prepared = {role: report for role, report in self.prepared.items() if report["member"] != name}
        if event.get("publisher"):
            self.versions.abort_writes()
        for unpinned in self.rounds.forget(name):
            if unpinned in self.groups:
                self._free_if_done(self.groups[unpinned])
        if event.get("left"):
            del self.members[name]
            self.space.leave(name)
            self.rounds.leave(name)
        for group in self._outstanding():
            self._offer(group)

    def _on_join(self, event: Event) -> None:
        self.rounds.join(event["stream"], event["member"], event["ranks"], event["tokens"])

    def _on_admit(self, event: Event) -> None:
        if event["group"] < self.next_group or event["step"] < self.step:
            return
        group = Group(event["group"], event["step"], event["position"], self.rules.samples_per_group)
        self.groups[group.id] = group
        self.steps.setdefault(group.step, []).append(group.id)
        self.next_group, self.next_position = group.id + 1, event["position"] + 1
        self.counts["admitted"] += 1
        self.counts["waiting"] += 1
        self._list(group)
        if "row" in event:
            group.source, group.row = event["source"], event["row"]
            self.numbers[group.source] = event["number"] + 1
            self.left_in_a_row.pop(group.source, None)

    def _on_left_out(self, event: Event) -> None:
        """Rows of a source up to a number that no group is admitted with. Where nothing but such rows come in a whole pass, those
        that have rested longest are awake again: so a plan leaves no more of them out at once (`rows_to_a_pass`)."""
        source, rested = event["source"], sum(event["rested"].values())
        self.numbers[source] = event["number"]
        for why, count in (event["filtered"] | {f"rests, {kind}": n for kind, n in event["rested"].items()}).items():
            reason = f"{source}: {why}" if source else why
            reason = reason if reason in self.left_out or len(self.left_out) < _MOST_REASONS else _OTHER_REASONS
            self.left_out[reason] = self.left_out.get(reason, 0) + count
        before = self.left_in_a_row.get(source, [0, 0])
        now = [before[0] + sum(event["filtered"].values()), before[1] + rested, event["num_rows"]]
        if self.curriculum is not None and now[1] and now[0] + now[1] >= event["num_rows"]:
            self.curriculum.wake(event["step"], source)
            now = [0, 0, event["num_rows"]]
        self.left_in_a_row[source] = now

    def _on_grant(self, event: Event) -> None:
        group = self.groups.get(event["group"])
        if group is None or group.state != "waiting" or event["ring"] not in self.space.rings:
            return
        group.epoch, group.rank = event["epoch"], event.get("rank", 0)
        self._hold(group, event["member"])
        self._move(group, "running")
        self.space.reserve(group.reservation(), event["ring"], event["entries"])

    def _on_put(self, event: Event) -> None:
        """A record became visible. Its rows are accepted one by one, the parts of a sample all or none; whoever comes second is
        refused and counted."""
        ring, pos = event["ring"], event["pos"]
        if ring not in self.space.rings:
            return
        touched: dict[int, Group] = {}
        branched = "info" in event and [1 for _, part, *_ in event["spans"] if part]
        fresh = self._fresh(event["spans"]) if branched else {}
        row = 0  # of the record
        for span in event["spans"]:
            group, taken = self.groups.get(span[0]), 0
            if group is not None and event["attempt"] == self.attempt:
                taken = self._take(group, span, fresh.get(span[0], 0) if branched else -1, event, row)
                if taken:
                    touched[group.id] = group
            self.refused_rows += span[3] - taken
            row += span[3]
        if "info" in event:
            if event["spans"][0][2] == GROUP_BLOB:
                self.media_bytes += event["bytes"]
            else:
                self.row_bytes += event["bytes"]
                self._saw(event["info"][REWARD])
        self.space.record(ring, pos, event["bytes"], len(touched), event["reservation"], event["entries"])
        for group in touched.values():
            group.records.append([ring, pos])
            if group.state == "running" and group.whole:
                self.space.release(group.reservation())
                self._filled.add(group.holder or "")
                self._hold(group, None)
                self.consecutive_filtered = self.consecutive_failed = 0
                self._move(group, "ready")
            self._offer(group)
        if not touched and (tail := self.space.trim(ring)) is not None:
            self._freed.append((ring, tail))
        if "info" in event:
            self._lose_without_room(event)

    def _lose_without_room(self, event: Event) -> None:
        """A holder that puts samples twice uses up the room of those that are missing: its lease ends, since nobody could put
        the rest under it."""
        group = self.groups.get(event["spans"][0][0])
        held = group is not None and group.state == "running" and event["attempt"] == self.attempt
        if group is not None and held and event["epoch"] == group.epoch and not self.space.holds(group.reservation()):
            self._lose(group, f"{group.holder} put samples twice and has no room for the others", blames="data")

    def _fresh(self, spans: list[Span]) -> dict[int, int]:
        """The samples of each group that a record has with all of their several parts, and that nobody has put before."""
        able = [span for span in spans if span[0] in self.groups and self.groups[span[0]].has(*span[1:])]
        return {group: chosen & ~self.groups[group].known for group, chosen in whole_samples(able).items()}

    def _take(self, group: Group, span: Span, fresh: int, event: Event, row: int) -> int:
        """The rows of a record from `row` on, as many of them as are the first of their kind: media, samples among `fresh`, or
        derived columns (they have no info)."""
        _, part, first, count = span
        columns, place = event["columns"], [event["ring"], event["pos"], event["seq"], row]
        media = first == GROUP_BLOB and count == 1 and not part and "info" in event
        if not media and not group.has(part, first, count):
            return 0  # no row has such a number; a fold takes any record, since it has been journalled
        if "info" not in event:
            return group.take_columns(span, columns, place)
        if media:
            return int(group.take_media(columns, event["epoch"], event["info"][0][row], place))
        return group.take_samples(span, fresh, columns, event["epoch"], event["info"], place)

    def _on_lose(self, event: Event) -> None:
        """A lease ended without progress. The memory stays reserved until its holder abandons it or is proved dead."""
        group = self._leased(event)
        if group is not None:
            self._lose(group, event["why"], blames="infra")

    def _on_error(self, event: Event) -> None:
        """The holder reports that this group's data failed (a reward that raised, a prompt that does not fit)."""
        group = self._leased(event)
        if group is not None:
            self.space.release(group.reservation())
            self._lose(group, event["why"], blames="data")

    def _leased(self, event: Event) -> Group | None:
        """The group of an event whose lease is the one that the event means; None when it has ended meanwhile."""
        group = self.groups.get(event["group"])
        return group if group is not None and group.state == "running" and group.epoch == event["epoch"] else None

    def _on_abandon(self, event: Event) -> None:
        self.space.release(f"group.{event['group']}.{event['epoch']}")

    def _on_settle(self, event: Event) -> None:
        """The holder (filtered) or a deadline (failed) decided a group's outcome before it was ready.

        A deadline revokes the right to put, never the memory: that stays reserved until the holder abandons it or dies.
        """
        group = self.groups.get(event["group"])
        if group is None or group.state not in ("waiting", "running") or group.epoch != event["epoch"]:
            return
        self._saw(event.get("rewards", ()))
        if "rewards" in event and self.unscored is not None:
            self.unscored += 1
        if event["outcome"] == "filtered":
            self.space.release(group.reservation())
            self.consecutive_filtered += 1
            self.consecutive_failed, self.last_error = 0, event["why"]
            self._judge(group, event.get("rewards", ()))
        group.error = event["why"]
        self._end(group, event["outcome"])

    def _on_rounds(self, event: Event) -> None:
        """Rounds that were planned together; one event, since half of a plan would lose the rows of the other half."""
        for made in event["rounds"]:
            if not self._fits(made):
                continue
            self.rounds.add(made, self.groups)
            for rank, reserve in enumerate(made["reserve"]):
                if reserve is not None and reserve[1]:
                    self.space.reserve(f"{made['key']}.{rank}", reserve[0], reserve[1])

    def _fits(self, made: Round) -> bool:
        """Whether a round names groups and rings that are there, and is new."""
        for reserve in made["reserve"]:
            if reserve is not None and reserve[0] not in self.space.rings:
                return False
        for rank in made["spans"]:
            for id, *_ in rank:
                if id not in self.groups or self.groups[id].state != "ready":
                    return False
        return not self.rounds.knows(made["key"])

    def _on_ack(self, event: Event) -> None:
        self.space.release(f"{event['key']}.{event['rank']}")
        for unpinned in self.rounds.acknowledge(event["key"], event["rank"]):
            if unpinned in self.groups:
                self._free_if_done(self.groups[unpinned])

    def _on_prepared(self, event: Event) -> None:
        """One of several trainable roles holds the next version on every rank, and waits for the others."""
        if event["version"] == self.next_version:
            self.prepared[event["role"]] = {name: event[name] for name in ("member", "version", "checksum", "spans")}

    def _on_left(self, event: Event) -> None:
        """A trainable role was told to leave a step that it has not trained: neither it nor any behind it is committed."""
        self.left = event["step"] if self.left is None else min(self.left, event["step"])

    def _on_commit(self, event: Event) -> None:
        """The last trainable role holds version `version` on every rank too. Version v > 0 trained step v - 1, each role that
        trains it on exactly the rows of its spans."""
        if self.version is not None and event["version"] <= self.version:
            return
        reports = {**self.prepared, event["role"]: event}
        self.version, self.prepared = event["version"], {}
        self.checksums = {role: report["checksum"] for role, report in reports.items()}
        step = self.version - 1
        trained = {span[0] for report in reports.values() for span in report["spans"]}
        for group_id in self.steps.pop(step, []):
            group = self.groups.get(group_id)
            if group is None or group.state not in LIVE:
                continue
            if group_id in trained and group.state == "ready":
                for oldest, count in Counter(group.oldest()).items():
                    if oldest != NO_VERSION:
                        self.staleness[step - oldest] = self.staleness.get(step - oldest, 0) + count
                self._judge(group, group.verdicts())
                self._end(group, "trained")
            else:  # what its holder has reserved stays so until it is abandoned
                self._end(group, "surplus")
        self._alive.pop(step, None)
        self._waiting.pop(step, None)
        self.rounds.close(step)
        if self.curriculum is not None:
            self.curriculum.forget(self.version)

    def _judge(self, group: Group, rewards: Sequence[float | None]) -> None:
        if self.curriculum is not None and group.row is not None:
            self.curriculum.judge(group.step, group.id, group.source, group.row, rewards)

    def _on_pin(self, event: Event) -> None:
        """The version in this slot stays there until its evaluation has a result."""
        self.versions.pins[event["label"]] = event["slot"]

    def _on_evaluated(self, event: Event) -> None:
        self.evaluations[event["label"]] = event["result"]
        self.versions.pins.pop(event["label"], None)
        self.evaluation_parts.pop(event["label"], None)

    def _on_evaluated_part(self, event: Event) -> None:
        if event["label"] not in self.evaluations:
            self.evaluation_parts.setdefault(event["label"], {}).setdefault(str(event["part"]), event["found"])

    # ---- state changes shared by handlers ---------------------------------------------------------------------------

    def _lose(self, group: Group, why: str, *, blames: str) -> None:
        group.error = why
        self._hold(group, None)
        group.infra_failures += blames == "infra"
        group.data_failures += blames == "data"
        beyond = (
            group.infra_failures > self.rules.max_infra_failures or group.data_failures > self.rules.max_data_failures
        )
        if beyond:
            if blames == "data" and self.unscored is not None:
                self.unscored += 1
            self._end(group, "quarantined")
        else:
            group.epoch += 1
            self._move(group, "waiting")

    def _end(self, group: Group, outcome: str) -> None:
        if outcome in ("failed", "quarantined"):
            self.consecutive_failed, self.last_error = self.consecutive_failed + 1, group.error
        self._hold(group, None)
        self._move(group, outcome)
        self.rounds.withdraw(group.id, group.step)
        self._free_if_done(group)

    def _offer(self, group: Group) -> None:
        if group.state == "ready":
            self.rounds.offer(group)

    def _free_if_done(self, group: Group) -> None:
        """A settled group that nobody reads gives its memory back and is forgotten."""
        if group.state in SETTLED and not self.rounds.pinned(group.id):
            for ring, pos in group.records:
                tail = self.space.unuse(ring, pos)
                if tail is not None:
                    self._freed.append((ring, tail))
            del self.groups[group.id]

    # ---- questions --------------------------------------------------------------------------------------------------

    def rows_to_a_pass(self, source: str, num_rows: int) -> int:
        """How many more rows of a source make a whole pass of such as were left out."""
        filtered, rested, *_ = self.left_in_a_row.get(source, [0, 0])
        return max(1, num_rows - filtered - rested)

    def rests(self, step: int, source: str, row: int) -> str:
        """As what a row of a source rests at a step: "solved" or "hopeless"; "" while it is awake."""
        return "" if self.curriculum is None else self.curriculum.why(step, source, row)

    def trains(self, role: str, step: int) -> bool:
        """Whether a trainable role trains a step, or leaves its weights as they are."""
        return step >= self.rounds.lanes[role].spec.first_step

    def is_left(self, step: int) -> bool:
        """Whether a step is not committed any more, since a trainable role was told to leave it or one before."""
        return self.left is not None and step >= self.left

    def has_all(self, role: str, step: int) -> bool:
        """Whether every row of a step has all that a trainable role reads of it."""
        members = self._whole(step)
        return bool(members) and self.rounds.has_all(role, members)

    def _whole(self, step: int) -> list[int]:
        """All groups of a step, where they are certain; else none."""
        members = self.membership(step)
        return members if len(members) == self.rules.groups_per_step else []

    def plan_rounds(
        self, stream: str, member: str, incarnation: int, step: int | None, *, full: bool = False
    ) -> list[Round]:
        """The next rounds of a stream, of one step when it is named; [] when nothing is ready (`rounds.py`). full: of a step only
        those to which nothing could be added."""
        if step is None and self.rounds.lanes[stream].spec.whole_step:
            return self.rounds.plan_whole(stream, member, incarnation, self._whole, self.groups)
        if step is None:
            return self.rounds.plan_forward(stream, member, incarnation, self.groups)
        if not self.rounds.may_train(stream, step, self.rules.groups_per_step):
            return []
        certain = self.mini_batches(step, self.rounds.lanes[stream].spec.mini_batches)
        if self.rounds.lanes[stream].spec.fixed:  # only those that no other survivor stands before
            first = set(itertools.takewhile(lambda id: self.groups[id].state == "ready", self.survivors(step)))
            certain = [[id for id in batch if id in first] for batch in certain]
        needed = self.rules.groups_per_step
        return self.rounds.plan_train(stream, member, step, certain, needed, self.groups, full=full)

    # ---- persistence ------------------------------------------------------------------------------------------------

    _PLAIN = (
        "attempt",
        "version",
        "checksums",
        "prepared",
        "left",
        "next_group",
        "next_position",
        "numbers",
        "left_out",
        "left_in_a_row",
        "counts",
        "refused_rows",
        "media_bytes",
        "row_bytes",
        "num_overflow",
        "consecutive_filtered",
        "consecutive_failed",
        "last_error",
        "unscored",
        "members",
        "evaluations",
        "evaluation_parts",
    )

    def dump(self) -> dict[str, Any]:
        """The whole state as plain JSON; `load(rules, dump())` is an equal index."""
        return {
            **formats.stamp(formats.JOURNAL),
            **{name: getattr(self, name) for name in self._PLAIN},
            "staleness": [[age, count] for age, count in sorted(self.staleness.items())],
            "steps": [[step, list(groups)] for step, groups in self.steps.items()],
            "groups": [group.dump() for group in self.groups.values()],
            "space": self.space.dump(),
            "versions": self.versions.dump(),
            "rounds": self.rounds.dump(),
            "judged": [] if self.curriculum is None else self.curriculum.judged(),
        }

    @classmethod
    def load(cls, rules: Rules, state: dict[str, Any], where: object = "the dump of an index") -> Index:
        """An index from a dump of this or an older release; what that one did not know is as in a new index. ConfigError where it
        is too new or too old to be read."""
        formats.check(state, formats.JOURNAL, where, oldest=formats.OLDEST_JOURNAL)
        index = cls(rules)
        for name in cls._PLAIN:
            setattr(index, name, state.get(name, getattr(index, name)))
        index.counts = {**cls(rules).counts, **index.counts}
        index.staleness = dict(state["staleness"])
        index.steps = {step: list(groups) for step, groups in state["steps"]}
        index.groups = {group["id"]: Group.load(group) for group in state["groups"]}
        for group in index.groups.values():
            index._list(group)
        index.space = Space.load(state["space"])
        index.versions = Versions.load(state["versions"])
        index.rounds = Rounds.load(rules.streams, state["rounds"])
        if rules.rests is not None:
            index.curriculum = Curriculum(rules.rests, rules.max_staleness, state.get("judged", ()))
        return index
