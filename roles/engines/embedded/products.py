"""Matrix products with weights that change seldom.

Owns one weight's storage for fast products. Where the processor can, large weights lie in oneDNN's blocked layout: with a few
dozen rows a product mostly waits for the weight to arrive from memory, and the plain layout costs a second pass that rearranges
it (a 9 M parameter model decodes a fifth faster). Elsewhere, and for weights that fit into a cache, it is a plain product.
Which processor can depends on the dtype (bfloat16 needs AVX-512 or AVX-NE-CONVERT) and on torch's build, so it is tried.

A product may have an adapter beside its weight (`models/lora.py`), which is computed as the trainer computes it: merged into
weights of 16 bits most of it would be rounded away, and a version would cost the time to lay all weights out anew.

Invariant: `product(x)` is `F.linear(x, weight)` to rounding, for the weight last given to `set`, and what was last given to
`adapt` beside it.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from rondo.models.lora import Pair

BLOCKED_FROM = 2**17
"""Elements from which the blocked layout wins; below, the weight is cached and the call's overhead decides."""


@functools.cache
def blocked_works(dtype: torch.dtype) -> bool:
    """Whether this processor multiplies by weights of `dtype` in the blocked layout: tried once, on a tiny one."""
    weight, x, residual = (torch.eye(*shape, dtype=dtype) for shape in ((32, 16), (4, 16), (4, 32)))
    try:
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight, len(x))
        plain = torch.ops.mkldnn._linear_pointwise(x, blocked, None, "none", [], "")
        added = torch.ops.mkldnn._linear_pointwise.binary(x, residual, blocked, None, "add")
    except (
        RuntimeError,
        AttributeError,
    ):  # no oneDNN in this build; none of this processor's instructions for the dtype
        return False
    return torch.equal(plain, F.linear(x, weight)) and torch.equal(added, 2 * plain)


class Product:
    """x [N, in] -> x W^T [N, out]. `num_rows` is the usual N, by which the layout is chosen; any N is correct."""

    def __init__(self, weight: torch.Tensor, num_rows: int) -> None:
        large = weight.device.type == "cpu" and weight.numel() >= BLOCKED_FROM
        self._blocked = large and blocked_works(weight.dtype)
        self._num_rows = num_rows
        self._weight = torch.empty(0)
        self._beside: Pair | None = None
        self.set(weight)

    def set(self, weight: torch.Tensor) -> None:
        """Takes a weight [out, in] over. A plain product refers to a parameter, which may change in place, and copies
        anything else into the storage it has."""
        if self._blocked:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), self._num_rows)
        elif self._weight.shape == weight.shape and not isinstance(weight, torch.nn.Parameter):
            self._weight.copy_(weight)
        else:
            self._weight = weight

    def adapt(self, beside: Pair | None) -> None:
        self._beside = beside

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._blocked:
            return self._adapted(torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], ""), x)
        return self._adapted(F.linear(x, self._weight), x)

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T; the residual's storage may be used for the result."""
        if self._blocked:
            added = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, None, "add")
            return self._adapted(added, x)
        return self._adapted(residual.addmm_(x, self._weight.t()), x)

    def _adapted(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self._beside is None:
            return y
        narrow, wide, scaling = self._beside
        return y.addmm_(F.linear(x, narrow), wide.t(), alpha=scaling)
