"""Which rows share a micro-batch: cut at a budget, and about equal over the ranks of a role group.

Owns the arithmetic of balancing alone: costs in, micro-batches out, the same for equal input. Knows neither streams nor steps
(`rounds.py`), and not what a cost is made of (`group.py`: the tokens of a row and its share of its media's encoder positions).

    costs {4: [9, 9], 5: [6, 6]}, 2 ranks, budget 20, both groups together
        -> [[ [[4, 0, 2]], [[5, 0, 2]] ]]        one round: rank 0 has group 4, rank 1 group 5

The rule: rows are laid out in units, costliest first to the rank with least work; each rank's units, in the order of their
groups, are then cut into micro-batches that hold at most the budget. A unit is one row, or the samples of a group that stay
together: a `whole` group always is one unit, and a group that shares media (`together`) is as few units as the budget allows,
since its media are encoded once in every micro-batch that has one of its samples.

What is used again stays with its rank, and is only cut anew (`recut`): streamed rounds are often small, and what a rank keeps
of a row is there.

Invariant: every row is in exactly one micro-batch, and one beyond the budget holds a single unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

from rondo.comm.spans import Span

Unit = tuple[int, int, int, int]  # group, first sample, how many samples stay together, what they cost
Costs = Mapping[int, Sequence[int]]  # group -> what each of its samples costs a micro-batch


def fill(ready: Iterable[tuple[int, Sequence[int]]], budget: int) -> dict[int, Sequence[int]]:
    """The first groups that fill the budget, with what their samples cost; at least one when there is one."""
    chosen: dict[int, Sequence[int]] = {}
    total = 0
    for group, costs in ready:
        total += sum(costs)
        if chosen and total > budget:
            break
        chosen[group] = costs
    return chosen


def micro_batches(
    costs: Costs,
    ranks: int,
    budget: int,
    *,
    whole: bool = False,
    together: Collection[int] = (),
) -> list[list[list[Span]]]:
    """Micro-batches [round][rank] -> spans, by the rule above; a rank that runs out has empty ones."""
    if ranks == 1 and not whole and not together:
        return [[spans] for spans in _cut_groups(costs, budget)]
    units = [unit for group in costs for unit in _units(group, costs[group], budget, whole, group in together)]
    shares: list[list[Unit]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(units, key=lambda unit: -unit[3]):
        rank = loads.index(min(loads))
        loads[rank] += unit[3]
        shares[rank].append(unit)
    batches = [[_spans(batch) for batch in _cut(sorted(share, key=lambda unit: unit[:2]), budget)] for share in shares]
    return [list(batch) for batch in zip_longest(*batches, fillvalue=[])]


def _cut_groups(costs: Costs, budget: int) -> list[list[Span]]:
    """What `_cut` makes of single rows, by the group: one that fits is not looked at row by row."""
    batches: list[list[Span]] = []
    total = budget + 1
    for group in sorted(costs):
        needed = sum(costs[group])
        if total + needed <= budget:
            batches[-1].append([group, 0, len(costs[group])])
            total += needed
            continue
        for sample, cost in enumerate(costs[group]):
            total += cost
            if total > budget:
                batches.append([[group, sample, 1]])
                total = cost
            elif sample:
                batches[-1][-1][2] += 1
            else:
                batches[-1].append([group, 0, 1])
    return batches


def recut(
    shares: Sequence[Iterable[Span]], costs: Costs, budget: int, *, together: Collection[int] = ()
) -> list[list[list[Span]]]:
    """The rows that each rank had, in as few micro-batches as neighbours in the order of their groups need."""
    batches: list[list[list[Span]]] = []
    for spans in shares:
        units: list[Unit] = []
        for group, first, count in spans:
            rows = [(group, sample, 1, costs[group][sample]) for sample in range(first, first + count)]
            units += [(group, first, count, sum(unit[3] for unit in rows))] if group in together else rows
        batches.append([_spans(batch) for batch in _cut(sorted(units, key=lambda unit: unit[:2]), budget)])
    return [list(batch) for batch in zip_longest(*batches, fillvalue=[])]


def _units(group: int, costs: Sequence[int], budget: int, whole: bool, together: bool) -> list[Unit]:
    if whole:
        return [(group, 0, len(costs), sum(costs))]
    rows = [(group, sample, 1, cost) for sample, cost in enumerate(costs)]
    if not together:
        return rows
    parts = _cut(rows, budget)
    return [(group, part[0][1], len(part), sum(unit[3] for unit in part)) for part in parts]


def _cut(units: Sequence[Unit], budget: int) -> list[list[Unit]]:
    """Neighbours that fit the budget together; a unit beyond it stands alone."""
    batches: list[list[Unit]] = []
    total = budget + 1
    for unit in units:
        total += unit[3]
        if total > budget:
            batches.append([])
            total = unit[3]
        batches[-1].append(unit)
    return batches


def _spans(units: Iterable[Unit]) -> list[Span]:
    """Units in their order; neighbours become one span."""
    spans: list[Span] = []
    for group, first, count, _ in units:
        if spans and spans[-1][0] == group and spans[-1][1] + spans[-1][2] == first:
            spans[-1][2] += count
        else:
            spans.append([group, first, count])
    return spans
