"""Which rows share a micro-batch: cut at a budget, and about equal over the ranks of a role group.

Owns the arithmetic of balancing alone: costs in, micro-batches out, the same for equal input. Knows neither streams nor steps
(`rounds.py`), and not what a cost is made of (`group.py`: the tokens of a row and its share of its media's encoder positions).

    costs {4: [9, 9], 5: [6, 6]}, 2 ranks, budget 20, both groups kept together
        -> [[ [[4, 0, 0, 2]], [[5, 0, 0, 2]] ]]        one round: rank 0 has group 4, rank 1 group 5

The rule: rows are laid out in units, costliest first to the rank with least work; each rank's units, in the order of their
groups, are then cut into micro-batches that hold at most the budget. A unit is one row, or those that stay together (`Bound`):
the parts of a sample, a group, or of a group that shares media as few units as the budget allows, since its media are encoded
once in every micro-batch that has one of its samples.

Here the rows of a group stand sample by sample, the parts of one behind each other, so that a unit is a run of them.

What is used again stays with its rank, and is only cut anew (`recut`): streamed rounds are often small, and what a rank keeps
of a row is there.

Invariant: every row is in exactly one micro-batch, and one beyond the budget holds a single unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import NamedTuple

from rondo.comm.ring.spans import Span, runs, samples, spans_of

Unit = tuple[int, int, int, int]  # group, first of its rows, how many rows stay together, what they cost
Costs = Mapping[int, Sequence[int]]  # group -> what each of its rows costs a micro-batch, sample by sample


class Bound(NamedTuple):
    """What stays in one micro-batch, whatever the budget: every `groups`, the parts of all `samples`; and, as far as the budget
    allows, the groups that share `media`. `parts`: of groups where a sample has several, how many each has."""

    groups: bool = False
    samples: bool = False
    media: Collection[int] = ()
    parts: Mapping[int, Sequence[int]] = {}

    @property
    def nothing(self) -> bool:
        """Whether every row stands for itself, the only part of its sample."""
        return not self.groups and not self.media and not self.parts

    def units(self, group: int, first: int, count: int, costs: Sequence[int], budget: int | None) -> list[Unit]:
        """Units of neighbouring rows of a group. budget: up to which media keep rows together; None: they do."""
        if self.groups or (group in self.media and budget is None):
            return [(group, first, count, sum(costs[first : first + count]))]
        if self.samples and group in self.parts:
            ends = list(accumulate(self.parts[group]))
            cuts = [first, *[end for end in ends if first < end < first + count], first + count]
            units = [(group, at, end - at, sum(costs[at:end])) for at, end in pairwise(cuts)]
        else:
            units = [(group, at, 1, costs[at]) for at in range(first, first + count)]
        if group not in self.media or budget is None:
            return units
        batches = _cut(units, budget)
        return [(group, made[0][1], sum(unit[2] for unit in made), sum(unit[3] for unit in made)) for made in batches]

    def spans(self, units: Iterable[Unit]) -> list[Span]:
        """Units in their order; neighbours become one span."""
        spans: list[Span] = []
        branched: dict[int, list[int]] = {}
        for group, first, count, _ in units:
            if group in self.parts:
                branched.setdefault(group, []).extend(range(first, first + count))
            elif spans and spans[-1][0] == group and spans[-1][2] + spans[-1][3] == first:
                spans[-1][3] += count
            else:
                spans.append([group, 0, first, count])
        if not branched:
            return spans
        for group, rows in branched.items():
            names = [(sample, part) for sample, parts in enumerate(self.parts[group]) for part in range(parts)]
            named = sorted([names[row] for row in rows], key=lambda name: name[::-1])
            spans += spans_of([(group, sample, part) for sample, part in named])
        return sorted(spans)

    def rows(self, spans: Iterable[Span]) -> dict[int, list[tuple[int, int]]]:
        """Of each group, the runs (first row, how many) that spans name."""
        found: dict[int, int] = {}
        for group, part, first, count in spans:
            rows = samples(first, count)
            if group in self.parts:
                starts = list(accumulate(self.parts[group], initial=0))
                rows = sum([1 << starts[sample] + part for sample in range(first, first + count)])
            found[group] = found.get(group, 0) | rows
        return {group: list(runs(rows)) for group, rows in found.items()}


def fill(ready: Iterable[tuple[int, Sequence[int]]], budget: int) -> dict[int, Sequence[int]]:
    """The first groups that fill the budget, with what their rows cost; at least one when there is one."""
    chosen: dict[int, Sequence[int]] = {}
    total = 0
    for group, costs in ready:
        total += sum(costs)
        if chosen and total > budget:
            break
        chosen[group] = costs
    return chosen


def micro_batches(costs: Costs, ranks: int, budget: int, bound: Bound | None = None) -> list[list[list[Span]]]:
    """Micro-batches [round][rank] -> spans, by the rule above; a rank that runs out has empty ones."""
    bound = bound or Bound()
    if ranks == 1 and bound.nothing:
        return [[spans] for spans in _cut_groups(costs, budget)]
    units = [unit for group in costs for unit in bound.units(group, 0, len(costs[group]), costs[group], budget)]
    shares: list[list[Unit]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(units, key=lambda unit: -unit[3]):
        rank = loads.index(min(loads))
        loads[rank] += unit[3]
        shares[rank].append(unit)
    return _rounds(shares, budget, bound)


def recut(
    shares: Sequence[Iterable[Sequence[Span]]], costs: Costs, budget: int, bound: Bound | None = None
) -> list[list[list[Span]]]:
    """The rows that each rank had, [rank][round] -> spans, in as few micro-batches as neighbours in the order of their groups
    need."""
    bound = bound or Bound()
    units = [
        [
            unit
            for spans in share
            for group, held in bound.rows(spans).items()
            for first, count in held
            for unit in bound.units(group, first, count, costs[group], None)
        ]
        for share in shares
    ]
    return _rounds(units, budget, bound)


def _rounds(shares: Iterable[Iterable[Unit]], budget: int, bound: Bound) -> list[list[list[Span]]]:
    """Each rank's units cut at the budget, in the order of their groups."""
    cut = [[bound.spans(batch) for batch in _cut(sorted(share, key=lambda unit: unit[:2]), budget)] for share in shares]
    return [list(batch) for batch in zip_longest(*cut, fillvalue=[])]


def _cut_groups(costs: Costs, budget: int) -> list[list[Span]]:
    """What `_cut` makes of single rows, by the group: one that fits is not looked at row by row."""
    batches: list[list[Span]] = []
    total = budget + 1
    for group in sorted(costs):
        needed = sum(costs[group])
        if not batches and needed <= budget:
            batches, total = [[]], 0
        if total + needed <= budget:
            batches[-1].append([group, 0, 0, len(costs[group])])
            total += needed
            continue
        for sample, cost in enumerate(costs[group]):
            total += cost
            if total > budget:
                batches.append([[group, 0, sample, 1]])
                total = cost
            elif sample:
                batches[-1][-1][3] += 1
            else:
                batches[-1].append([group, 0, 0, 1])
    return batches


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
