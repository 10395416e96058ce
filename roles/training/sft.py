"""Supervised fine-tuning: the policy learns to write the answers of demonstrations.

Owns the loss as an objective of a backend, which demonstrations make a batch, how a batch is cut into micro-batches, and the
training loop. Does not own steps and state (`backend.py`), nor where it runs: inside the actor before version 0, or as a job of
its own.

    source = job.demonstrated()
    backend = backend_of(model, job.sft)
    fine_tune(backend, tokenizer, open_dataset(source), job.sft, source, seed=0, on_step=print, should_stop=lambda: False)

Invariant: the loss of a step is the mean over all answer tokens of its batch (prompt tokens carry none), so it is the
same however the batch is cut into micro-batches and ranks. Batches depend on data, seed and step alone. A demonstration that
cannot be used is left out, told once, and counted; the next one of the order takes its place.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rondo.models.logprobs import response_log_probs
from rondo.models.media.inputs import MediaInputs
from rondo.models.mesh import Mesh
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import DataConfig, JobConfig, SftConfig, TrainConfig
from rondo.roles.data.cursor import Cursor, Order
from rondo.roles.data.datasets import Row, RowError, Rows
from rondo.roles.data.prompts import check_demonstration, encode_answer, render_prompt, without_media_section
from rondo.roles.training.backend import Backend, Use, make_ready, open_model
from rondo.roles.training.determinism import seed
from rondo.runtime.errors import Fatal

log = logging.getLogger(__name__)

_CACHED_BYTES = 1 << 30
_CACHED_ROW_BYTES = 256
"""What an encoded demonstration takes beside its arrays, about."""

Prepare = Callable[[Row, DataConfig, int, str], tuple[np.ndarray, MediaInputs | None]]
"""(row with media, its settings, most tokens, what limits them) -> tokens int32 [T] with placeholders, media. Raises like
`render_prompt`."""


class AnswerLoss:
    """The objective: minus the log-probs of answer tokens, in nats, over their number. Rows are `Packable`."""

    def __init__(self, model: Any, chunk_tokens: int) -> None:
        self._packing, self._chunk = Packing.of(model), chunk_tokens
        self._device = next(model.parameters()).device

    def sums(self, model: Any, rows: Sequence[Packable], use: Use) -> LossSums:
        packed = self._packing.pack(rows or [Packable(np.zeros(2, np.int32), 1)], train=True).to(self._device)
        log_probs, _ = response_log_probs(model, packed, chunk_tokens=self._chunk)
        counts = {"tokens": float(len(log_probs)), "samples": float(len(rows))}
        sums = LossSums(
            -log_probs.sum().double(),
            {name: torch.tensor(n, dtype=torch.float64, device=self._device) for name, n in counts.items()},
        )
        return sums if rows else sums.weightless()

    def measure(self) -> None:
        """Nothing but sums is made of a micro-batch."""

    def denominator(self, total: LossSums) -> float:
        return float(total.sums["tokens"])

    def figures(self) -> dict[str, float]:
        return {}

    def forget(self) -> None:
        """Nothing is kept of a step."""


def open_sft(config: JobConfig, path: str, *, world_size: int, device: str) -> Backend[AnswerLoss]:
    """The model of a job with the weights at `path`, to be fine-tuned and nothing else (collective)."""
    mesh = Mesh.open(config.train.mesh, world_size, device)
    seed(config.seed, mesh.rank)
    model, _ = open_model(config, path, mesh, device=device)
    assert config.sft is not None
    return backend_of(make_ready(model, config.train), config.sft, mesh=mesh, train=config.train)


def backend_of(
    model: Any,
    config: SftConfig,
    *,
    mesh: Mesh | None = None,
    train: TrainConfig = TrainConfig(),  # noqa: B008  # frozen
    beside: Backend[Any] | None = None,
) -> Backend[AnswerLoss]:
    """Over a model that is cut over `mesh`, with an optimizer of its own (collective without `beside`, whose model it is)."""
    objective = AnswerLoss(model, config.log_prob_chunk_tokens)
    return Backend(
        model, objective, config, num_steps=config.steps, mesh=mesh, offload=train.offload_optimizer,
        scales=train.dtype == "float16", beside=beside,
    )  # fmt: skip


def fine_tune(
    backend: Backend[AnswerLoss],
    tokenizer: Any,
    data: Rows,
    config: SftConfig,
    source: DataConfig,
    *,
    max_prompt_tokens: int | None = None,
    prepare: Prepare | None = None,
    seed: int = 0,
    on_step: Callable[[dict[str, Any]], None],
    should_stop: Callable[[], bool],
) -> bool:
    """Trains (collective) until all steps are done; False when `should_stop` said so on any rank before that. `source` says how
    the prompts of `data` are written.

    `should_stop` is asked before every step. `on_step` gets step, loss (in nats a token), lr, grad_norm, tokens (of answers),
    skipped (demonstrations so far that could not be used) and, if there are any, why of the first_skipped. `prepare` is for rows
    with media; `max_prompt_tokens`: None for what the answer leaves of `config.micro_batch_tokens`. Fatal where no demonstration
    can be used, or the gradient is no longer finite.
    """
    places = Cursor(Order(len(data), seed, source.shuffle, source.num_passes))
    limits = config.micro_batch_tokens, max_prompt_tokens
    encoded = _Encoded(lambda row: encode(tokenizer, data.row(row), source, *limits, prepare))
    for step in range(config.steps):
        # A rank that left alone would hang the others in their next collective.
        if backend.sum_over_ranks([float(should_stop())])[0]:
            return False
        batch = encoded.batch(places, config.batch_size)
        if not batch:
            break
        rounds = cut([sequence.cost for sequence in batch], config.micro_batch_tokens, backend.mesh.size)
        for number, micro_batches in enumerate(rounds):
            rows = [batch[i] for i in micro_batches[backend.mesh.rank]]
            backend.accumulate(step, rows, (), last=number == len(rounds) - 1)
        made = backend.update(step)
        backend.discard()
        if backend.is_lost(made):
            raise Fatal(f"the gradient of sft step {step} must be finite, got norm {made.grad_norm}. Lower sft.lr")
        num_tokens = sum(sequence.response for sequence in batch)
        figures = {"step": step, "loss": made.loss, "lr": backend.lr(step), "grad_norm": made.grad_norm}
        on_step(figures | {"tokens": num_tokens} | encoded.skipped())
    return True


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
