"""The training computation: what the actor's compute thread does with rows, one policy, one optimizer.

Owns model, optimizer and the sums of the step in progress. Does not own which rows come, when a step is committed, or where
snapshots lie: `actor.py` does. Methods run on the compute thread, but for those that say otherwise; those marked collective run
on every rank, in order.

A step makes one *update* (optimizer step), or several: its mini-batches, and passes over all of them. Where no role gives a row's
old log-probs, they are those under the weights that the step begins with: of the forward that its loss comes from in the first
update, of `score` before it for the rows of later mini-batches.

Invariant: gradients are sums over tokens and samples, scaled once by the true update's count; so however an update is cut into
micro-batches and ranks, it is the same gradient to rounding. A row is used once in every pass. The model computes in evaluation
mode, as it does wherever it is scored: dropout and other noise of its family would come into the ratio, and train on that.

    load or restore -> [score(rows) ...] -> [[accumulate(rows) ...] -> update(step) ...] -> finish(step) -> snapshot -> publish
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rondo.comm.bus.group import NO_VERSION
from rondo.comm.bus.spans import Span, rows_of
from rondo.comm.weights.sums import bucket_sum
from rondo.models import checkpoint, parallel
from rondo.models.acceptance import accept
from rondo.models.load import load_model, load_tokenizer
from rondo.models.logprobs import response_log_probs
from rondo.models.media.inputs import MediaInputs
from rondo.models.optimizer import learning_rate, make_optimizer
from rondo.models.packing import PackedBatch
from rondo.models.packing import Sequence as Packable
from rondo.models.parts import freeze
from rondo.models.routing import enable_replay
from rondo.models.state import load_training_state, training_state
from rondo.roles.algorithms import losses
from rondo.roles.algorithms.whitening import Contribution, Whitening
from rondo.roles.config import JobConfig
from rondo.roles.data.datasets import demonstrations
from rondo.roles.data.fingerprints import Fingerprints
from rondo.roles.data.media import preparer
from rondo.roles.engines.embedded.shared_weights import Lent
from rondo.roles.training import sft
from rondo.roles.training.determinism import seed, settle
from rondo.roles.training.mismatch import Gap


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One row as the loss needs it; T tokens, R of them response."""

    tokens: np.ndarray  # int32 [T]
    mask: np.ndarray  # uint8 [R], 1 = sampled by the policy
    advantages: np.ndarray  # float32 [R]
    rollout_log_probs: np.ndarray  # float32 [R]
    old_log_probs: np.ndarray | None  # float32 [R]; None: the trainer's own, detached
    ref_log_probs: np.ndarray | None  # float32 [R]; None: no KL
    policy_versions: (
        np.ndarray
    )  # int32 [R], the weights that each token was sampled under; NO_VERSION: an environment's
    scored: tuple[int, np.ndarray] | None = None  # (version, float32 [R]): actor_fwd's log-probs under that version
    media: MediaInputs | None = None
    routed_experts: np.ndarray | None = None  # uint8 or int16 [T - 1, layers, top_k]; None or empty: not told


@dataclass(frozen=True, slots=True)
class _Update:
    """What one optimizer step of the step in progress was."""

    total: losses.LossSums  # over all ranks
    loss: float
    grad_norm: float


