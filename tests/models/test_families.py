"""Families: loading, forward, export and loading again; the thinker of a whole omni model; what the tiny ones promise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rondo.models.checkpoint import export_hf
from rondo.models.families import FAMILIES, family_of
from rondo.models.load import check_weights, empty_model, load_config, load_model, load_tokenizer
from rondo.models.media.config import MediaConfig
from rondo.models.media.processor import Processor
from rondo.models.media.refs import MediaRef
from rondo.models.names import disk_shapes, load_disk_tensors
from rondo.models.tiny import qwen3, qwen3_5, qwen3_omni, qwen3_vl
from rondo.runtime.errors import ConfigError
from tests.e2e.omni import picture, sound
from tests.models.builders import full_tensors

BUILDS: dict[str, tuple[Callable[..., None], dict[str, int]]] = {
    "omni": (qwen3_omni.build, {}),
    "vl": (qwen3_vl.build, {}),
    "vl_moe": (qwen3_vl.build, {"num_experts": 4}),
    "3_5": (qwen3_5.build, {}),
    "3_5_moe": (qwen3_5.build, {"num_experts": 4}),
}


@pytest.fixture(scope="module", params=list(BUILDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build, sizes = BUILDS[request.param]
    path = tmp_path_factory.mktemp("families") / request.param
    path.mkdir()
    build(path, **sizes)
    return path


def asked(folder: Path) -> dict[str, torch.Tensor]:
    """The arguments of a forward on one prompt with every modality of the family."""
    family = family_of(load_config(str(folder)))
    assert family is not None
    refs = [MediaRef("image", picture(0)), MediaRef("video", [picture(n) for n in range(4)])]
    refs += [MediaRef("audio", sound(0))] if "audio" in family.modalities else []
    content: list[dict[str, str]] = [{"type": ref.kind} for ref in refs]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "?"}]}]
    made = Processor.load(str(folder), MediaConfig(video_min_tokens=4)).prepare(messages, refs)
    assert made.media is not None and set(made.media.modalities) == set(family.modalities)
    arrays = {name: torch.from_numpy(np.array(array)) for name, array in made.media.arrays.items()}
    positions = arrays.pop("positions")
    text = torch.arange(len(made.tokens), dtype=torch.float32)[None]
    tokens = torch.from_numpy(made.tokens.astype(np.int64))[None]
    return {"input_ids": tokens, "position_ids": torch.cat([text, positions])[:, None], **arrays}


def logits(model: Any, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**arguments).logits
    return found


def test_an_exported_folder_gives_the_same_logits_in_transformers_and_the_same_prompts_here(
    folder: Path, tmp_path: Path
) -> None:
    model = load_model(str(folder))
    out = tmp_path / "hf"
    export_hf(out, model, str(folder))
    again = transformers.AutoModelForImageTextToText.from_pretrained(out)
    assert type(again) is type(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    assert torch.equal(logits(model, asked(folder)), logits(again, asked(out)))
    assert load_tokenizer(str(out)).chat_template == load_tokenizer(str(folder)).chat_template


def test_what_is_published_has_the_names_on_disk_and_loads_into_another_model(folder: Path) -> None:
    model, other = load_model(str(folder)), load_model(str(folder))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    published = {name: tensor.clone() for name, tensor in full_tensors(model)}
    on_disk = load_file(folder / "model.safetensors")
    assert published.keys() == on_disk.keys() == disk_shapes(model).keys()
    assert all(torch.equal(published[name], on_disk[name]) for name in on_disk)
    load_disk_tensors(other, published)
    assert all(torch.equal(p, other.get_parameter(name)) for name, p in model.named_parameters())


def test_shape_and_size_are_known_without_weights(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    assert disk_shapes(empty_model(str(folder))) == {name: tuple(t.shape) for name, t in stored.items()}
    assert all(parameter.is_meta for parameter in empty_model(str(folder)).parameters())


def test_the_dummy_runs_every_tower_once(folder: Path) -> None:
    model = load_model(str(folder))
    family = family_of(model)
    assert family is not None
    calls: list[str] = []
    for path in set(family.towers.values()):
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: calls.append(path))
    tokens, media = family.dummy(model.config)
    arrays = {n: torch.from_numpy(a) for n, a in media.arrays.items() if n != "positions"}
    positions = torch.from_numpy(np.concatenate([np.arange(len(tokens), dtype=np.float32)[None], media.positions]))
    found = logits(
        model,
        {"input_ids": torch.from_numpy(tokens).long()[None], "position_ids": positions[:, None], **arrays},
    )
    assert torch.isfinite(found).all()
    assert sorted(calls) == sorted(family.towers[modality] for modality in media.modalities)
    assert media.modalities == tuple(m for m in ("image", "audio", "video") if m in family.modalities)


def test_every_parameter_of_a_tower_belongs_to_a_part_of_it(folder: Path) -> None:
    model = load_model(str(folder))
    family = family_of(model)
    assert family is not None
    from rondo.models.parts import part_of

    towers = tuple(f"{path}." for path in family.towers.values())
    for name, _ in model.named_parameters():
        assert (part_of(family, name) == "language") == (not name.startswith(towers)), name
    assert {part_of(family, name) for name, _ in model.named_parameters()} == {"language", *family.parts}


def test_equal_arguments_build_equal_weights_and_other_seeds_others_as_wide_as_asked(tmp_path: Path) -> None:
    stored = []
    for number, (seed, init_std) in enumerate(((0, 0.02), (0, 0.02), (1, 0.02), (0, 0.08))):
        path = tmp_path / str(number)
        path.mkdir()
        qwen3_vl.build(path, seed=seed, init_std=init_std)
        stored.append((path / "model.safetensors").read_bytes())
        for name, weight in load_file(path / "model.safetensors").items():
            if name.endswith(("q_proj.weight", "qkv.weight")):  # of the decoder, of the tower
                assert weight.std().item() == pytest.approx(init_std, rel=0.1)
    assert stored[0] == stored[1] != stored[2]


@pytest.mark.parametrize("build", [qwen3_vl.build, qwen3_omni.build, qwen3_5.build])
def test_sizes_that_do_not_divide_are_refused(build: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hidden_size must be an even multiple of num_heads, got 65 and 4"):
        build(tmp_path, hidden_size=65, num_heads=4)
    with pytest.raises(ConfigError, match="experts_per_token must be from 1 to num_experts, got 5 of 4"):
        build(tmp_path, num_experts=4, experts_per_token=5)


def test_a_model_of_text_has_no_family_and_is_exported_without_a_processor(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.mkdir()
    qwen3.build(path, hidden_size=32, num_layers=1)
    model = load_model(str(path))
    assert family_of(model) is None and all(family.model_types for family in FAMILIES)
    export_hf(tmp_path / "hf", model, str(path))
    assert not (tmp_path / "hf" / "preprocessor_config.json").exists()


def test_of_a_model_that_also_speaks_the_thinker_is_loaded(tmp_path: Path) -> None:
    thinker = tmp_path / "thinker"
    thinker.mkdir()
    qwen3_omni.build(thinker)
    whole = tmp_path / "whole"
    whole.mkdir()
    for file in thinker.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (whole / file.name).write_bytes(file.read_bytes())
    config = {"model_type": "qwen3_omni_moe", "thinker_config": json.loads((thinker / "config.json").read_text())}
    (whole / "config.json").write_text(json.dumps(config))
    tensors = {f"thinker.{name}": tensor for name, tensor in load_file(thinker / "model.safetensors").items()}
    save_file(tensors | {"talker.model.norm.weight": torch.ones(4)}, whole / "model.safetensors", {"format": "pt"})
    model, expected = load_model(str(whole)), load_model(str(thinker))
    assert type(model) is type(expected)
    check_weights(str(whole), empty_model(str(whole)))
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in expected.named_parameters())
    export_hf(tmp_path / "hf", model, str(whole))
    assert torch.equal(logits(load_model(str(tmp_path / "hf")), asked(tmp_path / "hf")), logits(model, asked(whole)))
