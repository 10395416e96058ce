"""One admitted prompt group: what is known of it, of its samples, and of the media they share.

Owns the record that the index keeps of a group, and which puts it takes: the first visible one for its media, for each sample,
and for each column of a sample. Does not own when a group changes its state (`index.py`) or where memory is (`space.py`).

    group 7, epoch 1, running      media   {"pixel_values": place, ...}         one record for all samples
                                   known   0b011: samples 0 and 1
                                   info   [[length of 0, of 1, ...], [response of 0, ...], rewards, oldest, newest versions]
                                   parts   [columns, first sample, count, place], ...     one a record and run of samples
    place = [ring, position, sequence, row in the record]

Invariant: what was taken is never replaced: media and rows stay over a lost lease, and whoever gets the group next finds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rondo.comm.spans import members, runs, samples

LIVE = ("waiting", "running", "ready")
SETTLED = ("trained", "filtered", "surplus", "failed", "quarantined")

Place = list[Any]  # [ring, position, sequence, row in the record]
Part = list[Any]  # [columns, first sample, how many samples, place of the first one]


INFO = ("length", "response", "reward", "oldest", "newest")
"""What is said of a sample: tokens, tokens of the response, reward, and the oldest and newest policy version of its tokens."""
LENGTH, RESPONSE, REWARD, OLDEST, NEWEST = range(len(INFO))


@dataclass(slots=True)
class Group:
    """One admitted prompt group. `position` is the data cursor's; (position, sample) seeds every draw."""

    id: int
    step: int
    position: int
    num_samples: int
    state: str = "waiting"
    epoch: int = 0
    holder: str | None = None
    rank: int = 0  # of the holder's, which generates it
    known: int = 0  # the set of samples that were put
    info: list[list[Any]] = field(
        default_factory=list
    )  # INFO by its parts, a value a sample; none before the first put
    parts: list[Part] = field(default_factory=list)  # where the columns of the samples lie
    have: dict[str, int] = field(default_factory=dict)  # column -> the set of samples that have it
    media: dict[str, Place] = field(default_factory=dict)
    encoder: int = 0  # positions that encoders take for the media
    records: list[list[Any]] = field(default_factory=list)  # [ring, position] of every record that was taken
    data_failures: int = 0
    infra_failures: int = 0
    error: str = ""

    def reservation(self) -> str:
        return f"group.{self.id}.{self.epoch}"

    @property
    def whole(self) -> bool:
        """Whether every sample was put."""
        return self.known == samples(0, self.num_samples)

    def costs(self) -> Sequence[int]:
        """What each sample of a whole group costs a micro-batch: its tokens, and its share of the encoders' positions."""
        lengths = self.info[LENGTH]
        if not self.encoder:
            return lengths
        share = -(-self.encoder // self.num_samples)
        return [length + share for length in lengths]

    # ---- puts -------------------------------------------------------------------------------------------------------

    def take_media(self, columns: Sequence[str], epoch: int, encoder: int, place: Place) -> bool:
        """Media from the holder of the lease; False when they are too late."""
        if not self._held(epoch) or self.media:
            return False
        self.media, self.encoder = dict.fromkeys(columns, place), encoder
        return True

    def take_samples(
        self, first: int, count: int, columns: Sequence[str], epoch: int, info: Sequence[Sequence[Any]], place: Place
    ) -> int:
        """Finished samples from the holder of the lease, `first` and those after it, the first of them at `place`; how many
        were taken. Those that come too late, or for the second time, are not. `info` are of the rows of the whole record."""
        if not self._held(epoch):
            return 0
        if not self.info:
            self.info = [[0] * self.num_samples for _ in INFO]
        fresh = samples(first, count) & ~self.known
        row = place[-1] - first
        for at, num in runs(fresh):
            for i, values in enumerate(info):
                self.info[i][at : at + num] = values[row + at : row + at + num]
        self.known |= fresh
        self._place(columns, first, fresh, place)
        return fresh.bit_count()

    def take_columns(self, first: int, count: int, columns: Sequence[str], place: Place) -> int:
        """Columns that another role made of samples; for how many of these at least one was new. None in a settled group."""
        wanted = samples(first, count) & self.known
        if self.state not in LIVE or not wanted:
            return 0
        return self._place(columns, first, wanted, place).bit_count()

    def forget_puts(self) -> None:
        """The memory of everything that was put is gone."""
        self.known, self.info, self.parts, self.have = 0, [], [], {}
        self.media, self.encoder, self.records = {}, 0, []

    def info_of(self, sample: int) -> tuple[Any, ...]:
        """`INFO` of one sample that was put."""
        return tuple(values[sample] for values in self.info)

    def numbers(self) -> list[int]:
        """The samples that were put, in order."""
        return members(self.known)

    def complete(self, columns: Iterable[str]) -> bool:
        """Whether every sample of the group has these columns."""
        whole = samples(0, self.num_samples)
        return all(self.have.get(name, 0) == whole for name in columns)

    def place(self, sample: int, column: str) -> Place | None:
        """Where a column of a sample lies, None when nobody has put it."""
        for columns, first, count, (ring, pos, seq, row) in self.parts:
            if column in columns and first <= sample < first + count:
                return [ring, pos, seq, row + sample - first]
        return None

    def _held(self, epoch: int) -> bool:
        return self.state == "running" and epoch == self.epoch

    def _place(self, columns: Sequence[str], first: int, wanted: int, place: Place) -> int:
        """Note where `columns` of the samples in `wanted` lie, counted from `first` at `place`; the set that is new to any."""
        fresh: dict[int, list[str]] = {}
        for name in columns:
            new = wanted & ~self.have.get(name, 0)
            if new:
                self.have[name] = self.have.get(name, 0) | new
                fresh.setdefault(new, []).append(name)
        ring, pos, seq, row = place
        taken = 0
        for new, names in fresh.items():
            taken |= new
            self.parts += [[names, at, count, [ring, pos, seq, row + at - first]] for at, count in runs(new)]
        return taken

    # ---- persistence ------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Plain JSON; `Group.load(dump())` is an equal group."""
        fields = {name: getattr(self, name) for name in Group.__slots__}
        have = {name: f"{chosen:x}" for name, chosen in self.have.items()}  # JSON knows no integers of many bits
        info = [list(values) for values in self.info]
        changed = {"known": f"{self.known:x}", "have": have, "info": info}
        return {**fields, **changed, "parts": list(self.parts), "records": list(self.records)}

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Group:
        have = {name: int(chosen, 16) for name, chosen in fields["have"].items()}
        return cls(**{**fields, "known": int(fields["known"], 16), "have": have})
