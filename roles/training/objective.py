"""The policy loss as an objective of a backend: rows of the bus into log-probs, and these into undivided sums.

Owns what the policy loss remembers of a step. Where no role gives a row's old log-probs, they are those under the weights that
the step begins with: of the forward that its loss comes from in the first update, of `score` before it for the rows of later
mini-batches. Where no role gives the reference's log-probs, they are those of the base of the adapters, which is computed beside
them. It remembers too the drift that some losses need to know of all rows before the first gradient. Does not own the formulas
(`roles/algorithms/`) or the steps (`backend.py`). The model computes in evaluation mode, as it does wherever it is scored:
dropout and other noise of its family would come into the ratio, and train on that.

    backend = open_policy(config, path, world_size=1, device="cpu")
    [backend.objective.score(backend.model, rows, spans) ...] -> [backend.accumulate(step, rows, spans, last=...) ...]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch

from rondo.comm.bus.group import NO_VERSION
from rondo.comm.ring.spans import Span
from rondo.models.logprobs import Scores, response_scores
from rondo.models.lora import base_alone
from rondo.models.media.inputs import KINDS, MediaInputs, kinds_of
from rondo.models.mesh import Mesh
from rondo.models.packing import PackedBatch, Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.routing import Heard
from rondo.roles.algorithms import distillation, losses
from rondo.roles.algorithms.drift import DRIFTS
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.algorithms.teachers import DistillationConfig
from rondo.roles.algorithms.whitening import Contribution, Whitening
from rondo.roles.config import JobConfig
from rondo.roles.engines.embedded.shared_weights import Lent
from rondo.roles.training.backend import Backend, Key, Use, make_ready, open_model
from rondo.roles.training.balance import Balance
from rondo.roles.training.determinism import seed
from rondo.roles.training.mismatch import Gap
from rondo.roles.training.ratios import Ratios
from rondo.runtime.memory.to_host import on_its_way

Told = Callable[[], list[np.ndarray]]
"""Routes of rows, uint8 or int16 [T - 1, layers, top_k] each, once they are on the CPU."""


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
    teacher_log_probs: np.ndarray | None = None  # float32 [R]; None: no teacher
    compared_ids: np.ndarray | None = None  # int32 [R, K]: the tokens that a teacher tells of, NONE for no token
    compared_log_probs: np.ndarray | None = None  # float32 [R, K]: the teacher's


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
    train, over_ranks = config.train, mesh.size > 1
    balance = Balance.of(model, train, over_ranks=over_ranks)
    backend = Backend(
        make_ready(model, train), PolicyObjective(config, packing, device, balance, over_ranks=over_ranks), train,
        num_steps=config.num_steps, mesh=mesh, mini_batches=train.num_mini_batches, passes=train.passes,
        publishes=config.model.dtype, adapters_alone=config.adapts_engines, offload=train.offload_optimizer,
        scales=train.dtype == "float16", lent=lent,
    )  # fmt: skip
    if balance is not None and train.router_bias_update_rate:
        backend.optimizer.register_step_post_hook(lambda *_: balance.even_out())
    return backend


class PolicyObjective:
    """The policy loss of a job. balance: of a mixture of experts. over_ranks: several ranks train."""

    def __init__(
        self, config: JobConfig, packing: Packing, device: str, balance: Balance | None = None, *, over_ranks: bool
    ) -> None:
        self._algorithm = config.loss()
        self._config, self._packing, self._device, self._over_ranks = config, packing, device, over_ranks
        self.balance = balance
        self._computes_reference = config.computes_reference
        self.forget()

    def forget(self) -> None:
        self._gap, self._ratios = Gap(), Ratios(self._algorithm)
        self._first: dict[Key, np.ndarray] = {}  # row -> log-probs under the weights that the step began with
        self._reference: dict[Key, np.ndarray] = {}  # row -> log-probs of the base
        self._whitening: Whitening | None = None
        # Of every row before the first update: log-ratios of its tokens that train, advantages and mask of all.
        self._scored: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._constants: dict[str, float] = {}
        self._routes: dict[Key, np.ndarray] = {}  # row -> routes of its first forward of the step
        self._last: tuple[Sequence[TrainRow], Use, Callable[[], torch.Tensor], Told | None] | None = None
        if self.balance is not None:
            self.balance.forget()

    def whiten(self, parts: Sequence[Contribution]) -> None:
        """Bring the advantages of the step to mean 0 and deviation 1. parts: of every row of all ranks, once."""
        self._whitening = Whitening.of(parts)

    def score(self, model: Any, rows: Sequence[TrainRow], spans: Sequence[Span]) -> None:
        """Before the first update: the old log-probs of rows of the step's later mini-batches (collective). No rows: a dummy
        through the same modules."""
        keys, heard = Use(0, 0, 0, spans).keys, Heard(records=True) if self._records(rows) else None
        with torch.no_grad():
            packed = self._packed(rows or [self._dummy_row()])
            log_probs = self._scores(model, packed, with_entropy=False, heard=heard).log_probs
        if rows:
            mine = _of_rows(log_probs.cpu(), rows)
            self._first |= zip(keys, mine, strict=True)
            if self._config.measures_drift:
                self._scored += [
                    ((log_probs - row.rollout_log_probs)[row.mask > 0], row.advantages.copy(), row.mask.copy())
                    for log_probs, row in zip(mine, rows, strict=True)
                ]
        if heard is not None:
            self._routes |= zip(keys, self._told(packed, heard)(), strict=True)

    def measure_drift(self, sum_over_ranks: Callable[[Sequence[float]], Sequence[float]]) -> None:
        """What the loss must know of all rows of the step, which were scored and whitened (collective)."""
        ratios = [found for found, *_ in self._scored]
        advantages = [self._whitened(each, mask)[mask > 0] for _, each, mask in self._scored]
        measure = DRIFTS[self._algorithm.policy_loss]
        nothing = np.zeros(0)
        self._constants = measure(
            np.concatenate([nothing, *ratios]), np.concatenate([nothing, *advantages]), self._algorithm, sum_over_ranks
        )
        self._scored = []

    def sums(self, model: Any, rows: Sequence[TrainRow], use: Use) -> LossSums:
        if self.balance is not None:
            self.balance.begin(use.update)
        if not rows:
            self._of_base(model, [self._dummy_row()], use)
            return self._sums_of(model, [self._dummy_row()])[0].weightless()
        rows, use = _by_sample(rows, use)
        rows = self._of_base(model, self._prepared(rows, use), use)
        sums, log_probs, told = self._sums_of(model, rows, use)
        self._last = rows, use, on_its_way(log_probs), told
        return sums

    def measure(self) -> None:
        if self._last is None:
            return
        (rows, use, log_probs, told), self._last = self._last, None
        mine = _of_rows(log_probs(), rows)
        self._ratios.add(mine, [row.old_log_probs for row in rows], [row.mask for row in rows])
        if use.passes:
            return
        self._measure_gap(rows, mine, use)
        if use.update == 0 and self._config.train.passes > 1:
            self._first |= zip(use.keys, mine, strict=True)
        if told is not None:
            self._routes |= zip(use.keys, told(), strict=True)

    def denominator(self, total: LossSums) -> float:
        return losses.denominator(total, self._algorithm, self._config.rollout.max_new_tokens)

    def figures(self) -> dict[str, float]:
        white = self._whitening
        found = {} if white is None else {"advantage_mean": white.mean, "advantage_std": white.deviation}
        found |= self._constants
        if self._over_ranks:
            self._gap.reduce(self._device)
            self._ratios.reduce(self._device)
        routers = {} if self.balance is None else self.balance.figures()
        return found | self._ratios.metrics() | self._gap.metrics() | routers

    def _prepared(self, rows: Sequence[TrainRow], use: Use) -> Sequence[TrainRow]:
        """Rows with the step's whitening and the routes of their first forward, and once the weights have moved with the
        log-probs from before."""
        if self._whitening is not None:
            rows = [replace(row, advantages=self._whitened(row.advantages, row.mask)) for row in rows]
        if self._routes:
            rows = [replace(row, routed_experts=self._routes.get(key)) for row, key in zip(rows, use.keys, strict=True)]
        if use.update == 0:
            return rows
        return [
            row if row.old_log_probs is not None else replace(row, old_log_probs=self._first[key])
            for row, key in zip(rows, use.keys, strict=True)
        ]

    def _whitened(self, advantages: np.ndarray, mask: np.ndarray) -> np.ndarray:
        return advantages if self._whitening is None else self._whitening.apply(advantages, mask)

    def _of_base(self, model: Any, rows: Sequence[TrainRow], use: Use) -> Sequence[TrainRow]:
        """Rows with the reference's log-probs where it is the base, computed in the first pass (collective)."""
        if not self._computes_reference:
            return rows
        if use.passes == 0:
            with torch.no_grad(), base_alone(model):
                log_probs = self._scores(model, self._packed(rows), with_entropy=False).log_probs
            self._reference |= zip(use.keys, _of_rows(log_probs.cpu(), rows), strict=False)  # a dummy has no key
        return [replace(row, ref_log_probs=self._reference[key]) for row, key in zip(rows, use.keys, strict=False)]

    def _sums_of(
        self, model: Any, rows: Sequence[TrainRow], use: Use | None = None
    ) -> tuple[LossSums, torch.Tensor, Told | None]:
        """The undivided loss of some rows, the log-probs of their response tokens behind each other, detached, and their routes
        where those are needed once more. Without a use, rows are a dummy's."""
        packed, heard, told = self._packed(rows), None, None
        if self.balance is not None:
            again = use is not None and use.passes == 0 and self._config.train.passes > 1
            heard = self.balance.hears(packed, records=again and self._records(rows))
        ids = self._column([row.compared_ids for row in rows], torch.int64)
        samples = _samples(rows, use)
        found = self._scores(model, packed, with_entropy=True, heard=heard, ids=ids)
        log_probs, entropy = found.log_probs, found.entropy
        sums = losses.policy_sums(
            self._algorithm,
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=self._column([row.old_log_probs for row in rows]),
            rollout_log_probs=self._column([row.rollout_log_probs for row in rows]),
            ref_log_probs=self._column([row.ref_log_probs for row in rows]),
            advantages=self._column([row.advantages for row in rows]),
            mask=self._column([row.mask for row in rows]),
            lengths=[sum(len(row.mask) for row in own) for own, _ in samples],
            begun=[begun for _, begun in samples],
            constants=self._constants,
            beside=self._taught(rows, found, ids),
            kinds=self._kinds([own[0] for own, _ in samples]),
        )
        if self.balance is not None and heard is not None:
            if use is not None:
                self.balance.add(heard)
            told = self._told(packed, heard) if heard.records else None
            if self._config.train.router_aux_loss_coef:
                sums = self._balanced(sums, self.balance.loss(heard))
        return sums, log_probs.detach(), told

    def _balanced(self, sums: LossSums, loss: torch.Tensor) -> LossSums:
        """With the load-balancing loss of the micro-batch, which weighs in the update as much as its tokens or samples do."""
        config = self._config
        counted = losses.counted(sums, self._algorithm, config.rollout.max_new_tokens).float()
        weighted = config.train.router_aux_loss_coef * counted * loss
        told = {"router_aux_loss": loss.detach().double() * sums.sums["tokens"]}
        return replace(sums, loss=sums.loss + weighted, sums={**sums.sums, **told})

    def _records(self, rows: Sequence[TrainRow]) -> bool:
        """Whether routes of these rows are replayed that nobody has recorded yet."""
        return self._config.train.router_replay == "r2" and bool(rows) and rows[0].routed_experts is None

    def _told(self, packed: PackedBatch, heard: Heard) -> Told:
        """The routes of every row, on their way to the CPU."""
        assert self.balance is not None
        told = on_its_way(heard.routes(self.balance.routing))
        return lambda: packed.of_sequences(told().numpy())

    def _taught(self, rows: Sequence[TrainRow], found: Scores, ids: torch.Tensor | None) -> losses.Beside | None:
        """What the teacher adds to the loss."""
        config = self._config.distillation
        if config is None:
            return None
        if config.top_k is None:
            teacher = self._column([row.teacher_log_probs for row in rows])
            return functools.partial(distillation.at_sampled, config, teacher_log_probs=teacher)
        teacher = self._column([row.compared_log_probs for row in rows])
        return functools.partial(distillation.at_likeliest, config, ids=ids, policy=found.others, teacher=teacher)

    def _kinds(self, rows: Sequence[TrainRow]) -> dict[str, list[bool]] | None:
        """Kind -> which samples are of it, by a row of each, where they may have media."""
        if self._config.media is None:
            return None
        found = [kinds_of(row.media.modalities if row.media is not None else ()) for row in rows]
        return {kind: [kind in each for each in found] for kind in KINDS}

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

    def _scores(
        self,
        model: Any,
        packed: PackedBatch,
        *,
        with_entropy: bool,
        heard: Heard | None = None,
        ids: torch.Tensor | None = None,
    ) -> Scores:
        config = self._config
        return response_scores(
            model,
            packed,
            temperature=config.rollout.temperature,
            chunk_tokens=config.train.log_prob_chunk_tokens,
            with_entropy=with_entropy,
            heard=heard,
            ids=None if ids is None else ids.clamp(min=0),
        )

    def _column(self, arrays: Sequence[np.ndarray | None], dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
        present = [array for array in arrays if array is not None]
        if len(present) < len(arrays):
            return None
        return torch.from_numpy(np.concatenate(present)).to(self._device, dtype)

    def _dummy_row(self) -> TrainRow:
        return TrainRow(
            np.zeros(2, np.int32), np.zeros(1, np.uint8), np.zeros(1, np.float32), np.zeros(1, np.float32), None,
            np.zeros(1, np.float32) if self._algorithm.needs_reference else None, np.zeros(1, np.int32),
            **untold(self._config.distillation, 1),
        )  # fmt: skip


def untold(config: DistillationConfig | None, response: int) -> dict[str, Any]:
    """The columns of a teacher for a row that no teacher saw."""
    if config is None:
        return {}
    if config.top_k is None:
        return {"teacher_log_probs": np.zeros(response, np.float32)}
    shape = (response, config.num_compared)
    return {"compared_ids": np.zeros(shape, np.int32), "compared_log_probs": np.zeros(shape, np.float32)}


def _by_sample(rows: Sequence[TrainRow], use: Use) -> tuple[Sequence[TrainRow], Use]:
    """The same rows, the parts of a sample behind each other."""
    if not any(part for _, part, _, _ in use.spans):
        return rows, use
    names, keys = sorted(zip(use.keys, range(len(rows)), strict=True)), list[Span]()
    for (group, sample, part), _ in names:
        keys.append([group, part, sample, 1])
    return [rows[at] for _, at in names], replace(use, spans=keys)


def _samples(rows: Sequence[TrainRow], use: Use | None) -> list[tuple[list[TrainRow], bool]]:
    """The rows of each sample here, which are neighbours; and whether the first one of all is here."""
    keys = [(0, at, 0) for at in range(len(rows))] if use is None else use.keys
    named = [list(own) for _, own in groupby(zip(keys, rows, strict=True), key=lambda each: each[0][:2])]
    return [([row for _, row in own], own[0][0][2] == 0) for own in named]


def _of_rows(log_probs: torch.Tensor, rows: Sequence[TrainRow]) -> list[np.ndarray]:
    """float32 [R] of every row, out of those on the CPU."""
    return np.split(log_probs.numpy(), np.cumsum([len(row.mask) for row in rows])[:-1])
