"""Who sends a version on to whom: flat, tree or chain, as a pure function of ranks.

Owns the shape. Does not own what is sent (`broadcast.py`).

    flat     root -> everyone, by the communicator's own broadcast           few receivers
    tree     root -> 2 -> 4 -> ...: a bucket passes log2(n) hands            many receivers, few buckets
    chain    root -> 1 -> 2 -> ...: every link carries every bucket once     many receivers, many buckets

Buckets are relayed one by one, so all links of a tree or chain are busy at the same time: with `b` buckets and `n`
receivers a chain takes b + n - 1 bucket times where a flat send over one link takes b * n.

Invariant: every rank but the root has exactly one parent, and is its parent's child.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Topology = Literal["auto", "flat", "tree", "chain"]
_FEW_RECEIVERS = 2


class Place(NamedTuple):
    """Where one rank stands: None is the root's parent. `flat` means the communicator's own broadcast carries buckets."""

    parent: int | None
    children: tuple[int, ...]
    flat: bool


def choose(num_ranks: int, num_buckets: int) -> Topology:
    """The shape that is done first, when all links are equal and one process sends to one other at a time."""
    num_receivers = num_ranks - 1
    if num_receivers <= _FEW_RECEIVERS:
        return "flat"
    depth = num_ranks.bit_length() - 1
    # A process of a tree sends every bucket twice; one of a chain once, but the last one waits for all before it.
    return "chain" if num_buckets + num_receivers <= 2 * (num_buckets + depth) else "tree"


def place(topology: Topology, num_ranks: int, rank: int, root: int) -> Place:
    """Raises ValueError for a topology that is not one of the three, or ranks that are none."""
    if topology not in ("flat", "tree", "chain"):
        raise ValueError(f"a topology must be flat, tree or chain, got {topology!r}.")
    if not 0 <= root < num_ranks or not 0 <= rank < num_ranks:
        raise ValueError(f"root and rank must be between 0 and {num_ranks - 1}, got {root} and {rank}.")
    at = (rank - root) % num_ranks
    if topology == "flat":
        parent, children = 0, range(1, num_ranks) if at == 0 else range(0)
    elif topology == "tree":
        parent, children = (at - 1) // 2, range(2 * at + 1, min(2 * at + 3, num_ranks))
    else:
        parent, children = at - 1, range(at + 1, min(at + 2, num_ranks))
    back = tuple((child + root) % num_ranks for child in children)
    return Place(None if at == 0 else (parent + root) % num_ranks, back, topology == "flat")
