"""What a step measures of its rows, ratios and operations, against plain counting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rondo.models.config import LoraConfig
from rondo.models.load import load_model
from rondo.models.lora import adapt
from rondo.models.tiny import qwen3
from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.training.quantiles import LENGTHS, LOG_RATIOS, SHARES, WHOLE, Counts, quantiles, repetition
from rondo.roles.training.ratios import Ratios
from rondo.roles.training.work import Work, peak_of


@pytest.mark.parametrize("bins", [LENGTHS, SHARES, LOG_RATIOS])
def test_quantiles_are_at_most_a_bin_below_those_of_the_values_and_add_up(bins: np.ndarray) -> None:
    assert (np.diff(bins) > 0).all()
    values = np.random.default_rng(0).choice(bins, 500) + np.abs(np.diff(bins)).min() / 2
    first, second = Counts(bins), Counts(bins)
    first.add(values[:200])
    second.add(values[200:])
    found = quantiles(bins, first.num + second.num, WHOLE)
    exact = np.quantile(values, list(WHOLE.values()), method="inverted_cdf")
    assert list(found.values()) == bins[np.searchsorted(bins, exact, "right") - 1].tolist()
    assert quantiles(bins, np.zeros(len(bins)), WHOLE) == {}


def _plain(row: Sequence[int]) -> float:
    grams = [tuple(row[at : at + 4]) for at in range(len(row) - 3)]
    return 1 - len(set(grams)) / len(grams)


def test_repetition_is_the_part_of_the_4_grams_of_each_row_that_stood_in_it_before() -> None:
    draws = np.random.default_rng(1)
    rows = [draws.integers(0, 3, size).astype(np.int32) for size in draws.integers(0, 40, 200)]
    expected = [_plain(row.tolist()) for row in rows if len(row) >= 4]
    assert repetition(rows) == pytest.approx(expected) and len(set(expected)) > 50
    assert repetition([np.array([1, 2, 3, 4] * 20)])[0] == pytest.approx(1 - 4 / 77)
    assert len(repetition([np.zeros(3, np.int32)])) == len(repetition([])) == 0


def test_ratios_are_told_by_quantile_over_the_tokens_that_train_and_those_outside_of_the_clip_over_rows() -> None:
    ratios = Ratios(AlgorithmConfig(clip_low=0.2, clip_high=0.28))
    mine, masks = [np.log([1.0, 1.3, 0.5, 1.0]), np.array([0.0, np.nan])], [np.array([1, 1, 1, 0]), np.array([1, 0])]
    ratios.add(mine, [np.zeros(4), None], masks)
    ratios.add([np.array([np.nan])], [np.array([np.nan])], [np.array([0])])  # a row without a token that trains
    found = ratios.metrics()
    assert (found["ratio_p1"], found["ratio_p50"]) == (pytest.approx(0.5, rel=0.1), 1.0)
    assert found["ratio_p99"] == pytest.approx(1.3, rel=0.05)
    assert (found["outside_clip_p50"], found["outside_clip_p100"]) == (0.0, pytest.approx(0.66))
    unbounded = Ratios(AlgorithmConfig(clip_low=1.0, clip_high=0.28))
    unbounded.add([np.array([-9.0])], [np.zeros(1)], [np.ones(1)])
    assert unbounded.metrics()["outside_clip_p100"] == 0.0


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["whole", "adapters"])
def test_operations_are_those_that_torch_counts_of_a_forward_and_a_backward(
    tmp_path: Path, lora: LoraConfig | None
) -> None:
    qwen3.build(tmp_path)
    model = load_model(str(tmp_path), dtype="float32", device="cpu", attn="eager")
    if lora is not None:
        adapt(model, lora, seed=0)
    tokens = 64
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.arange(tokens)[None] % 20).logits.sum().backward()
    work = Work.of(model, "float32")
    whole_square = work.figures(tokens, 2 * tokens**2, 1.0, 1.0, 1)["model_flops"]  # eager attention computes all of it
    # Nobody computes the gradient of what goes into the first layer, where it is frozen.
    assert counted.get_total_flops() == pytest.approx(whole_square, rel=1e-12 if lora is None else 0.05)
    assert work.told() == {
        "device": "cpu",
        "peak_flops_per_s": None,
        "why": "its peak in this dtype is not known here: no share of it is told (mfu)",
    }


def test_of_experts_those_count_that_a_token_is_routed_to(tmp_path: Path) -> None:
    qwen3.build(tmp_path, num_experts=4)
    model = load_model(str(tmp_path), dtype="float32", device="cpu", attn="sdpa")
    config, named = model.config, dict(model.named_parameters())
    experts = sum(each.numel() for name, each in named.items() if ".experts." in name)
    others = sum(each.numel() for name, each in named.items() if each.ndim > 1 and ".experts." not in name)
    looked_up = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    part = config.num_experts_per_tok / config.num_experts
    assert experts and Work.of(model, "float32").per_token == 6 * (others - looked_up + part * experts)


def test_the_share_of_a_peak_is_told_where_the_device_is_known() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_of("NVIDIA H100 PCIe", "float16") == 756e12
    assert peak_of("NVIDIA L4", "bfloat16") == 121e12 and peak_of("NVIDIA L40S", "bfloat16") == 362e12
    assert peak_of("NVIDIA H100 80GB HBM3", "float32") is peak_of("cpu", "bfloat16") is None
    found = Work(6e9, 0.0, "x", 1e15).figures(1e6, 0.0, 10.0, 5.0, 2)
    assert found == {
        "tokens_per_s": 1e5,
        "tokens_per_s_per_device": 5e4,
        "model_flops": 6e15,
        "flops_per_s_per_device": 3e14,
        "mfu": 0.6,
    }
    assert "mfu" not in Work(6e9, 0.0, "x", None).figures(1e6, 0.0, 10.0, 5.0, 2)
