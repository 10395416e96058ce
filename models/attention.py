"""Which attention a model is trained and scored with, and the proof that it keeps the sequences of a batch apart.

Owns what "auto" means on a device, which attentions a device has not, and how a kernel is proved before it is used: on its
device, in the precision of the run, with heads as the model's layers have them, it must give the queries of a flat batch what
each sequence gives alone, and the same gradients. Whole models are tried out in float32 with "sdpa" (`trials.py`), which says
that their layers attend as flat batches need; that a kernel does what those batches tell it is asked here, of one layer, where
the noise of bfloat16 has no depth to grow with. Does not own the kernels (`kernels.py`).

    choose(model, "auto", "bfloat16")      # Choice("flash_attention_2", "flash-attn is installed, and ...")
    chosen(model)                          # the same

Invariant: a kernel that was not proved for this model on its device reads no batch: `chosen` says "sdpa" until then.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rondo.models.kernels import FLASH, FLEX, Part
from rondo.models.shared_prefixes import Call, Segment, calls_of, lay_out, ways, why_apart
from rondo.models.towers import attend_with, part_of
from rondo.runtime.errors import ConfigError

TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Of the norm of what one token's heads give, or of a gradient there: more than rounding makes, products of ten bits in float32
included, and less than one token more or less that is seen."""
_Lengths = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
_BATCHES: tuple[_Lengths, ...] = (
    ((150, 5, 1), ((0, 130), (0, 1), (0, 129), (1, 40), (1, 200), (2, 13), (2, 1), (3, 70), (3, 9), (10, 33), (10, 2))),
    ((37, 3), ((0, 64), (0, 100), (1, 9), (2, 20), (2, 6))),
)
"""Lengths of the proof's prompts, and of what goes on (segment, length): on both sides of the blocks of 64 and 128 that kernels
work by, and behind answers too. Two batches: what is compiled for the second one serves all later lengths."""
_KERNELS = 64
"""Variants of flex_attention that one process may compile: by heads, precision, gradients, and length known or not. Beyond it
torch would go on with an attention that makes all scores, after eight unless it is told."""
_NARROW = 96
"""Of a window in the proof, where its layers have a wider one: so that it hides keys of these sequences, within blocks and whole
ones."""
_SPREAD = 2.0
"""Of the scores of the proof: a few keys of hundreds decide what a query gets."""

log = logging.getLogger(__name__)
_chosen: WeakKeyDictionary[Any, Choice] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Choice:
    """An attention by its name in transformers, and why it is that."""

    name: str
    why: str


def candidates(attn: str, device: str, dtype: str) -> list[Choice]:
    """What `model.attn` allows on a device ("cpu", "cuda:1") that computes in `dtype`, the best first. ConfigError where it names
    what the device has not."""
    if attn != "auto":
        if lack := _lacks(attn, device, dtype):
            raise ConfigError(
                f'model.attn must be an attention that the device of the run has, got "{attn}" on {device}: {lack}. '
                'Set it to "auto"'
            )
        return [Choice(attn, "model.attn names it")]
    found = [
        Choice(FLASH, "flash-attn is installed, and computes in half precision on this GPU"),
        Choice(FLEX, "torch compiles it for this GPU"),
        Choice("sdpa", "the device is a CPU" if not device.startswith("cuda") else "nothing better takes this model"),
    ]
    return [choice for choice in found if not _lacks(choice.name, device, dtype)]


def _lacks(attn: str, device: str, dtype: str) -> str:
    """Why there is no such attention, "" where there is."""
    if attn == FLEX and not device.startswith("cuda"):
        return "it has no backward on a CPU"
    if attn != FLASH:
        return ""
    if not device.startswith("cuda"):
        return "it runs on GPUs alone"
    if dtype == "float32":
        return "it computes in half precision alone, and train.dtype is float32"
    return "" if importlib.util.find_spec("flash_attn") else "the package flash-attn is not installed"


def choose(model: Any, attn: str, dtype: str) -> Choice:
    """The attention of `model` (whole or cut; on its device), proved. Once, before it computes in `dtype`.

    ConfigError where `attn` names one that the device, or the model, cannot have; with "auto" the next best is taken, and the log
    says why.
    """
    device = next(model.parameters()).device
    for choice in candidates(attn, str(device), dtype):
        problem = ""
        if choice.name in (FLASH, FLEX):
            problem = why_apart(model) or prove(choice.name, calls_of(model), device, getattr(torch, dtype))
        if not problem:
            log.info("attention: model=%s attn=%s why=%r", type(model).__name__, choice.name, choice.why)
            return _chosen.setdefault(model, choice)
        if attn != "auto":
            raise ConfigError(not_for(attn, type(model).__name__, problem))
        log.warning("attention: model=%s is not attn=%s reason=%r", type(model).__name__, choice.name, problem)
    raise AssertionError("sdpa must be among the candidates")


def choose_for_towers(model: Any, calls: set[Call], dtype: str) -> None:
    """The towers of `model`, which call their attention so, get the kernel that was chosen for it, proved for them; without, they
    go picture by picture."""
    name, device = chosen(model).name, next(model.parameters()).device
    if name not in (FLASH, FLEX) or not calls:
        return
    if problem := prove(name, calls, device, getattr(torch, dtype)):
        log.warning("attention: towers of model=%s are not attn=%s reason=%r", type(model).__name__, name, problem)
        return
    attend_with(model, name)


