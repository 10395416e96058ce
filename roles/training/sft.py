"""Supervised fine-tuning: the policy learns to write the answers of demonstrations.

Owns the loss as an objective of a backend, and what is made of a demonstration. Does not own which of them make a batch, nor the
steps (`supervised.py`).

    source = job.demonstrated()
    rows = open_dataset(source)
    backend = backend_of(model, job.sft, job.sft.num_steps(len(rows)))
    Learning(backend, encoder(tokenizer, job.sft, source), rows, None, job.sft, source, seed=0)

Invariant: the loss of a step is the mean over all answer tokens of its batch; prompt tokens carry none, nor do turns of a chat
that are not learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rondo.models.logprobs import response_scores
from rondo.models.media.inputs import MediaInputs
from rondo.models.mesh import Mesh
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import DataConfig, SftConfig, TrainConfig
from rondo.roles.data.datasets import Row
from rondo.roles.data.prompts import check_demonstration, render_prompt, without_media_section
from rondo.roles.data.turns import encode_turns
from rondo.roles.training.backend import Backend, Objective, Use
from rondo.roles.training.balance import Balance

Prepare = Callable[[Row, DataConfig, int, str], tuple[np.ndarray, MediaInputs | None]]
"""(row with media, its settings, most tokens, what limits them) -> tokens int32 [T] with placeholders, media. Raises like
`render_prompt`."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One row: its response begins with the first turn that is learnt."""

    sequence: Packable
    mask: np.ndarray  # uint8 [R], 1 = learnt

    @property
    def cost(self) -> int:
        return self.sequence.cost

    @property
    def num_bytes(self) -> int:
        media = self.sequence.media
        return int(self.sequence.tokens.nbytes + self.mask.nbytes + (media.num_bytes if media is not None else 0))


class AnswerLoss(Objective):
    """The objective: minus the log-probs of answer tokens, in nats, over their number. Where no gradient is asked for it tells
    the share of them that the model finds likeliest, too. balance: of a mixture of experts, whose load-balancing loss it adds."""

    def __init__(self, model: Any, chunk_tokens: int, balance: Balance | None = None) -> None:
        self._balance = balance if balance is not None and balance.coefficient else None
        self._packing, self._chunk = Packing.of(model), chunk_tokens
        self._device = next(model.parameters()).device

    def sums(self, model: Any, rows: Sequence[Demonstration], use: Use) -> LossSums:
        chosen = rows or [Demonstration(Packable(np.zeros(2, np.int32), 1), np.ones(1, np.uint8))]
        packed = self._packing.pack([row.sequence for row in chosen], train=True).to(self._device)
        mask = torch.from_numpy(np.concatenate([row.mask for row in chosen])).to(self._device, torch.float32)
        learns = torch.is_grad_enabled()
        heard = self._balance.hears(packed) if self._balance is not None and learns else None
        found = response_scores(model, packed, chunk_tokens=self._chunk, top_k=0 if learns else 1, heard=heard)
        counts = {
            "tokens": mask.sum(dtype=torch.float64),
            "samples": torch.tensor(len(rows), dtype=torch.float64, device=self._device),
        }
        if found.top_ids is not None:
            counts["token_accuracy"] = (mask * (found.top_ids[:, 0] == packed.targets)).sum(dtype=torch.float64)
        loss = -(found.log_probs * mask).sum().double()
        if self._balance is not None and heard is not None:
            evens = self._balance.loss(heard).double() * counts["tokens"]
            loss, counts["router_aux_loss"] = loss + self._balance.coefficient * evens, evens.detach()
        sums = LossSums(loss, counts)
        return sums if rows else sums.weightless()

    def denominator(self, total: LossSums) -> float:
        return float(total.sums["tokens"])


def backend_of(
    model: Any,
    config: SftConfig,
    num_steps: int,
    *,
    mesh: Mesh | None = None,
    train: TrainConfig = TrainConfig(),  # noqa: B008  # frozen
    beside: Backend[Any] | None = None,
    balance: Balance | None = None,
) -> Backend[AnswerLoss]:
    """Over a model that is cut over `mesh`, with an optimizer of its own (collective without `beside`, whose model it is)."""
    objective = AnswerLoss(model, config.log_prob_chunk_tokens, balance)
    return Backend(
        model, objective, config, num_steps=num_steps, mesh=mesh, offload=train.offload_optimizer,
        scales=train.dtype == "float16", beside=beside,
    )  # fmt: skip


def encoder(
    tokenizer: Any,
    config: SftConfig,
    source: DataConfig,
    *,
    max_prompt_tokens: int | None = None,
    prepare: Prepare | None = None,
) -> Callable[[Row], Demonstration]:
    """Return what makes a row into its tokens, of which the turns that `config.turns` names are learnt as the chat template
    writes them (`roles/data/turns.py`). The prompt is rendered as in reinforcement, with at most `max_prompt_tokens`; None for
    what the answer leaves of `config.micro_batch_tokens`. Raises like `render_prompt`."""
    max_tokens = config.micro_batch_tokens

    def encode(row: Row) -> Demonstration:
        made = encode_turns(tokenizer, row, source, config.turns)
        prompt, media = prompt_of(tokenizer, made.row, source, len(made.tokens), max_tokens, max_prompt_tokens, prepare)
        prompt = made.prompt(prompt)
        check_demonstration(row, prompt, made.tokens, max_tokens, source)
        return Demonstration(Packable(np.concatenate([prompt, made.tokens]), len(made.tokens), media), made.mask)

    return encode


def prompt_of(
    tokenizer: Any,
    row: Row,
    source: DataConfig,
    num_answer: int,
    max_tokens: int,
    max_prompt_tokens: int | None = None,
    prepare: Prepare | None = None,
    place: str = "sft",
) -> tuple[np.ndarray, MediaInputs | None]:
    """The prompt of a row as tokens, int32 [T], and its media, so that `num_answer` tokens behind it find room; the settings at
    `place` limit them."""
    limit, setting = max_prompt_tokens, "rollout.max_prompt_tokens"
    if limit is None:
        room = max_tokens - num_answer if source.too_long == "truncate" else max_tokens
        limit, setting = max(room, 1), f"{place}.micro_batch_tokens"
    if not row.media:
        return render_prompt(tokenizer, row, source, limit, setting=setting), None
    if prepare is None:
        raise without_media_section(row)
    return prepare(row, source, limit, setting)
