"""How a task is read: what a stream asks for with every batch, on both sides of the wire.

Owns these settings and their check; what they mean is said where they are given (`Partition.stream`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rondo.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Reading:
    """`rank` of `ranks` is the data-parallel rank, `peer` of `peers` this process among its equals."""

    task: str
    consumer: str
    columns: list[str]
    batch: int
    rank: int
    ranks: int
    peer: int
    peers: int
    until: str
    partial: bool

    def __post_init__(self) -> None:
        if not self.columns or self.until not in ("end", "now") or not 0 <= self.rank < self.ranks or self.batch < 1:
            raise ConfigError(
                "a stream must name columns, end with 'end' or 'now', and be for a rank below ranks with at least one row, got "
                f"columns {self.columns}, until {self.until!r}, rank {self.rank} of {self.ranks} and batch {self.batch}."
            )


class Who(NamedTuple):
    """Who asks."""

    member: str
    incarnation: int

    def scope(self, consumer: str) -> str:
        """Its stream of this name."""
        return f"{self.member}.{self.incarnation}{'/' if consumer else ''}{consumer}"
