"""One admitted prompt group: what is known of it, of its samples, and of the media they share.

Owns the record that the index keeps of a group, and which puts it takes: the first visible one for its media, for each sample
with all of its parts, and for each column of a row. Does not own when a group changes its state (`index.py`) or where memory is
(`space.py`).

    group 7, epoch 1, running      media    {"pixel_values": place, ...}         one record for all samples
    2 samples                      known    0b0111: samples 0 and 1, and part 1 of sample 0
                                   info     [[length of row 0, of row 1, ...], [response of row 0, ...], rewards, and so on]
                                   extents  [columns, part, first sample, count, place], ...    one a record and run of samples
    place = [ring, position, sequence, row in the record]

The rows of a group are numbered part by part, part * samples + sample: n samples of one part are the rows 0 to n - 1, and a set
of rows is one integer, as a set of samples is (`spans.py`).

Invariants: what was taken is never replaced: media and rows stay over a lost lease, and whoever gets the group next finds them;
the parts of a sample are taken together, from one record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rondo.comm.ring.spans import members, runs, samples

LIVE = ("waiting", "running", "ready")
SETTLED = ("trained", "filtered", "surplus", "failed", "quarantined")

Place = list[Any]  # [ring, position, sequence, row in the record]
Extent = list[Any]  # [columns, part, first sample, how many samples, place of the first one]


INFO = ("length", "response", "reward", "oldest", "newest", "finish", "verdict")
"""What is said of a row: tokens (and what encoders take of media of its own), tokens of the response, reward (None: it failed),
the oldest and newest policy version of its tokens, how the response ended, as its place in `FINISHES`, and the reward before
anything was taken off it for the response's length, which says how well the prompt is solved."""
LENGTH, RESPONSE, REWARD, OLDEST, NEWEST, FINISH, VERDICT = range(len(INFO))
FINISHES = ("stop", "length", "aborted")
"""By itself, at the limit of its length, or by somebody."""
NO_VERSION = -1
"""Policy version of tokens that no policy sampled (an environment's), and of a row that has no others: staleness leaves it
out."""
NEVER = 1 << 62
"""A version that is not published: who waits for a newer one hears of an end alone, the run's or its own."""


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
    known: int = 0  # the set of rows that were put
    info: list[list[Any]] = field(default_factory=list)  # a list for each of INFO, by row; none before the first put
    extents: list[Extent] = field(default_factory=list)  # where the columns of the rows lie
    have: dict[str, int] = field(default_factory=dict)  # column -> the set of rows that have it
    media: dict[str, Place] = field(default_factory=dict)
    encoder: int = 0  # positions that encoders take for the media
    records: list[list[Any]] = field(default_factory=list)  # [ring, position] of every record that was taken
    data_failures: int = 0
    infra_failures: int = 0
    error: str = ""
    row: int | None = None  # of the data, and the source of that: known where rows are looked at
    source: str = ""

    def reservation(self) -> str:
        return f"group.{self.id}.{self.epoch}"

    @property
    def known_samples(self) -> int:
        """The set of samples that were put, each with all of its parts."""
        return self.known & (1 << self.num_samples) - 1

    @property
    def whole(self) -> bool:
        """Whether every sample was put."""
        every = (1 << self.num_samples) - 1
        return self.known & every == every

    @property
    def branched(self) -> bool:
        """Whether a sample that was put has several parts."""
        return self.known.bit_length() > self.num_samples

    def parts(self) -> list[int]:
        """How many parts each sample has; 0 for one that was not put."""
        return [len(rows) for rows in self._rows_of_samples()]

    def by_part(self) -> dict[tuple[int, int], int]:
        """The samples of each (group, part), as `spans.by_part` has them of all rows that were put."""
        every, n = samples(0, self.num_samples), self.num_samples
        return {(self.id, at // n): self.known >> at & every for at in range(0, self.known.bit_length(), n)}

    def at(self, part: int, first: int, count: int) -> slice:
        """The rows of a span, in `info`."""
        start = part * self.num_samples + first
        return slice(start, start + count)

    def costs(self) -> Sequence[int]:
        """What each row of a whole group costs a micro-batch, sample by sample and part by part: its tokens, and its share of the
        encoders' positions."""
        lengths: Sequence[int] = self.info[LENGTH]
        if self.branched:
            lengths = [lengths[row] for rows in self._rows_of_samples() for row in rows]
        if not self.encoder:
            return lengths
        share = -(-self.encoder // len(lengths))
        return [length + share for length in lengths]

    def oldest(self) -> list[int]:
        """The oldest policy version of each sample of a whole group, over its parts; NO_VERSION where it has none."""
        versions: list[int] = self.info[OLDEST]
        if not self.branched:
            return versions
        of = [[versions[row] for row in rows] for rows in self._rows_of_samples()]
        return [min([version for version in each if version != NO_VERSION], default=NO_VERSION) for each in of]

    # ---- puts -------------------------------------------------------------------------------------------------------

    def take_media(self, columns: Sequence[str], epoch: int, encoder: int, place: Place) -> bool:
        """Media from the holder of the lease; False when they are too late."""
        if not self._held(epoch) or self.media:
            return False
        self.media, self.encoder = dict.fromkeys(columns, place), encoder
        return True

    def has(self, part: int, first: int, count: int) -> bool:
        """Whether such rows can be of this group."""
        return part >= 0 and 0 <= first <= first + count <= self.num_samples

    def take_samples(
        self,
        span: Sequence[int],
        among: int,
        columns: Sequence[str],
        epoch: int,
        info: Sequence[Sequence[Any]],
        place: Place,
    ) -> int:
        """One part of finished samples from the holder of the lease, those `among` them whose other parts come too, the first one
        at `place`; how many rows were taken. Those that come too late, or for the second time, are not. `info` are of the rows
        of the whole record."""
        _, part, first, count = span
        chosen = samples(first, count) & among
        if not self._held(epoch) or not chosen:
            return 0
        shift = part * self.num_samples
        fresh = (chosen << shift) & ~self.known
        row = place[-1] - first - shift
        if not self.info and fresh == samples(0, self.num_samples):
            self.info = [list(told[row : row + self.num_samples]) for told in info]
        else:
            self.info = self.info or [[] for _ in INFO]
            missing = [0] * (shift + self.num_samples - len(self.info[0]))
            for kept, told in zip(self.info, info, strict=False):
                kept += missing
                for at, num in runs(fresh):
                    kept[at : at + num] = told[row + at : row + at + num]
        self.known |= fresh
        self._place(columns, part, first, fresh, place)
        return fresh.bit_count()

    def take_columns(self, span: Sequence[int], columns: Sequence[str], place: Place) -> int:
        """Columns that another role made of rows; for how many of these at least one was new. None in a settled group."""
        _, part, first, count = span
        if self.state not in LIVE or part * self.num_samples >= self.known.bit_length():
            return 0
        wanted = samples(first, count) << part * self.num_samples & self.known
        return self._place(columns, part, first, wanted, place).bit_count() if wanted else 0

    def forget_puts(self) -> None:
        """The memory of everything that was put is gone."""
        self.known, self.info, self.extents, self.have = 0, [], [], {}
        self.media, self.encoder, self.records = {}, 0, []

    def info_of(self, sample: int, part: int = 0) -> tuple[Any, ...]:
        """`INFO` of one row that was put."""
        return tuple(values[part * self.num_samples + sample] for values in self.info)

    def verdicts(self) -> list[float | None]:
        """The verdict of each sample of a group; its reward where an older release put it."""
        of: list[float | None] = self.info[VERDICT if len(self.info) > VERDICT else REWARD]
        return of[: self.num_samples]

    def response(self, sample: int) -> int:
        """Tokens of the response of a sample that was put, over its parts."""
        rows = self._rows_of_samples()[sample] if self.branched else [sample]
        return sum([self.info[RESPONSE][row] for row in rows])

    def numbers(self) -> list[int]:
        """The samples that were put, in order."""
        return members(self.known_samples)

    def complete(self, columns: Iterable[str]) -> bool:
        """Whether every row of every sample of the group has these columns."""
        return self.whole and not [name for name in columns if self.have.get(name, 0) != self.known]

    def _held(self, epoch: int) -> bool:
        return self.state == "running" and epoch == self.epoch

    def _rows_of_samples(self) -> list[list[int]]:
        """The numbers of each sample's rows that were put, in the order of its parts."""
        found: list[list[int]] = [[] for _ in range(self.num_samples)]
        for row in members(self.known):
            found[row % self.num_samples].append(row)
        return found

    def _place(self, columns: Sequence[str], part: int, first: int, wanted: int, place: Place) -> int:
        """Note where `columns` of the rows in `wanted`, all of one part, lie, counted from sample `first` at `place`; the set
        that is new to any."""
        fresh: dict[int, Sequence[str]] = {}
        if columns and wanted and not self.have:
            self.have, fresh = dict.fromkeys(columns, wanted), {wanted: columns}
        for name in columns if not fresh else ():
            new = wanted & ~self.have.get(name, 0)
            if new:
                self.have[name] = self.have.get(name, 0) | new
                fresh[new] = [*fresh.get(new, ()), name]
        ring, pos, seq, row = place
        taken, shift = 0, part * self.num_samples
        for new, names in fresh.items():
            taken |= new
            self.extents += [
                [names, part, at, count, [ring, pos, seq, row + at - first]] for at, count in runs(new >> shift)
            ]
        return taken

    # ---- persistence ------------------------------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        """Plain JSON; `Group.load(dump())` is an equal group."""
        fields = {name: getattr(self, name) for name in Group.__slots__}
        have = {name: f"{chosen:x}" for name, chosen in self.have.items()}  # JSON knows no integers of many bits
        info = [list(values) for values in self.info]
        changed = {"known": f"{self.known:x}", "have": have, "info": info}
        return {**fields, **changed, "extents": list(self.extents), "records": list(self.records)}

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Group:
        have = {name: int(chosen, 16) for name, chosen in fields["have"].items()}
        return cls(**{**fields, "known": int(fields["known"], 16), "have": have})
