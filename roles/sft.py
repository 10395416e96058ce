"""Supervised fine-tuning: the policy learns to write the answers of demonstrations.

Owns which demonstrations make a batch, how a batch is cut into micro-batches, and the training loop. Does not own the
model, its log-probs or the optimizer (`models/`), nor where it runs: inside the actor before version 0, or as a job of
its own.

    data = open_dataset(config.source())
    warm_up(model, tokenizer, data, config, "cpu", seed=0, on_step=print, should_stop=lambda: False)

Invariant: the loss of a step is the mean over all answer tokens of its batch (prompt tokens carry none), so it is the
same however the batch is cut into micro-batches and ranks. Batches depend on seed and step alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rondo.models import parallel
from rondo.models.logprobs import response_log_probs
from rondo.models.optimizer import learning_rate, make_optimizer
from rondo.models.packing import Sequence as Packable
from rondo.models.packing import can_share_rows, pack
from rondo.roles.config import DataConfig, SftConfig
from rondo.roles.cursor import Cursor, Order
from rondo.roles.datasets import Dataset, Row, RowError
from rondo.roles.prompts import encode_answer, render_prompt
from rondo.runtime.errors import ConfigError

_CACHED_ROWS = 1 << 16


def warm_up(
    model: Any,
    tokenizer: Any,
    data: Dataset,
    config: SftConfig,
    device: torch.device | str,
    *,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    on_step: Callable[[dict[str, float]], None],
    should_stop: Callable[[], bool],
) -> int:
    """Trains `model` in place with an optimizer of its own (collective), and returns the number of steps taken.

    Fewer than `config.steps` when `should_stop` said so on any rank; it is asked before every step. `on_step` gets
    step, loss (in nats a token), lr, grad_norm and tokens (of answers). RowError for a row that cannot be used,
    ConfigError when the gradient is no longer finite.
    """
    source = config.source()
    optimizer = make_optimizer(model, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    share_rows = can_share_rows(model)
    places = Cursor(Order(len(data), seed, source.shuffle, source.num_passes))

    @functools.lru_cache(maxsize=_CACHED_ROWS)
    def encoded(row: int) -> Packable:
        return encode(tokenizer, data.row(row), source, config.micro_batch_tokens)

    def loss_of(sequences: Sequence[Packable]) -> torch.Tensor:
        """The undivided loss of one micro-batch; no sequences: a dummy of weight 0 through the same modules."""
        weight = -1.0 if sequences else 0.0
        packed = pack(sequences or [Packable(np.zeros(2, np.int32), 1)], share_rows=share_rows).to(device)
        log_probs, _ = response_log_probs(model, packed, chunk_tokens=config.log_prob_chunk_tokens)
        return weight * log_probs.sum()

    def over_ranks(value: float) -> float:
        if world_size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=device)
        dist.all_reduce(shared)
        return float(shared)

    model.train()
    for step in range(config.steps):
        # A rank that left alone would hang the others in their next collective.
        if over_ranks(float(should_stop())):
            return step
        batch = [encoded(place.row) for place in islice(places, config.batch_size)]
        if not batch:
            return step
        rounds = cut([len(sequence.tokens) for sequence in batch], config.micro_batch_tokens, world_size)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for number, micro_batches in enumerate(rounds):
            parallel.set_sync(model, number == len(rounds) - 1)
            loss = loss_of([batch[i] for i in micro_batches[rank]])
            loss.backward()
            total += loss.detach()
        num_tokens = sum(sequence.response for sequence in batch)
        # Gradients are means over ranks: undone here, so that only the number of tokens divides.
        parallel.scale_gradients(model, world_size / num_tokens)
        grad_norm = parallel.clip_grad_norm(model, config.clip_grad_norm)
        if not math.isfinite(grad_norm):
            raise ConfigError(f"the gradient of sft step {step} must be finite, got norm {grad_norm}. Lower sft.lr")
        lr = learning_rate(
            step, config.lr, warmup_steps=config.warmup_steps, schedule=config.schedule, total=config.steps,
            min_fraction=config.min_lr_fraction,
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = over_ranks(float(total)) / num_tokens
        on_step({"step": step, "loss": mean, "lr": lr, "grad_norm": grad_norm, "tokens": num_tokens})
    return config.steps


def encode(tokenizer: Any, row: Row, source: DataConfig, max_tokens: int) -> Packable:
    """Prompt, answer and end of sequence as tokens, int32; the answer and its end are scored. RowError when too
    long."""
    prompt = render_prompt(tokenizer, row, source, max_tokens, setting="sft.micro_batch_tokens")
    answer = encode_answer(tokenizer, row)
    if len(prompt) + len(answer) > max_tokens:
        raise RowError(
            f"{row.name}: prompt and answer must have at most {max_tokens} tokens, got {len(prompt)} + {len(answer)}. "
            "Raise sft.micro_batch_tokens, or shorten or remove the row"
        )
    return Packable(np.concatenate([prompt, answer]), len(answer))


def cut(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[list[int]]]:
    """Rounds of one micro-batch a rank, as indices into `lengths`, with at most `max_tokens` in each.

    Longest first, into the emptiest that fits, so that the ranks of a round finish together. Every rank has as many
    micro-batches, some of them perhaps empty: ranks that differ in their number would hang.
    """
    micro_batches: list[list[int]] = []
    used: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in range(len(used)) if used[b] + lengths[index] <= max_tokens]
        if len(used) < num_ranks or not fitting:
            micro_batches.append([])
            used.append(0)
            fitting = [len(used) - 1]
        chosen = min(fitting, key=used.__getitem__)
        micro_batches[chosen].append(index)
        used[chosen] += lengths[index]
    micro_batches += [[] for _ in range(-len(micro_batches) % num_ranks)]
    return [micro_batches[start : start + num_ranks] for start in range(0, len(micro_batches), num_ranks)]
