"""How a token is drawn from logits: counter-based uniforms, inverse CDF, and the log-prob that the trainer will see.

Owns the random numbers of generation and the draw. Owns no model and no sequence.

Invariant: the draw at position p of a sample is a function of (its seed, p, its logits). Slot, batch, engine and retries do
not enter: `uniform(seed, p)` is a hash, there is no generator state to carry or to lose.

    probabilities   0.1  0.6  0.3        u = 0.65
    cumulative      0.1  0.7  1.0        first entry above u: token 1, log-prob log(0.6)
"""

from __future__ import annotations

import numpy as np
import torch

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(z: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), uint64 to uint64, elementwise."""
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


def uniforms(seed: int, start: int, count: int) -> np.ndarray:
    """The uniform numbers of positions start .. start + count - 1 of the sample `seed`: float32 [count] in [0, 1).

    24 bits each, so that `u * total` rounds to less than `total` for every float32 total. The seed is mixed before the
    counter is added: neighbouring seeds share no stretch of their streams.
    """
    base = _mix(np.array([seed], np.uint64) + _GAMMA)
    counter = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return (_mix(base + counter * _GAMMA) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def keep_top(probs_NV: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor) -> torch.Tensor:
    """Zeroes what top-k and then top-p drop; the rest is unchanged and not renormalised.

    `top_k_N` int64 (values < 1: off), `top_p_N` float32 (1: off). Top-p looks at what top-k left, renormalised, and keeps
    every token before which the likelier ones hold less than `top_p` (Holtzman et al., ICLR 2020, 3.1); the likeliest
    always stays, however small the share. Equal probabilities are ranked by token id.
    """
    ranked, order = probs_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(ranked.shape[-1], device=ranked.device)
    ranked = ranked.masked_fill((top_k_N[:, None] > 0) & (rank_V >= top_k_N[:, None]), 0.0)
    upto = ranked.cumsum(-1)
    before = torch.nn.functional.pad(upto[:, :-1], (1, 0))
    dropped = (before >= top_p_N[:, None] * upto[:, -1:]) & (top_p_N[:, None] < 1.0)
    dropped[:, 0] = False
    return torch.zeros_like(probs_NV).scatter_(-1, order, ranked.masked_fill(dropped, 0.0))


def likeliest(
    logits_V: torch.Tensor, temperature: float, count: int, num_tokens: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable of the first `num_tokens` tokens after the temperature (0: of the plain logits): (int64 [K],
    float32 [K] log-probs), K up to `count`."""
    log_probs_V = (logits_V.float() / (temperature or 1.0)).log_softmax(-1)[:num_tokens]
    values, tokens = log_probs_V.topk(min(count, log_probs_V.shape[-1]))
    return tokens.cpu().numpy(), values.cpu().numpy()


DRAWN = np.dtype([("temperature", np.float32), ("top_k", np.int64), ("top_p", np.float32)], align=True)
"""How one sample is drawn, as in `SamplingParams`."""


def draw(
    logits_NV: torch.Tensor, drawn_N: np.ndarray, uniforms_N: np.ndarray, num_tokens: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one of the first `num_tokens` tokens a row: (int64 [N], float32 [N] log-probs over all of V, after temperature,
    before top-k and top-p).

    Row i of the logits (any float dtype, any device) is drawn as `drawn_N[i]` says, of `DRAWN`. A row that holds a NaN gets the
    log-prob NaN; the caller checks.
    """
    device = logits_NV.device
    scaled = logits_NV.float()
    temperature_N, top_k_N, top_p_N = (drawn_N[name].copy() for name in DRAWN.names or ())
    greedy_N = temperature_N == 0.0
    temperature_N[greedy_N] = 1.0
    if (temperature_N != 1.0).any():
        scaled = scaled / torch.from_numpy(temperature_N).to(device)[:, None]
    probs_NV = scaled.softmax(-1)
    kept_NV = probs_NV[:, :num_tokens]
    filtered = np.flatnonzero((top_k_N > 0) | (top_p_N < 1.0))
    if filtered.size:
        rows = torch.from_numpy(filtered).to(device)
        top_k, top_p = (torch.from_numpy(column[filtered]).to(device) for column in (top_k_N, top_p_N))
        kept_NV = kept_NV.index_copy(0, rows, keep_top(kept_NV[rows], top_k, top_p))
    upto_NV = kept_NV.cumsum(-1)
    threshold_N1 = upto_NV[:, -1:] * torch.from_numpy(uniforms_N).to(device)[:, None]
    # `right`: the first entry strictly above the threshold, so a token of probability 0 is never drawn.
    tokens_N1 = torch.searchsorted(upto_NV, threshold_N1, right=True)
    if greedy_N.any():
        rows = torch.from_numpy(greedy_N).to(device)[:, None]
        tokens_N1 = torch.where(rows, scaled[:, :num_tokens].argmax(-1, keepdim=True), tokens_N1)
    tokens_N1.clamp_(max=kept_NV.shape[-1] - 1)  # only rows with NaN exceed it
    log_probs_N1 = probs_NV.gather(-1, tokens_N1).log_()
    return tokens_N1[:, 0].cpu().numpy(), log_probs_N1[:, 0].cpu().numpy()
