"""What attention kernels of GPUs hold beside the tensors that a trace sees: a formula for each, under its own name. In bytes.

Owns the formulas. Does not own which kernel is taken (`models/attention.py`). They are of the backward of one layer, of the
decoder or of a tower, which takes more than its forward; queries, keys, values and their gradients are in the trace. Imports no
torch.

    WORKSPACE_OF["flash_attention_2"](heads, tokens=16_384, rows=8, width=2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Heads:
    num_heads: int
    num_key_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Of a decoder's or a tower's layers, by its config."""
        names = ("num_attention_heads", "num_heads", "encoder_attention_heads")
        num = next(found for name in names if (found := getattr(config, name, None)))
        width = getattr(config, "hidden_size", None) or config.d_model
        return cls(
            num, getattr(config, "num_key_value_heads", None) or num, getattr(config, "head_dim", None) or width // num
        )


def flash_attention_2(heads: Heads, *, tokens: int, rows: int, width: int) -> int:
    """csrc/flash_attn/flash_api.cpp, mha_varlen_bwd: gradients of queries add up in float32, in heads that are rounded up and in
    rows that are longer by 128 tokens, with a number beside each head; where heads share keys, gradients of keys and values are
    made for every head first."""
    rounded = -(-heads.head_dim // 32) * 32 if heads.head_dim <= 192 else 256
    sums = _FLOAT * (tokens + 128 * rows) * heads.num_heads * (rounded + 1)
    apart = 2 * width * tokens * heads.num_heads * heads.head_dim
    return sums + (apart if heads.num_key_heads != heads.num_heads else 0)


def flex_attention(heads: Heads, *, tokens: int, rows: int, width: int) -> int:
    """torch/_inductor/kernel/flex: the logarithm of each query's sum of scores, and what its outcome has of its gradient, both in
    float32; the outcome of all heads once more, in the order of the layer."""
    return tokens * heads.num_heads * (2 * _FLOAT + width * heads.head_dim)


WORKSPACE_OF: dict[str, Callable[..., int]] = {
    "flash_attention_2": flash_attention_2,
    "flex_attention": flex_attention,
}
