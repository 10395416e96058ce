"""What the coordinator tells a member about its work: a lease for a rollout replica, a round for one rank of a role group.

Owns the form of these answers, read off the index; changes nothing. Who gets which work, and when, is decided before
(`index.py`, `rounds.py`, `coordinator.py`); `bus.py` reads them.

    lease   {"group": 7, "epoch": 0, "step": 1, "position": 7, "ring": "ring/rollout-0/0",
             "has_media": False, "have": [[sample, reward, response, finish], ...]}     what earlier holders put
    round   {"key", "index", "step", "last", "turn", "update", "closes", "ring",
             "spans": [[7, 0, 0, 2], ...],
             "groups": [{"group": 7, "step": 1, "samples": 8, "media": {column: place},
                         "extents": [[columns, part, first sample, count, place], ...]}, ...]}

Invariant: places are named by the record, not by the row, and the media of a group once a round, only to streams that read them;
the records that rollout put are always among them, since they say of each row what it is (`group.INFO`).
"""

from __future__ import annotations

from typing import Any

from rondo.comm.bus.group import FINISH, REWARD, Group
from rondo.comm.bus.index import Index
from rondo.comm.bus.rounds import Round


def lease_of(index: Index, group: Group) -> dict[str, Any]:
    """What the holder of a group is told."""
    return {
        "group": group.id, "epoch": group.epoch, "step": group.step, "position": group.position,
        "ring": index.space.ring_of(group.reservation()),
        "has_media": bool(group.media),
        "have": [
            [sample, group.info[REWARD][sample], group.response(sample), group.info[FINISH][sample]]
            for sample in group.numbers()
        ],
    }  # fmt: skip


def round_of(index: Index, made: Round, rank: int) -> dict[str, Any]:
    """This rank's part of a round."""
    spec = index.rounds.lanes[made.stream].spec
    spans, reserve, wanted = made.spans[rank], made.reserve[rank], set(spec.inputs)
    named = wanted.union(index.rules.base_columns)
    groups = []
    for id in dict.fromkeys([span[0] for span in spans]):
        group = index.groups[id]
        extents = [
            [[name for name in columns if name in wanted], *rows]
            for columns, *rows in group.extents
            if not named.isdisjoint(columns)
        ]
        media = group.media if spec.media else {}
        groups.append(
            {"group": id, "step": group.step, "samples": group.num_samples, "extents": extents, "media": media}
        )
    return {
        "key": made.key, "index": made.index, "step": made.step, "last": made.last,
        "turn": made.turn, "update": made.update, "closes": made.closes,
        "spans": spans, "groups": groups, "ring": reserve[0] if reserve else None,
    }  # fmt: skip
