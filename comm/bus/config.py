"""Settings of the data bus: how large its rings are and how the weight slab is laid out.

Owns `BusConfig`. Does not own the check that all of it fits into memory: `rondo check` and the coordinator do.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rondo.runtime.section import Section

_MIB = 1 << 20


class BusConfig(Section):
    """Sizes in bytes of shared memory; every ring is reserved in full when its role group starts."""

    ring_bytes: int = Field(64 * _MIB, ge=_MIB)
    """One ring a rollout replica: its finished prompt groups until they are trained."""
    column_ring_bytes: int = Field(8 * _MIB, ge=_MIB)
    """One ring for every process that adds columns (log_probs, ref_log_probs, values, advantages)."""
    weight_slots: int = Field(2, ge=2)
    """Policy versions that the weight slab holds: the newest, and the one being written or still read."""
    weight_bucket_bytes: int = Field(16 * _MIB, ge=4096)
    """Published weights carry one checksum for every so many bytes."""
    max_infra_failures: int = Field(5, ge=1)
    """Deaths that one prompt group may see while it is leased; one more puts it into quarantine."""

    def refused(self) -> Iterator[str]:
        if self.column_ring_bytes > self.ring_bytes:
            yield (
                "bus.column_ring_bytes must be at most bus.ring_bytes, "
                f"got {self.column_ring_bytes} and {self.ring_bytes}. A column holds less than a row: lower the first"
            )
