"""An adapter is the two small products that its paper says, under peft's names, and nothing else of a model moves."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from rondo.models.config import LoraConfig
from rondo.models.hf_folder import write_adapter
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.lora import (
    adapt,
    adapted,
    base_alone,
    canary_of,
    config_of,
    for_peft,
    in_place_of_adapters,
    learning,
    load_published,
    published_adapter,
)
from rondo.models.names import adapter_tensors, disk_shapes, memory_tensors
from rondo.models.packing import Packing
from rondo.models.parallel import compute_in
from rondo.models.published import own_weights, published_shapes
from rondo.models.tiny import qwen3, qwen3_5, qwen3_omni, qwen3_vl
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.runtime.errors import ConfigError
from tests.models import multimodal
from tests.models.builders import SIZES, tiny
from tests.strength import LONG

LORA = LoraConfig(rank=4, alpha=6.0)
EXPERTS = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "experts"))
TOKENS = torch.arange(1, 13)[None] * 7 % 90


def adapted_tiny(family: str = "qwen3", settings: LoraConfig = LORA, *, large: bool = True) -> Any:
    model = tiny(family).eval()
    adapt(model, settings)
    if large:
        load_published(model, canary(model, settings))
    return model


def canary(model: Any, settings: LoraConfig = LORA) -> dict[str, torch.Tensor]:
    return canary_of({name: tensor.shape for name, tensor in published_adapter(model).items()}, settings)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


def test_a_product_with_an_adapter_is_its_weight_and_two_small_matrices() -> None:
    model = adapted_tiny()
    product, x = adapted(model)["model.layers.1.mlp.down_proj"], torch.randn(3, 96)
    a, b = product.lora_A.weight, product.lora_B.weight
    assert a.shape == (4, 96) and b.shape == (64, 4)
    torch.testing.assert_close(product(x), x @ product.weight.T + 6 / 4 * (x @ a.T) @ b.T)


def test_a_fresh_adapter_changes_nothing_and_depends_on_seed_and_name_alone() -> None:
    model, other = tiny("qwen3").eval(), tiny("qwen3").eval()
    before = logits(model)
    adapt(model, LORA, seed=3)
    assert torch.equal(logits(model), before)
    adapt(other, LORA.model_copy(update={"targets": ("up_proj",)}), seed=3)
    drawn = published_adapter(model)
    assert all(torch.equal(tensor, drawn[name]) for name, tensor in published_adapter(other).items())
    assert len({float(t[0, 0]) for name, t in drawn.items() if "lora_A" in name}) == len(adapted(model))


def test_the_base_alone_is_what_it_was_and_a_canary_reaches_every_target() -> None:
    before, model = logits(tiny("qwen3").eval()), adapted_tiny()
    with base_alone(model):
        assert torch.equal(logits(model), before)
    whole = logits(model)
    for name, tensor in published_adapter(model).items():
        if "lora_B" in name:
            with in_place_of_adapters(model, published_adapter(model) | {name: torch.zeros_like(tensor)}):
                without = logits(model)
            assert float((without - whole).abs().mean()) > 0.05, name
    assert torch.equal(logits(model), whole)


def test_adapters_alone_have_gradients() -> None:
    model = adapted_tiny()
    model(input_ids=TOKENS).logits.sum().backward()
    have = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert have == set(adapter_tensors(model)) == {n for n, p in model.named_parameters() if p.requires_grad}


def test_names_are_those_of_peft_and_the_base_keeps_its_own() -> None:
    model = adapted_tiny(settings=LoraConfig(rank=2, targets=("q_proj", "layers.0.mlp.up_proj")))
    paths = ["layers.0.self_attn.q_proj", "layers.0.mlp.up_proj", "layers.1.self_attn.q_proj"]
    wanted = [f"base_model.model.model.{path}.lora_{m}.weight" for path in paths for m in "AB"]
    assert list(published_adapter(model)) == wanted
    assert memory_tensors(model).keys() == dict(tiny("qwen3").named_parameters()).keys()
    assert disk_shapes(model) == disk_shapes(tiny("qwen3"))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_merged_weights_compute_what_base_and_adapter_do(family: str) -> None:
    model, plain = adapted_tiny(family), tiny(family).eval()
    weights = dict(own_weights(model))
    assert {name: t.shape for name, t in weights.items()} == {n: t.shape for n, t in published_shapes(plain).items()}
    before = logits(plain)
    load_published(plain, weights)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-4, rtol=0)
    assert float((logits(plain) - before).abs().max()) > 0.1


def test_each_expert_has_an_adapter_of_its_own_which_lies_in_a_folder_as_in_that_of_peft() -> None:
    model, plain = adapted_tiny("qwen3_moe", EXPERTS), tiny("qwen3_moe").eval()
    before, weights, told = logits(plain), dict(own_weights(plain)), for_peft(published_adapter(model))
    with base_alone(model):
        torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=0)

    def added(at: str, of: str = "") -> torch.Tensor:
        a, b = (told.pop(f"base_model.model.{at}{of}.lora_{half}.weight") for half in "AB")
        if "experts" not in at:
            return 6 / 4 * b @ a
        return 6 / 4 * torch.einsum("ore,eri->eoi", b.reshape(len(b), 4, -1), a.reshape(-1, 4, a.shape[1]))

    for number in range(2):
        at = f"model.layers.{number}"
        weights[f"{at}.self_attn.q_proj.weight"] += added(f"{at}.self_attn.q_proj")
        gates_and_ups, downs = added(f"{at}.mlp.experts", ".base_layer"), added(f"{at}.mlp.experts")
        for expert, (both, down) in enumerate(zip(gates_and_ups, downs, strict=True)):
            parts = dict(zip(("gate", "up", "down"), (*both.chunk(2), down), strict=True))
            for part, more in parts.items():
                weights[f"{at}.mlp.experts.{expert}.{part}_proj.weight"] += more
    assert told == {}
    for name, tensor in own_weights(model):
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=1e-5)
    load_published(plain, weights)
    torch.testing.assert_close(logits(plain), logits(model), atol=1e-4, rtol=0)
    assert float((logits(plain) - before).abs().max()) > 0.1


def test_dropout_is_on_while_demonstrations_are_learnt_alone() -> None:
    model = adapted_tiny(settings=LoraConfig(rank=4, dropout=0.5))
    torch.manual_seed(0)
    with learning(model):
        assert not torch.equal(logits(model), logits(model))
    assert torch.equal(logits(model), logits(model))


def test_the_language_model_has_adapters_and_a_tower_where_it_is_named() -> None:
    def paths(*targets: str) -> set[str]:
        model = multimodal.tiny("qwen3_vl")
        adapt(model, LoraConfig(targets=targets) if targets else LORA)
        return set(adapted(model))

    language, vision = paths(), paths("vision")
    assert language and vision and not any("visual" in path for path in language)
    assert all("visual" in path for path in vision)
    assert paths("language", "vision") == language | vision
    assert {path.rpartition(".")[2] for path in paths("q_proj", "qkv")} == {"q_proj", "qkv"}


@pytest.mark.parametrize("family", multimodal.FAMILIES if LONG else ["qwen3_omni"])
def test_adapters_of_every_part_learn_from_media_and_merge(family: str) -> None:
    model, plain = multimodal.tiny(family), multimodal.tiny(family)
    sound = ("audio",) if family == "qwen3_omni" else ()
    adapt(model, LORA.model_copy(update={"targets": ("language", "vision", "projector", *sound)}))
    packed = Packing.of(model).pack(multimodal.ragged(model), train=True)
    with torch.no_grad():
        before = response_log_probs(plain, packed)[0]
    load_published(model, canary(model))
    computing = compute_in(model, activation_checkpointing=True)
    log_probs, _ = response_log_probs(computing, packed)
    log_probs.sum().backward()
    # What the last features of a tower are added to is no response.
    learns = {name: p.grad for name, p in adapter_tensors(model).items() if "merger_list.1" not in name}
    assert all(grad is not None and grad.isfinite().all() and grad.any() for grad in learns.values())
    with torch.no_grad(), base_alone(model):
        torch.testing.assert_close(response_log_probs(computing, packed)[0], before, atol=1e-5, rtol=0)
    load_published(plain, dict(own_weights(model)))
    with torch.no_grad():
        torch.testing.assert_close(response_log_probs(plain, packed)[0], log_probs.detach(), atol=1e-3, rtol=0)
    assert float((log_probs.detach() - before).abs().mean()) > 0.1


@pytest.mark.parametrize(
    ("family", "target", "why"),
    [
        ("qwen3", "lm_head", "it is the output layer"),
        ("qwen3", "qproj", "got 'qproj'. Correct it"),
        ("qwen3", "vision", "got 'vision'. Correct it"),
        ("qwen3_moe", "norm", "got 'norm'. Correct it"),
    ],
)
def test_targets_that_can_have_no_adapter_are_refused_with_the_reason(family: str, target: str, why: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.lora\.targets must name products") as refused:
        adapt(tiny(family), LoraConfig(targets=("q_proj", target)))
    assert why in str(refused.value)


@pytest.mark.parametrize("change", [lambda t: t.popitem(), lambda t: t.update(other=torch.zeros(1))])
def test_an_adapter_of_other_targets_is_refused_and_nothing_is_written(change: Callable[[Any], object]) -> None:
    model = adapted_tiny(large=False)
    tensors = canary(model)
    change(tensors)
    before = {name: tensor.clone() for name, tensor in published_adapter(model).items()}
    with pytest.raises(ConfigError, match=r"an adapter must have exactly the 28 tensors"):
        load_published(model, tensors)
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_adapter(model).items())


def test_the_folder_says_what_peft_reads(tmp_path: Path) -> None:
    qwen3.build(tmp_path / "base", hidden_size=32, num_layers=2)
    model = load_model(str(tmp_path / "base"))
    adapt(model, LORA)
    load_published(model, canary(model))
    write_adapter(tmp_path / "adapter", model, str(tmp_path / "base"), "float32")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert told["peft_type"] == "LORA" and told["r"] == 4 and told["lora_alpha"] == 6.0
    assert sorted(told["target_modules"]) == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    found, own = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), published_adapter(model)
    assert found.keys() == own.keys() and all(torch.equal(found[name], own[name]) for name in own)


def test_the_folder_names_its_base_so_that_it_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    qwen3.build(Path("base"), hidden_size=32, num_layers=2)
    model = load_model("base")
    adapt(model, LORA)
    write_adapter(tmp_path / "adapter", model, "base", "float32")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_bytes())
    assert told["base_model_name_or_path"] == str(tmp_path / "base")
    monkeypatch.chdir("/")
    base = hf.AutoModelForCausalLM.from_pretrained(told["base_model_name_or_path"])
    assert base.config.hidden_size == 32


def some_layers_dense(folder: Path) -> None:
    """A mixture whose dense layer's products have the names that those of experts have on disk."""
    sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    torch.manual_seed(0)
    hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, mlp_only_layers=[1])).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


