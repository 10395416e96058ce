"""What the coordinator tells a member about its work: a lease for a rollout replica, a round for one rank of a role group.

Owns the form of these answers, read off the index; changes nothing. Who gets which work, and when, is decided before
(`index.py`, `rounds.py`, `coordinator.py`); `bus.py` reads them.

    lease   {"group": 7, "epoch": 0, "step": 1, "position": 7, "ring": "ring/rollout-0/0",
             "has_media": False, "have": [[sample, reward, response, finish], ...]}     what earlier holders put
    round   {"key", "index", "step", "last", "turn", "update", "closes", "ring",
             "spans": [[7, 0, 0, 2], ...], "info": [lengths, responses, rewards, finishes],
             "groups": [{"group": 7, "step": 1, "samples": 8, "media": {column: place},
                         "extents": [[columns, part, first sample, count, place], ...]}, ...]}

Invariant: places are named by the record, not by the row, and the media of a group once a round, only to streams that read them.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from rondo.comm.bus.group import FINISH, LENGTH, RESPONSE, REWARD, Group
from rondo.comm.bus.index import Index
from rondo.comm.bus.rounds import Round, Stream


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
    spans = made.spans[rank]
    groups = {group: index.groups[group] for group, *_ in spans}
    reserve = made.reserve[rank]
    return {
        "key": made.key, "index": made.index, "step": made.step, "last": made.last,
        "turn": made.turn, "update": made.update, "closes": made.closes,
        "spans": spans,
        "info": [
            list(chain.from_iterable([groups[span[0]].info[field][groups[span[0]].at(*span[1:])] for span in spans]))
            for field in (LENGTH, RESPONSE, REWARD, FINISH)
        ],
        "groups": [_group(group, spec) for group in groups.values()],
        "ring": reserve[0] if reserve else None,
    }  # fmt: skip


def _group(group: Group, spec: Stream) -> dict[str, Any]:
    wanted = set(spec.inputs)
    extents = [
        [names, *rows] for columns, *rows in group.extents if (names := [name for name in columns if name in wanted])
    ]
    return {
        "group": group.id, "step": group.step, "samples": group.num_samples, "extents": extents,
        "media": group.media if spec.media else {},
    }  # fmt: skip
