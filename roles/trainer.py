"""The training computation: what the actor's compute thread does with rows, one policy, one optimizer.

Owns model, optimizer and the sums of the step in progress. Does not own which rows come, when a step is committed, or where
snapshots lie: `actor.py` does. Every method runs on the compute thread; methods marked collective run on every rank in order.

Invariant: gradients are sums over tokens and samples, scaled once by the true step's count; so however a step is cut into
micro-batches and ranks, it is the same gradient to rounding.

    load or restore -> [accumulate(rows) ...] -> finish(step) -> snapshot -> publish
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rondo.comm.spans import Span
from rondo.comm.weights.sums import bucket_sum
from rondo.models import checkpoint, parallel
from rondo.models.load import load_model, load_tokenizer
from rondo.models.logprobs import response_log_probs
from rondo.models.media.inputs import MediaInputs
from rondo.models.optimizer import learning_rate, make_optimizer
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.parts import freeze
from rondo.models.state import load_training_state, training_state
from rondo.roles import losses, sft
from rondo.roles.config import JobConfig
from rondo.roles.datasets import demonstrations
from rondo.roles.gap import Gap
from rondo.roles.media import preparer


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One sample as the loss needs it; T tokens, R of them response."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [R], 1 = sampled by the policy
    advantages: np.ndarray  # float32 [R]
    rollout_log_probs: np.ndarray  # float32 [R]
    old_log_probs: np.ndarray | None  # float32 [R]; None: the trainer's own, detached
    ref_log_probs: np.ndarray | None  # float32 [R]; None: no KL
    policy_versions: np.ndarray  # int32 [R], the weights that each token was sampled under
    scored: tuple[int, np.ndarray] | None = None  # (version, float32 [R]): actor_fwd's log-probs under that version
    media: MediaInputs | None = None


class Trainer:
    def __init__(self, config: JobConfig, path: str, *, rank: int, world_size: int, device: str) -> None:
        self.config = config
        self._path = path
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(device)
        self._algorithm = config.algorithm.resolved()
        train = config.train
        model = load_model(path, dtype="float32", device=device, attn=config.model.attn)
        self._frozen = freeze(
            model, train.freeze, freeze_parameters=train.freeze_parameters, train_parameters=train.train_parameters
        )
        self._packing = Packing.of(model)
        self.model = parallel.shard(
            model,
            world_size=world_size,
            param_dtype=train.dtype,
            activation_checkpointing=train.activation_checkpointing,
            encoders=train.encoders,
        )
        self.optimizer = make_optimizer(
            self.model, lr=train.lr, betas=train.betas, weight_decay=train.weight_decay, eps=train.eps
        )
        self._parameters = list(self.model.parameters())  # as they are between two forwards
        self._sums: losses.LossSums | None = None
        self._gap = Gap()
        self._trained: list[Span] = []

    # ---- a step -----------------------------------------------------------------------------------------------------

    def accumulate(self, step: int, rows: Sequence[TrainRow], spans: Sequence[Span], *, last: bool) -> None:
        """Add one micro-batch of `step` to the gradient (collective). No rows: a dummy of weight 0 through the same
        modules."""
        self.model.train()
        parallel.set_sync(self.model, last)
        sums = self._sums_of(rows, step) if rows else self._dummy()
        sums.loss.backward()
        self._sums = sums.detached() if self._sums is None else self._sums + sums.detached()
        self._trained += spans

    def _sums_of(self, rows: Sequence[TrainRow], step: int | None) -> losses.LossSums:
        """The undivided loss of some rows; with a `step`, their gap to the engine is measured too."""
        sequences = [Packable(row.tokens, len(row.mask), row.media) for row in rows]
        packed = self._packing.pack(sequences, train=True).to(self.device)
        log_probs, entropy = self._log_probs(packed)
        if step is not None:
            self._measure_gap(rows, log_probs.detach().float().cpu().numpy(), step)
        return losses.policy_sums(
            self._algorithm,
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=self._column([row.old_log_probs for row in rows]),
            rollout_log_probs=self._column([row.rollout_log_probs for row in rows]),
            ref_log_probs=self._column([row.ref_log_probs for row in rows]),
            advantages=self._column([row.advantages for row in rows]),
            mask=self._column([row.mask for row in rows]),
            lengths=[len(row.mask) for row in rows],
        )

    def _measure_gap(self, rows: Sequence[TrainRow], log_probs: np.ndarray, step: int) -> None:
        ends = np.cumsum([len(row.mask) for row in rows])[:-1]
        for row, mine in zip(rows, np.split(log_probs, ends), strict=True):
            modalities = row.media.modalities if row.media is not None else ()
            began = int(row.policy_versions[0])
            comparable = (row.mask > 0) & (row.policy_versions == began)
            if began == step:
                self._gap.add(mine, row.rollout_log_probs, comparable, modalities)
            elif row.scored is not None and row.scored[0] == began:
                self._gap.add(row.scored[1], row.rollout_log_probs, comparable, modalities)

    def _log_probs(self, packed: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        config = self.config
        return response_log_probs(
            self.model,
            packed,
            temperature=config.rollout.temperature,
            chunk_tokens=config.train.log_prob_chunk_tokens,
            with_entropy=True,
        )

    def _column(self, arrays: Sequence[np.ndarray | None]) -> torch.Tensor | None:
        present = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            return None
        return torch.from_numpy(np.concatenate(present)).to(self.device, torch.float32)

    def _dummy(self) -> losses.LossSums:
        row = TrainRow(
            np.zeros(2, np.int32), np.zeros(1, np.uint8), np.zeros(1, np.float32), np.zeros(1, np.float32), None,
            np.zeros(1, np.float32) if self._algorithm.needs_reference else None, np.zeros(1, np.int32),
        )  # fmt: skip
        return self._sums_of([row], None).weightless()

    def discard(self) -> None:
        """Forget the step in progress: its gradient, its sums, its rows."""
        parallel.discard_gradients(self.model)
        self._sums, self._gap, self._trained = None, Gap(), []

    def finish(self, step: int) -> tuple[dict[str, float], list[Span]]:
        """Scale, clip and step (collective). Metrics of the whole step, and every row that it trained, as spans.

        A gradient that is not finite changes no weight: the step counts, and `skipped` is 1 in its metrics.
        """
        if self._sums is None:
            raise AssertionError("finish needs at least one accumulated round")
        train = self.config.train
        total = self._sums.reduced(dist.group.WORLD if self.world_size > 1 else None)
        denominator = total.denominator(self._algorithm.normalizer, self.config.rollout.max_new_tokens)
        parallel.scale_gradients(self.model, self.world_size / denominator)
        grad_norm = parallel.clip_grad_norm(self.model, train.clip_grad_norm)
        lr = learning_rate(
            step, train.lr, warmup_steps=train.warmup_steps, schedule=train.schedule, total=self.config.num_steps,
            min_fraction=train.min_lr_fraction,
        )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if math.isfinite(grad_norm):
            self.optimizer.step()
        spans = self._gather_spans()
        if self.world_size > 1:
            self._gap.reduce(self.device)
        gap = self._gap.metrics()
        self.discard()
        skipped = float(not math.isfinite(grad_norm))
        return {
            "grad_norm": grad_norm,
            "lr": lr,
            "skipped": skipped,
            **total.metrics(self._algorithm, denominator),
            **gap,
        }, spans

    def _gather_spans(self) -> list[Span]:
        if self.world_size == 1:
            return self._trained
        mine = torch.tensor(self._trained, dtype=torch.int64, device=self.device).reshape(-1, 3)
        counts = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(counts, torch.tensor([len(mine)], device=self.device))
        longest = int(max(counts))
        padded = torch.full((longest, 3), -1, dtype=torch.int64, device=self.device)
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return [span for part, count in zip(parts, counts, strict=True) for span in part[: int(count)].tolist()]

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all ranks (collective)."""
        if self.world_size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared)
        return [float(value) for value in shared.tolist()]

    # ---- what lasts -------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's shard, optimizer and random states; no collective."""
        return training_state(self.model, self.optimizer)

    def load_state(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        load_training_state(self.model, self.optimizer, tensors, state)

    def checksum(self) -> int:
        """32 bits over this rank's weights, which tell equal versions of equal layouts apart from others; no collective."""
        crc = 0
        for parameter in self._parameters:
            shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            part = bucket_sum(shard.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            crc = zlib.crc32(part.to_bytes(4, "little"), crc)
        return crc

    def barrier(self) -> None:
        """Every rank has come here (collective)."""
        if self.world_size > 1:
            dist.barrier()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(disk name, whole tensor) one by one, gathered from the shards (collective: every rank iterates to the end). Asked for
        between two forwards; in one process the next may run while they are iterated, but not the optimizer."""
        return parallel.full_tensors(self.model, self.config.model.dtype)

    def save(self, folder: Path, extra: dict[str, Any], *, tokenizer_path: str | None = None) -> None:
        """Write a whole checkpoint, with a Hugging Face folder inside where a tokenizer is given (collective)."""
        checkpoint.save(folder, self.model, self.optimizer, extra, tokenizer_path=tokenizer_path)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        return checkpoint.load(folder, self.model, self.optimizer)

    def export(self, folder: Path, tokenizer_path: str) -> None:
        """Write a Hugging Face folder (collective)."""
        checkpoint.export_hf(folder, self.model, tokenizer_path)

    def _preparer(self) -> sft.Prepare | None:
        """How this process makes prompts of rows with media, where the job has some."""
        if self.config.media is None:
            return None
        return preparer(self._path, self.config.media)

    def warm_up(self, on_step: Callable[[dict[str, float]], None], should_stop: Callable[[], bool]) -> None:
        """Supervised fine-tuning as the job asks for, with an optimizer of its own (collective)."""
        config = self.config
        assert config.sft is not None
        sft.warm_up(
            self.model,
            load_tokenizer(self._path),
            demonstrations(config),
            config.sft,
            config.demonstrated(),
            self.device,
            prepare=self._preparer(),
            seed=config.seed,
            rank=self.rank,
            world_size=self.world_size,
            on_step=on_step,
            should_stop=should_stop,
        )
