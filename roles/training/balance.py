"""How evenly a mixture of experts uses them: what a step tells of its routers, and what evens them.

Owns the metrics of routers, the load-balancing loss and the update of correction biases. Does not own the hook that listens
(`models/routing.py`), nor how the loss is divided (`objective.py`).

    balance = Balance.of(model, train)                   # None: it has no experts
    heard = balance.hears(packed); response_log_probs(model, packed, heard=heard)
    loss += coefficient * balance.loss(heard); balance.add(heard)

The loss is that of a micro-batch of one process, as transformers computes it: how many tokens experts get is known then, and that
of all micro-batches would be known when the last of them has gone forward, too late for the gradient of the first. So, unlike all
else, it depends on how a step is cut. The biases, and the metrics, are of all micro-batches of all ranks.

Legend: L layers with a router, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from rondo.models.packing import PackedBatch
from rondo.models.routing import (
    Heard,
    Layer,
    Routing,
    correction_biases,
    hook_routers,
    no_experts,
    routers_of,
    scorings_of,
)
from rondo.roles.config import TrainConfig
from rondo.runtime.errors import ConfigError

_OFF = {"router_replay": "off", "router_aux_loss_coef": 0, "router_bias_update_rate": 0}


class Balance:
    """Of the steps of one trainer. over_ranks: several train."""

    def __init__(self, model: Any, train: TrainConfig, routing: Routing, *, over_ranks: bool = False) -> None:
        self.routing = routing
        self._num_layers = len(routers_of(model))
        self.coefficient, self._rate, self._over_ranks = (
            train.router_aux_loss_coef,
            train.router_bias_update_rate,
            over_ranks,
        )
        self._biases = correction_biases(model) if self._rate else {}
        self._device = next(model.parameters()).device
        self.forget()

    @classmethod
    def of(cls, model: Any, train: TrainConfig, *, over_ranks: bool = False) -> Balance | None:
        """Its routers are listened to from now on; None for a model without, and for one whose routers cannot be listened to.
        ConfigError where the settings need them."""
        if not look_at(model, train):
            return None
        routing = hook_routers(model, outside_of_graphs=train.compile)
        assert routing is not None
        return cls(model, train, routing, over_ranks=over_ranks)

    def forget(self) -> None:
        """The step in progress is over."""
        shape = self._num_layers, self.routing.num_experts
        self._counts_LE = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._sums = torch.zeros(4, dtype=torch.float64, device=self._device)
        self._of_update_LE, self._update = torch.zeros_like(self._counts_LE), 0

    def hears(self, packed: PackedBatch, *, records: bool = False) -> Heard:
        """What a forward of `packed` is to tell."""
        return Heard(packed.counted, records=records, watches=True, learns=self.coefficient > 0)

    def begin(self, update: int) -> None:
        """What comes is of this update of the step."""
        if update != self._update:
            self._of_update_LE, self._update = torch.zeros_like(self._of_update_LE), update

    def add(self, heard: Heard) -> None:
        """A micro-batch."""
        layers = _layers(heard)
        counts_LE = torch.stack([layer.counts for layer in layers])
        self._counts_LE, self._of_update_LE = self._counts_LE + counts_LE, self._of_update_LE + counts_LE
        told = [(layer.num_counted, layer.entropy, layer.num_replayed, layer.num_differing) for layer in layers]
        self._sums = self._sums + torch.stack([torch.stack([each.double() for each in one]) for one in told]).sum(0)

    def loss(self, heard: Heard) -> torch.Tensor:
        """E * sum over experts of f P, with f the part of all tokens and layers that an expert is given (so that these add up to
        top_k) and P its mean probability: Fedus et al. 2021, Switch Transformers, arXiv 2101.03961, equations 4 to 6, over all
        layers at once, as transformers' `load_balancing_loss_func` has it. top_k where all are used alike."""
        layers = _layers(heard)
        rows = torch.stack([layer.num_counted for layer in layers]).sum().clamp(min=1)
        share_E = torch.stack([layer.counts for layer in layers]).sum(0) / rows
        mean_E = torch.stack([layer.probabilities for layer in layers]).sum(0) / rows
        return self.routing.num_experts * (share_E * mean_E).sum()

    def even_out(self) -> None:
        """After an optimizer step: biases grow by the rate where experts were given less than the mean of their layer in the
        update, and fall by it where more (collective): Wang et al. 2024, arXiv 2408.15664, algorithm 1."""
        counts_LE = self._reduced(self._of_update_LE).double()
        steps_LE = self._rate * (counts_LE.mean(1, keepdim=True) - counts_LE).sign()
        for bias, step in zip(self._biases, steps_LE, strict=True):
            bias += step.to(bias.dtype)

    def figures(self) -> dict[str, float]:
        """Metrics of the step (collective): the greatest part of a layer's routes that one expert is given, the mean entropy of
        routers, routes that went nowhere, and the part of the replayed ones that routers would not have chosen."""
        counts_LE, sums = self._reduced(self._counts_LE).double(), self._reduced(self._sums)
        loads = (counts_LE.amax(1) / counts_LE.sum(1)).max()
        biases = [bias.abs().max().double() for bias in self._biases]
        figures = torch.cat([sums, torch.stack([loads, counts_LE.sum(), *biases])])
        rows, entropy, replayed, differing, max_share, routes, *greatest = figures.tolist()  # the host waits once
        if not rows:
            return {}
        found = {
            "router_max_share": max_share,
            "router_entropy": entropy / rows,
            "router_dropped": rows * self.routing.top_k - routes,
        }
        if greatest:
            found["router_bias_max"] = max(greatest)
        return found | ({"router_differs": differing / replayed} if replayed else {})

    def _reduced(self, values: torch.Tensor) -> torch.Tensor:
        found = values.clone()
        if self._over_ranks:
            dist.all_reduce(found)
        return found


def look_at(model: Any, train: TrainConfig) -> bool:
    """Whether `model`, on any device, has routers that can be listened to. ConfigError where it must, by the settings."""
    wanted = next((name for name, off in _OFF.items() if getattr(train, name) != off), None)
    try:
        routing = Routing.of(model)
        scorings_of(model)
    except ConfigError:
        if wanted is not None:
            raise
        return False
    if wanted is not None and routing is None:
        raise no_experts(model, f"train.{wanted}", repr(_OFF[wanted]))
    if train.router_bias_update_rate and len(correction_biases(model)) < len(routers_of(model)):
        raise ConfigError(
            f"train.router_bias_update_rate must be 0 for a model whose routers have no e_score_correction_bias, got "
            f"{train.router_bias_update_rate:g} with {type(model).__name__}. Use train.router_aux_loss_coef, or remove it"
        )
    return routing is not None


def _layers(heard: Heard) -> list[Layer]:
    return [heard.layers[number] for number in sorted(heard.layers)]
