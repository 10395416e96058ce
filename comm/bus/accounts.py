"""Every prompt group that is not behind us: its step, its state, who holds it; and what may be admitted next.

Owns admission, the membership of a step, the counts of promise B1, and when a run has to end for want of prompts that train.
Pure, and a part of the index's fold (`index.py`), which moves groups; `group.py` holds what was put of one.

    waiting --grant--> running --all n rows visible--> ready --commit--> trained
       ^                 |  |                            `--commit, beyond the first P--> surplus
       `--lose, error----'  `--settle--> filtered | failed        too many errors --> quarantined

Invariants: a group trains at the step it was admitted for and at no other; a step is its first P survivors in admission order;
accounts count samples, whatever rows they have; at every moment
admitted = trained + filtered + surplus + failed + quarantined + waiting + running + ready.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rondo.comm.bus.curriculum import Rests
from rondo.comm.bus.group import LIVE, SETTLED, Group
from rondo.comm.bus.journal import Event
from rondo.comm.bus.rounds import Stream, mini_batch_of

_MOST_UNSCORED = 5
"""Prompt groups that may fail before any sample of a run has had a reward: what has never worked will not."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the index must hold to; fixed for a run."""

    num_steps: int
    groups_per_step: int  # P, in prompt groups
    samples_per_group: int  # n
    max_staleness: int  # in policy versions
    base_columns: tuple[str, ...]  # written by rollout
    streams: tuple[Stream, ...]
    row_bytes: int  # worst case of one sample's record, all its parts, in a rollout ring
    media_bytes: int = 0  # worst case of the record with a prompt group's media; 0: there are none
    num_slots: int = 2
    spare_groups: int = 0
    max_consecutive_filtered: int = 1000
    max_consecutive_failed: int = 100
    max_data_failures: int = 2
    max_infra_failures: int = 5
    num_positions: int | None = None  # data-set rows times passes; None is endless
    looks: bool = False  # at rows before they are admitted, since a filter or a curriculum leaves some out
    rests: Rests | None = None  # of a curriculum


