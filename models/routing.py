"""Routers of a mixture of experts: what they choose is listened to, and replaced by what was recorded.

Owns the one hook on a model's routers, what is recorded with it, what is put in its place, and what a forward tells of them for
metrics and losses (`roles/training/balance.py`). Does not own where recordings lie (`roles/engines/embedded/recorder.py` in an
engine, the bus in between, `packing.py` in a micro-batch), nor where the experts are.

Transformers routes in one module a layer, `*TopKRouter`, which returns (logits, weights, experts). Two precisions, or two
orders of summing, choose other experts for a few tokens in a hundred, and those tokens get other log-probs. So the recorded
experts stand in for the router's choice, with weights gathered from the trainer's own probabilities: the gate still learns.

    engine   router -> experts [N, top_k] ------- routed_experts [T - 1, layers, top_k] --------.
    trainer  router -> logits -> probabilities -> weights at the recorded experts <-------------'

Invariant: a position without a recording (the last token of a sequence, padding, dummies) keeps the router's own choice, to the
bit. What activation checkpointing computes again goes the way that its forward went. A layer is named by its place in the
decoder: one without a router, or a router that lies elsewhere (a head for further tokens, a tower), shifts no other.

Legend: N positions of a forward in the order of the flat [rows, length]; E experts; L layers with a router, in their order.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from rondo.models.units import towers_of
from rondo.runtime.errors import ConfigError

_ROUTER = re.compile("Top[Kk]Router$")
_MOST_BYTES = 256
_NUM_TRIED = 64
_hooked: WeakSet[Any] = WeakSet()
"""Models whose routers have the hook."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What the recorded experts of a model look like: per token [num_layers, top_k], each below `num_experts`. Layers without
    experts count too, and hold zeros."""

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint8 if self.num_experts <= _MOST_BYTES else np.int16)

    @property
    def token_bytes(self) -> int:
        """Of one token's recording."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    @classmethod
    def of(cls, model: Any) -> Routing | None:
        """Of a model on any device, also without weights; None for one without experts. ConfigError where layers differ."""
        routers = routers_of(model)
        if not routers:
            return None
        kinds = {(int(router.top_k), int(router.num_experts)) for router in routers.values()}
        if len(kinds) > 1:
            raise ConfigError(
                f"the layers of {type(model).__name__} must all choose among as many experts, got (top_k, experts) "
                f"{sorted(kinds)}. Set train.router_replay to 'off'"
            )
        ((top_k, num_experts),) = kinds
        return cls(int(model.config.get_text_config().num_hidden_layers), top_k, num_experts)


