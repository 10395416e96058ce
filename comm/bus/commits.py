"""What may be committed: the next version, trained on exactly the rows of its step.

Owns the check alone, read off the index. Who commits when, and what a commit changes, is others' (`coordinator.py`, `index.py`).

    check_commit(index, "actor", 8, 0x1f2e3d4c, [[42, 0, 0, 8], [43, 0, 0, 8]])      # version 8 trained step 7
"""

from __future__ import annotations

from rondo.comm.bus.index import Index
from rondo.comm.ring.spans import Span, by_part, num_rows
from rondo.runtime.errors import Refused


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
