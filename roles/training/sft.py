"""Supervised fine-tuning: the policy learns to write the answers of demonstrations.

Owns which demonstrations make a batch, how a batch is cut into micro-batches, and the training loop. Does not own the
model, its log-probs or the optimizer (`models/`), nor where it runs: inside the actor before version 0, or as a job of
its own.

    source = job.demonstrated()
    warm_up(model, tokenizer, open_dataset(source), job.sft, source, "cpu", seed=0, on_step=print, should_stop=lambda: False)

Invariant: the loss of a step is the mean over all answer tokens of its batch (prompt tokens carry none), so it is the
same however the batch is cut into micro-batches and ranks. Batches depend on data, seed and step alone. A demonstration that
cannot be used is left out, told once, and counted; the next one of the order takes its place.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rondo.models import parallel
from rondo.models.logprobs import response_log_probs
from rondo.models.media.inputs import MediaInputs
from rondo.models.optimizer import learning_rate, make_optimizer
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.roles.config import DataConfig, SftConfig
from rondo.roles.data.cursor import Cursor, Order
from rondo.roles.data.datasets import Row, RowError, Rows
from rondo.roles.data.prompts import check_demonstration, encode_answer, render_prompt, without_media_section
from rondo.runtime.errors import Fatal

log = logging.getLogger(__name__)

_CACHED_BYTES = 1 << 30
_CACHED_ROW_BYTES = 256
"""What an encoded demonstration takes beside its arrays, about."""

Prepare = Callable[[Row, DataConfig, int, str], tuple[np.ndarray, MediaInputs | None]]
"""(row with media, its settings, most tokens, what limits them) -> tokens int32 [T] with placeholders, media. Raises like
`render_prompt`."""


def warm_up(
    model: Any,
    tokenizer: Any,
    data: Rows,
    config: SftConfig,
    source: DataConfig,
    device: torch.device | str,
    *,
    max_prompt_tokens: int | None = None,
    prepare: Prepare | None = None,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    on_step: Callable[[dict[str, Any]], None],
    should_stop: Callable[[], bool],
) -> int:
    """Trains `model` in place with an optimizer of its own (collective), and returns the number of steps taken. `source`
    says how the prompts of `data` are written.

    Fewer than `config.steps` when `should_stop` said so on any rank; it is asked before every step. `on_step` gets
    step, loss (in nats a token), lr, grad_norm, tokens (of answers), skipped (demonstrations so far that could not be used) and,
    if there are any, why of the first_skipped. `prepare` is for rows with media; `max_prompt_tokens`: None for what the answer
    leaves of `config.micro_batch_tokens`. Fatal where no demonstration can be used, or the gradient is no longer finite.
    """
    optimizer = make_optimizer(model, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
    packing = Packing.of(model)
    places = Cursor(Order(len(data), seed, source.shuffle, source.num_passes))
    limits = config.micro_batch_tokens, max_prompt_tokens
    encoded = _Encoded(lambda row: encode(tokenizer, data.row(row), source, *limits, prepare))

    def loss_of(sequences: Sequence[Packable]) -> torch.Tensor:
        """The undivided loss of one micro-batch; no sequences: a dummy of weight 0 through the same modules."""
        weight = -1.0 if sequences else 0.0
        packed = packing.pack(sequences or [Packable(np.zeros(2, np.int32), 1)], train=True).to(device)
        log_probs, _ = response_log_probs(model, packed, chunk_tokens=config.log_prob_chunk_tokens)
        return weight * log_probs.sum()

    def over_ranks(value: float) -> float:
        if world_size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=device)
        dist.all_reduce(shared)
        return float(shared)

    for step in range(config.steps):
        # A rank that left alone would hang the others in their next collective.
        if over_ranks(float(should_stop())):
            return step
        batch = encoded.batch(places, config.batch_size)
        if not batch:
            return step
        rounds = cut([sequence.cost for sequence in batch], config.micro_batch_tokens, world_size)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for number, micro_batches in enumerate(rounds):
            parallel.set_sync(model, number == len(rounds) - 1)
            loss = loss_of([batch[i] for i in micro_batches[rank]])
            loss.backward()
            total += loss.detach()
        num_tokens = sum(sequence.response for sequence in batch)
        parallel.scale_gradients(model, 1 / num_tokens)
        grad_norm = parallel.clip_grad_norm(model, config.clip_grad_norm)
        if not math.isfinite(grad_norm):
            raise Fatal(f"the gradient of sft step {step} must be finite, got norm {grad_norm}. Lower sft.lr")
        lr = learning_rate(
            step, config.lr, warmup_steps=config.warmup_steps, schedule=config.schedule, total=config.steps,
            min_fraction=config.min_lr_fraction,
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = over_ranks(float(total)) / num_tokens
        figures = {"step": step, "loss": mean, "lr": lr, "grad_norm": grad_norm, "tokens": num_tokens}
        on_step(figures | encoded.skipped())
    return config.steps


class _Encoded:
    """Demonstrations as they are trained, the last ones used kept in memory."""

    def __init__(self, encode_row: Callable[[int], Packable]) -> None:
        self._encode_row = encode_row
        self._kept: OrderedDict[int, Packable | None] = OrderedDict()
        self._num_bytes = 0
        self._skipped: set[int] = set()
        self._first_skipped = ""

    def skipped(self) -> dict[str, Any]:
        """How many demonstrations could not be used, and why the first could not."""
        told = {"first_skipped": self._first_skipped} if self._skipped else {}
        return {"skipped": len(self._skipped), **told}

    def batch(self, places: Cursor, size: int) -> list[Packable]:
        """The next `size` that can be used; fewer where the last pass ends. Fatal when none of all can."""
        batch: list[Packable] = []
        for place in places:
            item = self._one(place.row)
            if item is not None:
                batch.append(item)
            elif len(self._skipped) == places.order.num_rows:
                raise Fatal(
                    f"sft must have demonstrations that can be used, got none in {len(self._skipped)}; the first: "
                    f"{self._first_skipped}"
                )
            if len(batch) == size:
                break
        return batch

    def _one(self, row: int) -> Packable | None:
        """None for one that cannot be used."""
        if row in self._kept:
            self._kept.move_to_end(row)
            return self._kept[row]
        try:
            item = self._encode_row(row)
        except RowError as error:
            if row not in self._skipped:
                log.warning("demonstration left out: %s", error)
            self._first_skipped = self._first_skipped or str(error)
            self._skipped.add(row)
            item = None
        self._kept[row] = item
        self._num_bytes += _num_bytes(item)
        while self._num_bytes > _CACHED_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= _num_bytes(oldest)
        return item


def _num_bytes(item: Packable | None) -> int:
    if item is None:
        return _CACHED_ROW_BYTES
    return _CACHED_ROW_BYTES + item.tokens.nbytes + (item.media.num_bytes if item.media is not None else 0)


def encode(
    tokenizer: Any,
    row: Row,
    source: DataConfig,
    max_tokens: int,
    max_prompt_tokens: int | None = None,
    prepare: Prepare | None = None,
) -> Packable:
    """Prompt, answer and end of sequence as tokens, int32; the answer and its end are scored. The prompt is rendered as in
    reinforcement, with at most `max_prompt_tokens`; None for what the answer leaves of `max_tokens`. Raises like
    `render_prompt`."""
    row, answer = encode_answer(tokenizer, row, source)
    limit, setting = max_prompt_tokens, "rollout.max_prompt_tokens"
    if limit is None:
        room = max_tokens - len(answer) if source.too_long == "truncate" else max_tokens
        limit, setting = max(room, 1), "sft.micro_batch_tokens"
    media = None
    if row.media:
        if prepare is None:
            raise without_media_section(row)
        prompt, media = prepare(row, source, limit, setting)
    else:
        prompt = render_prompt(tokenizer, row, source, limit, setting=setting)
    check_demonstration(row, prompt, answer, max_tokens, source)
    return Packable(np.concatenate([prompt, answer]), len(answer), media)


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
