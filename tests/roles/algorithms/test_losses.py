"""Losses against values worked out by hand, against a plain numpy implementation, and under every cut of a batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rondo.roles.algorithms.algorithm import ALGORITHMS, AlgorithmConfig
from rondo.roles.algorithms.losses import Batch, denominator, importance, kl, policy_sums, ppo_clip
from rondo.roles.algorithms.sums import LossSums

GRPO = AlgorithmConfig()


def replace(algorithm: AlgorithmConfig, **options: Any) -> AlgorithmConfig:
    return algorithm.model_copy(update=options)


VARIANTS = {
    **{name: AlgorithmConfig(name=name) for name in ALGORITHMS},
    "everything": replace(
        GRPO, clip_high=0.28, dual_clip=1.5, kl_coef=0.1, tis_low=0.8, tis_high=1.2, normalizer="token"
    ),
    **{
        f"tis_{mode}_{level}_{normalizer}": replace(
            GRPO, tis_low=0.7, tis_high=1.4, tis_mode=mode, tis_level=level, normalizer=normalizer
        )
        for mode, level, normalizer in (
            ("mask", "token", "token"),
            ("mask", "geometric", "sample"),
            ("mask", "sequence", "constant"),
            ("truncate", "geometric", "constant"),
            ("truncate", "sequence", "token"),
        )
    },
    "k1": replace(GRPO, kl_coef=0.3, kl="k1"),
    "k2": replace(GRPO, kl_coef=0.3, kl="k2"),
    "low_var": replace(GRPO, kl_coef=0.3, kl="low_var"),
}
MAX_NEW_TOKENS = 16
TENSORS = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "mask", "entropy")


def ratios(*values: float) -> torch.Tensor:
    return torch.tensor([math.log(value) for value in values])


def batch(seed: int = 0, num_samples: int = 6) -> dict[str, Any]:
    """Random samples of 1 to 12 tokens with holes in their masks; garbage stands at masked tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 13, num_samples).tolist()
    total = sum(lengths)
    made: dict[str, Any] = {name: torch.from_numpy(rng.normal(-1.5, 0.4, total).astype(np.float32)) for name in TENSORS}
    made["mask"] = torch.from_numpy((rng.random(total) < 0.8).astype(np.float32))
    made["advantages"] = torch.from_numpy(np.repeat(rng.normal(size=num_samples), lengths).astype(np.float32))
    made["lengths"] = lengths
    return made


def cut(made: dict[str, Any], samples: list[int]) -> dict[str, Any]:
    starts = np.cumsum([0, *made["lengths"]])
    part = {name: torch.cat([made[name][starts[i] : starts[i + 1]] for i in samples]) for name in TENSORS}
    return part | {"lengths": [made["lengths"][i] for i in samples]}


def in_numpy(algorithm: AlgorithmConfig, made: dict[str, Any]) -> tuple[float, dict[str, float]]:
    """(loss, metrics) token by token, in float64, sharing nothing with what it checks."""
    values = {name: made[name].double().numpy() for name in TENSORS}
    losses: list[list[float]] = []
    seen: dict[str, list[float]] = {
        name: [] for name in ("low", "high", "dual", "ratio", "approx", "mismatch", "k3", "kl", "tis", "outside")
    }
    start = 0
    for length in made["lengths"]:
        sample = []
        kept = [t for t in range(start, start + length) if values["mask"][t]]
        product = math.prod(math.exp(values["old_log_probs"][t] - values["rollout_log_probs"][t]) for t in kept)
        of_sample = {"sequence": product, "geometric": product ** (1 / max(len(kept), 1))}
        for t in range(start, start + length):
            if not values["mask"][t]:
                continue
            new, old, rollout = (values[name][t] for name in ("log_probs", "old_log_probs", "rollout_log_probs"))
            advantage, ratio = values["advantages"][t], math.exp(new - old)
            loss = max(
                -ratio * advantage, -min(max(ratio, 1 - algorithm.clip_low), 1 + algorithm.clip_high) * advantage
            )
            if algorithm.dual_clip and advantage < 0:
                loss = min(loss, -algorithm.dual_clip * advantage)
            seen["low"].append(advantage < 0 and ratio < 1 - algorithm.clip_low)
            seen["high"].append(advantage > 0 and ratio > 1 + algorithm.clip_high)
            seen["dual"].append(bool(algorithm.dual_clip and advantage < 0 and ratio > algorithm.dual_clip))
            seen["ratio"].append(ratio)
            seen["approx"].append(ratio - 1 - (new - old))
            seen["mismatch"].append(abs(new - rollout))
            seen["k3"].append(math.exp(new - rollout) - 1 - (new - rollout))
            if algorithm.tis_high is not None:
                weight = of_sample.get(algorithm.tis_level, math.exp(old - rollout))
                outside = not algorithm.tis_low <= weight <= algorithm.tis_high
                if outside and algorithm.tis_mode == "mask":
                    weight = 0.0
                elif outside:
                    weight = algorithm.tis_low if weight < algorithm.tis_low else algorithm.tis_high
                seen["outside"].append(outside)
                seen["tis"].append(weight)
                loss *= weight
            if algorithm.kl_coef:
                x = new - values["ref_log_probs"][t]
                term = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x, "low_var": min(math.exp(-x) - 1 + x, 10)}
                seen["kl"].append(term[algorithm.kl])
                loss += algorithm.kl_coef * term[algorithm.kl]
            sample.append(loss)
        losses.append(sample)
        start += length
    flat = [loss for sample in losses for loss in sample]
    reduced: float = {
        "sample": sum(sum(sample) / max(len(sample), 1) for sample in losses) / len(losses),
        "token": sum(flat) / len(flat),
        "constant": sum(flat) / (len(losses) * MAX_NEW_TOKENS),
    }[algorithm.normalizer]
    return reduced, {name: float(np.mean(numbers)) for name, numbers in seen.items() if numbers}


