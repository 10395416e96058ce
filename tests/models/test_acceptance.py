"""What is asked of a model before it trains, and of a small one before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from rondo.models import acceptance
from rondo.models.acceptance import accept
from rondo.models.packing import Packing
from rondo.models.stand_in import small, stand_in
from rondo.runtime.errors import ConfigError
from tests.models import multimodal
from tests.models.builders import SIZES, tiny

ENCODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def test_a_model_that_trains_is_packed_as_it_wants() -> None:
    model = tiny("llama").to(torch.bfloat16).train()
    assert accept(model) == Packing.of(model)
    assert model.training


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: tiny("gemma2"),
            "Gemma2ForCausalLM must return what its output layer gives, got logits that it scales",
        ),
        (
            lambda: hf.BertLMHeadModel(hf.BertConfig(**ENCODER, initializer_range=0.5)),
            "BertLMHeadModel must not see those behind",
        ),
        (
            lambda: hf.LlamaModel(hf.LlamaConfig(**SIZES)),
            "LlamaModel must have an output layer, got none. Choose a causal LM",
        ),
    ],
)
def test_a_model_that_would_train_wrongly_is_refused_with_the_reason(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        accept(make())


def test_packing_that_changes_log_probs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(Packing):
        def pack(self, sequences: Any, *, train: bool = False) -> Any:
            packed = super().pack(sequences, train=train)
            packed.position_ids[:, 3:] += 1
            return packed

    monkeypatch.setattr(acceptance, "Packing", Shifted)
    with pytest.raises(
        ConfigError, match=r"must be those that Qwen3ForCausalLM gives each sequence alone, got some \S+ nats off"
    ):
        accept(tiny("qwen3"))


def test_a_small_model_keeps_the_kinds_of_layers_and_shrinks_everything_else() -> None:
    windows = ["sliding_attention", "full_attention"] * 24
    config = hf.Qwen3Config(num_hidden_layers=48, layer_types=windows, use_sliding_window=True, sliding_window=4096)
    model = stand_in(config)
    assert model.config.layer_types == ["sliding_attention", "full_attention"] * 2
    assert (model.config.sliding_window, model.config.hidden_size) == (8, 64)
    assert model.num_parameters() < 300_000
    assert config.num_hidden_layers == 48
    rotations = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "rope_theta": 1e4}
    phi = small(hf.Phi3Config(rope_parameters=rotations | {"original_max_position_embeddings": 4096}))
    assert len(phi.rope_parameters["short_factor"]) == 8


def test_a_family_with_media_is_asked_itself() -> None:
    assert stand_in(multimodal.tiny("qwen3_vl").config) is None
