"""Names on disk against what transformers itself writes and reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from rondo.models import parallel
from rondo.models.load import load_model
from rondo.models.names import disk_groups, disk_shapes, load_disk_tensors, memory_tensors
from rondo.models.stand_in import stand_in
from rondo.runtime.errors import ConfigError
from tests.models.builders import SIZES, full_tensors, tiny


def joined() -> Any:
    """A family that joins tensors on disk, which are apart in memory."""
    import transformers as hf

    torch.manual_seed(0)
    return hf.HrmTextForCausalLM(hf.HrmTextConfig(**SIZES))


def made(family: str) -> Any:
    return joined() if family == "hrm_text" else tiny(family, tied=family != "llama")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "gpt2", "hrm_text"])
def test_full_tensors_are_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = made(family)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    ours = dict(full_tensors(model))
    assert ours.keys() == written.keys()
    assert all(torch.equal(ours[name], written[name]) for name in written)
    assert disk_shapes(model) == {name: tuple(tensor.shape) for name, tensor in written.items()}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "hrm_text"])
def test_what_was_published_loads_back_bit_by_bit_and_in_place(family: str) -> None:
    source, target = made(family), made(family)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    places = {name: tensor.data_ptr() for name, tensor in memory_tensors(target).items()}
    load_disk_tensors(target, {name: tensor.clone() for name, tensor in full_tensors(source)})
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert {name: tensor.data_ptr() for name, tensor in memory_tensors(target).items()} == places


def test_experts_are_apart_on_disk_and_joined_in_memory() -> None:
    model = tiny("qwen3_moe")
    prefix = "model.layers.0.mlp.experts"
    group = next(group for group in disk_groups(model) if f"{prefix}.gate_up_proj" in group.sources)
    assert group.shapes == {f"{prefix}.{e}.{half}_proj.weight": (32, 64) for e in range(4) for half in ("gate", "up")}


def test_a_cast_happens_on_the_way_out_and_on_the_way_in() -> None:
    source, target = tiny("qwen3_moe"), tiny("qwen3_moe")
    tensors = {name: tensor.clone() for name, tensor in full_tensors(source, "bfloat16")}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    load_disk_tensors(target, tensors)
    expected = [parameter.to(torch.bfloat16).float() for parameter in source.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(expected, target.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "kept"), [("deepseek_v3", "e_score_correction_bias"), ("ernie4_5_moe", "mlp.gate.weight")]
)
def test_what_transformers_keeps_in_float32_is_published_trained_and_loaded_so(
    kind: str, kept: str, tmp_path: Path
) -> None:
    source = stand_in(CONFIG_MAPPING[kind]())
    source.save_pretrained(tmp_path)
    engine = load_model(str(tmp_path), dtype="bfloat16")
    with torch.no_grad():
        for tensor in memory_tensors(source).values():
            tensor += 0.01 * torch.randn(tensor.shape) * tensor.abs()
    tensors = {name: tensor.clone() for name, tensor in full_tensors(source, "bfloat16")}
    precise = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert {name for name in tensors if name.endswith(kept)} <= precise and "model.norm.weight" not in precise
    load_disk_tensors(engine, tensors)
    shown = {name: tensor for name, tensor in memory_tensors(source).items() if name.endswith(kept)}
    assert shown and all(torch.equal(memory_tensors(engine)[name], tensor) for name, tensor in shown.items())
    trained = parallel.compute_in(source, dtype="bfloat16")
    ids = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.equal(
            trained(input_ids=ids, use_cache=False).logits, engine(input_ids=ids, use_cache=False).logits
        )


def test_a_tied_weight_may_come_under_both_names() -> None:
    source, target = tiny("qwen3"), tiny("qwen3")
    tensors = {name: tensor + 1 for name, tensor in full_tensors(source)}
    load_disk_tensors(target, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert torch.equal(target.lm_head.weight, source.lm_head.weight + 1)


def test_other_names_or_shapes_are_refused_and_nothing_is_written() -> None:
    target = tiny("qwen3_moe")
    before = [parameter.clone() for parameter in target.parameters()]
    tensors = {name: tensor + 1 for name, tensor in full_tensors(target)}
    tensors["model.norm.bias"] = tensors.pop("model.norm.weight")
    tensors["model.embed_tokens.weight"] = torch.zeros(3, 64)
    with pytest.raises(ConfigError) as raised:
        load_disk_tensors(target, tensors)
    assert str(raised.value) == (
        "tensors must have exactly the names and shapes of Qwen3MoeForCausalLM on disk, got 1 missing (model.norm.weight); "
        "1 unknown (model.norm.bias); 1 of another shape (model.embed_tokens.weight [3, 64] instead of [266, 64]). "
        "Take them from a model of the same config"
    )
    assert all(torch.equal(a, b) for a, b in zip(before, target.parameters(), strict=True))
