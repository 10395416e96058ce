"""Policy versions: committed by those who train, published in slots of the slab, proved by those who read them.

Owns the endpoints of trainable roles and of readers of weights, and the check of what a commit names; not slots (`versions.py`)
or the bytes in them.

Invariant: a version is committed at most once, when every trainable role has reported it.
"""

from __future__ import annotations

from typing import Any

from rondo.comm.bus import wakes
from rondo.comm.bus.group import NEVER
from rondo.comm.bus.index import Index
from rondo.comm.bus.transitions import Transitions, at_once
from rondo.comm.ring.spans import Span, by_part, num_rows
from rondo.runtime.actors.actor import endpoint
from rondo.runtime.errors import Refused, Stopping


class Publishing(Transitions):
    """Endpoints of trainers and of readers of weights."""

    @at_once
    def committed(self, member: str, incarnation: int) -> dict[str, Any]:
        """The newest committed version, with its checksum for each trainable role; None before the first commit of a run.
        `restarts`: this member leaves to start again, in a run that goes on."""
        return {
            "version": self.index.version,
            "checksums": self.index.checksums,
            "attempt": self.index.attempt,
            "done": self.index.done,
            "restarts": self._drains(member, incarnation) and not (self._draining or self.index.done),
        }

    @endpoint
    async def await_version(
        self, member: str, incarnation: int, version: int, *, commits: bool = False, by: str = ""
    ) -> dict[str, Any]:
        """Waits until `version` or a newer one is committed. Stopping when the run is being stopped, and nothing is yet; for who
        takes part in this commit, when another role will not. by: until this trainable role has made it, for its part."""

        def reached() -> dict[str, Any] | None:
            newest = self.index.version
            if newest is not None and newest >= version:
                return {"version": newest}
            if by and self.index.prepared.get(by, {}).get("version") == version:
                return {"version": version}
            if commits:
                self._check_comes(version)
            elif newest is None:
                self._check_goes_on(f"version {version}")
            return None

        return await self._until(member, incarnation, reached)

    @at_once
    def step_on_bus(self, member: str, incarnation: int, step: int) -> dict[str, Any]:
        """What a whole step that is not committed yet paid for its longest trajectories, in seconds: from when half of its
        groups were there, and the version it trains on, to when the last was. 0 where samples came before a restart. Beside it
        the queues of now: prompt groups by state, and how full each ring is; how many rows were left out so far, by reason, and
        rest at this step."""
        times = sorted(self._put_at[group] for group in self.index.membership(step) if group in self._put_at)
        waited_s = max(0.0, times[-1] - max(times[(len(times) - 1) // 2], self._committed_at)) if times else 0.0
        rings = {name: (ring.head - ring.tail) / ring.capacity for name, ring in self.index.space.rings.items()}
        found = {"longest_wait_s": waited_s, "queues": dict(self.index.counts), "rings": rings}
        if self.index.rules.looks:
            found["left_out"] = dict(self.index.left_out)
        if self.index.curriculum is not None:
            found["resting"] = self.index.curriculum.num_resting(step)
        return found

    @at_once
    def commit(
        self,
        member: str,
        incarnation: int,
        attempt: int,
        version: int,
        checksum: int,
        spans: list[Span],
        role: str = "",
    ) -> dict[str, Any]:
        """Every rank of a trainable role (the only one, where none is named) holds version `version` of its weights, trained on
        exactly the rows of `spans`. At most once a version.

        With the last trainable role the version is committed, and its rows are released. Before, this role is prepared: it keeps
        the snapshots of `version` and of the one before, makes no further one, and waits (`await_version`). A death withdraws
        what was prepared. Answers the newest committed version. Stopping where another role will not train the step any more.
        """
        if attempt != self.index.attempt:
            raise Refused(f"commit must come from attempt {self.index.attempt}, got {attempt}. This process is late.")
        roles = self.index.trainable
        if role not in roles and (role or len(roles) != 1):
            raise Refused(
                f"commit must name the role that is trained, one of {', '.join(roles)}, got {role or 'none'}."
            )
        role = role or roles[0]
        if version != self.index.version and self.index.prepared.get(role, {}).get("version") != version:
            check_commit(self.index, role, version, checksum, spans)
            self._check_comes(version)
            last = set(roles) - {role} <= self.index.prepared.keys()
            groups = self.index.steps.get(version - 1, [])
            self._emit(
                {
                    "event": "commit" if last else "prepared", "role": role, "member": member, "version": version,
                    "checksum": checksum, "attempt": attempt, "spans": spans,
                }
            )  # fmt: skip
            if last:
                self._committed(groups)
        return {"version": self.index.version}

    def _check_comes(self, version: int) -> None:
        """Stopping for a version that one of several trainable roles does not make any more."""
        if len(self.index.trainable) > 1 and (self.index.is_left(version - 1) or (version and self.index.done)):
            raise Stopping(f"version {version} must be made by every trainable role, got one that has left its step.")

    def _committed(self, groups: list[int]) -> None:
        """`groups`: all that were admitted for the step that is over."""
        self._committed_at = self._clock()
        for times in (self._put_at, self._renewed, self._granted):
            for group in groups:
                times.pop(group, None)
        self._report("committed", {"version": self.index.version, "checksums": self.index.checksums})
        unbalanced = self.index.imbalance(scan=False)
        if unbalanced:
            self._report("fatal", {"cause": unbalanced})

    @endpoint
    async def begin_publish(self, member: str, incarnation: int, version: int) -> dict[str, Any]:
        """A slot of the slab that nobody holds; waits while every one is held."""

        def slot() -> dict[str, Any] | None:
            writable = self.index.versions.writable()
            if writable is None:
                return None
            self._emit({"event": "publishing", "slot": writable, "version": version})
            return {"slot": writable}

        return await self._until(member, incarnation, slot, wakes.SLOTS)

    @at_once
    def end_publish(self, member: str, incarnation: int, slot: int, version: int, checksum: int) -> None:
        self._emit({"event": "published", "slot": slot, "version": version, "checksum": checksum})
        for event in self._evaluations.keep(slot, version):
            self._emit(event)
            if event["event"] == "evaluated":
                self._report(
                    "evaluation_skipped", {"version": event["result"]["version"], "why": event["result"]["skipped"]}
                )

    @endpoint
    async def weights(
        self, member: str, incarnation: int, reader: str, newer_than: int, told: int | None = None
    ) -> dict[str, Any]:
        """The newest published version above `newer_than`, held for this reader ("role.rank") until it proves it; waits.
        Stopping for one that has none yet, when the run is being stopped.

        With `told`, the newest version that it was told of so: before that the slot of one that is being written, not held."""

        def newest() -> dict[str, Any] | None:
            slot = self.index.versions.newest
            if slot is None or self.index.versions.slots[slot].version <= newer_than:
                if newer_than < 0:
                    self._check_goes_on("weights")
                if self.index.done and self._evaluations.due() is None and not self._evaluations.missing():
                    return {"end": True}
                if newer_than == NEVER and self._drains(member, incarnation):
                    return {"end": True}
                coming = self.index.versions.coming
                version = self.index.versions.slots[coming].version if coming is not None else newer_than
                if told is None or version <= max(told, newer_than):
                    return None
                return {"coming": coming, "version": version, "attempt": self.index.attempt}
            ready = self.index.versions.slots[slot]
            self._emit({"event": "hold", "slot": slot, "reader": f"{member}/{reader}"})
            return {"slot": slot, "version": ready.version, "checksum": ready.checksum, "attempt": self.index.attempt}

        return await self._until(member, incarnation, newest, wakes.WEIGHTS)

    @at_once
    def proved(self, member: str, incarnation: int, reader: str, version: int) -> None:
        """This reader verified the checksum of `version` and serves it from now on."""
        self._emit({"event": "proved", "reader": f"{member}/{reader}", "version": version})

    @at_once
    def let_go(self, member: str, incarnation: int, reader: str) -> None:
        """This reader has done with the slot that it held, and serves what it served before."""
        self._emit({"event": "let_go", "reader": f"{member}/{reader}"})

    @at_once
    def evaluated(self, member: str, incarnation: int, label: str, result: dict[str, Any]) -> None:
        """The result of an evaluation; the first one for a label counts."""
        if label not in self.index.evaluations:
            self._emit({"event": "evaluated", "label": label, "result": result})
            if "skipped" in result:
                self._report("evaluation_failed", {"label": label, "why": result["skipped"]})
            else:
                self._report("metrics", {"evaluation": {"label": label, **result}})

    @at_once
    def evaluated_part(self, member: str, incarnation: int, label: str, part: int, found: dict[str, Any]) -> None:
        """What one engine found of its part; the first one counts."""
        if label not in self.index.evaluations and str(part) not in self.index.evaluation_parts.get(label, {}):
            self._emit({"event": "evaluated_part", "label": label, "part": part, "found": found})


def check_commit(index: Index, role: str, version: int, checksum: int, spans: list[Span]) -> None:
    """Refused unless `role` may report `version`, trained on `spans`."""
    expected = index.next_version
    if version != expected:
        raise Refused(f"commit must make version {expected}, got {version}. Restore the committed version first.")
    if version == 0 or not index.trains(role, version - 1):
        before = index.checksums.get(role, checksum)
        if spans or checksum != before:
            raise Refused(
                f"commit of version {version} must leave {role} as it is, with checksum {before:08x}, got {checksum:08x} and "
                f"{num_rows(spans)} rows. It trains from step {index.rounds.lanes[role].spec.first_step} on."
            )
        return
    members = index.membership(version - 1)
    wanted = {rows: chosen for id in members for rows, chosen in index.groups[id].by_part().items()}
    trained, repeated = by_part(spans)
    if len(members) != index.rules.groups_per_step or trained != wanted or repeated:
        raise Refused(
            f"commit of version {version} must train every row of its step once, got {num_rows(spans)} rows for "
            f"{sum(chosen.bit_count() for chosen in wanted.values())} in {len(members)} certain groups."
        )
