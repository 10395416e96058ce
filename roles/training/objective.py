"""The policy loss as an objective of a backend: rows of the bus into log-probs, and these into undivided sums.

Owns what the policy loss remembers of a step. Where no role gives a row's old log-probs, they are those under the weights that
the step begins with: of the forward that its loss comes from in the first update, of `score` before it for the rows of later
mini-batches. Does not own the formulas (`roles/algorithms/`) or the steps (`backend.py`). The model computes in evaluation mode,
as it does wherever it is scored: dropout and other noise of its family would come into the ratio, and train on that.

    backend = open_policy(config, path, world_size=1, device="cpu")
    [backend.objective.score(backend.model, rows, spans) ...] -> [backend.accumulate(step, rows, spans, last=...) ...]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rondo.comm.bus.group import NO_VERSION
from rondo.comm.ring.spans import Span
from rondo.models.logprobs import response_log_probs
from rondo.models.media.inputs import MediaInputs
from rondo.models.mesh import Mesh
from rondo.models.packing import PackedBatch, Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.routing import enable_replay
from rondo.roles.algorithms import losses
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.algorithms.whitening import Contribution, Whitening
from rondo.roles.config import JobConfig
from rondo.roles.engines.embedded.shared_weights import Lent
from rondo.roles.training.backend import Backend, Key, Use, make_ready, open_model
from rondo.roles.training.determinism import seed
from rondo.roles.training.mismatch import Gap
from rondo.runtime.memory.to_host import on_its_way


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


def open_policy(
    config: JobConfig, path: str, *, world_size: int, device: str, lends: bool = False
) -> Backend[PolicyObjective]:
    """The policy of a job, with the weights at `path` (collective). lends: to the engine of this process, as `lent`."""
    mesh = Mesh.open(config.train.mesh, world_size, device)
    seed(config.seed, mesh.rank)
    model, packing = open_model(config, path, mesh, device=device)
    return policy_of(config, model, packing, mesh, device, lent=Lent(model) if lends else None)


def policy_of(
    config: JobConfig, model: Any, packing: Packing, mesh: Mesh, device: str, lent: Lent | None = None
) -> Backend[PolicyObjective]:
    """The policy of a job with a `model` that is cut over `mesh` (collective)."""
    train = config.train
    if train.router_replay:  # of the trainer's own model alone: an engine routes by itself
        enable_replay(model)
    return Backend(
        make_ready(model, train), PolicyObjective(config, packing, device, over_ranks=mesh.size > 1), train,
        num_steps=config.num_steps, mesh=mesh, mini_batches=train.optimizer_steps_per_batch, passes=train.epochs,
        publishes=config.model.dtype, offload=train.offload_optimizer, scales=train.dtype == "float16", lent=lent,
    )  # fmt: skip


class PolicyObjective:
    """The policy loss of a job. `over_ranks`: several ranks train."""

    def __init__(self, config: JobConfig, packing: Packing, device: str, *, over_ranks: bool) -> None:
        self._algorithm = config.loss()
        self._config, self._packing, self._device, self._over_ranks = config, packing, device, over_ranks
        self.forget()

    def forget(self) -> None:
        self._gap = Gap()
        self._first: dict[Key, np.ndarray] = {}  # row -> log-probs under the weights that the step began with
        self._whitening: Whitening | None = None
        self._last: tuple[Sequence[TrainRow], Use, Callable[[], torch.Tensor]] | None = None

    def whiten(self, parts: Sequence[Contribution]) -> None:
        """Bring the advantages of the step to mean 0 and deviation 1. parts: of every row of all ranks, once."""
        self._whitening = Whitening.of(parts)

    def score(self, model: Any, rows: Sequence[TrainRow], spans: Sequence[Span]) -> None:
        """Before the first update: the old log-probs of rows of the step's later mini-batches (collective). No rows: a dummy
        through the same modules."""
        with torch.no_grad():
            packed = self._packed(rows or [self._dummy_row()])
            log_probs, _ = self._log_probs(model, packed, with_entropy=False)
        if rows:
            self._first |= zip(Use(0, 0, 0, spans).keys, _of_rows(log_probs.cpu(), rows), strict=True)

    def sums(self, model: Any, rows: Sequence[TrainRow], use: Use) -> LossSums:
        """ValueError for samples of several parts."""
        if not rows:
            return self._sums_of(model, [self._dummy_row()])[0].weightless()
        if any(part for _, part, _, _ in use.spans):
            raise ValueError(
                f"samples must have one part where the loss counts samples by rows, got {use.spans[:4]}. "
                "Put an episode as one row."
            )
        rows = self._prepared(rows, use)
        sums, log_probs = self._sums_of(model, rows)
        if use.passes == 0:
            self._last = rows, use, on_its_way(log_probs)
        return sums

    def measure(self) -> None:
        if self._last is None:
            return
        (rows, use, log_probs), self._last = self._last, None
        mine = _of_rows(log_probs(), rows)
        self._measure_gap(rows, mine, use)
        if use.update == 0 and self._config.train.epochs > 1:
            self._first |= zip(use.keys, mine, strict=True)

    def denominator(self, total: LossSums) -> float:
        return losses.denominator(total, self._algorithm.normalizer, self._config.rollout.max_new_tokens)

    def figures(self) -> dict[str, float]:
        white = self._whitening
        found = {} if white is None else {"advantage_mean": white.mean, "advantage_std": white.deviation}
        if self._over_ranks:
            self._gap.reduce(self._device)
        return found | self._gap.metrics()

    def _prepared(self, rows: Sequence[TrainRow], use: Use) -> Sequence[TrainRow]:
        """Rows with the step's whitening, and once the weights have moved with the log-probs from before."""
        if self._whitening is not None:
            rows = [replace(row, advantages=self._whitening.apply(row.advantages, row.mask)) for row in rows]
        if use.update == 0:
            return rows
        return [
            row if row.old_log_probs is not None else replace(row, old_log_probs=self._first[key])
            for row, key in zip(rows, use.keys, strict=True)
        ]

    def _sums_of(self, model: Any, rows: Sequence[TrainRow]) -> tuple[LossSums, torch.Tensor]:
        """The undivided loss of some rows, and the log-probs of their response tokens behind each other, detached."""
        log_probs, entropy = self._log_probs(model, self._packed(rows), with_entropy=True)
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

    def _measure_gap(self, rows: Sequence[TrainRow], log_probs: Sequence[np.ndarray], use: Use) -> None:
        """Before the first update the weights are those of version `use.step` still."""
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
            if began == use.step and use.update == 0:
                self._gap.add(mine, row.rollout_log_probs, comparable, modalities)
            elif row.scored is not None and row.scored[0] == began:
                self._gap.add(row.scored[1], row.rollout_log_probs, comparable, modalities)

    def _packed(self, rows: Sequence[TrainRow]) -> PackedBatch:
        sequences = [Packable(row.tokens, len(row.mask), row.media, row.routed_experts) for row in rows]
        return self._packing.pack(sequences, train=True).to(self._device)

    def _log_probs(
        self, model: Any, packed: PackedBatch, *, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        config = self._config
        return response_log_probs(
            model,
            packed,
            temperature=config.rollout.temperature,
            chunk_tokens=config.train.log_prob_chunk_tokens,
            with_entropy=with_entropy,
        )

    def _column(self, arrays: Sequence[np.ndarray | None]) -> torch.Tensor | None:
        present = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            return None
        return torch.from_numpy(np.concatenate(present)).to(self._device, torch.float32)

    def _dummy_row(self) -> TrainRow:
        return TrainRow(
            np.zeros(2, np.int32), np.zeros(1, np.uint8), np.zeros(1, np.float32), np.zeros(1, np.float32), None,
            np.zeros(1, np.float32) if self._algorithm.needs_reference else None, np.zeros(1, np.int32),
        )  # fmt: skip


def _of_rows(log_probs: torch.Tensor, rows: Sequence[TrainRow]) -> list[np.ndarray]:
    """float32 [R] of every row, out of those on the CPU."""
    return np.split(log_probs.numpy(), np.cumsum([len(row.mask) for row in rows])[:-1])
