"""Matrix products with weights that change seldom.

Owns one weight's storage for fast products. On x86 processors large weights lie in oneDNN's blocked layout: with a few dozen
rows a product mostly waits for the weight to arrive from memory, and the plain layout costs a second pass that rearranges it
(a 9 M parameter model decodes a fifth faster). Elsewhere, and for weights that fit into a cache, it is a plain product.

Invariant: `product(x)` is `F.linear(x, weight)` to rounding, for the weight last given to `set`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

BLOCKED_FROM = 2**17
"""Elements from which the blocked layout wins; below, the weight is cached and the call's overhead decides."""


class Product:
    """x [N, in] -> x W^T [N, out]. `num_rows` is the usual N, by which the layout is chosen; any N is correct."""

    def __init__(self, weight: torch.Tensor, num_rows: int) -> None:
        blocked = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self._blocked = blocked and weight.numel() >= BLOCKED_FROM
        self._num_rows = num_rows
        self._weight = torch.empty(0)
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._blocked:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return F.linear(x, self._weight)

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T; the residual's storage may be used for the result."""
        if self._blocked:
            return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, None, "add")
        return residual.addmm_(x, self._weight.t())
