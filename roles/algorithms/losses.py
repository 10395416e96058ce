"""Losses: the undivided policy loss of some samples, from the log-probs of their response tokens.

Owns how the parts of an algorithm come together: policy loss, correction, KL, entropy, and what is measured beside them. Does not
own the parts (`policy_losses.py`, `corrections.py`, `divergence.py`), the model's forward, advantages, or the optimizer step.

Invariant: `policy_sums` of a whole step equals the sum of `policy_sums` of any cut of it into micro-batches and ranks.
So the actor adds gradients up as rounds come, and divides once by the denominator of the true step.

    sums = policy_sums(algorithm, log_probs=..., ...); sums.loss.backward()          # for every micro-batch
    total = (a + b).reduced(group); float(total.loss) / denominator(total, algorithm, max_new_tokens)

Shapes: N response tokens of all samples behind each other, in the order of `lengths` (S samples). Log-probs are natural
logarithms in float32. Masked tokens are selected out and never multiplied by 0: they may hold anything, NaN too.

A loss and a correction, ours or the user's, see a whole `Batch` and give a number a token, and perhaps what is to be measured:

    def loss(batch, algorithm) -> tensor [N], or (tensor [N], {"clip_fraction": tensor [N], ...})
    def correction(batch, algorithm) -> weights [N], (weights [N], {...}), (weights, mask [N]) or (weights, mask, {...})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rondo.roles.algorithms.algorithm import AlgorithmConfig, function_of
from rondo.roles.algorithms.batch import Batch, Measured, bounded_exp
from rondo.roles.algorithms.corrections import CORRECTIONS, left_behind
from rondo.roles.algorithms.divergence import k3, kl
from rondo.roles.algorithms.policy_losses import POLICY_LOSSES
from rondo.roles.algorithms.sums import LossSums
from rondo.runtime.errors import Fatal

Beside = Callable[[Batch], tuple[torch.Tensor | None, Measured]]
"""A term of the loss of every token [N], or None, and what it measures."""


OURS = frozenset({
    "tokens", "samples", "kept_fraction", "kept_samples_fraction", "ratio_mean", "ratio_max", "approx_kl", "mismatch_mean",
    "mismatch_kl", "mismatch_max", "entropy", "opsm_fraction", "kl", "router_aux_loss",
})  # fmt: skip
"""Measures of every run, under whose names no loss or correction may measure something else."""


def counted(sums: LossSums, algorithm: AlgorithmConfig, max_new_tokens: int) -> torch.Tensor:
    """Return the tokens or samples that the loss of `sums` is divided by once the update is whole, by `loss_aggregation`.

    Tokens are those that a correction left in the loss. Samples are those with such a token or, with `count_rejected`, with a
    token that trains.
    """
    if algorithm.loss_aggregation == "token":
        return sums.sums["kept_fraction"]
    samples = sums.sums["samples" if algorithm.count_rejected else "kept_samples_fraction"]
    return samples * max_new_tokens if algorithm.loss_aggregation == "constant" else samples


def denominator(total: LossSums, algorithm: AlgorithmConfig, max_new_tokens: int) -> float:
    """Return what the summed loss and its gradient are divided by: at least 1, since a step may be masked whole."""
    return max(1.0, float(counted(total, algorithm, max_new_tokens)))


def policy_sums(
    algorithm: AlgorithmConfig,
    *,
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    lengths: Sequence[int],
    begun: Sequence[bool] | None = None,
    old_log_probs: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    constants: Mapping[str, float] | None = None,
    beside: Beside | None = None,
    kinds: Mapping[str, Sequence[bool]] | None = None,
) -> LossSums:
    """The undivided policy loss of some samples, and the sums that its metrics are made of: means over unmasked tokens.

    All tensors are [N]; `log_probs`, and `entropy` where it has a weight, carry the gradient; `mask` is 1 at tokens that the
    policy sampled. `old_log_probs` None takes the detached new ones; `constants` are what was measured over the step. ValueError
    when the algorithm needs `ref_log_probs` or `entropy` and they are missing. `mismatch_*` compare the trainer's log-probs with
    the engine's: on-policy a measure of their numerics alone, else of both that and the steps between. `approx_kl` is k3 against
    pi_old. `beside`: another term of every token's loss, which no correction weighs. `begun`: which of the samples have
    their first row here and are counted, where others have it in another micro-batch; None: all. `kinds`: name -> which samples
    are of that kind, for each of which it is told, too, how many tokens are clipped.
    """
    if sum(lengths) != len(log_probs):
        raise ValueError(f"lengths must add up to the number of log-probs, {len(log_probs)}, got {sum(lengths)}.")
    if algorithm.needs_reference and ref_log_probs is None:
        raise ValueError(f"ref_log_probs must be given with kl_coef {algorithm.kl_coef}, got none.")
    if algorithm.entropy_coef and entropy is None:
        raise ValueError(f"entropy must be given with entropy_coef {algorithm.entropy_coef}, got none.")
    keep = mask > 0

    def chosen(values: torch.Tensor) -> torch.Tensor:
        return torch.where(keep, values, 0.0)

    batch = Batch(
        log_probs=chosen(log_probs),
        old_log_probs=chosen(log_probs.detach() if old_log_probs is None else old_log_probs),
        rollout_log_probs=chosen(rollout_log_probs),
        advantages=chosen(advantages),
        mask=keep,
        lengths=lengths,
        ref_log_probs=None if ref_log_probs is None else chosen(ref_log_probs),
        entropy=None if entropy is None else chosen(entropy),
        constants=constants or {},
    )
    drift = batch.log_probs.detach() - batch.old_log_probs
    mismatch = batch.log_probs.detach() - batch.rollout_log_probs
    ratio = bounded_exp(drift)
    loss, measured = _per_token(algorithm.policy_loss, POLICY_LOSSES, "algorithm.policy_loss", batch, algorithm)
    partly = set() if algorithm.policy_loss in POLICY_LOSSES else set(measured)
    measured |= {
        "ratio_mean": ratio,
        "approx_kl": k3(drift),
        "mismatch_mean": mismatch.abs(),
        "mismatch_kl": k3(mismatch),
    }
    if batch.entropy is not None:
        measured["entropy"] = batch.entropy.detach()
    stays = keep
    if algorithm.corrected_by is not None:
        weights, stays, more = _corrected(algorithm.corrected_by, batch, algorithm)
        if twice := measured.keys() & more.keys():
            raise Fatal(
                f"algorithm.correction must measure what algorithm.policy_loss does not, got {min(twice)!r} of both. Rename one"
            )
        loss, measured = loss * weights, measured | more
        partly |= set() if algorithm.corrected_by in CORRECTIONS else set(more)
    if algorithm.opsm_delta is not None:
        gone = left_behind(batch, algorithm.opsm_delta)
        loss = torch.where(gone, 0.0, loss)
        measured["opsm_fraction"] = gone
    if algorithm.needs_reference:
        assert batch.ref_log_probs is not None
        divergence = kl(batch.log_probs, batch.ref_log_probs, algorithm.kl, batch.ratio())
        measured["kl"] = divergence.detach()
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coef * divergence
    if algorithm.entropy_coef:
        assert batch.entropy is not None
        loss = loss - algorithm.entropy_coef * batch.entropy
    if beside is not None:
        further, told = beside(batch)
        loss = loss if further is None else loss + further
        measured.update(told)

    if algorithm.loss_aggregation == "sample":
        loss = loss * batch.to_tokens(1.0 / batch.sums(stays.float()).clamp(min=1).float())
    tokens_S, kept_S = batch.sums(keep.float()), batch.sums(stays.float())
    counted = torch.ones_like(tokens_S, dtype=torch.bool)
    if begun is not None:
        counted = torch.tensor(begun, device=tokens_S.device)
    num_tokens = keep.sum(dtype=torch.float64)
    num_samples = (counted & (tokens_S > 0)).sum(dtype=torch.float64)
    sums = {
        "tokens": num_tokens,
        "samples": num_samples,
        "kept_fraction": stays.sum(dtype=torch.float64),
        "kept_samples_fraction": (counted & (kept_S > 0)).sum(dtype=torch.float64),
        **{name: chosen(values).sum(dtype=torch.float64) for name, values in measured.items()},
    }
    counts = {"kept_samples_fraction": num_samples, **dict.fromkeys(sorted(partly), num_tokens)}
    if kinds and "clip_fraction" in measured:
        clipped = chosen(measured["clip_fraction"].float())
        of_samples = torch.stack([batch.sums(clipped), tokens_S])  # [2, S]
        among = torch.tensor(list(kinds.values()), dtype=torch.float64).to(of_samples.device)  # [kinds, S]
        for kind, (num_clipped, num_of_kind) in zip(kinds, among @ of_samples.T, strict=True):
            sums[f"clip_fraction_{kind}"], counts[f"clip_fraction_{kind}"] = num_clipped, num_of_kind
    maxes = {"ratio_max": chosen(ratio).max().double(), "mismatch_max": mismatch.abs().max().double()}
    return LossSums(torch.where(stays, loss, 0.0).sum(), sums, maxes, counts)


def _corrected(
    name: str, batch: Batch, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Weights of a correction, the tokens that it leaves in the loss, and what it measures."""
    setting = "algorithm.correction"
    found = function_of(name, CORRECTIONS, setting)(batch, algorithm)
    parts = list(found) if isinstance(found, tuple) else [found]
    measured = parts.pop() if isinstance(parts[-1], Mapping) else {}
    if len(parts) > 2:  # weights and a mask
        raise Fatal(f"{setting} must give weights, and perhaps a mask, got {len(parts)} tensors. Correct it")
    weights, measured = _checked((parts[0], measured), setting, batch)
    if len(parts) == 1:
        return weights.detach(), batch.mask, measured
    kept, _ = _checked((parts[1], {}), setting, batch)
    return weights.detach(), batch.mask & (kept > 0), measured


def _per_token(
    name: str, ours: Mapping[str, Any], setting: str, batch: Batch, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a loss gives, and what it measures."""
    found = function_of(name, ours, setting)(batch, algorithm)
    return _checked(found if isinstance(found, tuple) else (found, {}), setting, batch)


def _checked(
    found: tuple[torch.Tensor, Mapping[str, torch.Tensor]], setting: str, batch: Batch
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Fatal for what is no number a token, and for a measure with the name of one of ours."""
    values, measured = found
    if taken := OURS.intersection(measured):
        raise Fatal(
            f"{setting} must measure under names of its own, got {min(taken)!r}, which every run has. Rename it"
        )
    for each in (values, *measured.values()):
        if getattr(each, "shape", None) != batch.mask.shape:
            raise Fatal(
                f"{setting} must give tensors with a number for each of {len(batch.mask)} tokens, "
                f"got {list(each.shape) if isinstance(each, torch.Tensor) else each!r:.80}. Correct it"
            )
    return values, {key: each.detach() for key, each in measured.items()}
