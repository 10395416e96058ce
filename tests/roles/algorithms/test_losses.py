"""Losses against values worked out by hand, against a plain numpy implementation, and under every cut of a batch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rondo.roles.algorithms.algorithm import ALGORITHMS, AlgorithmConfig
from rondo.roles.algorithms.batch import Batch
from rondo.roles.algorithms.corrections import importance
from rondo.roles.algorithms.divergence import kl, kl_of_samples
from rondo.roles.algorithms.losses import denominator, policy_sums
from rondo.roles.algorithms.policy_losses import POLICY_LOSSES, ppo_clip
from rondo.roles.algorithms.sums import LossSums
from rondo.runtime.errors import Fatal
from tests.roles.algorithms import by_hand
from tests.roles.algorithms.by_hand import CONSTANTS
from tests.roles.algorithms.by_hand import NAMES as TENSORS

GRPO = AlgorithmConfig()


def replace(algorithm: AlgorithmConfig, **options: Any) -> AlgorithmConfig:
    return algorithm.model_copy(update=options)


VARIANTS = {
    **{name: AlgorithmConfig(name=name) for name in ALGORITHMS},
    "everything": replace(
        GRPO, clip_high=0.28, dual_clip=1.5, kl_coef=0.1, tis_low=0.8, tis_high=1.2, loss_aggregation="token"
    ),
    **{
        f"tis_{mode}_{level}_{loss_aggregation}": replace(
            GRPO, tis_low=0.7, tis_high=1.4, tis_mode=mode, tis_level=level, loss_aggregation=loss_aggregation
        )
        for mode, level, loss_aggregation in (
            ("mask", "token", "token"),
            ("mask", "geometric", "sample"),
            ("mask", "sequence", "constant"),
            ("truncate", "geometric", "constant"),
            ("truncate", "sequence", "token"),
            ("reject", "token", "token"),
            ("reject", "geometric", "sample"),
            ("reject", "sequence", "constant"),
        )
    },
    "tis_reject_and_count": replace(
        GRPO, tis_low=0.7, tis_high=1.4, tis_mode="reject", tis_level="geometric", count_rejected=True
    ),
    "unbiased": replace(GRPO, kl_coef=0.3, kl="unbiased"),
    "kl_in_the_reward": replace(GRPO, kl_coef=0.3, kl="k1", kl_in="reward"),
    "entropy": replace(GRPO, entropy_coef=0.01),
    "opsm": replace(GRPO, opsm_delta=0.05, kl_coef=0.1),
    "gspo_wide": replace(AlgorithmConfig(name="gspo"), clip_low=0.1, clip_high=0.2),
    "gspo_token_wide": replace(AlgorithmConfig(name="gspo_token"), clip_low=0.1, clip_high=0.2),
    "cispo_narrow": replace(AlgorithmConfig(name="cispo"), clip_low=0.3, clip_high=0.3),
    "k1": replace(GRPO, kl_coef=0.3, kl="k1"),
    "k2": replace(GRPO, kl_coef=0.3, kl="k2"),
    "low_var": replace(GRPO, kl_coef=0.3, kl="low_var"),
}
MAX_NEW_TOKENS = 16


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


def run(algorithm: AlgorithmConfig, made: dict[str, Any]) -> tuple[LossSums, torch.Tensor]:
    """(sums, gradient of the undivided loss with respect to the log-probs)."""
    log_probs = made["log_probs"].clone().requires_grad_()
    sums = policy_sums(algorithm, **{"constants": CONSTANTS} | made | {"log_probs": log_probs})
    sums.loss.backward()
    assert log_probs.grad is not None
    return sums.detached(), log_probs.grad


def loss_of(algorithm: AlgorithmConfig, sums: LossSums) -> float:
    return float(sums.loss) / denominator(sums, algorithm, MAX_NEW_TOKENS)


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
def test_no_ratio_makes_a_token_of_negative_advantage_weigh_more_than_its_bound(algorithm: AlgorithmConfig) -> None:
    bound = 1 + algorithm.clip_high if algorithm.policy_loss == "reinforce" else 3.0
    for log_ratio in (0.0, 1.0, 1.2, 5.0, 30.0):
        made = {name: torch.zeros(1) for name in TENSORS}
        made |= {"log_probs": torch.tensor([log_ratio]), "advantages": -torch.ones(1), "mask": torch.ones(1)}
        _, gradient = run(algorithm, made | {"lengths": [1], "constants": {}})
        assert 0 <= float(gradient) <= bound


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_under_the_weights_that_sampled_every_loss_has_the_gradient_of_the_policy(name: str) -> None:
    made = batch(0) | {"old_log_probs": None, "constants": {}}
    made["rollout_log_probs"] = made["log_probs"]
    _, gradient = run(replace(GRPO, policy_loss=name, loss_aggregation="token"), made)
    torch.testing.assert_close(gradient, torch.where(made["mask"] > 0, -made["advantages"], 0.0), rtol=1e-5, atol=1e-6)


def weights(log_ratios: torch.Tensor, advantages: list[float], name: str, **options: Any) -> list[float]:
    """The gradient of -A log pi's share in each token's loss, of samples of one token."""
    log_probs = log_ratios.clone().requires_grad_()
    zeros, every = torch.zeros(len(log_ratios)), torch.ones(len(log_ratios), dtype=torch.bool)
    constants = options.pop("constants", {})
    made = Batch(log_probs, zeros, zeros, torch.tensor(advantages), every, [1] * len(log_ratios), constants=constants)
    loss, _ = POLICY_LOSSES[name](made, replace(GRPO, **options))
    loss.sum().backward()
    assert log_probs.grad is not None
    return (-log_probs.grad / torch.tensor(advantages)).tolist()


def test_what_a_token_weighs_by_hand() -> None:
    up, down = ratios(2.0, 0.5), ratios(2.0, 0.5)
    # Truncated on both sides; on the side that a sign pushes to; by the effective sample size.
    assert weights(up, [1, 1], "reinforce", clip_low=0.2, clip_high=0.3) == pytest.approx([1.3, 0.8])
    assert weights(up, [1, 1], "cispo_signed", clip_low=0.2, clip_high=0.3) == pytest.approx([1.3, 0.5])
    assert weights(down, [-1, -1], "cispo_signed", clip_low=0.2, clip_high=0.3) == pytest.approx([2.0, 0.8])
    assert weights(up, [1, 1], "p3o", constants={"ess": 0.8}) == pytest.approx([0.8 - 0.2 * 0.5, 0.5 + 0.2 * 1.0])
    # 4 p (1 - p) rho with p = sigmoid(tau (rho - 1)): 0.786448 x 2 at rho 2, 0.940015 / 2 at rho 1/2.
    assert weights(up, [1, 1], "sapo") == pytest.approx([1.5728954, 0.4700074], rel=1e-5)
    assert weights(ratios(1.0), [-1], "sapo", sapo_tau_negative=3.0) == pytest.approx([1.0])
    # Within the budget nothing is clipped; beyond it at 1 - e^-tau and e^tau - 1.
    assert weights(up, [1, -1], "m2po") == pytest.approx([2.0, 0.5])
    bounds = {"m2_clip_low": 0.3, "m2_clip_high": 0.5}
    assert weights(up, [1, -1], "m2po", constants=bounds) == pytest.approx([0.0, 0.0])
    # One ratio a sample, here the root of 2 x 1/2 x 8 = 2: each of three tokens has a third of it, or all of its own.
    ratio = ratios(2.0, 0.5, 8.0)
    for name, each in (("gspo", 2.0), ("gspo_token", 2.0)):
        log_probs = ratio.clone().requires_grad_()
        made = Batch(log_probs, torch.zeros(3), torch.zeros(3), torch.ones(3), torch.ones(3, dtype=torch.bool), [3])
        loss, _ = POLICY_LOSSES[name](made, replace(GRPO, clip_high=1.5))
        assert loss.tolist() == pytest.approx([-2.0] * 3)
        loss.sum().backward()
        assert log_probs.grad is not None and (-log_probs.grad).tolist() == pytest.approx([each] * 3)


def test_a_sample_that_the_policy_has_left_behind_trains_only_upwards() -> None:
    # Mean log-ratios of 0.1 down in the first two samples, 0.02 in the third; the second has a positive advantage.
    made = {"log_probs": torch.tensor([-0.2, 0.0, -0.1, -0.02]), "lengths": [2, 1, 1], "mask": torch.ones(4)}
    made |= {"rollout_log_probs": torch.zeros(4), "advantages": torch.tensor([-1.0, -1, 1, -1])}
    sums, gradient = run(replace(GRPO, opsm_delta=0.05, loss_aggregation="token"), made)
    assert gradient.tolist() == [0, 0, -1, 1] and sums.metrics()["opsm_fraction"] == 0.5


def test_denominators_follow_the_mask_of_a_correction(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def kept(batch, algorithm): return 2 * batch.mask.float(), batch.rollout_log_probs > -5\n"
        "def told(batch, algorithm): return (*kept(batch, algorithm), {'far': batch.rollout_log_probs < -5})\n"
        "def weighed(batch, algorithm): return (batch.rollout_log_probs > -5) * 2.0\n"
        "def three(batch, algorithm): return (batch.mask,) * 3\n"
    )
    # Samples of 2 and 3 tokens, of which the engine found one of each unlikely; A 1, ratio 1: losses of -2.
    made = {"log_probs": torch.zeros(5), "lengths": [2, 3], "mask": torch.ones(5), "advantages": torch.ones(5)}
    made |= {"rollout_log_probs": torch.tensor([-9.0, 0, 0, -9, 0]), "ref_log_probs": torch.ones(5)}
    found = {}
    for name in ("kept", "told", "weighed"):
        for loss_aggregation in ("token", "sample"):
            own = replace(
                GRPO, correction=f"{tmp_path}/own.py:{name}", loss_aggregation=loss_aggregation, kl="k1", kl_coef=0.5
            )
            sums, gradient = run(own, made)
            found[name, loss_aggregation] = loss_of(own, sums)
            assert not gradient[0].any() or name == "weighed"
            assert sums.metrics()["kept_fraction"] == (1.0 if name == "weighed" else 0.6)
    # -2 - 0.5 for each token that stays; else the KL of all five counts, and five are divided by.
    assert found["kept", "token"] == found["told", "token"] == -2.5 and found["kept", "sample"] == -2.5
    assert found["weighed", "token"] == pytest.approx((3 * -2 + 5 * -0.5) / 5)
    assert found["weighed", "sample"] == pytest.approx(((-2 / 2) + (2 * -2 / 3)) / 2 - 0.5)
    assert run(replace(GRPO, correction=f"{tmp_path}/own.py:told"), made)[0].metrics()["far"] == 0.4
    with pytest.raises(Fatal, match="must give weights, and perhaps a mask, got 3 tensors"):
        run(replace(GRPO, correction=f"{tmp_path}/own.py:three"), made)


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
    found, stays, measured = importance(made, algorithm)
    assert stays.all()
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
    assert kl(x, zero, "unbiased", torch.tensor([2.0, 1, 0.5])).tolist() == pytest.approx([2 * k3[0], k3[1], k3[2] / 2])
    for estimator in ("k1", "k2", "k3", "low_var"):
        mine = kl_of_samples(x.numpy(), zero.numpy(), estimator)
        assert mine.tolist() == pytest.approx(kl(x, zero, estimator).tolist())


def test_normalisers_by_hand() -> None:
    # Two samples of 1 and 3 tokens, ratio 1, advantages 1 and -1: token losses -1 | 1 1 1.
    made = {
        "log_probs": torch.zeros(4), "rollout_log_probs": torch.zeros(4), "mask": torch.ones(4), "lengths": [1, 3],
        "advantages": torch.tensor([1.0, -1, -1, -1]),
    }  # fmt: skip
    sums = {name: policy_sums(replace(GRPO, loss_aggregation=name), **made) for name in ("sample", "token", "constant")}
    assert loss_of(replace(GRPO, loss_aggregation="sample"), sums["sample"]) == pytest.approx(
        0, abs=1e-6
    )  # (-1 + 1) / 2
    assert loss_of(replace(GRPO, loss_aggregation="token"), sums["token"]) == 0.5  # 2 / 4
    assert loss_of(replace(GRPO, loss_aggregation="constant"), sums["constant"]) == 2 / (2 * MAX_NEW_TOKENS)


def test_clipped_tokens_are_told_of_each_kind_of_samples_however_a_step_is_cut() -> None:
    made, keep = batch(), batch()["mask"] > 0
    kinds = {"text": [True, False] * 3, "image": [False, True, False, True, False, False], "video": [False] * 6}
    whole = policy_sums(GRPO, **made, kinds=kinds)
    found, spans = whole.metrics(), torch.tensor(made["lengths"])
    clipped = ((made["log_probs"] - made["old_log_probs"]).exp() - 1) * made["advantages"].sign() > 0.2
    for kind in ("text", "image"):
        among = keep & torch.repeat_interleave(torch.tensor(kinds[kind]), spans)
        assert found[f"clip_fraction_{kind}"] == pytest.approx(float(clipped[among].float().mean()))
    assert not {"clip_fraction_video", "tokens_text"} & found.keys()
    assert found["clip_fraction"] == pytest.approx(float(clipped[keep].float().mean()))
    parts = [
        policy_sums(GRPO, **cut(made, [at]), kinds={kind: [of[at]] for kind, of in kinds.items()}) for at in range(6)
    ]
    assert sum(parts[1:], start=parts[0]).metrics() == pytest.approx(found, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("loss_aggregation", ["sample", "token", "constant"])
def test_a_sample_without_a_token_that_trains_is_in_no_count(loss_aggregation: str) -> None:
    """As one whose reward failed: with KL and entropy in the loss, it changes neither that nor what it is divided by."""
    algorithm, made = replace(GRPO, loss_aggregation=loss_aggregation, kl_coef=0.1, entropy_coef=0.1), batch()
    first, *lengths = made["lengths"]
    names = [name for name, value in made.items() if isinstance(value, torch.Tensor)]
    others = made | {name: made[name][first:] for name in names} | {"lengths": lengths}
    masked = made | {"mask": torch.cat([torch.zeros(first), made["mask"][first:]])}
    wanted, found = (policy_sums(algorithm, **each) for each in (others, masked))
    assert denominator(found, algorithm, 4) == denominator(wanted, algorithm, 4)
    assert loss_of(algorithm, found) == pytest.approx(loss_of(algorithm, wanted), rel=1e-6)
    assert found.metrics() == pytest.approx(wanted.metrics(), rel=1e-6)


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_the_policy_gradient() -> None:
    made = batch() | {"old_log_probs": None, "mask": torch.ones(sum(batch()["lengths"]))}
    sums, gradient = run(replace(GRPO, loss_aggregation="token"), made)
    np.testing.assert_allclose(gradient, -made["advantages"], rtol=1e-6)
    metrics = sums.metrics()
    assert (metrics["ratio_mean"], metrics["clip_fraction"], metrics["approx_kl"]) == (1, 0, 0)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(2))
def test_the_loss_and_its_metrics_equal_the_second_implementation(name: str, seed: int) -> None:
    algorithm, made = VARIANTS[name], batch(seed)
    sums, _ = run(algorithm, made)
    loss, seen = by_hand.loss(algorithm, made, MAX_NEW_TOKENS)
    metrics = sums.metrics()
    assert loss_of(algorithm, sums) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    keep = made["mask"] > 0
    ratio = (made["log_probs"] - made["old_log_probs"])[keep].exp()
    mismatch = (made["log_probs"] - made["rollout_log_probs"])[keep].abs()
    seen |= {
        "tokens": int(keep.sum()),
        "samples": sum(bool(part.any()) for part in keep.split(made["lengths"])),
        "ratio_max": float(ratio.max()),
        "mismatch_max": float(mismatch.max()),
    }
    assert metrics == pytest.approx(seen, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_gradient_equals_finite_differences(name: str) -> None:
    algorithm, made = VARIANTS[name], batch(3)
    sums, gradient = run(algorithm, made)
    scale = denominator(sums, algorithm, MAX_NEW_TOKENS)
    for token in range(0, len(gradient), 5):
        step = 1e-4
        sides = []
        for sign in (1, -1):
            moved = made["log_probs"].double()
            moved[token] += sign * step
            # TIS weights and pi_old are constants of the loss.
            sides.append(by_hand.loss(algorithm, made | {"log_probs": moved}, MAX_NEW_TOKENS, at=made)[0] * scale)
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
    of = (algorithm, MAX_NEW_TOKENS)
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


def test_a_step_masked_whole_gives_nothing_and_is_divided_by_one() -> None:
    made = batch(0) | {"mask": torch.zeros(sum(batch(0)["lengths"]))}
    sums, gradient = run(GRPO, made)
    assert not gradient.any()
    assert loss_of(GRPO, sums) == 0 and denominator(sums, GRPO, 1) == 1
    assert denominator(sums, replace(GRPO, loss_aggregation="token"), 1) == 1


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
    with pytest.raises(ValueError, match=r"entropy must be given with entropy_coef 0\.01"):
        policy_sums(VARIANTS["entropy"], **batch(0) | {"entropy": None})
    with pytest.raises(ValueError, match="lengths must add up"):
        policy_sums(GRPO, **batch(0) | {"lengths": [1]})
