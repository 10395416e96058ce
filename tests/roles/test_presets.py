"""What a size turns on, and that nothing of the user's own is changed."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rondo.roles.config import TrainConfig, full_size


def test_a_full_size_computes_layers_again_in_long_micro_batches_with_small_chunks_of_logits() -> None:
    found = full_size(8.2e9, ranks=4, lr=3e-6)
    assert found == TrainConfig(
        lr=3e-6, activation_checkpointing=True, micro_batch_tokens=16384, log_prob_chunk_tokens=1024
    )


def test_moments_of_the_largest_lie_in_host_memory() -> None:
    assert not full_size(8.2e9, ranks=4).offload_optimizer
    assert full_size(32.8e9, ranks=8).offload_optimizer
    assert not full_size(32.8e9, ranks=8, device_gib=141).offload_optimizer
    assert not full_size(32.8e9, ranks=8, offload_optimizer=False).offload_optimizer


def test_what_is_set_stays() -> None:
    found = full_size(8.2e9, ranks=4, micro_batch_tokens=40_000, activation_checkpointing=False)
    assert (found.micro_batch_tokens, found.activation_checkpointing) == (40_000, False)
    with pytest.raises(ValidationError, match="micro_batch"):
        full_size(8.2e9, ranks=4, micro_batch=2)