@dataclass(frozen=True, slots=True)
class Routes:
    """Recorded experts of a forward's positions."""

    experts: torch.Tensor  # integers [N, layers, top_k]
    recorded: torch.Tensor  # bool [N]; where False, the router chooses

    def to(self, device: torch.device | str) -> Routes:
        return Routes(self.experts.to(device), self.recorded.to(device))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a router weighs the experts that it chose: by their probabilities, softmax or sigmoid, brought to the sum 1 or not,
    times a factor."""

    sigmoid: bool = False
    renormalizes: bool = True
    factor: float = 1.0

    def scores(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """float32 [N, E]"""
        return logits_NE.float().sigmoid() if self.sigmoid else torch.softmax(logits_NE, -1, dtype=torch.float)

    def probabilities(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """float32 [N, E] with the sum 1; of sigmoids as in DeepSeek-V3 (arXiv 2412.19437, equation 19)."""
        scores = self.scores(logits_NE)
        return scores / scores.sum(-1, keepdim=True) if self.sigmoid else scores

    def weights(self, logits_NE: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """[N, top_k] at these experts, computed as routers do."""
        found = self.scores(logits_NE).gather(-1, experts)
        if self.renormalizes:
            found = found / found.sum(-1, keepdim=True)
        if self.factor != 1:
            found = found * self.factor
        return found.to(logits_NE.dtype)


def routers_of(model: Any) -> dict[int, nn.Module]:
    """Decoder layer -> its router, for those that have one. The decoder's are the first stack of layers outside of towers that is
    as deep as the config says."""
    found = {}
    for number, layer in enumerate(_decoder(model)):
        named = (module for module in layer.modules() if _ROUTER.search(type(module).__name__))
        routers = (module for module in named if hasattr(module, "top_k") and hasattr(module, "num_experts"))
        if (router := next(routers, None)) is not None:
            found[number] = router
    return found


def correction_biases(model: Any) -> list[torch.Tensor]:
    """Of the layers that have one, [E] each: what is added to the scores of experts for the choice among them alone."""
    return [
        buffer
        for layer in _decoder(model)
        for name, buffer in layer.named_buffers()
        if name.endswith("e_score_correction_bias")
    ]


def _decoder(model: Any) -> list[nn.Module]:
    depth = model.config.get_text_config().num_hidden_layers
    inside = {module for tower in towers_of(model) for module in tower.modules()}
    for name, stack in model.named_modules():
        named = isinstance(stack, nn.ModuleList) and name.rpartition(".")[2] == "layers"
        if named and stack not in inside and len(stack) >= depth:
            return list(stack)[:depth]
    return []


def listen(model: Any, hear: Callable[[int, torch.Tensor], None]) -> None:
    """From now on `hear(layer, experts [N, top_k])` is called for every router that runs."""
    for layer, router in routers_of(model).items():

        def tell(module: Any, args: Any, output: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            hear(layer, output[2])

        router.register_forward_hook(tell)


# ---- one forward --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layer:
    """What one router did with the positions that count."""

    num_counted: torch.Tensor  # int64, those positions
    counts: torch.Tensor  # int64 [E], tokens that each expert was given
    probabilities: torch.Tensor  # float32 [E], sums of the router's own; with the gradient where that is asked for
    entropy: torch.Tensor  # float64, sum over positions of that of the router's probabilities, in nats
    num_replayed: torch.Tensor  # int64, routes that a recording named
    num_differing: torch.Tensor  # int64, those of them that the router would not have chosen


@dataclass(slots=True, eq=False)
class Heard:
    """What the routers tell in one forward: where it `records` the experts of all positions, where it `watches` what metrics are
    made of, of the positions that count; where it `learns` too, sums of probabilities carry the gradient."""

    counted: torch.Tensor | None = None  # bool [N]; None: all positions count
    records: bool = False
    watches: bool = False
    learns: bool = False
    layers: dict[int, Layer] = field(default_factory=dict)
    experts: dict[int, torch.Tensor] = field(default_factory=dict)

    def routes(self, routing: Routing) -> torch.Tensor:
        """What was recorded, uint8 or int16 [N, layers, top_k]; zeros in layers without experts."""
        first = next(iter(self.experts.values()))
        found = torch.zeros(
            (len(first), routing.num_layers, routing.top_k),
            dtype=getattr(torch, routing.dtype.name),
            device=first.device,
        )
        for layer, experts in self.experts.items():
            found[:, layer] = experts.to(found.dtype)
        return found

    def hear(
        self,
        layer: int,
        scoring: Scoring,
        logits_NE: torch.Tensor,
        own: torch.Tensor,
        taken: torch.Tensor,
        routes: Routes | None,
    ) -> None:
        if self.records:
            self.experts[layer] = taken
        if not self.watches and not self.learns:
            return
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            probabilities_NE = scoring.probabilities(logits_NE)
            kept_NE = probabilities_NE if self.counted is None else probabilities_NE * self.counted[:, None]
            sums_E = kept_NE.sum(0)
        if not self.watches:
            return
        with torch.no_grad():
            ones = (
                torch.ones_like(taken)
                if self.counted is None
                else self.counted[:, None].expand_as(taken).to(taken.dtype)
            )
            counts = taken.new_zeros(logits_NE.shape[-1]).scatter_add_(0, taken.flatten(), ones.flatten())
            entropy = -torch.xlogy(kept_NE, probabilities_NE).sum(dtype=torch.float64)
            num_counted = ones[:, 0].sum()
            replayed = differing = torch.zeros_like(num_counted)
            if routes is not None:
                strange = (taken[:, :, None] != own[:, None, :]).all(-1) & routes.recorded[:, None]
                replayed, differing = routes.recorded.sum() * taken.shape[1], strange.sum()
        self.layers[layer] = Layer(num_counted, counts, sums_E, entropy, replayed, differing)


@dataclass(frozen=True, slots=True)
class _Passage:
    """What holds for the routers of one forward."""

    routes: Routes | None
    heard: Heard | None


_now: ContextVar[_Passage | None] = ContextVar("passage", default=None)


def hook_routers(model: Any, *, outside_of_graphs: bool = False) -> Routing | None:
    """Hang the hook on every router of `model`, sharded or not; None for a model without experts. It does nothing until a forward
    is given something to replay or to tell. outside_of_graphs: of torch.compile.

    ConfigError for routers that weigh experts otherwise than by probabilities over all of them.
    """
    if (routing := Routing.of(model)) is None:
        return None
    scorings = scorings_of(model)
    for layer, router in routers_of(model).items():
        hook = _hook(layer, scorings[type(router)])
        router.register_forward_hook(torch.compiler.disable(hook) if outside_of_graphs else hook)
    _hooked.add(model)
    return routing


def enable_replay(model: Any) -> Routing:
    """The same; ConfigError for a model without experts."""
    if (routing := hook_routers(model)) is None:
        raise no_experts(model)
    return routing


def no_experts(model: Any, setting: str = "train.router_replay", off: str = "'off'") -> ConfigError:
    return ConfigError(
        f"{setting} must be {off} for a model without routers that choose among experts, got {type(model).__name__}. Remove it"
    )


def scorings_of(model: Any) -> dict[type, Scoring]:
    """Of each class of routers in `model`. ConfigError where one weighs otherwise."""
    return {
        kind: scoring_of(router) for kind, router in {type(each): each for each in routers_of(model).values()}.items()
    }


def scoring_of(router: nn.Module) -> Scoring:
    """How it weighs. Tried out on a copy with weights of its own, since some families have a setting for it and some do not.
    ConfigError where weights are made otherwise: that cannot be replayed."""
    with _disable_current_modes(), torch.no_grad():  # also where all other tensors have no memory
        own = {
            id(p): nn.Parameter(torch.empty(p.shape)) for p in router.parameters()
        }  # whole, wherever the router's are
        trial = copy.deepcopy(router, own | {id(b): torch.zeros(b.shape) for b in router.buffers()})
        draw = torch.Generator().manual_seed(0)
        for parameter in trial.parameters():
            parameter.normal_(generator=draw)
        try:
            found = trial(torch.randn(_NUM_TRIED, trial.get_parameter("weight").shape[1], generator=draw))
        except (AttributeError, TypeError):  # it has no matrix of its own, or wants more than hidden states
            found = None
        if isinstance(found, tuple) and len(found) == 3:
            logits, weights, experts = found
            factor = float(getattr(router, "routed_scaling_factor", 1.0))
            for scoring in (Scoring(s, r, f) for s in (False, True) for r in (True, False) for f in {1.0, factor}):
                if torch.allclose(scoring.weights(logits, experts), weights, atol=1e-6):
                    return scoring
    raise ConfigError(
        f"train.router_replay must be 'off' for routers like {type(router).__name__}, which do not weigh experts with a softmax "
        "or a sigmoid over all of them. Remove it"
    )


@contextmanager
def through_routers(model: Any, routes: Routes | None = None, heard: Heard | None = None) -> Iterator[None]:
    """While the body runs, tokens of `model` go to the experts of `routes`, else where its routers send them; `heard` is told."""
    if (routes is not None or heard is not None) and model not in _hooked:
        raise AssertionError(
            f"enable_replay must be called for {type(model).__name__} before its routers are listened to"
        )
    with _Going(None if routes is None and heard is None else _Passage(routes, heard)):
        yield


def the_same_way() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For a forward that runs now, and again in its backward: both go the way of this moment, and compute the same on it. What
    the second tells is forgotten."""
    now = _now.get()
    if now is not None and now.heard is not None:
        now = replace(now, heard=Heard(now.heard.counted, learns=now.heard.learns))
    return nullcontext(), _Going(now)


class _Going:
    """May be entered more than once, and by a thread that runs a backward."""

    def __init__(self, now: _Passage | None) -> None:
        self._now = now
        self._before: list[_Passage | None] = []

    def __enter__(self) -> None:
        self._before.append(_now.get())
        _now.set(self._now)

    def __exit__(self, *_: object) -> None:
        _now.set(self._before.pop())


def _hook(layer: int, scoring: Scoring) -> Callable[..., Any]:
    def route(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        now = _now.get()
        if now is None:
            return None
        routes, (logits, weights, own) = now.routes, output
        taken = own
        if routes is not None:
            if len(own) != len(routes.recorded):
                raise AssertionError(
                    f"routes must be of the {len(own)} positions of a forward, got {len(routes.recorded)}"
                )
            taken = torch.where(routes.recorded[:, None], routes.experts[:, layer].to(own.dtype), own)
            weights = scoring.weights(logits, taken)
        if now.heard is not None:
            now.heard.hear(layer, scoring, logits, own, taken, routes)
        return logits, weights, taken

    return route
