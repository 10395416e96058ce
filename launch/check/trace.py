"""What a process that trains or scores would hold and send: the run's own code on tensors without memory.

Owns which code runs: that of `roles/training/` and `models/`, from a model on the meta device to the optimizer's step. Does not
own the count (`ledger.py`), on which rows (`rows.py`), how a few layers tell of all (`depths.py`), nor what other processes hold
(`estimate.py`).

    sizes = trace_training(config, path, num_ranks=8)     ->     Sizes(parts={"parameters": ...}, at="backward of the last layer")

The micro-batch is the largest there is, and meets the gradients of one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rondo.launch.check.depths import FORWARD, HEAD, OUTPUT, STEP, Depths, Point, Told, layers_of, text_layers
from rondo.launch.check.estimate import PREFILL, WIDTHS, WORKSPACE, Traced
from rondo.launch.check.ledger import (
    COPIES,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    Ledger,
    first_of,
)
from rondo.launch.check.rows import Rows
from rondo.launch.check.workspace import WORKSPACE_OF, Heads
from rondo.models import parallel
from rondo.models.attention import candidates
from rondo.models.config import MeshConfig
from rondo.models.load import load_config, without_memory
from rondo.models.logprobs import response_log_probs
from rondo.models.mesh import Mesh
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.stand_in import stand_in
from rondo.models.units import sharded_units, towers_of
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import JobConfig
from rondo.roles.training.backend import Backend, Use
from rondo.roles.training.objective import TrainRow, policy_of


class _Mesh(Mesh):
    """Nothing goes on beside what is traced."""

    def all_beside(self) -> None:
        return None

    def copy_beside(self) -> None:
        return None


class Tracer:
    """Of one job, with the model at `path`."""

    def __init__(self, config: JobConfig, path: str) -> None:
        plain = config.train.model_copy(update={"compile": False})  # what a compiler fuses would be less
        self._config, self._model_config = config.model_copy(update={"train": plain}), load_config(path)
        self._depths = Depths.of(without_memory(self._model_config))
        self._rows = Rows.of(config, self._model_config)
        self._tried = stand_in(self._model_config, "eager" if config.model.attn == "eager" else None)
        if self._tried is not None:
            Packing.of(self._tried)

    def of(self, name: str, num_ranks: int = 1, *, on_device: bool = False) -> Traced:
        """Of one of `num_ranks` processes that train ("actor") or score ("reference", "actor_fwd"), or of an engine that takes
        prompts in (PREFILL). on_device: they compute on accelerators, of which is told what a token more would take, too; else
        gloo carries what they send."""
        self._on_device = on_device
        if name == "actor":
            return self._training(num_ranks)
        if name != PREFILL:
            rows = [Packable(row.tokens, len(row.mask), row.media) for row in self._rows.micro_batch()]
            return self._scoring(num_ranks, self._config.train.dtype, rows)
        found = self._scoring(1, self._config.model.dtype, self._rows.prefill())
        return replace(found, parts={"prompts": found.parts[TEMPORARIES]})

    def _training(self, num_ranks: int) -> Traced:
        rollout, rows = self._config.rollout, self._rows.micro_batch()
        num_samples = -(-rollout.prompts_per_step * rollout.samples_per_prompt // num_ranks)
        rounds = -(-num_samples // self._rows.num_whole())
        with first_of(num_ranks):
            mesh = _Mesh.open(self._config.train.mesh, num_ranks)

            def traced(rows: Sequence[TrainRow], points: Sequence[Point]) -> list[Told]:
                return [self._trained(point, mesh, rows, rounds) for point in points]

            points = self._depths.points
            told = traced(rows, points)
            found = replace(self._depths.extend(told), num_micro_batches=rounds, tokens=_tokens(rows))
            if self._on_device:  # towers see the same, whatever the length of the responses
                fewer, of_text = self._rows.micro_batch(shorter=True), self._depths.of_text
                here = points[: len(of_text.points)]
                more, less = (of_text.extend(each) for each in (told[: len(here)], traced(fewer, here)))
                found = replace(found, token_bytes=(more.needed - less.needed) / (_tokens(rows) - _tokens(fewer)))
            return found

    def _trained(self, point: Point, mesh: Mesh, rows: Sequence[TrainRow], rounds: int) -> Told:
        """A micro-batch, the last one, and the step."""
        model = self._cut(point, mesh, "float32")
        with self._ledger() as ledger:
            _fill(model)
            packing = Packing.alike(model, self._tried)
            workspace = self._workspace(model, rows) if self._on_device and packing.share_prompts else 0
            backend = policy_of(self._config, model, packing, mesh, "cpu")
            ledger.name(PARAMETERS, [*model.parameters(), *model.buffers()])
            ledger.name(OPTIMIZER, (moment for state in backend.optimizer.state.values() for moment in state.values()))
            backend.objective = _Sections(backend, ledger)  # type: ignore[assignment]
            _mark(model, ledger)
            spans, sent = [[number, 0, 0, 1] for number in range(len(rows))], Counter[str]()
            apart = mesh.ranks is not None and mesh.ranks.size(0) > 1  # copies meet in the last micro-batch alone
            for parameter in () if apart else model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            for last in (False, True) if apart else (True,):
                ledger.name(GRADIENTS, (p.grad for p in model.parameters() if p.grad is not None))
                ledger.peaks.clear()
                ledger.sent.clear()
                ledger.section = FORWARD
                backend.accumulate(0, rows, spans, last=last)
                times = rounds if not apart else 1 if last else rounds - 1
                sent.update({name: size * times for name, size in ledger.sent.items()})
            ledger.name(GRADIENTS, (p.grad for p in model.parameters() if p.grad is not None))
            ledger.sent.clear()
            ledger.section = STEP
            backend.update(0)
            sent.update(ledger.sent)
        for section, peak in ledger.peaks.items():
            peak.parts[WORKSPACE] = workspace if section[:2] == ("backward", 0) else 0
        return Told({section: peak.parts for section, peak in ledger.peaks.items()}, sent)

    def _workspace(self, model: Any, rows: Sequence[TrainRow]) -> int:
        """Of the kernel that a device would attend with."""
        attn, dtype, text = self._config.model.attn, self._config.train.dtype, model.config.get_text_config()
        name = attn if attn != "auto" else candidates(attn, "cuda", dtype)[0].name
        num_heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
        heads = Heads(num_heads, getattr(text, "num_key_value_heads", None) or num_heads, head_dim)
        formula = WORKSPACE_OF.get(name)
        return 0 if formula is None else formula(heads, tokens=_tokens(rows), rows=len(rows), width=WIDTHS[dtype])

    def _scoring(self, num_ranks: int, dtype: str, rows: Sequence[Packable]) -> Traced:
        with first_of(num_ranks):
            mesh = _Mesh.open(MeshConfig(), num_ranks)
            return self._depths.extend([self._scored(point, mesh, dtype, rows) for point in self._depths.points])

    def _scored(self, point: Point, mesh: Mesh, dtype: str, rows: Sequence[Packable]) -> Told:
        model = self._cut(point, mesh, dtype)
        with self._ledger() as ledger, torch.no_grad():
            _fill(model)
            packed = Packing.alike(model, self._tried).pack(rows)
            parallel.compute_in(model, dtype)
            ledger.name(PARAMETERS, [*model.parameters(), *model.buffers()])
            _mark(model, ledger)
            ledger.peaks.clear()
            ledger.section = FORWARD
            train, temperature = self._config.train, self._config.rollout.temperature
            response_log_probs(model, packed, temperature=temperature, chunk_tokens=train.log_prob_chunk_tokens)
        return Told({section: peak.parts for section, peak in ledger.peaks.items()}, {})

    def _cut(self, point: Point, mesh: Mesh, dtype: str) -> Any:
        """As `load_model` has it before it reads."""
        train = self._config.train
        model = without_memory(self._depths.cut(self._model_config, point), dtype).eval()
        model.tie_weights()
        parallel.shard(model, mesh, param_dtype=train.dtype, encoders=train.encoders)
        return model

    def _ledger(self) -> Ledger:
        return Ledger(self._model_config.get_text_config().vocab_size, staged=not self._on_device)


def _tokens(rows: Sequence[TrainRow]) -> int:
    return sum(len(row.tokens) for row in rows)


class _Sections:
    """An objective that tells where a forward ends."""

    def __init__(self, backend: Backend[Any], ledger: Ledger) -> None:
        self._objective, self._ledger = backend.objective, ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def sums(self, model: Any, rows: Sequence[TrainRow], use: Use) -> LossSums:
        found = self._objective.sums(model, rows, use)
        for unit in sharded_units(model):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                self._ledger.name(COPIES, (part for held in group.fsdp_params for part in held.all_gather_outputs))
        self._ledger.keep()
        self._ledger.section = HEAD
        return found


def _mark(model: Any, ledger: Ledger) -> None:
    """Forward and backward are told layer by layer."""

    def begins(section: tuple[str, int, int] | str) -> Any:
        def hook(*_: Any) -> None:
            ledger.section = section

        return hook

    def ends(at: int, index: int) -> Any:
        def after(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(begins(("backward", at, index)))

        return after

    stacks = [text_layers(model), *(layers_of(tower, model) for tower in dict.fromkeys(towers_of(model)))]
    for at, layers in enumerate(stacks):
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(begins(("forward", at, index)))
            layer.register_forward_hook(ends(at, index))
    model.get_output_embeddings().register_forward_pre_hook(begins(OUTPUT))


def _fill(model: Any) -> None:
    """Every tensor gets a device; what is tied stays so."""
    there: dict[Any, Any] = {}
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor not in there:
                there[tensor] = torch.nn.Parameter(torch.empty_like(tensor, device="cpu"), tensor.requires_grad)
            module._parameters[name] = there.get(tensor)
        for name, tensor in module._buffers.items():
            module._buffers[name] = None if tensor is None else torch.empty_like(tensor, device="cpu")
    for unit in sharded_units(model):
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for held in group.fsdp_params:
                held.reset_sharded_param()
