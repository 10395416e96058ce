"""Who works on which prompt group: leases, with room for what comes of them, and evaluations, before leases or beside them.

Owns the answers to rollout replicas and the ends that they report. Does not own admission and outcomes (`accounts.py`), room
(`space.py`, `transitions.py`) or which evaluation is due (`evaluations.py`).

Invariant: a lease is granted only with room promised for all that is missing of its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rondo.comm.bus import wakes
from rondo.comm.bus.evaluations import Asked
from rondo.comm.bus.group import FINISH, Group
from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Event
from rondo.comm.bus.transitions import Transitions, at_once
from rondo.comm.bus.versions import EVALUATION_READER, engine_reader
from rondo.runtime.actors.actor import endpoint
from rondo.runtime.errors import Refused


class Leasing(Transitions):
    """Endpoints of rollout replicas."""

    @endpoint
    async def lease(
        self, member: str, incarnation: int, max_groups: int, held: list[list[int]], rank: int = 0
    ) -> dict[str, Any]:
        """Work for a rank of a rollout replica that works on `held` ([group, epoch] each); waits until there is some. One of:

        {"grants": [{group, epoch, step, position, row, ring, has_media, have: [[sample, verdict, response], ...]}, ...]}
        {"look": {"position", "numbers"}}: tell first which rows come next (`lookahead.py`);
        {"evaluate": {"label", "version", "part", "of"}}: sample these of the held-out prompts with exactly this version; with
        "parts", what was found of all of them: say what they are together;
        {"end": True}: the run needs nothing more, or nothing of this replica, which leaves and has put all that it was granted.

        What was granted and is not held was in an answer that got lost: it is granted again, the same.
        """
        hold = {(group, epoch) for group, epoch in held}
        work = partial(self._work, member, incarnation, rank, max_groups, hold)
        return await self._until(member, incarnation, work, wakes.lease(member))

    def _work(
        self, member: str, incarnation: int, rank: int, max_groups: int, held: set[tuple[int, int]]
    ) -> dict[str, Any] | None:
        label = self._evaluations.due()
        if self.index.done and label is None:
            return {"end": True}
        mine = [group for group in self.index.held_by(member) if group.rank == rank]
        drains = self._drains(member, incarnation)
        if drains and not mine:
            return {"end": True}
        version = self.index.versions.proved.get(f"{member}/{engine_reader(rank)}")
        if version is None or self._draining:
            return None
        unheard = [group for group in mine if (group.id, group.epoch) not in held]
        if unheard:
            return {"grants": [lease_of(self.index, group) for group in unheard]}
        if drains:
            return None
        if label is not None:
            target = 0 if label == "start" else self.index.version
            return self._evaluations.part_of(label, version, (member, incarnation, rank)) if version == target else None
        grants = self._grants(member, incarnation, rank, version, min(max_groups, self._share(version) - len(mine)))
        if not grants and self._lookahead.wanted is not None:
            return {"look": self._lookahead.wanted}
        return {"grants": grants} if grants else None

    @at_once
    def looked_at(
        self, member: str, incarnation: int, position: int, sources: list[list[Any]],
        source: str, number: int, rows: list[list[Any]], num_rows: int,
    ) -> None:  # fmt: skip
        """The answer to a look: [source, how many rows of it come before] from a position on, and [row, why a filter leaves it
        out or ""] of its source from a number on, of so many in a pass."""
        self._lookahead.tell(position, sources, source, number, rows, num_rows)

    def _share(self, version: int) -> int:
        """The most prompt groups that one engine may have at once: its part of the steps that it may work for, so that who asks
        first leaves some to the others."""
        rules, num_steps = self.index.rules, len(self.index.open_steps(version))
        num_engines = self.index.versions.num_engines(besides=self._draining_members)
        return -(-num_steps * (rules.groups_per_step + rules.spare_groups) // max(1, num_engines))

    @endpoint
    async def evaluation(self, member: str, incarnation: int) -> dict[str, Any]:
        """An evaluation beside the training; waits until there is one that no living member works on. One of:

        {"evaluate": {"label", "version", "slot", "checksum", "attempt"}}: the slot is held until "evaluation.0" proves the
        version, and stays pinned until the label has a result, so that another replica can begin anew; one that somebody asked
        for has "sets", and no pin; {"end": True}.
        """

        def work() -> dict[str, Any] | None:
            if self._drains(member, incarnation):
                return {"end": True}
            self._end_lost_evaluations()
            label = None if self._draining else self._evaluations.beside(member, incarnation)
            if label is None:
                return {"end": True} if self.index.done and not self._evaluations.missing() else None
            place = self._evaluations.place(label)
            self._emit({"event": "hold", "slot": place["slot"], "reader": f"{member}/{EVALUATION_READER}"})
            return {"evaluate": {"label": label, **place}}

        return await self._until(member, incarnation, work, wakes.EVALUATIONS)

    @endpoint
    async def ask_evaluation(self, label: str, sets: list[str], version: int | None) -> dict[str, Any]:
        """Somebody wants these sets evaluated beside the training, or to know how that is: as `Evaluations.ask`."""
        self._end_lost_evaluations()
        if label not in self.index.evaluations and (self._draining or self.index.done):
            raise Refused(
                "a run must go on to be evaluated, got one that ends. Evaluate its checkpoint with `rondo eval`"
            )
        told = self._evaluations.ask(label, Asked(tuple(sets), version))
        self._wakes.wake([wakes.EVALUATIONS])
        return told

    def _end_lost_evaluations(self) -> None:
        for label, why in list(self._evaluations.lost()):
            self._emit({"event": "evaluated", "label": label, "result": {"skipped": why}})
            self._report("evaluation_failed", {"label": label, "why": why})

    def _grants(self, member: str, incarnation: int, rank: int, version: int, max_groups: int) -> list[dict[str, Any]]:
        grants: list[dict[str, Any]] = []
        self._lookahead.wanted, is_told = None, True
        for step in self.index.wanting(version):
            is_told = is_told and self._admit(step)
            for group in self.index.waiting(step):
                if len(grants) >= max_groups:
                    return grants
                entries = self.index.entries(group)
                ring = self._room(f"ring/{member}/{rank}", member, entries, oldest=step == self.index.step)
                if ring is None:
                    return grants
                self._fold({
                    "event": "grant", "group": group.id, "epoch": group.epoch, "member": member, "rank": rank,
                    "incarnation": incarnation, "version": version, "ring": ring, "entries": entries,
                })  # fmt: skip
                self._renewed[group.id] = self._granted[group.id] = self._clock()
                grants.append(lease_of(self.index, group))
        return grants

    def _admit(self, step: int) -> bool:
        """Prompt groups of a step, in their order; whether all rows of these are known."""
        for event in self.index.plan_admissions(step):
            for each in self._lookahead.plan(self.index, event) if self.index.rules.looks else (event,):
                self._fold(each)
            if self._lookahead.wanted is not None:
                return False
        return True

    @at_once
    def renew(
        self, member: str, incarnation: int, groups: list[list[int]], held: list[list[int]] | None = None
    ) -> dict[str, Any]:
        """Progress was seen on these [group, epoch]; the answer names those of all that are `held` whose lease is lost."""
        for group, epoch in groups:
            if self._leases(member, group, epoch):
                self._renewed[group] = self._clock()
        return {"lost": [[group, epoch] for group, epoch in held or groups if not self._leases(member, group, epoch)]}

    def _leases(self, member: str, group: int, epoch: int) -> bool:
        found = self.index.groups.get(group)
        return found is not None and found.state == "running" and found.epoch == epoch and found.holder == member

    @at_once
    def engines(self, member: str, incarnation: int, rank: int, healthy: int, of: int) -> None:
        """So many of the engines of this rank serve proved weights; told every few seconds."""
        self._floor.tell(member, rank, healthy, of)

    @at_once
    def settle(
        self, member: str, incarnation: int, group: int, epoch: int, outcome: str, why: str,
        rewards: Sequence[float | None] = (),
    ) -> None:  # fmt: skip
        """A group ends before it is ready: `filtered`, with what rewards its samples have; `failed`, without enough of them;
        `error` when its data failed (retried, then quarantined)."""
        held = self.index.groups.get(group)
        if held is None or held.state != "running" or held.epoch != epoch:
            return  # its lease ended meanwhile
        if outcome == "error":
            self._emit({"event": "error", "group": group, "epoch": epoch, "why": why})
            left = self.index.groups.get(group)
            outcome = left.state if left is not None else "quarantined"
        else:
            self._emit(self._settle(group, epoch, outcome, why) | ({"rewards": list(rewards)} if rewards else {}))
        if outcome != "filtered":
            self._report("group_error", {"group": group, "epoch": epoch, "why": why, "state": outcome})

    @at_once
    def abandon(self, member: str, incarnation: int, group: int, epoch: int) -> None:
        """The holder of a lease stopped working on it, whatever became of the group: what is left reserved returns."""
        if self.index.space.holds(f"group.{group}.{epoch}"):
            self._emit({"event": "abandon", "group": group, "epoch": epoch})

    def _settle(self, group: int, epoch: int, outcome: str, why: str) -> Event:
        return {"event": "settle", "group": group, "epoch": epoch, "outcome": outcome, "why": why}


def lease_of(index: Index, group: Group) -> dict[str, Any]:
    """What the holder of a group is told, with what earlier holders put:

    {"group": 7, "epoch": 0, "step": 1, "position": 7, "row": None, "ring": "ring/rollout-0/0", "has_media": False,
     "have": [[sample, verdict, response, finish], ...]}
    """
    return {
        "group": group.id, "epoch": group.epoch, "step": group.step, "position": group.position,
        "row": group.row, "ring": index.space.ring_of(group.reservation()),
        "has_media": bool(group.media),
        "have": [
            [sample, group.verdicts()[sample], group.response(sample), group.info[FINISH][sample]]
            for sample in group.numbers()
        ],
    }  # fmt: skip
