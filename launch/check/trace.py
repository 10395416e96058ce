"""What a process that trains or scores would hold and send: the run's own code on tensors without memory.

Owns which code runs (that of `roles/training/` and `models/`, from a model on the meta device to the optimizer's step), on which
micro-batch, and how a few layers tell of all. Does not own the count (`ledger.py`), nor what other processes hold
(`estimate.py`).

    sizes = trace_training(config, path, num_ranks=8)     ->     Sizes(parts={"parameters": ...}, at="backward of the last layer")

The micro-batch is the largest there is: as many of the longest samples as `train.micro_batch_tokens` holds, each with a prompt of
its own. It comes twice, so that the second meets the gradients of the first. A model of equal layers is traced at two small
depths: what each layer more adds is the same from there on, in every section of a step.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rondo.launch.check.estimate import PREFILL, Traced, prefill_tokens
from rondo.launch.check.ledger import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    Ledger,
    first_of,
)
from rondo.models import parallel
from rondo.models.config import MeshConfig
from rondo.models.load import load_config, without_memory
from rondo.models.logprobs import response_log_probs
from rondo.models.mesh import Mesh
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.stand_in import stand_in
from rondo.models.units import decoder_layers, sharded_units, towers_of
from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import JobConfig
from rondo.roles.training.backend import Backend, Use
from rondo.roles.training.objective import TrainRow, policy_of

Section = str | int
"""Of a step; a number is the backward of that layer."""
_FORWARD, _HEAD, _STEP = "a forward", "the backward of the output layer", "the optimizer's step"


@dataclass(frozen=True, slots=True)
class _Told:
    """Of one depth."""

    sections: Mapping[Section, Mapping[str, int]]
    sent: Mapping[str, int]


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
        self._depths = _Depths.of(without_memory(self._model_config))
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
            return self._scoring(num_ranks, self._config.train.dtype, largest(self._config))
        length = self._config.rollout.max_prompt_tokens
        prompts = [length] * -(-prefill_tokens(self._config) // length)
        found = self._scoring(1, self._config.model.dtype, prompts, response=1)
        return replace(found, parts={"prompts": found.parts[TEMPORARIES]})

    def _training(self, num_ranks: int) -> Traced:
        config, lengths = self._config, largest(self._config)
        whole = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
        num_samples = -(-config.rollout.prompts_per_step * config.rollout.samples_per_prompt // num_ranks)
        rounds = -(-num_samples // sum(length == whole for length in lengths))
        with first_of(num_ranks):
            mesh = _Mesh.open(config.train.mesh, num_ranks)

            def traced(lengths: Sequence[int]) -> Traced:
                told = [self._trained(depth, mesh, lengths, rounds) for depth in self._depths.traced]
                return replace(self._depths.extend(told), num_micro_batches=rounds, tokens=sum(lengths))

            found = traced(lengths)
            if self._on_device:
                less = traced([-(-length // 2) for length in lengths])
                found = replace(found, token_bytes=(found.needed - less.needed) / (found.tokens - less.tokens))
            return found

    def _trained(self, depth: int, mesh: Mesh, lengths: Sequence[int], rounds: int) -> _Told:
        """A micro-batch, the last one, and the step."""
        model = self._cut(depth, mesh, "float32")
        with self._ledger() as ledger:
            _fill(model)
            backend = policy_of(self._config, model, Packing.alike(model, self._tried), mesh, "cpu")
            ledger.name(PARAMETERS, [*model.parameters(), *model.buffers()])
            ledger.name(OPTIMIZER, (moment for state in backend.optimizer.state.values() for moment in state.values()))
            backend.objective = _Sections(backend, ledger)  # type: ignore[assignment]
            _mark(model, ledger)
            rows = [_row(self._config, number, length) for number, length in enumerate(lengths)]
            spans, sent = [[number, 0, 0, 1] for number in range(len(rows))], Counter[str]()
            for last in (False, True):
                ledger.peaks.clear()
                ledger.sent.clear()
                ledger.section = _FORWARD
                backend.accumulate(0, rows, spans, last=last)
                ledger.name(GRADIENTS, (p.grad for p in model.parameters() if p.grad is not None))
                sent.update({name: size * (1 if last else rounds - 1) for name, size in ledger.sent.items()})
            ledger.sent.clear()
            ledger.section = _STEP
            backend.update(0)
            sent.update(ledger.sent)
        return _Told({section: peak.parts for section, peak in ledger.peaks.items()}, sent)

    def _scoring(self, num_ranks: int, dtype: str, lengths: Sequence[int], response: int | None = None) -> Traced:
        """response: tokens of each sample that are scored; None: as many as the longest response has."""
        with first_of(num_ranks):
            mesh = _Mesh.open(MeshConfig(), num_ranks)
            return self._depths.extend(
                [self._scored(depth, mesh, dtype, lengths, response) for depth in self._depths.traced]
            )

    def _scored(self, depth: int, mesh: Mesh, dtype: str, lengths: Sequence[int], response: int | None) -> _Told:
        rows = [_row(self._config, number, length) for number, length in enumerate(lengths)]
        sequences = [Packable(row.tokens, response or len(row.mask)) for row in rows]
        model = self._cut(depth, mesh, dtype)
        with self._ledger() as ledger, torch.no_grad():
            _fill(model)
            packed = Packing.alike(model, self._tried).pack(sequences)
            parallel.compute_in(model, dtype)
            ledger.name(PARAMETERS, [*model.parameters(), *model.buffers()])
            ledger.peaks.clear()
            ledger.section = _FORWARD
            train, temperature = self._config.train, self._config.rollout.temperature
            response_log_probs(model, packed, temperature=temperature, chunk_tokens=train.log_prob_chunk_tokens)
        return _Told({section: peak.parts for section, peak in ledger.peaks.items()}, {})

    def _cut(self, depth: int, mesh: Mesh, dtype: str) -> Any:
        """As `load_model` has it before it reads."""
        train = self._config.train
        model = without_memory(_of_depth(self._model_config, depth), dtype).eval()
        model.tie_weights()
        parallel.shard(model, mesh, param_dtype=train.dtype, encoders=train.encoders)
        return model

    def _ledger(self) -> Ledger:
        return Ledger(self._model_config.get_text_config().vocab_size, staged=not self._on_device)


class _Sections:
    """An objective that tells where a forward ends."""

    def __init__(self, backend: Backend[Any], ledger: Ledger) -> None:
        self._objective, self._ledger = backend.objective, ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def sums(self, model: Any, rows: Sequence[TrainRow], use: Use) -> LossSums:
        found = self._objective.sums(model, rows, use)
        self._ledger.keep()
        self._ledger.section = _HEAD
        return found


def _mark(model: Any, ledger: Ledger) -> None:
    """A backward is told layer by layer."""

    def begins(index: int) -> Any:
        def hook(_: torch.Tensor) -> None:
            ledger.section = index

        def after(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(hook)

        return after

    for index, layer in enumerate(_text_layers(model)):
        layer.register_forward_hook(begins(index))


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


def largest(config: JobConfig) -> list[int]:
    """The micro-batch with the most tokens: the longest samples, and a shorter one that fills it."""
    whole, room = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens, config.train.micro_batch_tokens
    lengths = [whole] * (room // whole)
    rest = room - sum(lengths)
    return [*lengths, rest] if rest > 1 else lengths


def _row(config: JobConfig, number: int, length: int) -> TrainRow:
    """A sample whose prompt begins like no other's."""
    response = min(max(config.rollout.max_new_tokens, length - config.rollout.max_prompt_tokens), length - 1)
    tokens = np.ones(length, np.int32)
    tokens[0] = number
    column = np.zeros(response, np.float32)
    return TrainRow(tokens, np.ones(response, np.uint8), column, column, column, column, np.zeros(response, np.int32))


