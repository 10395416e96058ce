"""A GGUF file becomes the run's Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rondo.models.config import ModelConfig
from rondo.models.load import prepare
from rondo.models.tiny import qwen3
from rondo.runtime.errors import ConfigError


def write(path: Path, folder: Path, *left_out: str) -> None:
    """The Qwen3 in `folder` as somebody's converter writes it, unquantized, without the tensors named in `left_out`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    config, tokenizer = model.config, json.loads((folder / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_token_types([3 if token in special else 1 for token in sorted(ids, key=ids.__getitem__)])
    writer.add_token_scores([0.0] * len(ids))
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name not in left_out and not (config.tie_word_embeddings and name == "lm_head.weight"):
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_written_once_as_a_folder_with_its_weights_and_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    qwen3.build(
        tmp_path / "from", hidden_size=256, num_heads=2, num_kv_heads=1
    )  # transformers knows no other width of a head
    write(tmp_path / "tiny.gguf", tmp_path / "from")
    config = ModelConfig(path=str(tmp_path / "tiny.gguf"))
    folder = prepare(config, tmp_path / "model")
    assert folder == str(tmp_path / "model") == prepare(config, tmp_path / "model")
    told = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "quantization_config" not in told and told["dtype"] == "float32"
    before, after = (AutoModelForCausalLM.from_pretrained(where) for where in (tmp_path / "from", folder))
    assert before.state_dict().keys() == after.state_dict().keys()
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.state_dict().items())
    text = "sort 3142>"
    tokenizers = [AutoTokenizer.from_pretrained(where) for where in (tmp_path / "from", folder)]
    assert tokenizers[0](text)["input_ids"] == tokenizers[1](text)["input_ids"]
    assert after.generation_config.eos_token_id == tokenizers[0].eos_token_id


def test_a_file_that_is_missing_or_no_model_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must name a GGUF file that exists, got .*nothing\.gguf'\. Check the path"):
        prepare(ModelConfig(path=str(tmp_path / "nothing.gguf")), tmp_path / "model")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(ConfigError, match=r"of a family that transformers reads, got .*text\.gguf'"):
        prepare(ModelConfig(path=str(tmp_path / "text.gguf")), tmp_path / "model")


def test_without_what_reads_it_the_line_to_install_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.gguf").touch()
    monkeypatch.setattr("rondo.models.gguf.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"without accelerate and gguf, got .* pip install 'rondo-rl\[gguf\]'"):
        prepare(ModelConfig(path=str(tmp_path / "tiny.gguf")), tmp_path / "model")


def test_a_gguf_file_without_all_weights_is_refused_instead_of_filled_at_random(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    qwen3.build(tmp_path / "from", hidden_size=256, num_heads=2, num_kv_heads=1)
    write(tmp_path / "tiny.gguf", tmp_path / "from", "model.norm.weight")
    with pytest.raises(
        ConfigError, match=r"got '.*tiny.gguf' with 1 missing \(model.norm.weight\)\. Download it again"
    ):
        prepare(ModelConfig(path=str(tmp_path / "tiny.gguf")), tmp_path / "model")
