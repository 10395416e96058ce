"""The gap between the engine's log-probs and the trainer's for the same tokens under the same weights, by modality.

Owns which tokens can be compared and the figures of a step. A token sampled under version v is compared with the trainer's own
log-prob where the step trains on v, else with actor_fwd's where that scored it under v; what nobody scored under its own
version is not measured, and counted by what is missing in `log_prob_gap_tokens`. Nor are tokens behind a change of version in
mid-sample: the engine made them over a cache that older weights have filled; nor the last one before it, since servers tell the
change one token off. So staleness is never taken for a gap: what is left is numerics, a wrong mask, a wrong position, a wrong
picture.

    gap = Gap(); gap.add(mine, sampled, chosen, ("image",)); gap.metrics()["log_prob_gap_image"]

Of adapters the gap says nothing at first: a fresh one changes nothing, and an engine that leaves it out agrees. So before the
first version an engine computes a canary, an adapter that changes every target much, and must find behind a few prompts what the
trainer found with it. From then on a version's checksum says that the adapter is there, and the gap, where both compute alike,
that it is what tokens are sampled with.

    canary = Canary.of(model, lora); canary.write(run_dir)                              # the trainer
    Canary.read(run_dir).refuse([(token, log_prob), ...], engine="rollout-0.0")         # whoever has an engine

Invariant: additive over rows, rounds and ranks. A row of several modalities counts for each of them, as mixed, and once for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist

from rondo.models.config import LoraConfig
from rondo.models.lora import base_alone, canary_of, in_place_of_adapters, published_adapter
from rondo.models.media.batch import placeholder_ids
from rondo.models.media.inputs import KINDS, kinds_of
from rondo.models.trials import logits_of
from rondo.models.units import drop_copies
from rondo.roles.config import JobConfig
from rondo.runtime.errors import Fatal
from rondo.runtime.records.record import write_whole

_CANARY = "canary.json"
_PROMPTS, _PROMPT_TOKENS, _LIKELIEST = 8, 12, 8
_FAR, _FAR_ALIKE = 0.5, 1e-3
"""How far an engine may be from the trainer: of what the canary moves log-probs by, since numbers of 16 bits are a tenth off
behind many layers; or in nats, where both compute alike."""
_KINDS = ("", *KINDS)
"""All rows, and those of each kind."""


class Gap:
    """Sums over the tokens of one step. For each kind: tokens, sum of |d|, sum of k3, greatest |d|, with
    d = trainer's - engine's log-prob in nats, and k3 = exp(d) - 1 - d, which estimates KL(engine || trainer)."""

    def __init__(self) -> None:
        self._sums = np.zeros((len(_KINDS), 3))
        self._max = np.zeros(len(_KINDS))

    def add(self, mine: np.ndarray, sampled: np.ndarray, chosen: np.ndarray, modalities: Sequence[str]) -> None:
        """One row: float32 [R] each, and which tokens count, bool [R]."""
        if not chosen.any():
            return
        difference = (mine[chosen] - sampled[chosen]).astype(np.float64)
        absolute = np.abs(difference)
        sums = [len(difference), absolute.sum(), (np.expm1(difference) - difference).sum()]
        for kind in ("", *kinds_of(modalities)):
            at = _KINDS.index(kind)
            self._sums[at] += sums
            self._max[at] = max(self._max[at], absolute.max())

    def reduce(self, device: torch.device | str) -> None:
        """The same over all ranks (collective)."""
        sums, greatest = torch.from_numpy(self._sums).to(device), torch.from_numpy(self._max).to(device)
        dist.all_reduce(sums)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        self._sums, self._max = sums.cpu().numpy(), greatest.cpu().numpy()

    def metrics(self) -> dict[str, float]:
        """`log_prob_gap` (mean of |d|), `..._max`, `..._k3`, `..._tokens` over all rows, and `log_prob_gap_<kind>` with
        its `_max` and `_k3` for each kind that was there. Empty when nothing could be compared."""
        found: dict[str, float] = {}
        for kind, (tokens, absolute, k3), greatest in zip(_KINDS, self._sums.tolist(), self._max.tolist(), strict=True):
            if not tokens:
                continue
            name = f"log_prob_gap_{kind}" if kind else "log_prob_gap"
            found |= {name: absolute / tokens, f"{name}_max": greatest, f"{name}_k3": k3 / tokens}
            if not kind:
                found[f"{name}_tokens"] = tokens
        return found


def refuse_gap(metrics: Mapping[str, Any], config: JobConfig) -> None:
    """End the run where engine and trainer disagree by more than the settings allow (nats), or by more than rounding where an
    engine with adapters computes as the trainer does; the step is not committed."""
    gap, limit = metrics.get("log_prob_gap", 0.0), config.train.max_log_prob_gap
    if limit is None and config.adapts_engines and config.computes_alike and not gap <= _FAR_ALIKE:
        raise Fatal(
            f"an engine must generate with the adapter whose version it names, got log-probs {gap:g} nats from the trainer's in "
            f"step {metrics['step']}, where both compute in float32. It kept an older one, or the base: set "
            "train.lora.publish='merged', or train.max_log_prob_gap to allow for it"
        )
    if limit is not None and not gap <= limit:
        raise Fatal(
            f"the log-prob gap between engine and trainer must be at most train.max_log_prob_gap {limit:g} nats, "
            f"got {gap:g} in step {metrics['step']}. Look at log_prob_gap_* in metrics.jsonl for the modality, or raise it"
        )


@dataclass(frozen=True, slots=True)
class Canary:
    """What a trainer finds behind a few prompts with the adapter of `canary_of`."""

    prompts: list[list[int]]
    likeliest: list[list[tuple[int, float]]]
    """Behind each prompt the likeliest tokens, the first one first, and their log-probs."""
    moved: float
    """How far the log-probs of those are from the base's, in nats; the mean."""

    @classmethod
    def of(cls, model: Any, settings: LoraConfig, num_tokens: int = _PROMPT_TOKENS) -> Canary:
        """Of the trainer's model, whose adapters are as they were when it returns (collective where it is sharded). num_tokens:
        the most that a prompt may have."""
        embeddings = model.get_input_embeddings()
        words = np.setdiff1d(np.arange(1, embeddings.num_embeddings), placeholder_ids(model))
        prompts = np.random.default_rng(0).choice(words, (_PROMPTS, min(num_tokens, _PROMPT_TOKENS)))
        ids = torch.from_numpy(prompts).to(next(model.parameters()).device)
        adapters = published_adapter(model)
        drawn = canary_of({name: tensor.shape for name, tensor in adapters.items()}, settings)
        with torch.no_grad():
            with in_place_of_adapters(model, drawn):
                found = _next_token(model, ids)
            with base_alone(model):
                base = _next_token(model, ids)
        log_probs, tokens = found.topk(min(_LIKELIEST, found.shape[1]))
        moved = float((log_probs - base.gather(1, tokens)).abs().mean())
        pairs = zip(tokens.tolist(), log_probs.tolist(), strict=True)
        return cls(prompts.tolist(), [list(zip(*pair, strict=True)) for pair in pairs], moved)

    def write(self, folder: Path) -> None:
        """Whole or not at all, for whoever reads it meanwhile."""
        write_whole(folder / _CANARY, orjson.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Canary:
        return cls(**orjson.loads((folder / _CANARY).read_bytes()))

    def refuse(self, found: Sequence[tuple[int, float]], engine: str, *, alike: bool) -> None:
        """Fatal unless the greedy token behind each prompt, and its log-prob, are what the trainer finds with the canary. alike:
        both compute in float32, with torch."""
        far = []
        for likeliest, (token, log_prob) in zip(self.likeliest, found, strict=True):
            expected = dict(likeliest).get(token)
            far.append(self.moved if expected is None else abs(expected - log_prob))
        distance = sum(far) / len(far)
        if not distance <= (_FAR_ALIKE if alike else _FAR * self.moved):
            raise Fatal(
                f"an engine must compute with the adapters that it is given, got {engine}, whose log-probs with one that moves "
                f"them by {self.moved:.3g} nats are {distance:.3g} from the trainer's. It leaves out adapters, or some targets: "
                "set train.lora.publish to 'merged', or change train.lora.targets"
            )


def _next_token(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """float32 [prompts, vocab]: log-probs of what follows each prompt, int64 [prompts, T]."""
    try:
        return torch.log_softmax(logits_of(model, input_ids=ids)[:, -1], -1)
    finally:
        drop_copies(model)
