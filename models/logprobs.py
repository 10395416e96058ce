"""Log-probs of the response tokens of a packed batch, and their entropy, for any Hugging Face causal LM; or their values.

Owns the way from hidden states to log-probs, or through a value head (`value_head.py`) to values. The model runs through its own
root forward, so whatever hangs on it (FSDP2's gathering, lent bfloat16 copies, a tower's dummy input) happens as always; only its
output layer is taken over by hooks for the call: it gets no rows to multiply, and in its place the R hidden states that predict
response tokens go through the same weight in chunks. Does not own packing, nor any loss.

Invariant: at most `chunk_tokens` rows of float32 logits exist at a time, in forward and in backward, which computes them
again unless one chunk holds all rows. Log-probs are those of the whole vocabulary after the temperature, as engines report them.

Shapes: B rows, L tokens a row, R response tokens, C tokens a chunk, H hidden size, V vocabulary, J ids a token, K likeliest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

from rondo.models.media.batch import collate, embedding, encoded_once
from rondo.models.packing import PackedBatch, Sequence, pack, why_alone
from rondo.models.routing import Heard, through_routers
from rondo.models.shared_prefixes import why_apart
from rondo.models.units import drop_copies
from rondo.runtime.errors import ConfigError


@dataclass(slots=True)
class Scores:
    """Of R response tokens, in the order of the packed sequences, in nats. None: not asked for."""

    log_probs: torch.Tensor
    """float32 [R]"""
    entropy: torch.Tensor | None = None
    """float32 [R]"""
    others: torch.Tensor | None = None
    """float32 [R, J]: log-probs of the ids that were asked for."""
    top_ids: torch.Tensor | None = None
    """int64 [R, K]: the likeliest tokens, the likeliest first."""
    top_log_probs: torch.Tensor | None = None
    """float32 [R, K]"""


def response_log_probs(model: Any, packed: PackedBatch, **how: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probs float32 [R], entropy in nats float32 [R] or None), in the packed sequences' order: as `response_scores`."""
    found = response_scores(model, packed, **how)
    return found.log_probs, found.entropy


def response_scores(
    model: Any,
    packed: PackedBatch,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 2048,
    with_entropy: bool = False,
    ids: torch.Tensor | None = None,
    top_k: int = 0,
    heard: Heard | None = None,
) -> Scores:
    """What the model says of the response tokens, and at their places of others: `ids`, int64 [R, J], and the `top_k` likeliest.
    heard: what is told of the model's routers, for `packed.counted`.

    Differentiable under grad mode, but for the likeliest. Collective when the model is sharded. Raises ConfigError for a
    temperature that is not positive, a model that mixes the sequences of a row, and one that changes logits after its output
    layer.
    """
    if temperature <= 0 or chunk_tokens < 1:
        raise ConfigError(
            f"temperature and chunk_tokens must be greater than 0, got {temperature} and {chunk_tokens}. "
            "Greedy samples have no log-probs to train on"
        )

    options = temperature, chunk_tokens, with_entropy, top_k

    def scores(head: Any, hidden_RH: torch.Tensor) -> tuple[Any, ...]:
        bias = getattr(head, "bias", None)
        targets_RJ = packed.targets[:, None] if ids is None else torch.cat([packed.targets[:, None], ids], 1)
        return _Score.apply(hidden_RH, head.weight, bias, targets_RJ, *options)

    log_probs_RJ, entropy_R, *top = _run(model, packed, scores, heard)
    return Scores(log_probs_RJ[:, 0], entropy_R, None if ids is None else log_probs_RJ[:, 1:], *top)


def response_values(model: Any, packed: PackedBatch) -> torch.Tensor:
    """float32 [R], in the order of the packed sequences: of each response token, the value of the state that it is sampled in.
    For a model with a value head. Differentiable, collective and refused as `response_scores` is."""

    def values(head: Any, hidden_RH: torch.Tensor) -> tuple[Any, ...]:
        return (type(head).forward(head, hidden_RH),)

    (values_R1,) = _run(model, packed, values)
    return values_R1[:, 0]


