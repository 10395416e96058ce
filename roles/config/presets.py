"""Settings that a model's size asks for, as one pure function: what it turns on can be read in `rondo show`, and given otherwise.

Owns what a size turns on in `train`. Does not own whether it fits: `rondo check` says that of these settings as of any. The dtype
is not among them, nor the attention: bfloat16 and the device's own kernels are what "auto" is wherever devices train.

    train=full_size(8.2e9, ranks=4, lr=1e-6, save_every=50)
"""

from __future__ import annotations

from typing import Any

from rondo.roles.config.training import TrainConfig

_TOKENS = 16384
"""A micro-batch: matrix products of the widths of billions of parameters fill a device with so many rows."""
_CHUNK_TOKENS = 1024
"""Of a vocabulary of 152,000, 0.6 GB for each tensor of float32 logits."""


def full_size(parameters: float, *, ranks: int, device_gib: float = 80, **settings: Any) -> TrainConfig:
    """`TrainConfig(**settings)` for a model of so many `parameters`, a copy of which is cut over `ranks` devices of `device_gib`
    each; of what `settings` name themselves, nothing is changed.

    Layers are computed again in the backward, micro-batches are long and logits come in small chunks. Where weights, gradients
    and moments would take more than half of a device, the moments lie in host memory; those of adapters are small.
    """
    state_bytes = 0 if settings.get("lora") is not None else 16 * parameters / ranks
    found = {
        "activation_checkpointing": True,
        "micro_batch_tokens": _TOKENS,
        "log_prob_chunk_tokens": _CHUNK_TOKENS,
        "offload_optimizer": state_bytes > device_gib * 2**30 / 2,
    }
    return TrainConfig(**found | settings)