def not_for(attn: str, model_name: str, problem: str) -> str:
    """What a user is told whose model cannot have it."""
    return (
        f'model.attn must be an attention that keeps the packed sequences of {model_name} apart, got "{attn}": {problem}. '
        'Set it to "auto"'
    )


def chosen(model: Any) -> Choice:
    """The attention of `model`; "sdpa" for one that was not asked."""
    return _chosen.get(model, Choice("sdpa", "nothing else was proved"))


def prove(name: str, calls: set[Call], device: torch.device, dtype: torch.dtype) -> str:
    """Whether a kernel gives each token of a flat batch what it gets alone, forward and backward: "", or what it does."""
    if not calls:
        return "no layer of it attends in a way that is known here"
    if name == FLEX:
        torch._dynamo.config.recompile_limit = max(_KERNELS, torch._dynamo.config.recompile_limit)
    for call, lengths in itertools.product(sorted(calls, key=repr), _BATCHES):
        try:
            problem = _compared(name, call, lengths, device, dtype)
        except (AssertionError, NameError):
            raise
        except Exception as error:  # noqa: BLE001  # whatever a kernel raises: it cannot be used
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300] or 'no message'}"
        if problem:
            what = f"{call.num_heads} heads of {call.head_dim}" + (
                f" in windows of {call.window}" if call.window else ""
            )
            return f"{name} with {what} in {str(dtype).removeprefix('torch.')}: {problem}"
    return ""


def _compared(name: str, call: Call, lengths: _Lengths, device: torch.device, dtype: torch.dtype) -> str:
    prompts, answers = lengths if call.causal else (lengths[0], ())
    segments = [*map(Segment, prompts), *(Segment(length, behind) for behind, length in answers)]
    starts, shared = lay_out(segments, name)
    spans = [torch.arange(start, start + one.length) for start, one in zip(starts, segments, strict=True)]
    draw = torch.Generator().manual_seed(0)
    num_tokens, scaling = sum(one.length for one in segments), call.scaling or call.head_dim**-0.5
    window = None if call.window is None else min(call.window, _NARROW)
    seen = 0 if call.causal else max(prompts)  # keys behind a query's own that it sees
    (whole,) = shared.parts
    if not call.causal:
        ends = torch.tensor([*starts, num_tokens], dtype=torch.int32)
        whole = part_of(name, ends, max(prompts), num_tokens)

    def drawn(heads: int, size: int, spread: float = 1.0) -> torch.Tensor:
        return (torch.randn(num_tokens, heads, size, generator=draw) * spread).to(device, dtype)

    inputs = (
        drawn(call.num_heads, call.head_dim, _SPREAD / (scaling * call.head_dim**0.5)),
        drawn(call.num_key_heads, call.head_dim),
        drawn(call.num_key_heads, call.value_dim),
    )
    weight = drawn(call.num_heads, call.value_dim)
    whole = whole.to(device)
    found = _with_gradients(lambda *x: _through(whole, x, call.scaling, window), inputs, weight)
    with torch.no_grad():
        scored = _through(whole, inputs, call.scaling, window)
    alone = [torch.cat([*(spans[at] for at in way), own]) for way, own in zip(ways(segments), spans, strict=True)]
    rows = [torch.arange(len(one) - len(own), len(one)) for one, own in zip(alone, spans, strict=True)]  # that are kept
    places = torch.cat([span[kept] for span, kept in zip(alone, rows, strict=True)]).argsort().to(device)

    def each_alone(*x: torch.Tensor) -> torch.Tensor:
        parts = [
            _plain([one[span.to(device)] for one in x], scaling, window, seen)[kept.to(device)]
            for span, kept in zip(alone, rows, strict=True)
        ]
        return torch.cat(parts)[places]

    expected = _with_gradients(each_alone, tuple(one.float() for one in inputs), weight.float())
    names = ("outcome", "gradient of queries", "gradient of keys", "gradient of values", "score")
    for what, one, other in zip(names, (*found, scored), (*expected, expected[0]), strict=True):
        gap = _gap(one.float(), other)
        if not gap <= TOLERANCE[dtype]:
            return f"the {what} of a token in a packed batch is {gap:.2g} of its norm off that alone"
    return ""


def _through(part: Part, x: tuple[torch.Tensor, ...], scaling: float | None, window: int | None) -> torch.Tensor:
    return part.attend(torch.nn.Module().eval(), *x, scaling=scaling, dropout=0.0, window=window)


def _with_gradients(
    attend: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], weight: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(outcome, gradients of queries, keys and values), each [N, heads, size]."""
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        outcome = attend(*leaves)
        return outcome.detach(), *torch.autograd.grad(outcome, leaves, weight)


def _plain(x: Sequence[torch.Tensor], scaling: float, window: int | None, behind: int) -> torch.Tensor:
    """Attention of one sequence, in a window or full, up to so many keys behind a query's own, written out: queries, keys and
    values [T, heads, size] -> [T, heads, size]."""
    query, key, value = x
    each = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(each, 1)) * scaling
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1 + behind)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(-window)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(each, 1))


def _gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest difference of a token, relative to its norm, or to the mean norm where its own is smaller."""
    norms = expected.flatten(1).norm(dim=1)
    return float(((found - expected).flatten(1).norm(dim=1) / norms.clamp(min=float(norms.mean()))).max())
