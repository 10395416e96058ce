"""What a loss adds up: sums over tokens and samples, undivided, until the true step is whole.

Owns adding, sharing over ranks and what metrics are made of the sums. Does not own any formula.

    total = (a + b).reduced(group); total.metrics() -> {"tokens": ..., "samples": ..., "clip_fraction": ..., "kl": ...}

Invariant: the sums of a step are the same however it is cut into micro-batches and ranks. Micro-batches and ranks may measure
different things: what one of them did not measure counts as nothing measured there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import orjson
import torch
import torch.distributed as dist

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over some tokens and samples. `loss` carries the gradient; the rest is detached and float64.

    `sums` holds at least "tokens" and "samples", how many are counted. The metric of another sum is its mean over "tokens", or
    over the count of the same name in `counts`, where it was measured of some tokens alone. `maxes` are maxima.
    """

    loss: torch.Tensor
    sums: Named
    maxes: Named = field(default_factory=dict)
    counts: Named = field(default_factory=dict)

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.loss + other.loss,
            _merged(self.sums, other.sums, torch.add),
            _merged(self.maxes, other.maxes, torch.maximum),
            _merged(self.counts, other.counts, torch.add),
        )

    def detached(self) -> LossSums:
        """The same without the graph: what is left after `loss.backward()`."""
        return replace(self, loss=self.loss.detach())

    def weightless(self) -> LossSums:
        """The same graph with weight 0 and nothing counted: for a rank that has no rows in a round."""
        zeros = (
            {name: torch.zeros_like(value) for name, value in of.items()} for of in (self.sums, self.maxes, self.counts)
        )
        return LossSums(self.loss * 0.0, *zeros)

    def reduced(self, group: dist.ProcessGroup | None) -> LossSums:
        """The same over all ranks of `group`, without gradient (collective); None is this process alone."""
        if group is None:
            return self
        zero = self.loss.new_zeros((), dtype=torch.float64)
        mine = self.sums, self.counts, self.maxes
        names = _names_of_all_ranks([[*of] for of in mine], zero.device, group)
        sums, counts, maxes = (
            {name: of.get(name, absent) for name in every}
            for of, every, absent in zip(mine, names, (zero, zero, zero - torch.inf), strict=True)
        )
        added = torch.stack([self.loss.detach().double(), *sums.values(), *counts.values()])
        dist.all_reduce(added, dist.ReduceOp.SUM, group=group)
        greatest = torch.stack([zero, *maxes.values()])
        dist.all_reduce(greatest, dist.ReduceOp.MAX, group=group)
        return LossSums(
            added[0],
            dict(zip(sums, added[1:], strict=False)),
            dict(zip(maxes, greatest[1:], strict=True)),
            dict(zip(counts, added[1 + len(sums) :], strict=True)),
        )

    def metrics(self) -> dict[str, float]:
        """Return the number of tokens and samples, the mean of every other sum over the tokens that it was measured of, unless
        there are none, and the maxima."""
        # Read back at once: a device is waited for once a step, not once a figure.
        read = iter(torch.stack([*self.sums.values(), *self.counts.values(), *self.maxes.values()]).tolist())
        sums, counts, maxes = (dict(zip(of, read, strict=False)) for of in (self.sums, self.counts, self.maxes))
        totals = {name: sums.pop(name) for name in ("tokens", "samples")}
        over = {name: counts.get(name, max(1.0, totals["tokens"])) for name in sums}
        return totals | {name: value / over[name] for name, value in sums.items() if over[name]} | maxes


def _merged(a: Named, b: Named, of_both: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Named:
    return {**a, **b, **{name: of_both(value, b[name]) for name, value in a.items() if name in b}}


def _names_of_all_ranks(names: list[list[str]], device: torch.device, group: dist.ProcessGroup) -> list[list[str]]:
    """Return each list with the names that any rank has in its place, in an order that is the same on all ranks (collective).

    Costs one small all-reduce where all ranks have the same names, as all but a user's loss give."""
    mine = orjson.dumps(names)
    digest = int.from_bytes(hashlib.blake2b(mine, digest_size=7).digest(), "big")
    bounds = torch.tensor([digest, -digest, len(mine)], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    most, negated_least, longest = bounds.tolist()
    if most == -negated_least:
        return names
    padded = torch.frombuffer(bytearray(mine.ljust(longest)), dtype=torch.uint8).to(device)  # JSON may end with spaces
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, padded, group=group)
    of_ranks = [orjson.loads(each.cpu().numpy().tobytes()) for each in gathered]
    return [sorted(set().union(*lists)) for lists in zip(*of_ranks, strict=True)]
