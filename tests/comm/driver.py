"""A hand-driven bus: an index, and the acts that a coordinator would turn into events. No process, no memory, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rondo.comm.bus.accounts import Rules
from rondo.comm.bus.group import Group
from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Event
from rondo.comm.bus.rounds import Stream
from rondo.comm.ring.records import GROUP_BLOB
from rondo.comm.ring.spans import num_samples, rows_of, spans_of

STREAMS = (
    Stream("actor_fwd", ("tokens",), ("log_probs",), media=True),
    Stream("advantages", ("loss_mask",), ("advantages",), whole_groups=True),
    Stream("actor", ("tokens", "advantages", "log_probs"), kind="train", media=True),
)
BASE = ("tokens", "loss_mask")


def by_field(info: Sequence[Sequence[float]]) -> list[list[float]]:
    """What is said of samples, as a put's event has it: one list for each of `INFO`."""
    return [list(values) for values in zip(*info, strict=True)]


def rules(**changes: Any) -> Rules:
    fields = {
        "num_steps": 4, "groups_per_step": 3, "samples_per_group": 2, "max_staleness": 1, "base_columns": BASE,
        "streams": STREAMS, "row_bytes": 256, "num_slots": 2,
    }  # fmt: skip
    return Rules(**{**fields, **changes})


class Driver:
    """Emits events, applies them, and keeps them for replay."""

    def __init__(self, **changes: Any) -> None:
        self.index = Index(rules(**changes))
        self.events: list[Event] = []
        self.pos: dict[str, int] = {}
        self.emit(event="attempt", attempt=0)
        for member, ranks in (
            ("rollout-0", 1),
            ("rollout-1", 1),
            ("actor_fwd-0", 1),
            ("advantages-0", 1),
            ("actor-0", 1),
        ):
            self.start(member, 1, ranks)
        self.join()
        self.commit(0)

    def emit(self, **event: Any) -> None:
        self.events.append(event)
        self.index.apply(event)
        self.index.freed()

    def start(self, member: str, incarnation: int, ranks: int = 1) -> None:
        self.emit(event="started", member=member, incarnation=incarnation, ranks=ranks)
        self.emit(event="ring", ring=f"ring/{member}/0", bytes=1 << 16, member=member)

    def join(self, tokens: int = 1 << 20) -> None:
        for stream in ("actor_fwd", "advantages", "actor"):
            self.emit(event="join", stream=stream, member=f"{stream}-0", ranks=1, tokens=tokens)

    def die(self, member: str, incarnation: int) -> None:
        self.emit(event="dead", member=member, incarnation=incarnation, publisher=member == "actor-0")

    def admit(self, step: int) -> list[int]:
        planned = self.index.plan_admissions(step)
        for event in planned:
            self.emit(**event)
        return [event["group"] for event in planned]

    def grant(self, group: int, member: str = "rollout-0", incarnation: int = 1) -> Group:
        found = self.index.groups[group]
        self.emit(
            event="grant", group=group, epoch=found.epoch, member=member, incarnation=incarnation, version=0,
            ring=f"ring/{member}/0", entries=self.index.entries(found),
        )  # fmt: skip
        return found

    def put(
        self,
        group: int,
        samples: list[int],
        *,
        epoch: int | None = None,
        member: str = "rollout-0",
        reward: float = 1.0,
    ) -> None:
        found = self.index.groups.get(group)
        at = found.epoch if epoch is None and found is not None else epoch
        self._put(
            f"ring/{member}/0", [[group, s, 0] for s in samples], list(BASE), epoch=at, reservation=f"group.{group}.{at}",
            info=by_field([[10, 4, reward, 0, 0, 0, reward] for _ in samples]),
        )  # fmt: skip

    def put_columns(self, key: str, rows: list[list[int]], columns: list[str], member: str) -> None:
        self._put(f"ring/{member}/0", rows, columns, epoch=0, reservation=f"{key}.0")

    def put_media(
        self, group: int, *, epoch: int | None = None, member: str = "rollout-0", encoder: int = 0, num_bytes: int = 512
    ) -> None:
        found = self.index.groups.get(group)
        at = found.epoch if epoch is None and found is not None else epoch
        self._put(
            f"ring/{member}/0", [[group, GROUP_BLOB, 0]], ["pixel_values"], epoch=at, reservation=f"group.{group}.{at}",
            info=[[encoder]], num_bytes=num_bytes,
        )  # fmt: skip

    def _put(self, ring: str, rows: list[list[int]], columns: list[str], *, num_bytes: int = 128, **more: Any) -> None:
        pos = self.pos.get(ring, 0)
        self.pos[ring] = pos + num_bytes
        spans = spans_of(rows)
        self.emit(
            event="put", ring=ring, pos=pos, seq=pos // 128 + 1, bytes=num_bytes, spans=spans, columns=columns,
            attempt=self.index.attempt, entries=num_samples(spans) if "info" in more else 1, **more,
        )  # fmt: skip

    def fill(self, group: int, member: str = "rollout-0") -> None:
        """Grant and put every sample."""
        self.grant(group, member)
        self.put(group, list(range(self.index.rules.samples_per_group)), member=member)

    def forward(self, stream: str, column: str, incarnation: int = 1, *, ack: bool = True) -> list[list[list[int]]]:
        """Run every round that is ready for a forward stream; the rows of each."""
        done = []
        while planned := self.index.plan_rounds(stream, f"{stream}-0", incarnation, None):
            self.emit(event="rounds", rounds=planned)
            for made in planned:
                if ack:
                    self.put_columns(made["key"], rows_of(made["spans"][0]), [column], f"{stream}-0")
                    self.emit(event="ack", key=made["key"], rank=0)
                done.append(rows_of(made["spans"][0]))
        return done

    def train_rounds(self, step: int) -> list[Event]:
        planned = self.index.plan_rounds("actor", "actor-0", 1, step)
        if planned:
            self.emit(event="rounds", rounds=planned)
        return planned

    def score(self) -> None:
        self.forward("actor_fwd", "log_probs")
        self.forward("advantages", "advantages")

    def commit(self, version: int) -> list[list[int]]:
        members = self.index.membership(version - 1) if version else []
        rows = [[g, s, 0] for g in members for s in range(self.index.rules.samples_per_group)]
        self.emit(
            event="commit", role="actor", version=version, checksum=7, attempt=self.index.attempt, spans=spans_of(rows)
        )
        return rows

    def step(self, step: int) -> list[list[int]]:
        for group in self.admit(step):
            self.fill(group)
        self.score()
        while self.train_rounds(step):
            pass
        return self.commit(step + 1)
