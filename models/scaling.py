"""Loss scaling for float16, whose gradients would vanish below 6e-8 and overflow above 65,504.

Owns the scale: how large it is, and when it grows and falls. Does not own where it multiplies (`roles/training/backend.py`), nor
who finds a gradient that is not finite: the norm over all ranks does (`parallel.clip_grad_norm`), so all of them go the same way.
It lies in the optimizer's groups, with what else of it changes beside tensors (`state.py`), and so in snapshots and checkpoints.

    scale = LossScale(optimizer); scale.begin(tokens_or_samples_that_the_loss_is_a_sum_over)
    (loss * scale.value).backward(); scale_gradients(model, 1 / (count * scale.value)); norm = clip_grad_norm(...)
    scale.after(math.isfinite(norm))
"""

from __future__ import annotations

import math

import torch

OF_A_SCALE = ("loss_scale", "num_finite")
"""In the optimizer's first group."""
_OF_A_MEAN = 2.0**13
"""The first scale of a loss that is a mean. Three doublings below the first of torch's GradScaler: a step that overflows costs a
batch of samples."""
_LEAST = 2.0**-24
_GROWS_AFTER = 200


class LossScale:
    """The factor of the loss. Halved by a gradient that is not finite, whose step is not taken, and doubled after
    `_GROWS_AFTER` finite ones in a row. It begins with the first micro-batch."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._group = optimizer.param_groups[0]
        self._group["loss_scale"] = 0.0
        self._group["num_finite"] = 0

    @property
    def has_begun(self) -> bool:
        return self.value > 0

    def begin(self, denominator: float) -> None:
        """Set the first scale. The loss of a micro-batch is a sum, divided after the backward: `denominator` is what would make
        a mean of it, such as its tokens, or its samples where each sample's loss is a mean already."""
        self._group["loss_scale"] = 2.0 ** round(math.log2(_OF_A_MEAN / max(1.0, denominator)))

    @property
    def value(self) -> float:
        """Always a power of two: what it does to a gradient is undone to the bit."""
        return float(self._group["loss_scale"])

    @property
    def is_least(self) -> bool:
        """Whether a gradient that is not finite has another cause."""
        return self.value <= _LEAST

    def after(self, finite: bool) -> None:
        """One update was made, or skipped."""
        self._group["num_finite"] = self._group["num_finite"] + 1 if finite else 0
        if not finite:
            self._group["loss_scale"] = max(_LEAST, self.value / 2)
        elif self._group["num_finite"] == _GROWS_AFTER:
            self._group["loss_scale"], self._group["num_finite"] = self.value * 2, 0