# ---- a few layers tell of all -------------------------------------------------------------------------------------------


def _text_layers(model: Any) -> list[Any]:
    inside = {module for tower in towers_of(model) for module in tower.modules()}
    return [layer for layer in decoder_layers(model) if layer not in inside]


@dataclass(frozen=True, slots=True)
class _Depths:
    """Layers of a decoder that come in turns: `before` others, then again and again `period` kinds."""

    num_layers: int
    before: int
    period: int
    traced: tuple[int, ...]

    @classmethod
    def of(cls, model: Any) -> _Depths:
        layers, types = _text_layers(model), getattr(model.config.get_text_config(), "layer_types", None)
        kinds = [
            (types[index] if types else None, type(layer), [(name, p.shape) for name, p in layer.named_parameters()])
            for index, layer in enumerate(layers)
        ]
        num, found = len(kinds), (len(kinds), 1)
        for period in range(1, num // 2):
            before = max((i - period + 1 for i in range(period, num) if kinds[i] != kinds[i - period]), default=0)
            found = min(found, (before, period), key=sum)
        before, period = found
        first = max(before + max(2 * period, _NEIGHBOURS), _DEEPSTACK if towers_of(model) else 0)
        first += (num - first) % period
        second = first + period
        return cls(num, before, period, (first, second) if second < num else (num,))

    def extend(self, told: Sequence[_Told]) -> Traced:
        """Of the whole model. What a layer more adds to a section is the same for each."""
        sections = [self._named(each.sections, depth) for each, depth in zip(told, self.traced, strict=True)]
        first, last = sections[0], sections[-1]
        sizes = {name: self._longer(parts, last[name]) for name, parts in first.items()}
        at = max(sizes, key=lambda name: sum(sizes[name].values()))
        depths = f" at {' and '.join(map(str, self.traced))} of {self.num_layers} layers" if len(told) > 1 else ""
        kept = sizes.get(_HEAD, {})
        sent = self._longer(told[0].sent, told[-1].sent)
        return Traced(f"traced{depths}, in {at}", sizes[at], sent, kept=kept.get(ACTIVATIONS, 0) + kept.get(LOGITS, 0))

    def _named(self, sections: Mapping[Section, Mapping[str, int]], depth: int) -> dict[str, Mapping[str, int]]:
        """Layers by what they are at every depth: counted from the ends. Of those between, none holds more."""
        found = {}
        for section, parts in sections.items():
            if isinstance(section, str):
                found[section] = parts
            elif depth - section <= self.period:
                found[f"the backward of layer -{depth - section}"] = parts
            elif section < self.before + self.period:
                found[f"the backward of layer {section + 1}"] = parts
        return found

    def _longer(self, first: Mapping[str, int], last: Mapping[str, int]) -> dict[str, int]:
        if len(self.traced) == 1:
            return dict(first)
        times = (self.num_layers - self.traced[0]) // self.period
        return {name: size + (last[name] - size) * times for name, size in first.items()}


_NEIGHBOURS = 3
"""Layers of which FSDP2 holds something at once: of one gradients leave, one is in its backward, the next is gathered."""
_DEEPSTACK = 4
"""Layers that take features of encoders, at most, and one more."""


def _of_depth(config: Any, depth: int) -> Any:
    """The same model with its first layers alone."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    text.num_hidden_layers = depth
    if types:
        text.layer_types = types[:depth]
    return config