def _run(model: Any, packed: PackedBatch, score: _ScoreOf, heard: Heard | None = None) -> tuple[Any, ...]:
    """What `score` makes of the output layer and the hidden states that predict response tokens."""
    batch = collate(model, packed.media, device=packed.input_ids.device)
    arguments = {"input_ids": packed.input_ids, "use_cache": False, "return_dict": True, **batch.arguments}
    if packed.shared is not None and why_apart(model):
        raise ConfigError(
            f"{type(model).__name__} must attend as flat batches need, got layers that do otherwise. "
            "Pack with the Packing of this model"
        )
    if packed.position_ids is not None:
        # On four axes the positions say little about rows: those of text alone do.
        several = packed.shared is None and len(packed.responses) > len(packed.input_ids)
        if several and why_alone(model):
            raise ConfigError(
                f"rows must hold one sequence each for {type(model).__name__}, which mixes those of a row, "
                "got rows with several. Pack with the Packing of this model"
            )
        arguments["position_ids"] = packed.position_ids
    head = model.get_output_embeddings()
    scoring = _scoring(head, packed, score)
    sharing: AbstractContextManager[dict[str, Any]] = nullcontext({})
    if packed.shared is not None:
        sharing = packed.shared.arguments(packed.input_ids)
    routed = through_routers(model, packed.routes, heard)
    with scoring as found, encoded_once(model, batch), embedding(model, packed.embedded_ids), routed, sharing as more:
        output = model(**arguments, **more)
    if found.scores is None or output.logits is not found.scores[0]:
        raise ConfigError(
            f"{type(model).__name__} must return what its output layer gives, got logits that it scales or caps. "
            "Train a model without logit soft-capping or scaling"
        )
    if not torch.is_grad_enabled() and isinstance(model, FSDPModule):
        drop_copies(model)  # no backward will
    return found.scores


