"""Rotations that depend on the longest sequence of a batch: right up to their border, refused beyond it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from rondo.models.logprobs import response_log_probs
from rondo.models.packing import Packing, Sequence
from rondo.models.rotations import longest_alike
from rondo.roles.engines.embedded.embedded import slot_engine
from rondo.runtime.errors import ConfigError
from tests.models.builders import SIZES, unpacked
from tests.roles.engines.engines import gap, request, run

LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [9.0] * 8,
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}


def rotated(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = SIZES | {"initializer_range": 0.3}
    if kind == "longrope":
        return hf.Phi3ForCausalLM(
            hf.Phi3Config(**sizes, rope_parameters=LONG | {"rope_theta": 1e4}, original_max_position_embeddings=32)
        ).eval()
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**sizes | {"max_position_embeddings": 32}, rope_parameters=DYNAMIC | {"rope_theta": 1e4})
    ).eval()


def sequences(*lengths: int) -> list[Sequence]:
    return [Sequence(np.random.default_rng(n).integers(1, 200, n).astype(np.int32), n - 3) for n in lengths]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_up_to_its_border_each_sequence_is_rotated_as_alone(kind: str) -> None:
    model = rotated(kind)
    assert longest_alike(model) == 32
    batch = sequences(32, 9, 20, 5)
    with torch.no_grad():
        found, _ = response_log_probs(model, Packing.of(model).pack(batch))
        expected = torch.cat([unpacked(model, one)[0] for one in batch])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    requests = [request("a", 20, 12), request("b", 3, 10), request("c", 9, 20)]
    assert gap(model, requests, run(slot_engine(model, num_slots=2, max_length=32), requests)) < 3e-5


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_sequence_beyond_the_border_is_refused_where_it_would_change_those_beside_it(kind: str) -> None:
    model = rotated(kind)
    with pytest.raises(ConfigError) as caught:
        Packing.of(model).pack(sequences(9, 33))
    assert str(caught.value) == (
        f"a sequence must have at most 32 tokens with {type(model).__name__}, which rotates longer ones, and those beside them, "
        "by other angles, got 33. Lower rollout.max_prompt_tokens or rollout.max_new_tokens"
    )
    with pytest.raises(ConfigError, match=r"must have at most 32 tokens with .* got 33"):
        slot_engine(model, num_slots=2, max_length=33)


def test_other_rotations_have_no_border() -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    for config in (hf.LlamaConfig(**SIZES), hf.LlamaConfig(**SIZES, rope_parameters=yarn)):
        assert longest_alike(hf.LlamaForCausalLM(config)) is None
