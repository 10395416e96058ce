from __future__ import annotations

import pytest
import torch

from rondo.roles.engines.sglang.weights_proof import Recipes, told_by
from rondo.roles.engines.sglang.weights_sums import checksum

LAYER = "model.layers.0.mlp.experts"


def experts(num_rows: int) -> dict[str, torch.Tensor]:
    """More than ten: their order is that of numbers."""
    made = torch.Generator().manual_seed(num_rows)
    shapes = {"gate_proj": (num_rows, 6), "up_proj": (num_rows, 6), "down_proj": (6, num_rows)}
    return {
        f"{LAYER}.{number}.{part}.weight": torch.randn(shape, generator=made)
        for number in range(11)
        for part, shape in shapes.items()
    }


def recipes(size: int) -> Recipes:
    return Recipes(device="cpu", dtype=torch.float32, size=size, num_kv_heads=2)


@pytest.mark.parametrize(("num_rows", "filled_rows"), [(8, 8), (40, 64)], ids=["divided", "filled up with zeros"])
def test_the_experts_of_a_rank_are_a_slice_of_each(num_rows: int, filled_rows: int) -> None:
    """[E, 2I / 2, H] and [E, H, I / 2] of rank 1 of 2, as a server on a CPU has them."""
    tensors = experts(num_rows)

    def part(name: str) -> list[torch.Tensor]:
        return [tensors[f"{LAYER}.{number}.{name}.weight"] for number in range(11)]

    def sliced(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.zeros(filled_rows - num_rows, 6)])[filled_rows // 2 :]

    both = zip(part("gate_proj"), part("up_proj"), strict=True)
    w13 = torch.stack([torch.cat([sliced(gate), sliced(up)]) for gate, up in both])
    w2 = torch.stack([sliced(down.t()).t() for down in part("down_proj")])
    told = {(1, f"{LAYER}.w13_weight"): checksum([w13], "cpu"), (1, f"{LAYER}.w2_weight"): checksum([w2], "cpu")}
    found = recipes(2)
    assert found.learn(told, tensors) == set() and found.settled
    assert found.expect(tensors) == told
    tensors[f"{LAYER}.10.up_proj.weight"] = tensors[f"{LAYER}.10.up_proj.weight"] + 1
    assert found.wrong(told, found.expect(tensors), tensors) == {(1, f"{LAYER}.w13_weight")}


def test_names_match_whatever_their_wrappers() -> None:
    norm, qkv = "thinker.model.layers.0.norm.weight", "model.visual.blocks.0.attn.qkv.weight"
    tensors = {norm: torch.randn(4), qkv: torch.randn(6, 2)}
    told = {
        (0, "model.layers.0.norm.weight"): checksum([tensors[norm]], "cpu"),
        (0, "visual.blocks.0.attn.qkv_proj.weight"): checksum([tensors[qkv]], "cpu"),
    }
    assert recipes(1).learn(told, tensors) == set()


def test_tensors_are_compared_in_the_servers_own_precision() -> None:
    tensor = torch.randn(5, 3)
    told = {(0, "norm.weight"): checksum([tensor.bfloat16()], "cpu")}
    half = Recipes(device="cpu", dtype=torch.bfloat16, size=1, num_kv_heads=1)
    assert half.learn(told, {"norm.weight": tensor}) == set()
    assert recipes(1).learn(told, {"norm.weight": tensor}) == set(told)


def test_what_stays_in_float32_beside_bfloat16_weights_is_compared_as_it_was_sent() -> None:
    tensors = {"mlp.gate.e_score_correction_bias": torch.randn(7), "norm.weight": torch.randn(5).bfloat16()}
    told = {(0, name): checksum([tensor], "cpu") for name, tensor in tensors.items()}
    half = Recipes(device="cpu", dtype=torch.bfloat16, size=1, num_kv_heads=1)
    assert half.learn(told, tensors) == set()
    assert half.expect(tensors) == told


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3, 4)])
def test_a_tensor_of_any_shape_that_fits_no_recipe_is_unknown(shape: tuple[int, ...]) -> None:
    assert recipes(4).learn({(3, "odd"): "0" * 16}, {"odd": torch.randn(shape)}) == {(3, "odd")}


def test_what_a_draft_model_tells_is_left_out() -> None:
    models = [{"role": "target", "tp_rank": 1}, {"role": "draft", "tp_rank": 1}]
    ranks = [{"checksums": {"norm": "a", "draft.norm": "b"}, "parallelism_info": models}]
    assert told_by({"ranks": ranks}) == {(1, "norm"): "a"}
