"""Reading and building model folders, and what is said when they are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rondo.models import random_weights
from rondo.models.config import ModelConfig
from rondo.models.load import (
    check_weights,
    empty_model,
    load_config,
    load_model,
    load_tokenizer,
    prepare,
    tensors_of,
)
from rondo.models.names import disk_shapes
from rondo.models.tiny import qwen3
from rondo.models.value_head import give_value_head
from rondo.runtime.errors import ConfigError
from tests.models.builders import folder_of

TINY = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "num_layers": 1}


def built(**arguments: object) -> ModelConfig:
    return ModelConfig(build=qwen3.build, build_args=TINY | arguments)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(prepare(built(), tmp_path / "model"))


def test_a_built_model_is_built_once_and_equal_for_equal_arguments(folder: Path, tmp_path: Path) -> None:
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert prepare(built(), folder) == str(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    weights = (folder / "model.safetensors").read_bytes()
    assert (Path(prepare(built(), tmp_path / "again")) / "model.safetensors").read_bytes() == weights
    assert (Path(prepare(built(seed=1), tmp_path / "other")) / "model.safetensors").read_bytes() != weights
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "model", "other"]


def test_a_folder_with_another_model_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be empty or hold the model of .*\"seed\":1.*, got .*Remove it"):
        prepare(built(seed=1), folder)


def test_building_does_not_touch_the_callers_random_state(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    prepare(built(), tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hidden_size must be an even multiple of num_heads, got 100 and 3\."):
        qwen3.build(tmp_path, hidden_size=100, num_heads=3)
    with pytest.raises(ConfigError, match=r"num_heads must be a multiple of num_kv_heads, got 4 and 3\."):
        qwen3.build(tmp_path, num_kv_heads=3)


def test_the_tiny_model_loads_as_any_hugging_face_folder(folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert len(tokenizer) == model.config.vocab_size == 266
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    assert torch.equal(model.lm_head.weight, load_model(str(folder)).lm_head.weight)


def test_tokens_are_bytes_and_any_text_round_trips(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    for text in ("s3142>", " a  b\n\n\tc ", "naïve 東京 🙂", "".join(map(chr, range(1, 300))), "don't 've 1234567"):
        ids = tokenizer(text).input_ids
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids) == text


def test_the_chat_template_marks_turns_with_single_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder), needs_chat_template=True)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer(text).input_ids) == len(text) - (len("<|im_start|>") - 1) * 2 - (len("<|im_end|>") - 1)


def test_a_missing_chat_template_is_said_where_one_is_needed(tmp_path: Path) -> None:
    path = prepare(built(chat_template=False), tmp_path / "model")
    assert load_tokenizer(path).chat_template is None
    with pytest.raises(ConfigError, match=r"must have a chat template for data.apply_chat_template, got none\. Put"):
        load_tokenizer(path, needs_chat_template=True)


def test_a_path_without_a_model_is_said_with_what_lies_there(folder: Path, tmp_path: Path) -> None:
    assert prepare(ModelConfig(path=str(folder)), tmp_path) == str(folder)
    with pytest.raises(ConfigError, match=r"must be a folder that exists, got '/nowhere/at/all'\. Check the path"):
        prepare(ModelConfig(path="/nowhere/at/all"), tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    with pytest.raises(ConfigError, match=r"must be a folder with a config.json, got '.*data' with train.jsonl\."):
        load_config(str(tmp_path / "data"))
    (tmp_path / "data" / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    with pytest.raises(
        ConfigError, match=r"must name a model that transformers .* can load, got '.*data' \(ValueError"
    ):
        load_config(str(tmp_path / "data"))


def test_a_folder_without_a_tokenizer_is_said(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"must hold a tokenizer that transformers can load, got "):
        load_tokenizer(str(folder))


def test_a_model_with_missing_weights_is_refused_instead_of_filled_at_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"exactly those of Qwen3.*, got 1 missing \(model.layers.0.mlp.up_proj.weight\)\."
    ):
        load_model(str(folder))


def changed(folder: Path, **tensors: torch.Tensor) -> str:
    """The folder with further tensors, or others of the same name."""
    weights = load_file(folder / "model.safetensors") | tensors
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_tensors_that_the_model_has_no_place_for_are_refused_by_name(tmp_path: Path, family: str) -> None:
    path = folder_of(tmp_path, family)
    check_weights(path, empty_model(path))
    own = load_file(tmp_path / "model.safetensors")
    beside = {f"model.layers.0.self_attn.{name}": torch.zeros(4) for name in ("q_proj.bias", "q_proj.weight_scale_inv")}
    older = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}  # transformers itself leaves it out
    changed(tmp_path, **older)
    assert torch.equal(load_model(path).lm_head.weight, own["model.embed_tokens.weight"])
    save_file(beside, tmp_path / "consolidated.safetensors")  # the same once more, in a layout that is not loaded
    model = load_model(path)
    model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    assert tensors_of(str(tmp_path / "shards")).keys() == tensors_of(path).keys() - older.keys()
    changed(tmp_path, **beside)
    for refuses in (lambda: check_weights(path, empty_model(path)), lambda: load_model(path)):
        with pytest.raises(
            ConfigError, match=r"got 2 that it has no place for \(model.layers.0.self_attn.q_proj.bias, .*_inv\)"
        ):
            refuses()


def configured(folder: Path, **settings: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def cut(folder: Path, *names: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({n: w for n, w in weights.items() if n not in names}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("family", "tied", "change", "got"),
    [
        (
            "qwen3",
            True,
            lambda folder: (
                cut(folder, "model.norm.weight", "model.layers.1.mlp.up_proj.weight"),
                changed(folder, **{"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 5), "model.x.weight": torch.zeros(1)}),
            ),
            r"2 missing \(model.layers.1.mlp.up_proj.weight, model.norm.weight\); 1 of another shape "
            r"\(model.layers.0.mlp.up_proj.weight \[3, 5\] instead of \[\d+, \d+\]\); 1 that it has no place for "
            r"\(model.x.weight\)\. Download or export the folder again, or correct config.json$",
        ),
        (
            "qwen3",
            True,
            lambda folder: configured(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3),
            r"11 missing \(model.layers.2.input_layernorm.weight, .*, \.\.\.\)\. .*; num_hidden_layers there counts 3 layers, of "
            r"which 2 have weights$",
        ),
        (
            "qwen3",
            True,
            lambda folder: configured(folder, num_hidden_layers=1, layer_types=["full_attention"]),
            r"11 that it has no place for \(model.layers.1.input_layernorm.weight",
        ),
        (
            "qwen3",
            True,
            lambda folder: configured(folder, tie_word_embeddings=False),
            r"1 missing \(lm_head.weight\)\. .*; tie_word_embeddings must be true there if the model's output layer is its emb",
        ),
        (
            "qwen3",
            True,
            lambda folder: configured(folder, vocab_size=512),
            r"1 of another shape \(model.embed_tokens.weight \[\d+, 64\] instead of \[512, 64\]\)",
        ),
        (
            "qwen3",
            False,
            lambda folder: changed(folder, **{"lm_head.weight": torch.zeros(8, 8, dtype=torch.int8)}),
            r"1 of another shape \(lm_head.weight \[8, 8\] instead of",
        ),
        (
            "qwen3",
            False,
            lambda folder: changed(folder, **{"model.norm.weight": torch.zeros(64, dtype=torch.int8)}),
            r"1 of another shape \(model.norm.weight of another kind of numbers than torch.float32\)",
        ),
        (
            "qwen3_moe",
            True,
            lambda folder: cut(folder, "model.layers.0.mlp.experts.1.up_proj.weight", "model.layers.0.mlp.gate.weight"),
            r"2 missing \(model.layers.0.mlp.experts.1.up_proj.weight, model.layers.0.mlp.gate.weight\)",
        ),
    ],
)  # fmt: skip
def test_weights_that_are_not_those_of_the_config_are_named_without_being_read(
    tmp_path: Path, family: str, tied: bool, change: Callable[[Path], object], got: str
) -> None:
    path = folder_of(tmp_path, family, tied=tied)
    check_weights(path, empty_model(path))
    change(tmp_path)
    with pytest.raises(ConfigError, match=got):
        check_weights(path, empty_model(path))


def test_a_folder_with_the_output_layer_alone_is_whole_where_it_is_tied(tmp_path: Path) -> None:
    path = folder_of(tmp_path, "qwen3", tied=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    changed(tmp_path, **{"lm_head.weight": embedding})
    cut(tmp_path, "model.embed_tokens.weight")
    check_weights(path, empty_model(path))
    assert torch.equal(load_model(path).get_input_embeddings().weight, embedding)


def test_a_sharded_folder_is_compared_by_its_index_and_names_files_that_are_not_there(tmp_path: Path) -> None:
    load_model(folder_of(tmp_path / "whole", "qwen3")).save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    path = str(tmp_path / "shards")
    check_weights(path, empty_model(path))
    configured(tmp_path / "shards", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"1 missing \(lm_head.weight\)"):
        check_weights(path, empty_model(path))
    [lost, *_] = sorted((tmp_path / "shards").glob("*.safetensors"))
    lost.unlink()
    with pytest.raises(ConfigError, match=rf"got 1 of \d+ missing \({lost.name}\)\. Download them"):
        load_config(path)
    (tmp_path / "shards" / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"index.json must be an index of safetensors files, got KeyError"):
        load_config(path)


def test_a_value_head_needs_no_output_layer_and_is_compared_where_a_folder_has_one(tmp_path: Path) -> None:
    path = folder_of(tmp_path, "qwen3", tied=False)
    cut(tmp_path, "lm_head.weight")

    def scoring() -> Any:
        model = empty_model(path)
        give_value_head(model)
        return model

    check_weights(path, scoring())
    changed(tmp_path, **{"score.weight": torch.zeros(1, 64)})
    check_weights(path, scoring())
    changed(tmp_path, **{"score.weight": torch.zeros(2, 64)})
    with pytest.raises(ConfigError, match=r"score.weight of a folder must have one label, \[1, 64\], got \[2, 64\]"):
        check_weights(path, scoring())


def test_quantized_weights_are_refused_before_anything_is_built(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for section in ({"quantization_config": {"quant_method": "fp8"}}, {"compression_config": {"quant_method": "int8"}}):
        (folder / "config.json").write_text(json.dumps(config | section))
        with pytest.raises(
            ConfigError, match=r"must hold weights of full precision.* with a quantization_config \((fp|int)8\)"
        ):
            prepare(ModelConfig(path=str(folder)), folder)
    (folder / "config.json").write_text(json.dumps(config))
    name = "model.layers.0.mlp.up_proj.weight"
    changed(folder, **{name: load_file(folder / "model.safetensors")[name].to(torch.float8_e4m3fn)})
    with pytest.raises(ConfigError, match=rf"must hold weights of full precision.* with {name} of F8_E4M3\."):
        prepare(ModelConfig(path=str(folder)), folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    with pytest.raises(
        ConfigError, match=r"model.safetensors must be a whole safetensors file, got .*Download it again"
    ):
        load_config(str(folder))


def test_weights_that_the_config_ties_are_equal_or_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path, "qwen3", tied=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    model = load_model(changed(tmp_path, **{"lm_head.weight": embedding.clone()}))  # some releases write both
    assert model.lm_head.weight is model.model.embed_tokens.weight
    changed(tmp_path, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ConfigError, match=r"got a lm_head.weight that differs from model.embed_tokens.weight: engines"):
        load_model(path)


def test_a_device_that_is_asked_for_is_the_one_of_whatever_names_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []

    def choose(device: str) -> None:
        chosen.append(device)
        raise InterruptedError  # there is none here

    monkeypatch.setattr(torch.cuda, "set_device", choose)
    with pytest.raises(InterruptedError):
        load_model(str(folder), device="cuda:3")
    load_model(str(folder))
    assert chosen == ["cuda:3"]


def test_a_folder_of_random_weights_loads_as_any_and_holds_none(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "source", "qwen3_moe")

    def made(name: str, **arguments: object) -> Any:
        build = {"build": random_weights.build, "build_args": {"config": source} | arguments}
        path = prepare(ModelConfig(**build), tmp_path / name)
        assert not list(Path(path).glob("*.safetensors"))
        assert (
            len(disk_shapes(empty_model(path))) == len(disk_shapes(load_model(source)))
            or "num_hidden_layers" in arguments
        )
        return load_model(path)

    one, usual = made("one", seed=1), load_model(source)
    assert one.lm_head.weight is one.model.embed_tokens.weight
    for (name, tensor), (_, other) in zip(one.named_parameters(), usual.named_parameters(), strict=True):
        spread = 0.1 if tensor.ndim > 1 else 0.0  # the config's, and ones for norms
        assert float(tensor.detach().std()) == pytest.approx(spread, rel=0.1), name
        assert tensor.shape == other.shape and (tensor.ndim > 1 or torch.equal(tensor, other)), name
    before = torch.get_rng_state()
    again, others = made("again", seed=1), made("others", seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, one.parameters(), again.parameters()))
    assert not torch.equal(one.lm_head.weight, others.lm_head.weight)
    short = made("short", seed=1, num_hidden_layers=1)
    assert len(short.model.layers) == 1 and torch.equal(short.model.norm.weight, one.model.norm.weight)
    assert torch.equal(short.model.layers[0].mlp.experts.down_proj, one.model.layers[0].mlp.experts.down_proj)


def test_the_dtype_is_the_one_asked_for(folder: Path) -> None:
    model = load_model(str(folder), dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training
    with pytest.raises(ConfigError, match=r"dtype must be one of float32, bfloat16, float16, got 'float64'\."):
        load_model(str(folder), dtype="float64")


@pytest.mark.parametrize("tied", [True, False])
def test_the_shapes_of_parameters_are_told_as_they_lie_on_disk(tmp_path: Path, tied: bool) -> None:
    path = folder_of(tmp_path, "qwen3_moe", tied=tied)
    weights = load_file(tmp_path / "model.safetensors")
    assert disk_shapes(empty_model(path)) == {name: tuple(tensor.shape) for name, tensor in weights.items()}
