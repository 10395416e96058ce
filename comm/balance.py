"""Which rows share a micro-batch: cut at a budget, and about equal over the ranks of a role group.

Owns the arithmetic of balancing alone: costs in, micro-batches out, the same for equal input. Knows neither streams nor steps
(`rounds.py`), and not what a cost is made of (`group.py`: the tokens of a row and its share of its media's encoder positions).

    costs {4: [9, 9], 5: [6, 6]}, 2 ranks, budget 20, both groups together
        -> [[ [[4, 0], [4, 1]], [[5, 0], [5, 1]] ]]        one round: rank 0 has group 4, rank 1 group 5

The rule: rows are laid out in units, costliest first to the rank with least work; each rank's units, in the order of their
groups, are then cut into micro-batches that hold at most the budget. A unit is one row, or the samples of a group that stay
together: a `whole` group always is one unit, and a group that shares media (`together`) is as few units as the budget allows,
since its media are encoded once in every micro-batch that has one of its samples.

Invariant: every row is in exactly one micro-batch, and one beyond the budget holds a single unit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, zip_longest

RowId = list[int]  # [group, sample]
Unit = tuple[list[RowId], int]  # rows that stay together, and what they cost
Costs = Mapping[int, Sequence[int]]  # group -> what each of its samples costs a micro-batch


def fill(groups: Sequence[int], costs: Costs, budget: int) -> list[int]:
    """The first groups that fill the budget; at least one when there is one."""
    chosen: list[int] = []
    total = 0
    for group in groups:
        cost = sum(costs[group])
        if chosen and total + cost > budget:
            break
        chosen.append(group)
        total += cost
    return chosen


def micro_batches(
    groups: Sequence[int],
    costs: Costs,
    ranks: int,
    budget: int,
    *,
    whole: bool = False,
    together: Collection[int] = (),
) -> list[list[list[RowId]]]:
    """Micro-batches [round][rank] -> rows, by the rule above; a rank that runs out has empty ones."""
    units = [unit for group in groups for unit in _units(group, costs[group], budget, whole, group in together)]
    loads, shares = [0] * ranks, [[] for _ in range(ranks)]  # type: list[int], list[list[Unit]]
    for unit in sorted(units, key=lambda unit: -unit[1]):
        rank = loads.index(min(loads))
        loads[rank] += unit[1]
        shares[rank].append(unit)
    batches = [_cut(sorted(share, key=lambda unit: unit[0][0]), budget) for share in shares]
    rows = [[list(chain.from_iterable(rows for rows, _ in batch)) for batch in share] for share in batches]
    return [list(batch) for batch in zip_longest(*rows, fillvalue=[])]


def _units(group: int, costs: Sequence[int], budget: int, whole: bool, together: bool) -> list[Unit]:
    rows: list[Unit] = [([[group, sample]], cost) for sample, cost in enumerate(costs)]
    if not whole and not together:
        return rows
    parts = [rows] if whole else _cut(rows, budget)
    return [(list(chain.from_iterable(rows for rows, _ in part)), sum(cost for _, cost in part)) for part in parts]


def _cut(units: Sequence[Unit], budget: int) -> list[list[Unit]]:
    """Neighbours that fit the budget together; a unit beyond it stands alone."""
    batches: list[list[Unit]] = []
    total = 0
    for unit in units:
        if not batches or total + unit[1] > budget:
            batches.append([])
            total = 0
        batches[-1].append(unit)
        total += unit[1]
    return batches
