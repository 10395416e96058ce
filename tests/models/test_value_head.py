"""A value head in the place of an output layer: its weights, what is not read, and that values are those of the trunk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from rondo.models.acceptance import accept
from rondo.models.load import load_model
from rondo.models.logprobs import response_values
from rondo.models.value_head import ValueHead, give_value_head, value_head_of
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
    for num_labels, message in ((1, ""), (3, "score.weight of critic.path must have one label")):
        score = torch.randn(num_labels, hidden)
        save_file(tensors | {"score.weight": score}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        if message:
            with pytest.raises(ConfigError, match=message):
                critic(path)
        else:
            assert torch.equal(critic(path).lm_head.value, score)


def test_a_head_computes_in_float32_whatever_its_weights_are() -> None:
    head = ValueHead(8, dtype=torch.bfloat16, device=torch.device("cpu"))
    torch.nn.init.normal_(head.value)
    assert head(torch.randn(2, 3, 8, dtype=torch.bfloat16)).dtype == torch.float32