class Trainer:
    def __init__(
        self, config: JobConfig, path: str, *, rank: int, world_size: int, device: str, lends: bool = False
    ) -> None:
        """lends: to the engine of this process, as `lent`."""
        self.config = config
        self._path = path
        self.rank, self.world_size = rank, world_size
        self.device = torch.device(device)
        self._algorithm = config.loss()
        settle(config)
        seed(config.seed, rank)
        train = config.train
        model = load_model(path, dtype="float32", device=device, attn=config.model.attn)
        self._frozen = freeze(
            model, train.freeze, freeze_parameters=train.freeze_parameters, train_parameters=train.train_parameters
        )
        self._packing = accept(model)
        self.lent = Lent(model) if lends else None
        if train.router_replay:  # of the trainer's own model alone: an engine routes by itself
            enable_replay(model)
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
        # What goes on beside the training has groups of its own: collectives of one group must not cross. Each has one at a time.
        self._saving_group = dist.new_group(backend="gloo") if world_size > 1 else None
        self._settling_group = dist.new_group(backend="gloo") if world_size > 1 else None
        self._parameters = list(self.model.parameters())  # as they are between two forwards
        self._sums: losses.LossSums | None = None
        self._gap = Gap()
        self._trained: list[Span] = []
        self._updates: list[_Update] = []
        self._first: dict[
            tuple[int, ...], np.ndarray
        ] = {}  # (group, sample, part) -> log-probs under the weights that the step began with
        self._uses: dict[tuple[int, ...], int] = {}  # (group, sample, part) -> passes of this step that used it
        self._whitening: Whitening | None = None

    # ---- a step -----------------------------------------------------------------------------------------------------

    def whiten(self, parts: Sequence[Contribution]) -> None:
        """Bring the advantages of the step to mean 0 and deviation 1 (collective). parts: of every row of this rank, once."""
        self._whitening = Whitening.of(self._gathered(parts, 3, torch.float64))

    def score(self, rows: Sequence[TrainRow], spans: Sequence[Span]) -> None:
        """Before the first update: the old log-probs of rows of the step's later mini-batches (collective). No rows: a dummy
        through the same modules."""
        with torch.no_grad():
            packed = self._packed(rows or [self._dummy_row()])
            log_probs, _ = self._log_probs(packed, with_entropy=False)
        if rows:
            self._first |= zip(_keys(spans), _of_rows(log_probs, rows), strict=True)

    def accumulate(
        self, step: int, rows: Sequence[TrainRow], spans: Sequence[Span], *, last: bool, update: int = 0
    ) -> None:
        """Add one micro-batch of an update of `step` to the gradient (collective). No rows: a dummy of weight 0 through the same
        modules. last: of its update. ValueError for samples of several parts."""
        if any(part for _, part, _, _ in spans):
            raise ValueError(
                f"samples must have one part where the loss counts samples by rows, got {spans[:4]}. Put an episode as one row."
            )
        parallel.set_sync(self.model, last)
        used = update // self.config.train.optimizer_steps_per_batch
        if rows:
            rows = self._prepared(rows, spans, used, moved=update > 0)
            sums, log_probs = self._sums_of(rows)
            if used == 0:
                mine = _of_rows(log_probs, rows)
                self._measure_gap(rows, mine, step, unchanged=update == 0)
                if update == 0 and self.config.train.epochs > 1:
                    self._first |= zip(_keys(spans), mine, strict=True)
        else:
            sums = self._sums_of([self._dummy_row()])[0].weightless()
        sums.loss.backward()
        self._sums = sums.detached() if self._sums is None else self._sums + sums.detached()
        if used == 0:
            self._trained += spans

    def _prepared(
        self, rows: Sequence[TrainRow], spans: Sequence[Span], used: int, *, moved: bool
    ) -> Sequence[TrainRow]:
        """Rows with the step's whitening, and once the weights have moved with the log-probs from before."""
        if self._whitening is not None:
            rows = [replace(row, advantages=self._whitening.apply(row.advantages, row.mask)) for row in rows]
        if self.config.train.epochs > 1:
            for key in _keys(spans):
                if self._uses.get(key, 0) != used:
                    raise AssertionError(
                        f"row {key} must be used once in every pass, got pass {used} after {self._uses.get(key)}"
                    )
                self._uses[key] = used + 1
        if not moved:
            return rows
        return [
            row if row.old_log_probs is not None else replace(row, old_log_probs=self._first[key])
            for row, key in zip(rows, _keys(spans), strict=True)
        ]

    def _sums_of(self, rows: Sequence[TrainRow]) -> tuple[losses.LossSums, torch.Tensor]:
        """The undivided loss of some rows, and the log-probs of their response tokens behind each other, detached."""
        log_probs, entropy = self._log_probs(self._packed(rows), with_entropy=True)
        sums = losses.policy_sums(
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
        return sums, log_probs.detach()

    def _measure_gap(
        self, rows: Sequence[TrainRow], log_probs: Sequence[np.ndarray], step: int, *, unchanged: bool
    ) -> None:
        """unchanged: the weights are those of version `step` still."""
        for row, mine in zip(rows, log_probs, strict=True):
            modalities = row.media.modalities if row.media is not None else ()
            sampled = row.policy_versions != NO_VERSION
            versions = row.policy_versions[sampled]
            if not len(versions):
                continue
            began = int(versions[0])
            same = versions == began
            comparable = row.mask > 0
            comparable[~sampled] = False
            comparable[sampled] &= same & np.append(same[1:], True)
            if began == step and unchanged:
                self._gap.add(mine, row.rollout_log_probs, comparable, modalities)
            elif row.scored is not None and row.scored[0] == began:
                self._gap.add(row.scored[1], row.rollout_log_probs, comparable, modalities)

    def _packed(self, rows: Sequence[TrainRow]) -> PackedBatch:
        sequences = [Packable(row.tokens, len(row.mask), row.media, row.routed_experts) for row in rows]
        return self._packing.pack(sequences, train=True).to(self.device)

    def _log_probs(self, packed: PackedBatch, *, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        config = self.config
        return response_log_probs(
            self.model,
            packed,
            temperature=config.rollout.temperature,
            chunk_tokens=config.train.log_prob_chunk_tokens,
            with_entropy=with_entropy,
        )

    def _column(self, arrays: Sequence[np.ndarray | None]) -> torch.Tensor | None:
        present = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            return None
        return torch.from_numpy(np.concatenate(present)).to(self.device, torch.float32)

    def _dummy_row(self) -> TrainRow:
        return TrainRow(
            np.zeros(2, np.int32), np.zeros(1, np.uint8), np.zeros(1, np.float32), np.zeros(1, np.float32), None,
            np.zeros(1, np.float32) if self._algorithm.needs_reference else None, np.zeros(1, np.int32),
        )  # fmt: skip

    @property
    def moved(self) -> bool:
        """Whether the weights are no longer those that the step in progress began with."""
        return bool(self._updates)

    def discard(self) -> None:
        """Forget the step in progress: its gradient, its sums, its rows. Updates that it has made stay in the weights."""
        parallel.discard_gradients(self.model)
        self._sums, self._gap, self._trained, self._updates = None, Gap(), [], []
        self._first, self._uses, self._whitening = {}, {}, None

    def update(self, step: int) -> None:
        """Scale, clip and step with what was accumulated since the last update (collective).

        A gradient that is not finite changes no weight: the update counts, and is counted in the metric `skipped`.
        """
        if self._sums is None:
            raise AssertionError("update needs at least one accumulated round")
        train = self.config.train
        total = self._sums.reduced(dist.group.WORLD if self.world_size > 1 else None)
        denominator = total.denominator(self._algorithm.normalizer, self.config.rollout.max_new_tokens)
        parallel.scale_gradients(self.model, 1 / denominator)
        grad_norm = parallel.clip_grad_norm(self.model, train.clip_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr(step)
        if self.lent is not None:
            self.lent.moves()
        if math.isfinite(grad_norm):
            self.optimizer.step()
        self._updates.append(_Update(total, float(total.loss) / denominator, grad_norm))
        parallel.discard_gradients(self.model)
        self._sums = None

    def finish(self, step: int) -> tuple[dict[str, float], list[Span]]:
        """The step's last update (collective). Metrics of the whole step, and every row that it trained, as spans.

        With several updates, `loss` and `grad_norm` are means over them, and other means are over every use of a token.
        """
        self.update(step)
        updates = self._updates
        metrics = sum([made.total for made in updates[1:]], start=updates[0].total).metrics(self._algorithm, 1.0)
        for name in ("tokens", "samples"):
            metrics[name] /= self.config.train.epochs
        if self._whitening is not None:
            metrics |= {"advantage_mean": self._whitening.mean, "advantage_std": self._whitening.deviation}
        spans = self._gathered(self._trained, 4, torch.int64)
        if self.world_size > 1:
            self._gap.reduce(self.device)
        metrics |= self._gap.metrics()
        self.discard()
        norms = [made.grad_norm for made in updates]
        return {
            "grad_norm": sum(norms) / len(norms),
            "lr": self._lr(step),
            "skipped": float(sum(not math.isfinite(norm) for norm in norms)),
            "num_updates": float(len(updates)),
            **metrics,
            "loss": sum(made.loss for made in updates) / len(updates),
        }, spans

    def _lr(self, step: int) -> float:
        train = self.config.train
        return learning_rate(
            step, train.lr, warmup_steps=train.warmup_steps, schedule=train.schedule, total=self.config.num_steps,
            min_fraction=train.min_lr_fraction,
        )  # fmt: skip

    def _gathered(self, tuples: Sequence[Any], width: int, dtype: torch.dtype) -> list[Any]:
        """Tuples of `width` numbers of all ranks, one rank's behind the other's (collective)."""
        if self.world_size == 1:
            return list(tuples)
        mine = torch.tensor(tuples, dtype=dtype, device=self.device).reshape(-1, width)
        counts = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(counts, torch.tensor([len(mine)], device=self.device))
        longest = int(max(counts))
        padded = torch.full((longest, width), -1, dtype=dtype, device=self.device)
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        return [found for part, count in zip(parts, counts, strict=True) for found in part[: int(count)].tolist()]

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
        """32 bits over this rank's weights, which tell equal versions of equal layouts apart from others; no collective, on any
        thread."""
        crc = 0
        for parameter in self._parameters:
            shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            part = bucket_sum(shard.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
            crc = zlib.crc32(part.to_bytes(4, "little"), crc)
        return crc

    def join_checksums(self, part: int) -> int:
        """One checksum of all ranks' parts, in their order. Nobody has it before every rank came here (collective, on any thread,
        in turn with `weights`)."""
        if self.world_size == 1:
            return part
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(parts, torch.tensor([part]), group=self._settling_group)
        return zlib.crc32(b"".join(int(each).to_bytes(4, "little") for each in parts))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(disk name, whole tensor) one by one, on rank 0; the other ranks give their shards (collective: every rank iterates to
        the end). Asked for between two forwards; the next may run while they are iterated on another thread, but not the
        optimizer."""
        return parallel.full_tensors(self.model, self.config.model.dtype, beside=self._settling_group)

    def save(
        self,
        folder: Path,
        extra: dict[str, Any],
        beside: checkpoint.Beside | None = None,
        *,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write a whole checkpoint, with a Hugging Face folder inside where a tokenizer is given (collective)."""
        group = self._saving_group
        checkpoint.save(folder, self.model, self.optimizer, extra, beside, tokenizer_path=tokenizer_path, group=group)

    def stage(self) -> checkpoint.Staged:
        """This rank's state, copied to host memory; no collective."""
        return checkpoint.stage(self.model, self.optimizer)

    def write(
        self,
        folder: Path,
        staged: checkpoint.Staged,
        extra: dict[str, Any],
        beside: checkpoint.Beside | None = None,
        *,
        gives_way: bool = False,
    ) -> bool:
        """Write a checkpoint of what was staged, on another thread than the compute thread (collective there). False where a rank
        gives way to a newer one."""
        return checkpoint.write(folder, staged, extra, beside, group=self._saving_group, gives_way=gives_way)

    def load_checkpoint(self, folder: Path) -> dict[str, Any]:
        return checkpoint.load(folder, self.model, self.optimizer)

    def export(self, folder: Path, tokenizer_path: str) -> None:
        """Write a Hugging Face folder (collective)."""
        checkpoint.export_hf(folder, self.model, tokenizer_path, group=self._saving_group)

    def _preparer(self) -> sft.Prepare | None:
        """How this process makes prompts of rows with media, where the job has some."""
        if self.config.media is None:
            return None
        return preparer(self._path, self.config.media)

    def warm_up(
        self,
        on_step: Callable[[dict[str, Any]], None],
        should_stop: Callable[[], bool],
        fingerprints: Fingerprints | None = None,
    ) -> bool:
        """Supervised fine-tuning as the job asks for, with an optimizer of its own (collective). False on every rank when it was
        cut short by a rank that should stop. DataChanged for demonstrations that are not those of the `fingerprints`."""
        config = self.config
        assert config.sft is not None
        num_steps = sft.warm_up(
            self.model,
            load_tokenizer(self._path),
            demonstrations(config, fingerprints),
            config.sft,
            config.demonstrated(),
            self.device,
            max_prompt_tokens=config.prompt_limit(),
            prepare=self._preparer(),
            seed=config.seed,
            rank=self.rank,
            world_size=self.world_size,
            on_step=on_step,
            should_stop=should_stop,
        )
        return num_steps == config.sft.steps or self.sum_over_ranks([float(should_stop())])[0] == 0


def _of_rows(log_probs: torch.Tensor, rows: Sequence[TrainRow]) -> list[np.ndarray]:
    """float32 [R] of every row."""
    return np.split(log_probs.float().cpu().numpy(), np.cumsum([len(row.mask) for row in rows])[:-1])


def _keys(spans: Sequence[Span]) -> list[tuple[int, ...]]:
    """(group, sample, part) of every row, in their order."""
    return [tuple(row) for row in rows_of(spans)]
