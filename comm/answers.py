"""What the coordinator tells a member about its work: a lease for a rollout replica, a round for one rank of a role group.

Owns the form of these answers, read off the index; changes nothing. Who gets which work, and when, is decided before
(`index.py`, `rounds.py`, `coordinator.py`); `bus.py` reads them.

    lease   {"group": 7, "epoch": 0, "step": 1, "position": 7, "ring": "ring/rollout-0/0",
             "has_media": False, "have": [[sample, reward, response], ...]}     what earlier holders have put
    round   {"key", "index", "step", "last", "ring",
             "rows":  [{"group": 7, "sample": 0, ..., "places": {column: place}}, ...],
             "media": [[7, {column: place}], ...]}

Invariant: the media of a group are named once a round, whatever the number of its samples, and only to streams that read them.
"""

from __future__ import annotations

from typing import Any

from rondo.comm.group import Group
from rondo.comm.index import Index
from rondo.comm.rounds import Round


def lease_of(index: Index, group: Group) -> dict[str, Any]:
    """What the holder of a group is told."""
    return {
        "group": group.id, "epoch": group.epoch, "step": group.step, "position": group.position,
        "ring": index.space.ring_of(group.reservation()),
        "has_media": bool(group.media),
        "have": [[sample, row.reward, row.response] for sample, row in sorted(group.rows.items())],
    }  # fmt: skip


def round_of(index: Index, made: Round, rank: int) -> dict[str, Any]:
    """This rank's part of a round."""
    spec = index.rounds.lanes[made.stream].spec
    groups = {group: index.groups[group] for group, _ in made.rows[rank]}
    reserve = made.reserve[rank]
    return {
        "key": made.key, "index": made.index, "step": made.step, "last": made.last,
        "rows": [_row(groups[group], sample, spec.inputs) for group, sample in made.rows[rank]],
        "media": [[id, group.media] for id, group in groups.items() if spec.media and group.media],
        "ring": reserve[0] if reserve else None,
    }  # fmt: skip


def _row(group: Group, sample: int, columns: tuple[str, ...]) -> dict[str, Any]:
    row = group.rows[sample]
    return {
        "group": group.id, "sample": sample, "step": group.step, "length": row.length, "response": row.response,
        "reward": row.reward, "places": {name: row.places[name] for name in columns},
    }  # fmt: skip
