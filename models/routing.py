"""Router replay: a trainer sends each token to the experts that the engine sampled it with.

Owns the one hook on a model's routers, what is recorded with it and what is put in its place. Does not own where recordings lie
(`roles/engines/embedded/recorder.py` in an engine, the bus in between, `packing.py` in a micro-batch).

Transformers routes in one module a layer, `*TopKRouter`, which returns (logits, weights, experts). Two precisions, or two
orders of summing, choose other experts for a few tokens in a hundred, and those tokens get other log-probs. So the recorded
experts stand in for the router's choice, with weights gathered from the trainer's own probabilities: the gate still learns.

    engine   router -> experts [N, top_k] ------- routed_experts [T - 1, layers, top_k] --------.
    trainer  router -> logits -> probabilities -> weights at the recorded experts <-------------'

Invariant: a position without a recording (the last token of a sequence, padding, dummies) keeps the router's own choice, to the
bit. What activation checkpointing computes again goes the way that its forward went.

Legend: N positions of a forward in the order of the flat [rows, length]; E experts.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import nn

from rondo.runtime.errors import ConfigError

_ROUTER = "TopKRouter"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_MOST_BYTES = 256
_NUM_TRIED = 64
_replaying: WeakSet[Any] = WeakSet()
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
                f"{sorted(kinds)}. Set train.router_replay=False"
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


_routes: ContextVar[Routes | None] = ContextVar("routes", default=None)


def routers_of(model: Any) -> dict[int, nn.Module]:
    """Decoder layer -> its router."""
    return {
        int(place[1]): module
        for name, module in model.named_modules()
        if type(module).__name__.endswith(_ROUTER) and (place := _LAYER.search(name)) is not None
    }


def listen(model: Any, hear: Callable[[int, torch.Tensor], None]) -> None:
    """From now on `hear(layer, experts [N, top_k])` is called for every router that runs."""
    for layer, router in routers_of(model).items():

        def tell(module: Any, args: Any, output: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            hear(layer, output[2])

        router.register_forward_hook(tell)


# ---- replay -------------------------------------------------------------------------------------------------------------


def enable_replay(model: Any) -> None:
    """Hang the hook on every router of `model`, sharded or not. Does nothing until a forward is given `Routes`.

    ConfigError for a model without experts, or whose weights are no softmax over all of them.
    """
    if (routing := Routing.of(model)) is None:
        raise no_experts(model)
    for layer, router in routers_of(model).items():
        _check_layers(layer, routing)
        router.register_forward_hook(_hook(layer, renormalizes(router)))
    _replaying.add(model)


def no_experts(model: Any) -> ConfigError:
    return ConfigError(
        f"train.router_replay must be False for a model without routers that choose among experts, got True with "
        f"{type(model).__name__}. Remove it"
    )


def renormalizes(router: nn.Module) -> bool:
    """Whether the weights of the chosen experts are brought to the sum 1. Tried out on a copy with weights of its own, since some
    families have a setting for it and some do not. ConfigError where they are made otherwise: that cannot be replayed."""
    own = {id(p): nn.Parameter(torch.empty(p.shape)) for p in router.parameters()}  # whole, wherever the router's are
    trial = copy.deepcopy(router, own | {id(b): torch.zeros(b.shape) for b in router.buffers()})
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trial.parameters():
            parameter.normal_(generator=draw)
        hidden = torch.randn(_NUM_TRIED, trial.get_parameter("weight").shape[1], generator=draw)
        found = trial(hidden)
    if isinstance(found, tuple) and len(found) == 3:
        logits, weights, experts = found
        for answer in (True, False):
            if torch.allclose(_weights(logits, experts, answer), weights, atol=1e-6):
                return answer
    raise ConfigError(
        f"train.router_replay must be False for routers like {type(router).__name__}, which do not weigh experts with a softmax "
        "over all of them, got True. Remove it"
    )


@contextmanager
def replaying(model: Any, routes: Routes | None) -> Iterator[None]:
    """While the body runs, tokens of `model` go to these experts; with None where its routers send them."""
    if routes is not None and model not in _replaying:
        raise AssertionError(f"enable_replay must be called for {type(model).__name__} before it replays routes")
    with _Going(routes):
        yield


def the_same_way() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For a forward that runs now, and again in its backward: both go the way of this moment."""
    return nullcontext(), _Going(_routes.get())


class _Going:
    """May be entered more than once, and by a thread that runs a backward."""

    def __init__(self, routes: Routes | None) -> None:
        self._now = routes
        self._before: list[Routes | None] = []

    def __enter__(self) -> None:
        self._before.append(_routes.get())
        _routes.set(self._now)

    def __exit__(self, *_: object) -> None:
        _routes.set(self._before.pop())


def _hook(layer: int, renormalize: bool) -> Callable[..., Any]:
    def replay(router: Any, args: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        routes = _routes.get()
        if routes is None:
            return None
        logits, _, own = output
        if len(own) != len(routes.recorded):
            raise AssertionError(f"routes must be of the {len(own)} positions of a forward, got {len(routes.recorded)}")
        experts = torch.where(routes.recorded[:, None], routes.experts[:, layer].to(own.dtype), own)
        return logits, _weights(logits, experts, renormalize), experts

    return replay


def _weights(logits_NE: torch.Tensor, experts: torch.Tensor, renormalize: bool) -> torch.Tensor:
    """[N, top_k] at these experts, computed as routers do."""
    found = torch.softmax(logits_NE, -1, dtype=torch.float).gather(-1, experts)
    if renormalize:
        found = found / found.sum(-1, keepdim=True)
    return found.to(logits_NE.dtype)


def _check_layers(layer: int, routing: Routing) -> None:
    if layer >= routing.num_layers:
        raise AssertionError(f"a router must lie in one of {routing.num_layers} decoder layers, got layer {layer}")