def run(algorithm: AlgorithmConfig, made: dict[str, Any]) -> tuple[LossSums, torch.Tensor]:
    """(sums, gradient of the undivided loss with respect to the log-probs)."""
    log_probs = made["log_probs"].clone().requires_grad_()
    sums = policy_sums(algorithm, **made | {"log_probs": log_probs})
    sums.loss.backward()
    assert log_probs.grad is not None
    return sums.detached(), log_probs.grad


def loss_of(algorithm: AlgorithmConfig, sums: LossSums) -> float:
    return float(sums.loss) / denominator(sums, algorithm.normalizer, MAX_NEW_TOKENS)


def clipped(log_ratios: torch.Tensor, advantages: list[float], **bounds: float) -> tuple[torch.Tensor, Any]:
    """The clipped loss of one sample, all of whose tokens train."""
    zeros, every = torch.zeros(len(log_ratios)), torch.ones(len(log_ratios), dtype=torch.bool)
    made = Batch(log_ratios, zeros, zeros, torch.tensor(advantages), every, [len(log_ratios)])
    return ppo_clip(made, replace(GRPO, **bounds))


def test_the_clip_by_hand() -> None:
    loss, measured = clipped(ratios(1.5, 0.5, 1.5, 0.5, 1.1), [1.0, 1, -1, -1, 1], clip_high=0.28)
    # A > 0: the ratio is capped at 1.28 from above only. A < 0: at 0.8 from below only.
    assert loss.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8, -1.1])
    assert measured["clip_high_fraction"].tolist() == [True, False, False, False, False]
    assert measured["clip_low_fraction"].tolist() == [False, False, False, True, False]


def test_the_dual_clip_by_hand() -> None:
    loss, measured = clipped(ratios(5, 2, 5), [-2.0, -2, 2], dual_clip=3)
    assert loss.tolist() == pytest.approx([6, 4, -2.4])  # bounded at 3 x 2; below it; A > 0 is not touched
    assert measured["clip_dual_fraction"].tolist() == [True, False, False]


@pytest.mark.parametrize("algorithm", [VARIANTS[name] for name in ALGORITHMS], ids=ALGORITHMS)
def test_no_ratio_makes_a_token_of_negative_advantage_weigh_more_than_three(algorithm: AlgorithmConfig) -> None:
    for log_ratio in (0.0, 1.0, 1.2, 5.0, 30.0):
        made = {name: torch.zeros(1) for name in TENSORS}
        made |= {"log_probs": torch.tensor([log_ratio]), "advantages": -torch.ones(1), "mask": torch.ones(1)}
        sums, gradient = run(algorithm, made | {"lengths": [1]})
        assert float(sums.loss) <= 3.0 and 0 <= float(gradient) <= 3.0