def score_tokens(
    model: Any, tokens: np.ndarray, response: int, top_k: int, *, chunk_tokens: int = 2048
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the last `response` of one sequence's tokens, integers [T]: log-probs float32 [R], and of the `top_k` likeliest at their
    places ids int64 and log-probs float32, [R, K]."""
    packed = pack([Sequence(tokens, response)], share_rows=False).to(next(model.parameters()).device)
    with torch.no_grad():
        found = response_scores(model, packed, chunk_tokens=chunk_tokens, top_k=top_k)
    none = torch.zeros(response, 0)
    top = (
        (none.long(), none)
        if found.top_ids is None or found.top_log_probs is None
        else (found.top_ids, found.top_log_probs)
    )
    return (found.log_probs.cpu().numpy(), *(each.cpu().numpy() for each in top))


_ScoreOf = Callable[[Any, torch.Tensor], tuple[Any, ...]]
"""(output layer, hidden states [R, H]) -> what is said of response tokens. Its first stands in the place of logits: whole and not
a view, since FSDP2 hangs on it what happens before the backward."""


@dataclass(slots=True)
class _Found:
    hidden_BLH: torch.Tensor | None = None
    scores: tuple[Any, ...] | None = None


@contextmanager
def _scoring(head: Any, packed: PackedBatch, score: _ScoreOf) -> Iterator[_Found]:
    """While the body runs, `head` returns what `score` gives instead of logits [B, L, V]."""
    found = _Found()

    def take(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        found.hidden_BLH = args[0]
        return (args[0][:0],)

    def give(module: Any, args: tuple[torch.Tensor], logits: torch.Tensor) -> Any:
        assert found.hidden_BLH is not None
        found.scores = score(module, found.hidden_BLH.flatten(0, 1).index_select(0, packed.positions))
        return found.scores[0]

    handles = [head.register_forward_pre_hook(take), head.register_forward_hook(give)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class _Score(torch.autograd.Function):
    """hidden [R, H], weight [V, H], bias [V] or None, targets int64 [R, J] -> log-probs [R, J], entropy [R] or None, and of the
    likeliest tokens ids and log-probs, [R, K] or None.

    With z = logits / temperature, p = softmax(z), t the target: d log p_t / dz = onehot(t) - p, and for the entropy
    E = -sum(p log p): dE / dz = -p (log p + E).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_RJ: torch.Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        top_k: int,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.save_for_backward(hidden_RH, weight_VH, bias_V, targets_RJ)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        log_probs_RJ = hidden_RH.new_empty(targets_RJ.shape, dtype=torch.float32)
        entropy_R = log_probs_RJ.new_empty(len(hidden_RH)) if with_entropy else None
        top_RK = log_probs_RJ.new_empty(len(hidden_RH), top_k) if top_k else None
        top_ids_RK = None if top_RK is None else torch.empty_like(top_RK, dtype=torch.int64)
        ctx.kept_CV = None
        for start in range(0, len(hidden_RH), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            all_CV = _all_log_probs(hidden_RH[part], weight_VH, bias_V, temperature)
            if len(all_CV) == len(hidden_RH):
                ctx.kept_CV = all_CV
            log_probs_RJ[part] = all_CV.gather(1, targets_RJ[part])
            if top_RK is not None and top_ids_RK is not None:
                top_RK[part], top_ids_RK[part] = all_CV.topk(top_k)
            if entropy_R is not None:
                entropy_R[part] = _entropy(all_CV, all_CV.exp())
        ctx.mark_non_differentiable(*(each for each in (top_ids_RK, top_RK) if each is not None))
        return log_probs_RJ, entropy_R, top_ids_RK, top_RK

    @staticmethod
    def backward(
        ctx: Any, grad_RJ: torch.Tensor | None, entropy_grad_R: torch.Tensor | None, *_: torch.Tensor | None
    ) -> tuple[Any, ...]:
        hidden_RH, weight_VH, bias_V, targets_RJ = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden_RH) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        for start in range(0, len(hidden_RH), ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            all_CV, ctx.kept_CV = ctx.kept_CV, None  # the backward of this is the first: it is soon free
            if all_CV is None:
                all_CV = _all_log_probs(hidden_RH[part], weight_VH, bias_V, ctx.temperature)
            grad_CV = _grad_logits(
                all_CV,
                targets_RJ[part],
                None if grad_RJ is None else grad_RJ[part] / ctx.temperature,
                None if entropy_grad_R is None else entropy_grad_R[part, None] / ctx.temperature,
            )
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0)
            grad_CV = grad_CV.to(weight_VH.dtype)
            if grad_hidden is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden[part])
            if grad_weight is not None:
                if weight_VH.dtype == torch.float32:
                    grad_weight.addmm_(grad_CV.T, hidden_RH[part])
                else:
                    grad_weight += grad_CV.T @ hidden_RH[part]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VH.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _all_log_probs(
    hidden_CH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    """float32 [C, V], after the temperature; the product is in the model's dtype, as in its own forward."""
    logits_CV = F.linear(hidden_CH, weight_VH, bias_V).float()
    if temperature != 1:
        logits_CV /= temperature
    return torch.log_softmax(logits_CV, -1)


def _entropy(all_CV: torch.Tensor, probs_CV: torch.Tensor) -> torch.Tensor:
    return -(probs_CV * all_CV).sum(-1)


def _grad_logits(
    all_CV: torch.Tensor, targets_CJ: torch.Tensor, grad_CJ: torch.Tensor | None, entropy_grad_C1: torch.Tensor | None
) -> torch.Tensor:
    """float32 [C, V]: gradient of the logits before the temperature, whose factor is in both gradients."""
    probs_CV = all_CV.exp()
    grad_CV = torch.zeros_like(probs_CV) if grad_CJ is None else probs_CV * -grad_CJ.sum(1, keepdim=True)
    if grad_CJ is not None:
        grad_CV.scatter_add_(1, targets_CJ, grad_CJ)
    if entropy_grad_C1 is not None:
        grad_CV -= entropy_grad_C1 * probs_CV * (all_CV + _entropy(all_CV, probs_CV)[:, None])
    return grad_CV
