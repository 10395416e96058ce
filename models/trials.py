"""A model is tried out on a few tokens: what it makes of them in one way, against what it makes of them alone.

Owns how that is computed and compared. Does not own what is tried: who shares prompts (`shared_prefixes.py`), who shares rows
(`packing.py`), who trains at all (`acceptance.py`), who generates (`roles/engines/embedded/hf_forward.py`).

Trials compute in float32 whatever the weights are, a unit at a time: the noise of bfloat16 grows with depth, to a tenth of the
logits and to other experts, while that of float32 stays a thousand times below what a wrong mask or position does.

    with trial(model):
        if problem := differs(logits_of(model, input_ids=both)[5:], logits_of(model, input_ids=second)): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rondo.models.units import computing_in, drop_copies
from rondo.runtime.errors import ConfigError

TOLERANCE = 1e-3
"""Of the norm of a difference of logits, relative to theirs."""


class Failed(ConfigError):
    """The model's own code cannot compute what is tried; the text says why."""


@contextmanager
def trial(model: Any) -> Iterator[None]:
    """While the body runs, `model` computes in float32 and evaluation mode, without gradients (collective where it is sharded,
    and before it is told to compute otherwise)."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), computing_in(model, torch.float32):
            yield
    finally:
        drop_copies(model)
        model.train(was_training)


def logits_of(model: Any, **arguments: Any) -> torch.Tensor:
    """float32 [B, T, V]. Raises Failed for whatever the model's code raises, but for what only a mistake of ours can be."""
    try:
        logits: torch.Tensor = model(**{"use_cache": False, "return_dict": True} | arguments).logits
    except (AssertionError, NameError, Failed):
        raise
    except Exception as error:  # it is the code of any family, and refuses in any way
        raise Failed(f"{type(error).__name__}: {' '.join(str(error).split())[:300] or 'no message'}") from error
    return logits.float()


def differs(found: torch.Tensor, expected: torch.Tensor) -> str:
    """How far logits are off, in words; "" where they are equal to rounding."""
    gap = float((found - expected).norm() / expected.norm())
    return "" if gap <= TOLERANCE else f"logits are {gap:.2g} of their norm off"
