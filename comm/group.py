"""One admitted prompt group: what is known of it, of its samples, and of the media they share.

Owns the record that the index keeps of a group, and which puts it takes: the first visible one for its media, for each sample,
and for each column of a sample. Does not own when a group changes its state (`index.py`) or where memory is (`space.py`).

    group 7, epoch 1, running      media   {"pixel_values": place, ...}         one record for all samples
                                   rows    0: {"tokens": place, ...}  1: ...    place = [ring, position, sequence, row]

Invariant: what was taken is never replaced: media and rows stay over a lost lease, and whoever gets the group next finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

LIVE = ("waiting", "running", "ready")
SETTLED = ("trained", "filtered", "surplus", "failed", "quarantined")

Place = list[Any]  # [ring, position, sequence, row in the record]


@dataclass(slots=True)
class Row:
    """One sample: lengths in tokens, reward, the policy versions of its tokens, and where its columns lie."""

    length: int
    response: int
    reward: float
    oldest: int
    newest: int
    places: dict[str, Place] = field(default_factory=dict)


@dataclass(slots=True)
class Group:
    """One admitted prompt group. `position` is the data cursor's; (position, sample) seeds every draw."""

    id: int
    step: int
    position: int
    state: str = "waiting"
    epoch: int = 0
    holder: str | None = None
    rows: dict[int, Row] = field(default_factory=dict)
    media: dict[str, Place] = field(default_factory=dict)
    encoder: int = 0  # positions that encoders take for the media
    visible: dict[str, int] = field(default_factory=dict)  # column -> rows that have it
    records: list[list[Any]] = field(default_factory=list)  # [ring, position] of every record that was taken
    data_failures: int = 0
    infra_failures: int = 0
    error: str = ""

    def reservation(self) -> str:
        return f"group.{self.id}.{self.epoch}"

    def costs(self) -> list[int]:
        """What each sample costs a micro-batch: its tokens, and its share of the encoders' positions."""
        share = -(-self.encoder // len(self.rows)) if self.encoder else 0
        return [row.length + share for _, row in sorted(self.rows.items())]

    # ---- puts -------------------------------------------------------------------------------------------------------

    def take_media(self, columns: Sequence[str], epoch: int, encoder: int, place: Place) -> bool:
        """Media from the holder of the lease; False when they are too late."""
        if not self._held(epoch) or self.media:
            return False
        self.media, self.encoder = dict.fromkeys(columns, place), encoder
        return True

    def take_sample(self, sample: int, columns: Sequence[str], epoch: int, info: Sequence[Any], place: Place) -> bool:
        """A finished sample from the holder of the lease; False when it is too late."""
        if not self._held(epoch) or sample in self.rows:
            return False
        self.rows[sample] = Row(*info)
        self._place(self.rows[sample], columns, place)
        return True

    def take_columns(self, sample: int, columns: Sequence[str], place: Place) -> bool:
        """Columns that another role made of a sample; False when all of them are there, or the group is settled."""
        row = self.rows.get(sample)
        fresh = [name for name in columns if row is not None and name not in row.places]
        if row is None or self.state not in LIVE or not fresh:
            return False
        self._place(row, fresh, place)
        return True

    def forget_puts(self) -> None:
        """The memory of everything that was put is gone."""
        self.rows, self.media, self.encoder, self.visible, self.records = {}, {}, 0, {}, []

    def _held(self, epoch: int) -> bool:
        return self.state == "running" and epoch == self.epoch

    def _place(self, row: Row, columns: Sequence[str], place: Place) -> None:
        row.places.update(dict.fromkeys(columns, place))
        for name in columns:
            self.visible[name] = self.visible.get(name, 0) + 1

    # ---- persistence ------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Plain JSON; `Group.load(dump())` is an equal group."""
        fields = {name: getattr(self, name) for name in Group.__slots__ if name != "rows"}
        rows = [[sample, *(getattr(row, name) for name in Row.__slots__)] for sample, row in self.rows.items()]
        return {**fields, "rows": rows}

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Group:
        rows = {sample: Row(*values) for sample, *values in fields["rows"]}
        return cls(**{**fields, "rows": rows})