@pytest.mark.parametrize(
    ("mode", "level", "weights", "outside"),
    [
        # Samples of ratios 2, 1/2, 4 and of 1/4, (masked), 1/4; bounds 0.3 and 1.8.
        ("truncate", "token", [1.8, 0.5, 1.8, 0.3, 0.3], [1, 0, 1, 1, 1]),
        ("mask", "token", [0, 0.5, 0, 0, 0], [1, 0, 1, 1, 1]),
        ("truncate", "sequence", [1.8, 1.8, 1.8, 0.3, 0.3], [1, 1, 1, 1, 1]),  # products 4 and 1/16
        ("mask", "geometric", [4 ** (1 / 3)] * 3 + [0, 0], [0, 0, 0, 1, 1]),  # roots 4^(1/3) and 1/4
        ("truncate", "geometric", [4 ** (1 / 3)] * 3 + [0.3, 0.3], [0, 0, 0, 1, 1]),
    ],
)
def test_corrections_by_hand(mode: Any, level: Any, weights: list[float], outside: list[int]) -> None:
    keep, zeros = torch.tensor([True, True, True, True, False, True]), torch.zeros(6)
    old = ratios(2, 0.5, 4, 0.25, 99, 0.25)
    made = Batch(zeros, old, rollout_log_probs=zeros, advantages=zeros, mask=keep, lengths=[3, 3])
    algorithm = replace(GRPO, tis_low=0.3, tis_high=1.8, tis_mode=mode, tis_level=level)
    found, measured = importance(made, algorithm)
    assert found[keep].tolist() == pytest.approx(weights)
    share = measured["tis_mask_fraction" if mode == "mask" else "tis_clip_fraction"]
    assert share[keep].tolist() == [bool(value) for value in outside]


def test_kl_estimators_by_hand() -> None:
    x = torch.tensor([0.5, -0.5, -4.0])
    zero = torch.zeros(3)
    assert kl(x, zero, "k1").tolist() == pytest.approx([0.5, -0.5, -4])
    assert kl(x, zero, "k2").tolist() == pytest.approx([0.125, 0.125, 8])
    k3 = [math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5, math.exp(4) - 5]
    assert kl(x, zero, "k3").tolist() == pytest.approx(k3)
    assert kl(x, zero, "low_var").tolist() == pytest.approx([*k3[:2], 10])


def test_normalisers_by_hand() -> None:
    # Two samples of 1 and 3 tokens, ratio 1, advantages 1 and -1: token losses -1 | 1 1 1.
    made = {
        "log_probs": torch.zeros(4), "rollout_log_probs": torch.zeros(4), "mask": torch.ones(4), "lengths": [1, 3],
        "advantages": torch.tensor([1.0, -1, -1, -1]),
    }  # fmt: skip
    sums = {name: policy_sums(replace(GRPO, normalizer=name), **made) for name in ("sample", "token", "constant")}
    assert loss_of(replace(GRPO, normalizer="sample"), sums["sample"]) == pytest.approx(0, abs=1e-6)  # (-1 + 1) / 2
    assert loss_of(replace(GRPO, normalizer="token"), sums["token"]) == 0.5  # 2 / 4
    assert loss_of(replace(GRPO, normalizer="constant"), sums["constant"]) == 2 / (2 * MAX_NEW_TOKENS)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient() -> None:
    made = batch() | {"old_log_probs": None, "mask": torch.ones(sum(batch()["lengths"]))}
    sums, gradient = run(replace(GRPO, normalizer="token"), made)
    np.testing.assert_allclose(gradient, -made["advantages"], rtol=1e-6)
    metrics = sums.metrics()
    assert (metrics["ratio_mean"], metrics["clip_fraction"], metrics["approx_kl"]) == (1, 0, 0)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_and_its_metrics_equal_the_numpy_implementation(name: str, seed: int) -> None:
    algorithm, made = VARIANTS[name], batch(seed)
    sums, _ = run(algorithm, made)
    loss, seen = in_numpy(algorithm, made)
    metrics = sums.metrics()
    assert loss_of(algorithm, sums) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    names = {
        "low": "clip_low_fraction", "high": "clip_high_fraction", "dual": "clip_dual_fraction",
        "ratio": "ratio_mean", "approx": "approx_kl", "mismatch": "mismatch_mean", "k3": "mismatch_kl", "kl": "kl",
        "tis": "tis_weight_mean",
        "outside": "tis_clip_fraction" if algorithm.tis_mode == "truncate" else "tis_mask_fraction",
    }  # fmt: skip
    for theirs, value in seen.items():
        assert metrics[names[theirs]] == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(seen["low"] + seen["high"])
    keep = made["mask"] > 0
    assert metrics["tokens"] == int(keep.sum()) and metrics["samples"] == 6
    assert metrics["entropy"] == pytest.approx(float(made["entropy"][keep].mean()), rel=1e-5)
    assert metrics["ratio_max"] == pytest.approx(
        float((made["log_probs"] - made["old_log_probs"])[keep].exp().max()), rel=1e-5
    )
    assert ("kl" in metrics) == algorithm.needs_reference
    assert ("tis_weight_mean" in metrics) == (algorithm.tis_high is not None)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_equals_finite_differences(name: str) -> None:
    algorithm, made = VARIANTS[name], batch(3)
    _, gradient = run(algorithm, made)
    scale = {"sample": 6.0, "token": float((made["mask"] > 0).sum()), "constant": 6.0 * MAX_NEW_TOKENS}[
        algorithm.normalizer
    ]
    for token in range(0, len(gradient), 5):
        step = 1e-4
        sides = []
        for sign in (1, -1):
            moved = made["log_probs"].double()
            moved[token] += sign * step
            # TIS weights and pi_old are constants of the loss.
            sides.append(in_numpy(algorithm, made | {"log_probs": moved})[0] * scale)
        assert float(gradient[token]) == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("parts", [[[0, 1, 2], [3, 4, 5]], [[5], [0, 3], [1, 2, 4]], [[i] for i in range(6)]])
