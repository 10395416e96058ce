"""Up to which length a sequence's rotary angles are its own, and not those of the longest one beside it.

With `longrope` and `dynamic` rotations transformers takes other angles for a whole batch as soon as one of its sequences is
longer than a border, and a cache keeps keys of both sides. So sequences are held below the border, where each gets the angles
that it has alone. Owns the border and the sentence; who asks is the packing of a micro-batch, an engine at its start, and
`rondo check`.
"""

from __future__ import annotations

from typing import Any

from rondo.runtime.errors import ConfigError


def longest_alike(model: Any) -> int | None:
    """Most tokens of a sequence; None where angles depend on nothing but the position."""
    borders = [border for module in model.modules() for border in _borders(module)]
    return min(borders, default=None)


def check_length(model_name: str, border: int | None, length: int) -> None:
    """Raises ConfigError for sequences of `length` tokens beyond `border`."""
    if border is not None and length > border:
        raise ConfigError(
            f"a sequence must have at most {border} tokens with {model_name}, which rotates longer ones, and those beside them, "
            f"by other angles, got {length}. Lower rollout.max_prompt_tokens or rollout.max_new_tokens"
        )


def _borders(module: Any) -> list[int]:
    kinds = getattr(module, "rope_type", None)
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None)
    if kinds is None or not parameters:
        return []
    each = (
        [(kind, parameters[layers]) for layers, kind in kinds.items()]
        if isinstance(kinds, dict)
        else [(kinds, parameters)]
    )
    found = [int(one["original_max_position_embeddings"]) for kind, one in each if kind == "longrope"]
    return found + [int(module.original_max_seq_len) for kind, _ in each if "dynamic" in kind]
