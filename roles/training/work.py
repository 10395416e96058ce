"""Work: how many floating-point operations a step of a model takes, and which share of its device's peak that is.

Owns the count by the model's shape and the peaks by a device's name. Does not own times. The count is of the model, whatever is
computed again or shared: 6 operations a token for every matrix weight that it meets (2 forward, 4 backward; 4 in all where the
weight is frozen, whose own gradient nobody computes), and 6 L h T^2 for a row of T tokens in L layers of causal full attention
with h = heads x head dimension (Chowdhery et al. 2022, arXiv 2204.02311, appendix B, with the half of its attention that the mask
leaves). Experts count by the part of them that a token is routed to. Not counted: encoders of media, and layers of other
attention but for their weights.

    work = Work.of(model, "bfloat16"); work.figures(tokens, squares, step_s, train_s, num_ranks)["mfu"]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rondo.models.routing import Routing
from rondo.models.units import towers_of

_EXPERTS = re.compile(r"(^|\.)experts\.")
PEAKS: Mapping[str, float] = {
    "GB200": 2500, "B200": 2250, "H200": 989, "H100 PCIE": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "H20": 148,
    "A100": 312, "A800": 312, "A40": 150, "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121, "A6000": 155,
    "RTX 4090": 165, "RTX 3090": 71, "V100": 125, "T4": 65, "MI325X": 1307, "MI300X": 1307, "MI250X": 383,
}  # fmt: skip
"""TFLOP/s of dense products in 16 bits, of vendors' data sheets, by what a name holds; the first that fits."""


@dataclass(frozen=True, slots=True)
class Work:
    """`peak`: of a device, in FLOP/s; None where it is not known."""

    per_token: float
    per_square: float
    device: str
    peak: float | None

    @classmethod
    def of(cls, model: Any, dtype: str) -> Work:
        """Of a model as it trains in `dtype`, sharded or not."""
        config, routing = model.config.get_text_config(), Routing.of(model)
        towers = {id(each) for tower in towers_of(model) for each in tower.parameters()}
        looked_up = model.get_input_embeddings().weight
        is_tied = getattr(model.get_output_embeddings(), "weight", None) is looked_up
        per_token = 0.0
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or id(weight) in towers or (weight is looked_up and not is_tied):
                continue
            part = routing.top_k / routing.num_experts if routing is not None and _EXPERTS.search(name) else 1.0
            per_token += (6 if weight.requires_grad else 4) * part * weight.numel()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = sum(kind == "full_attention" for kind in kinds)
        device = next(model.parameters()).device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        return cls(per_token, 6.0 * layers * config.num_attention_heads * head, name, peak_of(name, dtype))

    def figures(self, tokens: float, squares: float, step_s: float, train_s: float, num_ranks: int) -> dict[str, float]:
        """Of a step of so many tokens over all ranks. squares: the sum over its rows of the square of their tokens."""
        flops, step_s = self.per_token * tokens + self.per_square * squares, max(step_s, 1e-9)
        found = {
            "tokens_per_s": tokens / step_s, "tokens_per_s_per_device": tokens / step_s / num_ranks,
            "model_flops": flops, "flops_per_s_per_device": flops / step_s / num_ranks,
        }  # fmt: skip
        if self.peak is not None and train_s > 0:
            found["mfu"] = flops / train_s / num_ranks / self.peak
        return found

    def told(self) -> dict[str, Any]:
        """As an event."""
        why = "" if self.peak is not None else "its peak in this dtype is not known here: no share of it is told (mfu)"
        return {"device": self.device, "peak_flops_per_s": self.peak, "why": why}


def peak_of(device: str, dtype: str) -> float | None:
    """FLOP/s of a device in products of that dtype; None where that is not known."""
    if dtype not in ("bfloat16", "float16"):
        return None
    named = device.upper().replace("-", " ")
    return next((1e12 * peak for name, peak in PEAKS.items() if re.search(rf"\b{name}\b", named)), None)