def test_any_cut_into_micro_batches_gives_the_same_gradient_and_metrics(name: str, parts: list[list[int]]) -> None:
    algorithm, made = VARIANTS[name], batch(1)
    whole, gradient = run(algorithm, made)
    starts = np.cumsum([0, *made["lengths"]])
    total: LossSums | None = None
    for samples in parts:
        sums, partial = run(algorithm, cut(made, samples))
        wanted = torch.cat([gradient[starts[i] : starts[i + 1]] for i in samples])
        torch.testing.assert_close(partial, wanted, rtol=1e-6, atol=1e-8)
        total = sums if total is None else total + sums
    assert total is not None
    of = (algorithm.normalizer, MAX_NEW_TOKENS)
    assert denominator(total, *of) == denominator(whole, *of)
    assert loss_of(algorithm, total) == pytest.approx(loss_of(algorithm, whole), rel=1e-5, abs=1e-7)
    assert total.metrics() == pytest.approx(whole.metrics(), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("name", VARIANTS)
def test_masked_tokens_may_hold_anything(name: str) -> None:
    algorithm, made = VARIANTS[name], batch(2)
    sums, gradient = run(algorithm, made)
    hole = made["mask"] == 0
    assert hole.any()
    dirty = dict(made)
    for column, junk in zip(TENSORS, (5.0, math.nan, math.inf, -math.inf, math.nan, None, math.nan), strict=True):
        if junk is not None:
            dirty[column] = torch.where(hole, junk, made[column])
    again, dirty_gradient = run(algorithm, dirty)
    assert torch.equal(gradient, dirty_gradient) and not gradient[hole].any()
    assert again.metrics() == sums.metrics()


def test_a_sample_masked_whole_counts_as_a_sample_and_gives_nothing() -> None:
    made = batch(0) | {"mask": torch.zeros(sum(batch(0)["lengths"]))}
    sums, gradient = run(GRPO, made)
    assert not gradient.any()
    assert loss_of(GRPO, sums) == 0 and denominator(sums, "sample", 1) == 6
    assert denominator(sums, "token", 1) == 1


def test_an_exploding_ratio_gives_finite_gradients() -> None:
    made = batch(0) | {"old_log_probs": batch(0)["log_probs"] - 300, "ref_log_probs": batch(0)["log_probs"] + 300}
    sums, gradient = run(VARIANTS["everything"], made)
    assert torch.isfinite(sums.loss) and torch.isfinite(gradient).all()


def test_weightless_sums_add_nothing_and_keep_the_graph() -> None:
    made = batch(0)
    log_probs = made["log_probs"].clone().requires_grad_()
    dummy = policy_sums(GRPO, **made | {"log_probs": log_probs}).weightless()
    dummy.loss.backward()
    assert log_probs.grad is not None and not log_probs.grad.any()
    sums, _ = run(GRPO, made)
    both = sums + dummy.detached()
    assert both.metrics() == sums.metrics() and both.loss == sums.loss


def test_a_missing_reference_and_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ref_log_probs must be given with kl_coef 0\.3"):
        policy_sums(VARIANTS["k1"], **batch(0) | {"ref_log_probs": None})
    with pytest.raises(ValueError, match="lengths must add up"):
        policy_sums(GRPO, **batch(0) | {"lengths": [1]})
