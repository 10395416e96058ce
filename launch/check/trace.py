"""What a process that trains or scores would hold and send: the run's own code on tensors without memory.

Owns which code runs: that of `roles/training/` and `models/`, from a model on the meta device to the optimizer's step. Does not
own the count (`ledger.py`), on which rows (`rows.py`), how a few layers tell of all (`depths.py`), nor what other processes hold
(`estimate.py`).

    sizes = trace_training(config, path, num_ranks=8)     ->     Sizes(parts={"parameters": ...}, at="backward of the last layer")

The micro-batch is the largest there is, and meets the gradients of one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
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
from rondo.models.load import load_config, without_memory
from rondo.models.logprobs import response_log_probs, response_values
from rondo.models.lora import adapt
from rondo.models.mesh import Mesh
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.stand_in import stand_in
from rondo.models.units import sharded_units, towers_of
from rondo.models.value_head import give_value_head
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import JobConfig
from rondo.roles.config.genrm import SCORER
from rondo.roles.training.backend import Backend, Use
from rondo.roles.training.objective import TrainRow, policy_of
from rondo.roles.training.values import ValueRow, critic_of


class _Mesh(Mesh):
    """Nothing goes on beside what is traced."""

    def all_beside(self) -> None:
        return None

    def copy_beside(self) -> None:
        return None


class Tracer:
    """Of one job, with the model at `path`."""

    def __init__(self, config: JobConfig, path: str, *, values: bool = False) -> None:
        """values: it has a value head, and what it trains learns values."""
        self._path, self._values = path, values
        plain = config.train.model_copy(update={"compile": False})  # what a compiler fuses would be less
        self._config, self._model_config = config.model_copy(update={"train": plain}), load_config(path)
        self._depths = Depths.of(without_memory(self._model_config))
        self._rows = Rows.of(config, self._model_config)
        self._tried = stand_in(self._model_config, "eager" if config.model.attn == "eager" else None)
        if self._tried is not None:
            Packing.of(self._tried)

    def of(self, name: str, num_ranks: int = 1, *, on_device: bool = False) -> Traced:
        """Of one of `num_ranks` processes that train ("actor", "critic") or score ("reference", "actor_fwd", as SCORER a reward
        model the longest answers), or of an engine that takes prompts in (PREFILL). on_device: they compute on accelerators, of
        which is told what a token more would take, too; else gloo carries what they send."""
        self._on_device = on_device
        if name == "actor":
            return self._training(num_ranks)
        if name == "critic":
            return self._of_critic().of("actor", num_ranks, on_device=on_device)
        if name == SCORER:
            longest = Packable(np.zeros(self._config.train.micro_batch_tokens, np.int32), 1)
            return self._scoring(num_ranks, self._config.train.dtype, [longest])
        if name != PREFILL:
            rows = [Packable(row.tokens, len(row.mask), row.media) for row in self._rows.micro_batch()]
            return self._scoring(num_ranks, self._config.train.dtype, rows)
        found = self._scoring(1, self._config.model.dtype, self._rows.prefill())
        return replace(found, parts={"prompts": found.parts[TEMPORARIES]})

    def _of_critic(self) -> Tracer:
        """Of its own weights, mesh and micro-batches, as a trainer."""
        critic, train = self._config.critic, self._config.train
        assert critic is not None
        tokens = critic.micro_batch_tokens
        train = train.model_copy(update={"micro_batch_tokens": tokens, "mesh": critic.mesh, "lora": critic.lora})
        return Tracer(self._config.model_copy(update={"train": train}), critic.path or self._path, values=True)

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
        lora = self._config.train.lora
        model = self._cut(point, mesh, "float32" if lora is None else self._config.train.dtype, adapts=lora is not None)
        if lora is not None:
            adapt(model, lora, dtype=torch.float32)
        with self._ledger() as ledger:
            _fill(model)
            packing = Packing.alike(model, self._tried)
            trains = critic_of if self._values else policy_of
            backend: Backend[Any] = trains(self._config, model, packing, mesh, "cpu")
            ledger.name(PARAMETERS, [*model.parameters(), *model.buffers()])
            ledger.name(OPTIMIZER, (moment for state in backend.optimizer.state.values() for moment in state.values()))
            backend.objective = _Sections(backend, ledger)
            encoded = _mark(model, ledger)
            given = (
                [ValueRow(row.tokens, row.advantages, row.advantages, row.media) for row in rows]
                if self._values
                else rows
            )
            spans, sent = [[number, 0, 0, 1] for number in range(len(rows))], Counter[str]()
            apart = mesh.ranks is not None and mesh.ranks.size(0) > 1  # copies meet in the last micro-batch alone
            for parameter in () if apart else model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            for last in (False, True) if apart else (True,):
                ledger.name(GRADIENTS, (p.grad for p in model.parameters() if p.grad is not None))
                ledger.peaks.clear()
                ledger.sent.clear()
                ledger.section = FORWARD
                backend.accumulate(0, given, spans, last=last)
                times = rounds if not apart else 1 if last else rounds - 1
                sent.update({name: size * times for name, size in ledger.sent.items()})
            ledger.name(GRADIENTS, (p.grad for p in model.parameters() if p.grad is not None))
            ledger.sent.clear()
            ledger.section = STEP
            backend.update(0)
            sent.update(ledger.sent)
        workspaces = self._workspaces(model, rows, encoded) if self._on_device and packing.share_prefixes else {}
        for section, peak in ledger.peaks.items():
            peak.parts[WORKSPACE] = workspaces.get(section[1], 0) if section[0] == "backward" else 0
        return Told({section: peak.parts for section, peak in ledger.peaks.items()}, sent)

    def _workspaces(
        self, model: Any, rows: Sequence[TrainRow], encoded: Mapping[int, tuple[int, int]]
    ) -> dict[int, int]:
        """Of the kernel that a device would attend with, in the backward of a layer of each stack. encoded: tokens and sequences
        of each tower's."""
        attn, dtype = self._config.model.attn, self._config.train.dtype
        formula = WORKSPACE_OF.get(attn if attn != "auto" else candidates(attn, "cuda", dtype)[0].name)
        if formula is None:
            return {}
        sizes = {0: (model.config.get_text_config(), _tokens(rows), len(rows))}
        for at, tower in enumerate(towers_of(model), start=1):
            if at in encoded:
                sizes[at] = (tower.config, *encoded[at])
        return {
            at: formula(Heads.of(config), tokens=tokens, rows=number, width=WIDTHS[dtype])
            for at, (config, tokens, number) in sizes.items()
        }

    def _scoring(self, num_ranks: int, dtype: str, rows: Sequence[Packable]) -> Traced:
        with first_of(num_ranks):
            mesh = _Mesh.open(self._config.train.mesh.of_scorers(num_ranks), num_ranks)
            return self._depths.extend([self._scored(point, mesh, dtype, rows) for point in self._depths.points])

    def _scored(self, point: Point, mesh: Mesh, dtype: str, rows: Sequence[Packable]) -> Told:
        model = self._cut(point, mesh, dtype)
        with self._ledger() as ledger, torch.no_grad():
            _fill(model)
            packed = Packing.alike(model, self._tried).pack(rows, behind=self._values)
            parallel.compute_in(model, dtype)
            ledger.name(PARAMETERS, [*model.parameters(), *model.buffers()])
            _mark(model, ledger)
            ledger.peaks.clear()
            ledger.section = FORWARD
            train, temperature = self._config.train, self._config.rollout.temperature
            if self._values:
                response_values(model, packed)
            else:
                response_log_probs(model, packed, temperature=temperature, chunk_tokens=train.log_prob_chunk_tokens)
        return Told({section: peak.parts for section, peak in ledger.peaks.items()}, {})

    def _cut(self, point: Point, mesh: Mesh, dtype: str, *, adapts: bool = False) -> Any:
        """As `load_model` has it before it reads."""
        train = self._config.train
        model = without_memory(self._depths.cut(self._model_config, point), dtype).eval()
        model.tie_weights()
        if self._values:
            give_value_head(model, whole=adapts)
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


def _mark(model: Any, ledger: Ledger) -> dict[int, tuple[int, int]]:
    """Forward and backward are told layer by layer. What the layers of each tower take in at most is filled in by its number:
    tokens, and the sequences that they are."""
    encoded: dict[int, tuple[int, int]] = {}

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

    def takes(at: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            hidden, *more = args
            cuts = kwargs["cu_seqlens"] if "cu_seqlens" in kwargs else more[0]
            encoded[at] = max(encoded.get(at, (0, 0)), (hidden.shape[-2], len(cuts) - 1))

        return hook

    stacks = [text_layers(model), *(layers_of(tower, model) for tower in dict.fromkeys(towers_of(model)))]
    for at, layers in enumerate(stacks):
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(begins(("forward", at, index)))
            layer.register_forward_hook(ends(at, index))
        if at:
            layers[0].register_forward_pre_hook(takes(at), with_kwargs=True)
    model.get_output_embeddings().register_forward_pre_hook(begins(OUTPUT))
    return encoded


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
