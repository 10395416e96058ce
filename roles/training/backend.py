"""The training computation, whatever is trained: what the compute thread of a role with weights of its own does with rows.

Owns how a model is sharded, its optimizer, the sums of the step in progress, and what of them lasts: state for snapshots,
checkpoints, weights to publish. Does not own the loss and what it needs from a row (an `Objective`: `objective.py`, `sft.py`),
which rows come, when a step is committed, or where snapshots lie (`actor.py`). Methods run on the compute thread, but for those
that say otherwise; those marked collective run on every rank, in order.

A step makes one *update* (optimizer step), or several: its mini-batches, and passes over all of them.

    [[accumulate(rows) ...] -> update(step) ...] -> finish(step) -> snapshot -> publish

Invariant: gradients are sums over tokens and samples, scaled once by the true update's count; so however an update is cut into
micro-batches and ranks, it is the same gradient to rounding. A row is used once in every pass.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from rondo.comm.ring.spans import Span, rows_of
from rondo.comm.weights.sums import bucket_sum
from rondo.models import checkpoint, parallel
from rondo.models.acceptance import accept
from rondo.models.at_rest import AtRest, own_part, resident
from rondo.models.host_memory import give_back_freed
from rondo.models.load import load_model
from rondo.models.lora import adapt, published_adapter
from rondo.models.mesh import Mesh
from rondo.models.names import adapter_tensors, local_part, memory_tensors
from rondo.models.optimizer import learning_rate, make_optimizer
from rondo.models.packing import Packing
from rondo.models.parts import freeze
from rondo.models.published import own_adapter, own_weights, published_shapes
from rondo.models.scaling import LossScale
from rondo.models.state import load_training_state, training_state
from rondo.models.value_head import give_value_head
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import JobConfig, OptimizerConfig, TrainConfig
from rondo.roles.engines.embedded.shared_weights import Lent
from rondo.roles.training.determinism import settle
from rondo.runtime.memory.to_host import host_bytes

P = ParamSpec("P")
T = TypeVar("T")
Key = tuple[int, ...]
"""(group, sample, part) of a row."""


@dataclass(frozen=True, slots=True)
class Use:
    """Which use of its rows a micro-batch is: of which step, after how many of its updates and of its passes."""

    step: int
    update: int
    passes: int
    spans: Sequence[Span]

    @property
    def keys(self) -> list[Key]:
        """The name of every row, in their order."""
        return [tuple(row) for row in rows_of(self.spans)]


class Objective(Protocol):
    """A loss that adds up: of the rows of any micro-batch, undivided, and divided once. May remember things of a step; one that
    inherits from this and says nothing else does not."""

    def sums(self, model: Any, rows: Sequence[Any], use: Use) -> LossSums:
        """The undivided loss of a micro-batch and what its metrics are made of (collective). No rows: a dummy of weight 0 through
        the same modules."""

    def measure(self) -> None:
        """What must wait for values of the last micro-batch, once its backward is under way."""
        return

    def denominator(self, total: LossSums) -> float:
        """What the sums of an update over all ranks are divided by."""

    def figures(self) -> dict[str, float]:
        """Metrics of the step that are no sums (collective)."""
        return {}

    def forget(self) -> None:
        """The step in progress is over, or given up."""
        return


AnyObjective = TypeVar("AnyObjective", bound=Objective)


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step was."""

    total: LossSums  # over all ranks
    loss: float
    grad_norm: float


def open_model(
    config: JobConfig,
    path: str,
    mesh: Mesh,
    *,
    device: str,
    dtype: str | None = None,
    adapters: torch.dtype | None = None,
    values: bool = False,
) -> tuple[Any, Packing]:
    """The model with the weights at `path` in `dtype`, cut over `mesh` and filled (collective); how it wants sequences. It
    computes in float32 until it is told otherwise.

    None: as it is trained: all of it in float32, or with `train.lora` fresh adapters in float32 beside a base in the dtype of the
    computation. adapters: the dtype of those that one in `dtype` has. `values`: with a value head."""
    lora = config.train.lora
    if dtype is None:
        dtype, adapters = ("float32", None) if lora is None else (config.train.dtype, torch.float32)
    adapts = lora is not None and adapters is not None
    settle(config)
    if mesh.ranks is not None:
        give_back_freed()

    def cut(model: Any) -> None:
        if values:
            give_value_head(model, whole=adapts)
        parallel.shard(model, mesh, param_dtype=config.train.dtype, encoders=config.train.encoders)

    model = load_model(path, dtype=dtype, device=device, attn=config.model.attn, cut=cut)
    packing = accept(model, attn=config.model.attn, dtype=config.train.dtype)
    if lora is not None and adapts:
        adapt(model, lora, seed=config.seed, dtype=adapters)
    return model, packing


