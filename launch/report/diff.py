"""Where two deterministic runs part, for `rondo compare`.

Owns the comparison and its words; `roles/training/parity.py` owns the files. Compares step by step, rank by rank, round by
round: first which samples, then their bits, then the weights that came out; so what is told is the cause and not what followed
from it.

    step 3, round 1, rank 0: group 13 sample 2 has other tokens; weights of version 4 are 5d1c93f0 and 99a0ee21
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rondo.roles.training.parity import FOLDER, RowSum, Step, read
from rondo.runtime.errors import ConfigError


def show_diff(first: Path, second: Path, *, ids_only: bool) -> int:
    """Print where the runs part. 0: nowhere; 1: there."""
    found = first_difference(first, second, ids_only=ids_only)
    num_steps = len(next(iter(read(first).values())))
    print(found or f"equal in all {num_steps} steps: {'ids and their order' if ids_only else 'ids, rows and weights'}")
    return int(found is not None)


def first_difference(first: Path, second: Path, *, ids_only: bool = False) -> str | None:
    """The first difference in words, or None. `ids_only` looks at which samples were trained, in which order, alone: what
    holds above max_staleness 0, where rounds are cut by lengths and lengths come from other weights.

    Raises ConfigError for a run without parity files.
    """
    ours, theirs = _read(first), _read(second)
    if ids_only:
        ours, theirs = _merged(ours), _merged(theirs)
    if ours.keys() != theirs.keys():
        return f"the runs trained on {len(ours)} and {len(theirs)} ranks, whose rounds cannot be compared"
    steps = sorted({step for ranks in (ours, theirs) for found in ranks.values() for step in found})
    for step in steps:
        for rank in sorted(ours):
            a, b = ours[rank].get(step), theirs[rank].get(step)
            if a is None or b is None:
                return f"step {step}, rank {rank}: only in {second if a is None else first}"
            found = _of_ids(a, b) if ids_only else _of_step(a, b)
            if found is not None:
                where, what = found
                when = f"step {step}" if step >= 0 else "before the first step"
                return f"{when}, {where}rank {rank}: {what}; {_of_weights(a, b)}"
    return None


def _read(run: Path) -> dict[int, dict[int, Step]]:
    found = read(run)
    if not found:
        raise ConfigError(
            f"RUN must be the directory of a run with deterministic=True, which writes {FOLDER}/, got {run} without. "
            "Run it again with --set deterministic=True"
        )
    return found


def _merged(ranks: dict[int, dict[int, Step]]) -> dict[int, dict[int, Step]]:
    """As if one rank had trained it all; how rows are shared out follows their lengths, so several ranks have no order."""
    if len(ranks) == 1:
        return ranks
    found = {}
    for step, first in ranks[0].items():
        rows = [row for steps in ranks.values() if step in steps for rows in steps[step].rounds for row in rows]
        found[step] = Step(step, first.version, first.checksum, (tuple(sorted(rows)),))
    return {0: found}


def _of_step(a: Step, b: Step) -> tuple[str, str] | None:
    """(place, what) of the first difference of a step on one rank."""
    for number, (mine, other) in enumerate(zip(a.rounds, b.rounds, strict=False)):
        what = _of_rows(mine, other)
        if what is not None:
            return f"round {number}, ", what
    if len(a.rounds) != len(b.rounds):
        return f"round {min(len(a.rounds), len(b.rounds))}, ", f"{len(a.rounds)} rounds and {len(b.rounds)}"
    if a.checksum != b.checksum:
        return "all rounds equal, ", "the weights differ"
    return None


def _of_rows(mine: Sequence[RowSum], other: Sequence[RowSum]) -> str | None:
    ids, their_ids = [row[:2] for row in mine], [row[:2] for row in other]
    if ids != their_ids:
        return f"samples {_names(ids)} against {_names(their_ids)}"
    for (group, sample, tokens, rest), (_, _, their_tokens, their_rest) in zip(mine, other, strict=True):
        if tokens != their_tokens:
            return f"group {group} sample {sample} has other tokens"
        if rest != their_rest:
            return f"group {group} sample {sample} has equal tokens, but other log-probs, advantages, mask or versions"
    return None


def _of_ids(a: Step, b: Step) -> tuple[str, str] | None:
    ids, their_ids = ([row[:2] for rows in step.rounds for row in rows] for step in (a, b))
    return None if ids == their_ids else ("", f"samples {_names(ids)} against {_names(their_ids)}")


def _of_weights(a: Step, b: Step) -> str:
    if a.checksum == b.checksum:
        return f"weights of version {a.version} are equal, {a.checksum:08x}"
    return f"weights of version {a.version} are {a.checksum:08x} and {b.checksum:08x}"


def _names(ids: Sequence[Sequence[int]]) -> str:
    """Samples as group/sample, the first eight of them."""
    shown = " ".join(f"{group}/{sample}" for group, sample in ids[:8]) or "none"
    return f"{shown} ... ({len(ids)})" if len(ids) > 8 else shown
