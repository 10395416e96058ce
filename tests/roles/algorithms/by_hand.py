"""A second implementation of the losses: token by token, in float64 and plain Python, from the papers; of ours it takes settings.

What a formula takes as a number, its stop-gradients, is read off `at`, the batch where the gradient is taken; so finite
differences of `loss` over the log-probs of `made` are its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

NAMES = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "mask", "entropy")
CONSTANTS = {"ess": 0.6, "m2_clip_low": 0.35, "m2_clip_high": 0.55}


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(ratio: float, advantage: float, low: float, high: float, dual: float) -> float:
    loss = max(-ratio * advantage, -clip(ratio, 1 - low, 1 + high) * advantage)
    return min(loss, -dual * advantage) if advantage < 0 else loss


def sides(ratio: float, advantage: float, low: float, high: float, dual: float) -> dict[str, bool]:
    return {
        "clip_low_fraction": advantage < 0 and ratio < 1 - low,
        "clip_high_fraction": advantage > 0 and ratio > 1 + high,
        "clip_dual_fraction": advantage < 0 and ratio > dual,
    }


def policy(
    a: Any, *, A: float, new: float, old: float, fixed: float, seq: float, seq_fixed: float
) -> tuple[float, Any]:
    """(loss of a token, where it is clipped). fixed: its log-prob as a number; seq: mean log-ratio of its sample."""
    now, was = math.exp(new - old), math.exp(fixed - old)
    match a.policy_loss:
        case "ppo_clip":
            bounds = (a.clip_low, a.clip_high, a.dual_clip)
            return surrogate(now, A, *bounds), sides(now, A, *bounds)
        case "gspo":
            bounds = (a.clip_low, a.clip_high, a.dual_clip)
            return surrogate(math.exp(seq), A, *bounds), sides(math.exp(seq), A, *bounds)
        case "gspo_token":
            bounds = (a.clip_low, a.clip_high, a.dual_clip)
            ratio = math.exp(seq_fixed) * math.exp(new) / math.exp(fixed)
            return surrogate(ratio, A, *bounds), sides(ratio, A, *bounds)
        case "m2po":
            bounds = (CONSTANTS["m2_clip_low"], CONSTANTS["m2_clip_high"], a.dual_clip)
            return surrogate(now, A, *bounds), sides(now, A, *bounds)
        case "sapo":
            tau = a.sapo_tau_positive if A > 0 else a.sapo_tau_negative
            gate = 1 / (1 + math.exp(-tau * (now - 1)))
            return -4 / tau * gate * A, {"clip_fraction": 4 * gate * (1 - gate) < 0.9}
        case "reinforce":
            weight = clip(was, 1 - a.clip_low, 1 + a.clip_high)
            return -weight * A * new, {"clip_low_fraction": was < weight, "clip_high_fraction": was > weight}
        case "cispo_signed":
            weight = min(was, 1 + a.clip_high) if A >= 0 else clip(was, 1 - a.clip_low, a.dual_clip)
            return -weight * A * new, {
                "clip_low_fraction": A < 0 and was < 1 - a.clip_low,
                "clip_high_fraction": A >= 0 and was > 1 + a.clip_high,
            }
        case "p3o":
            ess = CONSTANTS["ess"]
            divergence = (new - old) + math.exp(old - new) - 1
            return -min(was, ess) * A * new + (1 - ess) * divergence, {
                "clip_low_fraction": False,
                "clip_high_fraction": was > ess,
            }
    raise AssertionError(a.policy_loss)


def importance(a: Any, token: float, tokens: Sequence[float]) -> tuple[float, bool]:
    """(weight, whether it lies outside of its bounds)."""
    product = math.prod(tokens)
    ratio = {"token": token, "sequence": product, "geometric": product ** (1 / max(len(tokens), 1))}[a.tis_level]
    outside = not a.tis_low <= ratio <= a.tis_high
    if not outside:
        return ratio, False
    return (clip(ratio, a.tis_low, a.tis_high) if a.tis_mode == "truncate" else 0.0), True


def kl(a: Any, new: float, old: float, ref: float) -> float:
    x = new - ref
    k3 = math.exp(-x) - 1 + x
    return {"k1": x, "k2": x * x / 2, "k3": k3, "low_var": min(k3, 10), "unbiased": k3 * math.exp(new - old)}[a.kl]


def loss(
    a: Any, made: dict[str, Any], max_new_tokens: int, at: dict[str, Any] | None = None
) -> tuple[float, dict[str, float]]:
    """(the divided loss, metrics)."""
    of = {name: made[name].double().numpy() for name in NAMES}
    fixed = (at or made)["log_probs"].double().numpy()
    seen: dict[str, list[float]] = {}
    samples: list[list[float]] = []
    start = trained = 0

    def tell(**values: float) -> None:
        for name, value in values.items():
            seen.setdefault(name, []).append(float(value))

    for length in made["lengths"]:
        kept = [t for t in range(start, start + length) if of["mask"][t]]
        start += length
        trained += bool(kept)
        samples.append([])
        drifts = [of["log_probs"][t] - of["old_log_probs"][t] for t in kept]
        drifts_fixed = [fixed[t] - of["old_log_probs"][t] for t in kept]
        ratios = [math.exp(of["old_log_probs"][t] - of["rollout_log_probs"][t]) for t in kept]
        fallen = np.mean([of["rollout_log_probs"][t] - fixed[t] for t in kept]) if kept else 0.0
        for t, engine_ratio in zip(kept, ratios, strict=True):
            new, old, rollout, advantage = (
                of[n][t] for n in ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")
            )
            term, clipped = policy(
                a,
                A=advantage,
                new=new,
                old=old,
                fixed=fixed[t],
                seq=float(np.mean(drifts)),
                seq_fixed=float(np.mean(drifts_fixed)),
            )
            if "clip_fraction" not in clipped:
                clipped["clip_fraction"] = clipped["clip_low_fraction"] or clipped["clip_high_fraction"]
            gap = new - rollout
            tell(
                **clipped, ratio_mean=math.exp(new - old), approx_kl=math.exp(new - old) - 1 - (new - old),
                mismatch_mean=abs(gap), mismatch_kl=math.exp(gap) - 1 - gap, entropy=of["entropy"][t],
            )  # fmt: skip
            stays = True
            if a.tis_high is not None:
                weight, outside = importance(a, engine_ratio, ratios)
                tell(
                    tis_weight_mean=weight,
                    **{"tis_clip_fraction" if a.tis_mode == "truncate" else "tis_mask_fraction": outside},
                )
                term *= weight
                stays = not (outside and a.tis_mode == "reject")
            if a.opsm_delta is not None:
                gone = advantage < 0 and fallen > a.opsm_delta
                tell(opsm_fraction=gone)
                term = 0.0 if gone else term
            if a.kl_coef:
                tell(kl=kl(a, new, old, of["ref_log_probs"][t]))
                term += a.kl_coef * seen["kl"][-1] if a.kl_in == "loss" else 0.0
            term -= a.entropy_coef * of["entropy"][t]
            tell(kept_fraction=stays)
            if stays:
                samples[-1].append(term)
    flat = [term for sample in samples for term in sample]
    left = sum(map(bool, samples))
    counted = max(trained if a.count_rejected else left, 1)
    divided = {
        "sample": sum(sum(sample) / max(len(sample), 1) for sample in samples) / counted,
        "token": sum(flat) / max(len(flat), 1),
        "constant": sum(flat) / (counted * max_new_tokens),
    }[a.loss_aggregation]
    means = {name: float(np.mean(values)) for name, values in seen.items()}
    return divided, means | ({"kept_samples_fraction": left / trained} if trained else {})


def advantages(name: str, groups: Sequence[Sequence[dict[str, Any]]], kl_coef: float) -> list[np.ndarray]:
    """Of the samples of a step: from their rewards to what each token gets, NaN where it does not train. A sample is a dict of
    reward, parts (components, of weights 1 and 2), mask, and x = log pi - log pi_ref of its tokens; what kl_coef takes is k1."""
    found: list[np.ndarray] = []
    for group in groups:
        total = np.array([each["reward"] for each in group])
        if kl_coef and name != "reinforce_plus_plus":  # the sum over a sample, off its reward
            total -= [kl_coef * each["x"][each["mask"] > 0].sum() for each in group]
        n, mean = len(group), total.mean()
        match name:
            case "dr_grpo" | "reinforce_plus_plus_baseline":
                made = total - mean
            case "rloo":  # against the mean of the others
                made = np.array([total[i] - np.delete(total, i).mean() for i in range(n)])
            case "maxrl":
                made = (total - mean) / mean
            case "gdpo":  # each component brought to one scale
                made = np.zeros(n)
                for weight, column in zip((1, 2), np.array([each["parts"] for each in group]).T, strict=True):
                    made += weight * (column - column.mean()) / column.std(ddof=1)
            case "reinforce_plus_plus":
                made = total
            case _:
                made = (total - mean) / (total.std(ddof=1) + 1e-6)
        for each, value in zip(group, made, strict=True):
            tokens = np.full(len(each["mask"]), np.nan)
            kept = np.flatnonzero(each["mask"])
            tokens[kept] = value
            if (
                name == "reinforce_plus_plus"
            ):  # G_t: the reward at the end, less the KL of this token and of those behind it
                tokens[kept] -= [kl_coef * each["x"][kept[at:]].sum() for at in range(len(kept))]
            found.append(tokens)
    if name.startswith("reinforce_plus_plus"):
        every = np.concatenate(found)
    elif name == "gdpo":
        every = np.array([np.nanmean(each) for each in found])
    else:
        return found
    return [(each - np.nanmean(every)) / np.nanstd(every) for each in found]
