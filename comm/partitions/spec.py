"""What is fixed for a partition when it is made, and for a task when it is first read: sizes, columns, the sampler.

Owns these settings, their checks and their form on the wire; not what a sampler does (`samplers.py`).

    bus.partition("replay", capacity_bytes=8 << 30, clear_after=("actor",))
    part.stream("actor", columns=["tokens"], sampler=TokenBudget(tokens=16384), batch=64)

Invariant: a setting reaches the coordinator whole or not at all; equal settings have equal JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from rondo.runtime.errors import ConfigError

MIB = 1 << 20
MIN_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Spec:
    """A partition's settings; whoever names the partition first fixes them."""

    capacity_bytes: int = 256 * MIB
    """Memory that its rings may take together. Every producer has one chunk for certain, also beyond this."""
    chunk_bytes: int = 0
    """Memory taken at a time, and the smallest ring; 0: an eighth of the capacity, at most 64 MiB."""
    num_producers: int = 1
    """How many producers must say `end` before the partition has ended."""
    clear_after: tuple[str, ...] = ()
    """Tasks: a row that all of them have acknowledged is cleared by itself."""
    spill_dir: str = ""
    """Folder on a disk for rings beyond the capacity; empty: a put waits instead."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < MIN_CHUNK_BYTES or self.num_producers < 1 or self.chunk_bytes < 0:
            raise ConfigError(
                f"a partition must have at least {MIN_CHUNK_BYTES} bytes and one producer, got capacity_bytes "
                f"{self.capacity_bytes}, chunk_bytes {self.chunk_bytes} and num_producers {self.num_producers}."
            )

    @property
    def ring_bytes(self) -> int:
        """What one ring takes at least."""
        return self.chunk_bytes or max(MIN_CHUNK_BYTES, min(64 * MIB, self.capacity_bytes // 8))

    def dump(self) -> dict[str, Any]:
        return {**asdict(self), "clear_after": list(self.clear_after)}

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Spec:
        return cls(**{**fields, "clear_after": tuple(fields.get("clear_after", ()))})


@dataclass(frozen=True, slots=True)
class Sampler:
    """Which ready rows come next, and to which data-parallel rank. Use one of the kinds below."""

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name in ("rows_per_group", "tokens", "window"):
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")

    def dump(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Sequential(Sampler):
    """Rows in the order in which the coordinator saw them; ranks get neighbouring parts of equal size."""

    kind: ClassVar[str] = "sequential"


@dataclass(frozen=True, slots=True)
class Groups(Sampler):
    """Whole groups only: rows that were put with the same `groups` id, `rows_per_group` of them, on the same rank; a
    further row of a group waits for another set."""

    rows_per_group: int
    kind: ClassVar[str] = "groups"


@dataclass(frozen=True, slots=True)
class Balanced(Sampler):
    """Sequential, then dealt to the ranks so that their tokens are about equal (the costliest first)."""

    equal_size: bool = True
    """The same number of rows on every rank; False balances better, and `batch` is what ranks get on average."""
    kind: ClassVar[str] = "balanced"


@dataclass(frozen=True, slots=True)
class TokenBudget(Sampler):
    """Every rank gets rows up to `tokens`, in order; a row beyond it stands alone."""

    tokens: int
    kind: ClassVar[str] = "token_budget"


@dataclass(frozen=True, slots=True)
class VersionWindow(Sampler):
    """Only rows whose policy version lies in the window, oldest version first; others stay where they are.

    `max_staleness` counts back from the version that the caller names, or else the newest that a row was put with.
    """

    min_version: int | None = None
    max_version: int | None = None
    max_staleness: int | None = None
    kind: ClassVar[str] = "version_window"


@dataclass(frozen=True, slots=True)
class Ordered(Sampler):
    """The same order for the same seed, whatever the order of arrival.

    With `window`, keys must be the numbers 0, 1, 2, ...: they are shuffled within consecutive windows of this size (1: not at
    all) and a row waits for those before it. Without, rows come when the partition has ended, in the order of a hash of key
    and seed.
    """

    seed: int = 0
    window: int | None = None
    kind: ClassVar[str] = "ordered"


@dataclass(frozen=True, slots=True)
class Own(Sampler):
    """A class of the user's, "package.module:Class", run by the coordinator (`own.py` says what it must do)."""

    path: str
    settings: dict[str, Any] = field(default_factory=dict)
    kind: ClassVar[str] = "own"

    def __post_init__(self) -> None:
        module, _, name = self.path.partition(":")
        if not module or not name:
            raise ConfigError(f"a sampler's path must read package.module:Class, got {self.path!r}.")


KINDS: dict[str, type[Sampler]] = {
    kind.kind: kind for kind in (Sequential, Groups, Balanced, TokenBudget, VersionWindow, Ordered, Own)
}


def load_sampler(fields: dict[str, Any]) -> Sampler:
    """Raises ConfigError for a kind that there is not, TypeError for settings that it has not."""
    kind = KINDS.get(fields["kind"])
    if kind is None:
        raise ConfigError(f"a sampler's kind must be one of {', '.join(KINDS)}, got {fields['kind']}.")
    return kind(**{name: value for name, value in fields.items() if name != "kind"})