BUILDS: dict[str, Callable[[Path], None]] = {
    "qwen3": functools.partial(qwen3.build, hidden_size=32, num_layers=2),
    "qwen3_moe": functools.partial(qwen3.build, hidden_size=32, num_layers=2, num_experts=4, moe_intermediate_size=24),
    "qwen3_vl_moe": functools.partial(qwen3_vl.build, num_experts=4),
    "qwen3_5_moe": functools.partial(qwen3_5.build, num_experts=4),
    "qwen3_omni": qwen3_omni.build,
    "dense": some_layers_dense,
}


@pytest.mark.parametrize(
    ("build", "targets"),
    [
        ("qwen3_moe", ("q_proj", "experts.gate_up_proj")), ("dense", ("language", "experts")),
        ("qwen3_vl_moe", ("experts",)),
        *(pytest.param(name, targets, marks=pytest.mark.skipif(not LONG, reason="more families: RONDO_TEST_LONG=1"))
          for name in ("qwen3", "qwen3_moe", "qwen3_5_moe", "qwen3_omni", "dense")
          for targets in (("language",), ("language", "experts"), ("experts.down_proj",))[: 1 if name == "qwen3" else 3]),
    ],
)  # fmt: skip
def test_peft_computes_with_the_folder_what_the_trainer_does(
    build: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    BUILDS[build](tmp_path / "base")
    model, base = (load_model(str(tmp_path / "base")).eval() for _ in range(2))
    before, lora = logits(base), LoraConfig(rank=4, alpha=6.0, dropout=0.1, targets=targets)
    adapt(model, lora)
    load_published(model, canary(model, lora))
    write_adapter(tmp_path / "adapter", model, str(tmp_path / "base"), "float32")
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-5, rtol=0)
    assert float((logits(model) - before).abs().max()) > 0.01


def test_targets_are_whole_paths_where_a_last_name_is_also_anothers() -> None:
    model = tiny("qwen3")
    adapt(model, LoraConfig(targets=("layers.1.self_attn.q_proj", "down_proj")))
    paths = ["model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    assert config_of(model, "base")["target_modules"] == paths