class Accounts:
    """What stands where; `rules` are fixed."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.version: int | None = None  # newest committed policy version; None before the first commit
        self.next_group = 0
        self.next_position = 0
        self.numbers: dict[str, int] = {}  # source -> its rows that were admitted or left out; where rows are looked at
        self.left_out: dict[str, int] = {}  # why rows were left out -> how often
        self.left_in_a_row: dict[str, list[int]] = {}  # source -> rows a filter leaves out, rows that rest, of so many
        self.groups: dict[int, Group] = {}
        self.steps: dict[int, list[int]] = {}  # uncommitted step -> its groups in admission order
        self.counts: dict[str, int] = {"admitted": 0, **dict.fromkeys((*LIVE, *SETTLED), 0)}
        self.consecutive_filtered = 0
        self.consecutive_failed = 0  # failed and quarantined prompt groups since one was ready or filtered
        self.last_error = ""  # of the last of them, or why one was filtered
        self.unscored: int | None = (
            0  # prompt groups that failed for their own fault; None once any sample had a reward
        )
        # Found again from the groups: what is asked for often, without a scan.
        self._alive: dict[int, int] = {}  # step -> its groups that are not settled
        self._waiting: dict[int, list[int]] = {}  # step -> its waiting groups, sorted: in admission order
        self._held: dict[str, set[int]] = {}  # member -> the groups that it has a lease on

    def _saw(self, rewards: Iterable[float | None]) -> None:
        """Rewards of samples that were put or settled."""
        if self.unscored is not None and any(reward is not None for reward in rewards):
            self.unscored = None

    # ---- moves ------------------------------------------------------------------------------------------------------

    def _move(self, group: Group, state: str) -> None:
        if group.state == state:  # a new attempt finds groups that wait already
            return
        self.counts[group.state] -= 1
        self.counts[state] += 1
        if group.state == "waiting":
            self._waiting[group.step].remove(group.id)
        elif state == "waiting":
            bisect.insort(self._waiting.setdefault(group.step, []), group.id)
        if state in SETTLED:
            self._alive[group.step] -= 1
        group.state = state

    def _list(self, group: Group) -> None:
        """Take a group into the lists that are found again from the groups."""
        if group.state in LIVE:
            self._alive[group.step] = self._alive.get(group.step, 0) + 1
        if group.state == "waiting":
            bisect.insort(self._waiting.setdefault(group.step, []), group.id)
        if group.holder is not None:
            self._held.setdefault(group.holder, set()).add(group.id)

    def _hold(self, group: Group, member: str | None) -> None:
        if group.holder is not None:
            self._held[group.holder].discard(group.id)
        if member is not None:
            self._held.setdefault(member, set()).add(group.id)
        group.holder = member

    def _outstanding(self) -> Iterator[Group]:
        return (group for group in list(self.groups.values()) if group.state in LIVE)

    # ---- questions --------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The oldest uncommitted step: the version it trains on has the same number."""
        return self.version if self.version is not None else 0

    @property
    def next_version(self) -> int:
        """The version that is committed next."""
        return 0 if self.version is None else self.version + 1

    @property
    def done(self) -> bool:
        return self.version is not None and (
            self.version >= self.rules.num_steps or (self._out_of_data and not self._all_left_out)
        )

    @property
    def _out_of_data(self) -> bool:
        """The data ended, and what is left of them cannot fill the oldest step: the run ends with whole steps."""
        if self.rules.num_positions is None:
            return False
        return self._alive.get(self.step, 0) + self._num_left < self.rules.groups_per_step

    @property
    def _num_left(self) -> int:
        """Rows that were not taken yet, of data that end."""
        assert self.rules.num_positions is not None
        taken = self.numbers.get("", self.next_position) if self.rules.looks else self.next_position
        return self.rules.num_positions - taken

    @property
    def _all_left_out(self) -> str:
        """Why no step can fill, where a filter leaves too few rows; else empty."""
        most = max(self.left_out, key=self.left_out.__getitem__, default="")
        fix = f"Most often: {most}. Correct data.filter, or take other data"
        for source, (filtered, rested, of) in self.left_in_a_row.items():
            if filtered >= of and not rested:
                return f"data.filter must leave rows{f' of {source}' * bool(source)}, got none of {of}. {fix}"
        if not self.version and self.left_out and self._out_of_data:
            return f"data.filter must leave a step's {self.rules.groups_per_step} rows before the data end, got fewer. {fix}"
        return ""

    def imbalance(self, *, scan: bool = True) -> str:
        """Empty while promise B1 holds; else the sentence that stops the run. `scan`: count the living groups one by one too."""
        counts = self.counts
        if counts["admitted"] != sum(counts[state] for state in (*LIVE, *SETTLED)):
            return f"prompt groups must balance, got {counts}"
        live = dict.fromkeys(LIVE, 0)
        for group in self.groups.values() if scan else ():
            if group.state in live:
                live[group.state] += 1
        if not scan or all(counts[state] == live[state] for state in LIVE):
            return ""
        return f"prompt groups must balance, got {counts} against {live} outstanding"

    def survivors(self, step: int) -> list[int]:
        """Groups of a step that have not been settled, in admission order."""
        return [g for g in self.steps.get(step, ()) if g in self.groups and self.groups[g].state in LIVE]

    def membership(self, step: int) -> list[int]:
        """The ready groups whose place among the step's first P survivors is certain, in admission order."""
        first, groups = self.survivors(step)[: self.rules.groups_per_step], self.groups
        return [g for g in first if groups[g].state == "ready"]

    def mini_batches(self, step: int, num: int) -> list[list[int]]:
        """`membership` by mini-batch: without the groups that change theirs when one that is not ready yet, before them, is
        settled and those behind it move up."""
        if num == 1:
            return [self.membership(step)]
        needed, missing = self.rules.groups_per_step, 0
        batches: list[list[int]] = [[] for _ in range(num)]
        for place, id in enumerate(self.survivors(step)[:needed]):
            if self.groups[id].state != "ready":
                missing += 1
            elif (batch := mini_batch_of(place, needed, num)) == mini_batch_of(place - missing, needed, num):
                batches[batch].append(id)
        return batches

    def held_by(self, member: str) -> list[Group]:
        """The groups that this member has a lease on."""
        return [self.groups[id] for id in sorted(self._held.get(member, ()))]

    def running(self) -> list[Group]:
        """The groups that anyone has a lease on."""
        return [self.groups[id] for held in self._held.values() for id in sorted(held)]

    def waiting(self, step: int) -> list[Group]:
        """The groups of a step that wait for a lease, in admission order."""
        return [self.groups[id] for id in self._waiting.get(step, ())]

    def plan_admissions(self, step: int) -> list[Event]:
        """Admissions that bring a step to P + spare groups; fewer when the data end."""
        alive = self._alive.get(step, 0)
        missing = self.rules.groups_per_step + self.rules.spare_groups - alive
        if self.rules.num_positions is not None:
            left = self._num_left
            if alive + left < self.rules.groups_per_step:
                return []  # a step that cannot fill is not begun
            missing = min(missing, left)
        return [
            {"event": "admit", "group": self.next_group + i, "step": step, "position": self.next_position + i}
            for i in range(missing)
        ]

    def open_steps(self, engine_version: int) -> range:
        """Steps that an engine with this proved version may work for: k - e <= max_staleness."""
        return range(self.step, min(engine_version + self.rules.max_staleness + 1, self.rules.num_steps))

    def wanting(self, engine_version: int) -> Iterator[int]:
        """Those of them that lack prompt groups, or have some that wait for a lease."""
        whole, alive, waiting = self.rules.groups_per_step + self.rules.spare_groups, self._alive, self._waiting
        return (step for step in self.open_steps(engine_version) if alive.get(step, 0) < whole or waiting.get(step))

    def entries(self, group: Group) -> list[int]:
        """Room (bytes a record) to reserve for what is still missing of a group; its media come first.

        Where a prompt has no media, its first sample uses up their room.
        """
        media = [self.rules.media_bytes] if self.rules.media_bytes and not group.media else []
        return media + [self.rules.row_bytes] * (group.num_samples - group.known_samples.bit_count())

    def starving(self) -> str:
        """Why the oldest step can never fill, or empty while it can."""
        if self.consecutive_filtered > self.rules.max_consecutive_filtered:
            return (
                f"filtered prompt groups in a row must be at most {self.rules.max_consecutive_filtered} "
                f"(rollout.max_consecutive_filtered), got {self.consecutive_filtered}. The last one was filtered for: "
                f"{self.last_error}"
            )
        if (self.unscored or 0) >= _MOST_UNSCORED:
            return (
                f"a sample must have a reward, got none ever, and {self.unscored} prompt groups have failed. The last one failed "
                f"so: {self.last_error}"
            )
        if self.consecutive_failed > self.rules.max_consecutive_failed:
            return (
                f"failed prompt groups in a row must be at most {self.rules.max_consecutive_failed} "
                f"(rollout.max_consecutive_failed), got {self.consecutive_failed}. The last one failed so: {self.last_error}"
            )
        return self._all_left_out