def make_ready(model: Any, train: TrainConfig) -> Any:
    """`model` as it trains: parts of it frozen, in the precision of the settings."""
    if train.lora is None:
        freeze(model, train.freeze, freeze_parameters=train.freeze_parameters, train_parameters=train.train_parameters)
    return parallel.compute_in(
        model, train.dtype, activation_checkpointing=train.activation_checkpointing, compiled=train.compile
    )


@dataclass(frozen=True, slots=True)
class Groups:
    """What goes on beside the training has groups of its own: collectives of one group must not cross. Each has one at a time."""

    saving: dist.ProcessGroup | None
    settling: dist.ProcessGroup | None
    publishing: dist.ProcessGroup | None  # of the ranks of a copy

    @classmethod
    def beside(cls, mesh: Mesh) -> Groups:
        """Collective."""
        return cls(mesh.all_beside(), mesh.all_beside(), mesh.copy_beside())


class Backend(Generic[AnyObjective]):
    def __init__(
        self,
        model: Any,
        objective: AnyObjective,
        optimizer: OptimizerConfig,
        *,
        num_steps: int,
        mesh: Mesh | None = None,
        mini_batches: int = 1,
        passes: int = 1,
        publishes: str = "float32",
        adapters_alone: bool = False,
        offload: bool = False,
        scales: bool = False,
        lent: Lent | None = None,
        beside: Backend[Any] | None = None,
    ) -> None:
        """model: cut over `mesh`, or whole. num_steps: of the learning rate's schedule. mini_batches, passes: of a step.
        publishes: the dtype of published weights; adapters_alone: nothing else is. offload: moments lie in host memory. scales:
        the loss, as float16 needs it. lent: the model to the engine of this process. beside: a backend of the same model, which
        rests while this one is used, and whose mesh, groups, offload and scales it takes (collective without)."""
        self.model, self.objective = model, objective
        self.mesh: Mesh = beside.mesh if beside is not None else mesh or Mesh()
        self.device = next(model.parameters()).device
        self.lent = lent
        self._settings, self._num_steps, self._publishes = optimizer, num_steps, publishes
        self._adapters_alone = adapters_alone
        self._mini_batches, self._passes = mini_batches, passes
        self._offload: bool = offload if beside is None else beside._offload
        self.optimizer = make_optimizer(
            model, lr=optimizer.lr, betas=optimizer.betas, weight_decay=optimizer.weight_decay, eps=optimizer.eps,
            offload=self._offload,
        )  # fmt: skip
        self._scales: bool = scales if beside is None else beside._scales
        self._scale = LossScale(self.optimizer) if self._scales else None
        self._at_rest = AtRest()
        self._groups: Groups = beside._groups if beside is not None else Groups.beside(self.mesh)
        # As they are between two forwards.
        self._lasting = list((adapter_tensors(model) or memory_tensors(model)).values())
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._schedule_from = 0
        self._sums: LossSums | None = None
        self._trained: list[Span] = []
        self._updates: list[Update] = []
        self._uses: dict[Key, int] = {}  # row -> passes of this step that used it

    # ---- a step -----------------------------------------------------------------------------------------------------

    def accumulate(self, step: int, rows: Sequence[Any], spans: Sequence[Span], *, last: bool, update: int = 0) -> None:
        """Add one micro-batch of an update of `step` to the gradient (collective). spans: which rows these are. No rows: a dummy
        of weight 0 through the same modules. last: of its update."""
        use = Use(step, update, update // self._mini_batches, spans)
        for key in use.keys if self._passes > 1 else ():
            if self._uses.get(key, 0) != use.passes:
                raise AssertionError(
                    f"row {key} must be used once in every pass, got pass {use.passes} after {self._uses.get(key)}"
                )
            self._uses[key] = use.passes + 1
        parallel.set_last(self.model, last)
        sums = self.objective.sums(self.model, rows, use)
        if self._scale is not None and not self._scale.has_begun:
            (of_all,) = self.sum_over_ranks([self.objective.denominator(sums.detached())])
            self._scale.begin(of_all / self.mesh.size)
        (sums.loss if self._scale is None else sums.loss * self._scale.value).backward()
        self.objective.measure()
        self._sums = sums.detached() if self._sums is None else self._sums + sums.detached()
        if use.passes == 0:
            self._trained += spans

    @property
    def moved(self) -> bool:
        """Whether the weights are no longer those that the step in progress began with."""
        return bool(self._updates)

    def discard(self) -> None:
        """Forget the step in progress: its gradient, its sums, its rows. Updates that it has made stay in the weights."""
        parallel.discard_gradients(self.model)
        self._sums, self._trained, self._updates, self._uses = None, [], [], {}
        self.objective.forget()

    def update(self, step: int) -> Update:
        """Scale, clip and step with what was accumulated since the last update (collective).

        A gradient that is not finite changes no weight: the update counts, and is counted in the metric `skipped`.
        """
        if self._sums is None:
            raise AssertionError("update needs at least one accumulated round")
        total = self._sums.reduced(dist.group.WORLD if self.mesh.size > 1 else None)
        denominator = self.objective.denominator(total)
        parallel.scale_gradients(self.model, 1 / (denominator * (1 if self._scale is None else self._scale.value)))
        grad_norm = parallel.clip_grad_norm(self.model, self._settings.clip_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)
        if self.lent is not None:
            self.lent.moves()
        if math.isfinite(grad_norm):
            self.optimizer.step()
        if self._scale is not None:
            self._scale.after(math.isfinite(grad_norm))
        made = Update(total, float(total.loss) / denominator, grad_norm)
        self._updates.append(made)
        parallel.discard_gradients(self.model)
        self._sums = None
        return made

    def is_lost(self, made: Update) -> bool:
        """Whether its gradient is not finite, and a smaller loss scale would not mend that."""
        mends = self._scale is not None and not self._scale.is_least and math.isfinite(made.loss)
        return not math.isfinite(made.grad_norm) and not mends

    def finish(self, step: int) -> tuple[dict[str, float], list[Span]]:
        """The step's last update (collective). Metrics of the whole step, and every row that it trained, as spans.

        With several updates, `loss` and `grad_norm` are means over them, and other means are over every use of a token.
        """
        self.update(step)
        updates = self._updates
        metrics = sum([made.total for made in updates[1:]], start=updates[0].total).metrics()
        for name in ("tokens", "samples"):
            metrics[name] /= self._passes
        spans = self.gathered(self._trained, 4, torch.int64)
        metrics |= self.objective.figures()
        self.discard()
        norms = [made.grad_norm for made in updates]
        return {
            "grad_norm": sum(norms) / len(norms),
            "lr": self.lr(step),
            "skipped": float(sum(not math.isfinite(norm) for norm in norms)),
            "num_updates": float(len(updates)),
            **({} if self._scale is None else {"loss_scale": self._scale.value}),
            **metrics,
            "loss": sum(made.loss for made in updates) / len(updates),
        }, spans

    def lr(self, step: int) -> float:
        """The learning rate of step `step`."""
        its = self._settings
        return learning_rate(
            step - self._schedule_from, its.lr, warmup_steps=its.warmup_steps, schedule=its.schedule,
            total=self._num_steps - self._schedule_from, min_fraction=its.min_lr_fraction,
        )  # fmt: skip

    def gathered(self, tuples: Sequence[Any], width: int, dtype: torch.dtype = torch.float64) -> list[Any]:
        """Tuples of `width` numbers of all ranks, one rank's behind the other's (collective)."""
        if self.mesh.size == 1:
            return list(tuples)
        mine = torch.tensor(tuples, dtype=dtype, device=self.device).reshape(-1, width)
        gathered = torch.zeros(self.mesh.size, dtype=torch.int64, device=self.device)
        dist.all_gather_single(gathered, torch.tensor([len(mine)], device=self.device))
        counts = gathered.tolist()
        padded = torch.full((max(counts), width), -1, dtype=dtype, device=self.device)
        padded[: len(mine)] = mine
        parts = padded.new_empty(self.mesh.size * len(padded), width)
        dist.all_gather_single(parts, padded)
        of_ranks = parts.view(self.mesh.size, -1, width).tolist() if len(padded) else [[]] * self.mesh.size
        return [found for part, count in zip(of_ranks, counts, strict=True) for found in part[:count]]

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all ranks (collective)."""
        if self.mesh.size == 1:
            return list(values)
        shared = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(shared)
        return [float(value) for value in shared.tolist()]

    # ---- turns on a device -----------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Between two steps: weights, unless they are lent, and moments lie in host memory until `wake`, and can be read there
        (collective, on any thread, in turn with `weights`: on return the devices of all ranks are free). Idempotent."""
        states = () if self._offload else self.optimizer.state.values()
        moments = (each for state in states for each in state.values() if each.ndim)
        weights = resident(self.model) if self.lent is None else ()
        on_device = (each for each in (*weights, *map(own_part, moments)) if each.device == self.device)
        self._at_rest.leave(on_device)
        if self.mesh.size > 1:
            dist.barrier(group=self._groups.settling)

    def wake(self) -> None:
        """Before a forward after `rest`; no collective. Idempotent."""
        self._at_rest.come_back()

    # ---- what lasts -------------------------------------------------------------------------------------------------

    def beside(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `function` gives, which reads tensors that `state` or `weights` named, on another thread while the next step's
        forwards run: its copies have a stream of their own, behind what had been computed when those were asked for."""
        with torch.cuda.stream(self._copies):
            return function(*args, **kwargs)

    def _named(self) -> None:
        if self._copies is not None:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's shard, optimizer and random states; no collective."""
        self._named()
        return training_state(self.model, self.optimizer)

    def load_state(self, tensors: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        load_training_state(self.model, self.optimizer, tensors, state)

    def checksum(self) -> int:
        """32 bits over this rank's weights, and what else a snapshot has of the model, which tell equal versions of equal layouts
        apart from others; no collective, on any thread."""
        crc = 0
        for tensor in self._lasting:
            part = bucket_sum(host_bytes(local_part(tensor.detach())))
            crc = zlib.crc32(part.to_bytes(4, "little"), crc)
        return crc

    def join_checksums(self, part: int) -> int:
        """One checksum of all ranks' parts, in their order. Nobody has it before every rank came here (collective, on any thread,
        in turn with `weights`)."""
        if self.mesh.size == 1:
            return part
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.mesh.size)]
        dist.all_gather(parts, torch.tensor([part]), group=self._groups.settling)
        return zlib.crc32(b"".join(int(each).to_bytes(4, "little") for each in parts))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(published name, what this rank gives of it) of all that is published; the ranks of a copy give all of it (collective
        over `publishing`). Asked for between two forwards; the next may run while they are iterated on another thread, but not
        the optimizer."""
        self._named()
        give = own_adapter if self._adapters_alone else own_weights
        return give(self.model, self._publishes, beside=self.publishing)

    def shapes(self) -> dict[str, torch.Tensor]:
        """Published name -> a tensor without memory, of all that is published."""
        if self._adapters_alone:
            return {name: tensor.to("meta") for name, tensor in published_adapter(self.model, self._publishes).items()}
        return published_shapes(self.model, self._publishes)

    @property
    def publishing(self) -> dist.ProcessGroup | None:
        """The ranks of this one's copy of the model; None where it is whole here."""
        return self._groups.publishing

    def save(
        self,
        folder: Path,
        extra: dict[str, Any],
        beside: checkpoint.Beside | None = None,
        *,
        tokenizer_path: str | None = None,
    ) -> None:
        """Write a whole checkpoint, with a Hugging Face folder inside where a tokenizer is given (collective)."""
        group = self._groups.saving
        checkpoint.save(folder, self.model, self.optimizer, extra, beside, tokenizer_path=tokenizer_path, group=group)

    def stage(self, held: checkpoint.Held | None = None) -> checkpoint.Staged:
        """This rank's state, copied to host memory, or as a snapshot holds it there; no collective."""
        return checkpoint.stage(self.model, self.optimizer, held)

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
        return checkpoint.write(folder, staged, extra, beside, group=self._groups.saving, gives_way=gives_way)

    def load_checkpoint(self, folder: Path, resets: Sequence[int] = ()) -> dict[str, Any]:
        """What the checkpoint knows beside the state. resets: versions from which the optimizer is fresh; the moments of such a
        checkpoint stay there."""
        kept = checkpoint.load(folder, self.model, self.optimizer, group=self._groups.saving)
        if kept.get("version") in resets:
            for state in self.optimizer.state.values():
                for tensor in state.values():
                    tensor.zero_()
        return kept

    def count_from(self, resets: Sequence[int], version: int) -> None:
        """At `version` the schedule counts from the last of `resets`."""
        self._schedule_from = max((each for each in resets if each <= version), default=0)

    def add_result(self, folder: Path, tokenizer_path: str) -> None:
        """Write what others load of a checkpoint into it (collective)."""
        checkpoint.add_result(folder, self.model, tokenizer_path, group=self._groups.saving)

    def export(self, folder: Path, tokenizer_path: str) -> None:
        """Write a Hugging Face folder, adapters merged (collective)."""
        checkpoint.export_hf(folder, self.model, tokenizer_path, group=self._groups.saving)
