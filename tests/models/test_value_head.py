"""A value head in the place of an output layer: its weights, what is not read, and that values are those of the trunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from rondo.models import checkpoint
from rondo.models.acceptance import accept
from rondo.models.load import load_model
from rondo.models.logprobs import response_values
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.models.value_head import ValueHead, check_scores, config_of_scores, give_value_head, value_head_of
from rondo.runtime.errors import ConfigError
from tests.models.builders import folder_of, sequences


def critic(path: str) -> Any:
    return load_model(path, cut=give_value_head)


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3", False), ("qwen3_moe", False), ("gpt2", True)])
def test_values_are_a_row_times_what_the_trunk_makes_of_the_tokens_before(
    tmp_path: Path, family: str, tied: bool
) -> None:
    path = folder_of(tmp_path, family, tied=tied)
    model, plain = critic(path), hf.AutoModelForCausalLM.from_pretrained(path)
    assert value_head_of(model) == "lm_head" and "lm_head.weight" not in model.state_dict()
    packing = accept(model)
    rows = sequences([(9, 4), (12, 7), (5, 1)])
    found = response_values(model, packing.pack(rows, train=True))
    assert found.dtype == torch.float32 and found.requires_grad
    head = model.lm_head.value.detach()
    with torch.no_grad():
        hidden = [plain.base_model(torch.from_numpy(row.tokens).long()[None]).last_hidden_state[0] for row in rows]
    wanted = [each[-row.response - 1 : -1] @ head[0] for each, row in zip(hidden, rows, strict=True)]
    torch.testing.assert_close(found.detach(), torch.cat(wanted), atol=1e-5, rtol=1e-4)
    assert 0.01 < head.std() < 0.03 and torch.equal(critic(path).lm_head.value, model.lm_head.value)


def test_a_folder_of_a_model_that_scores_has_the_head_and_one_of_several_labels_is_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path, "qwen3", tied=False)
    tensors = load_file(tmp_path / "model.safetensors")
    hidden = tensors["lm_head.weight"].shape[1]
    del tensors["lm_head.weight"]  # as models for sequence classification are saved
    for num_labels, message in ((1, ""), (3, "score.weight of a folder must have one label")):
        score = torch.randn(num_labels, hidden)
        save_file(tensors | {"score.weight": score}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if message:
            with pytest.raises(ConfigError, match=message):
                critic(path)
        else:
            assert torch.equal(critic(path).lm_head.value, score)
            save_file(tensors | {"lm_head.value": -score}, tmp_path / "model.safetensors", metadata={"format": "pt"})
            assert torch.equal(critic(path).lm_head.value, -score)  # as critics were written before


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3_moe", False), ("gpt2", True)])
def test_it_is_written_as_a_model_for_sequence_classification_and_read_again(
    tmp_path: Path, family: str, tied: bool
) -> None:
    path = folder_of(tmp_path / "before", family, tied=tied)
    model = critic(path)
    check_scores(model)
    checkpoint.export_hf(tmp_path / "out", model, path)
    scores = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    packing = accept(model)
    rows = sequences([(9, 4), (12, 7), (5, 1)])
    rows += sequences([(model.config.max_position_embeddings, 3)])  # has no room for another token
    ends = np.cumsum([row.response + 1 for row in rows]) - 1
    with torch.no_grad():
        found = response_values(model, packing.pack(rows, behind=True))[ends]
        wanted = [scores(torch.from_numpy(row.tokens).long()[None]).logits[0, 0] for row in rows]
    torch.testing.assert_close(found, torch.stack(wanted), atol=1e-5, rtol=1e-4)
    read = critic(str(tmp_path / "out")).state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ConfigError, match=r"no place for \(score.weight\)|must be complete, got 1 missing"):
        load_model(str(tmp_path / "out"))


def test_a_family_that_transformers_does_not_classify_with_is_refused() -> None:
    config = hf.MambaConfig(vocab_size=8, hidden_size=8, state_size=2, num_hidden_layers=1, intermediate_size=16)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    give_value_head(model)
    with pytest.raises(
        ConfigError, match="transformers must have MambaForCausalLM as a model for sequence classification"
    ):
        check_scores(model)


def test_an_end_of_sequence_that_pads_too_pads_nothing_in_the_folder() -> None:
    tokenizer = build_tokenizer()
    config = hf.Qwen3Config(vocab_size=266, pad_token_id=3)
    found, other = config_of_scores(config, tokenizer), config_of_scores(hf.MambaConfig(), tokenizer)
    assert found.pad_token_id == tokenizer.pad_token_id and found.architectures == ["Qwen3ForSequenceClassification"]
    assert other.num_labels == 1 and other.architectures is None  # a critic's, which transformers has no such model of
    tokenizer.pad_token = tokenizer.eos_token
    assert config_of_scores(config, tokenizer).pad_token_id is None and config.pad_token_id == 3


def test_a_head_computes_in_float32_whatever_its_weights_are() -> None:
    head = ValueHead(8, dtype=torch.bfloat16, device=torch.device("cpu"))
    torch.nn.init.normal_(head.value)
    assert head(torch.randn(2, 3, 8, dtype=torch.bfloat16)).dtype == torch.float32
