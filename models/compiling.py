"""torch.compile by block: each decoder layer's forward is compiled by itself.

Owns what is compiled, and whether this machine can. Layers of one kind share their code, so that it is made once for all of
them: for the length of the first micro-batch, and when one has another length, once more for any. Told at once that all is
dynamic, torch makes symbols of the sizes of heads and hidden states too, and slower code in more time. What gathers a layer's
weights, lends it copies or computes it again stays around it, and every rank compiles by itself. Attention over a flat batch
stays outside too: its blocks are others in every micro-batch.

    check_compiler("cuda:0"); compile_layers(layers)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from rondo.models.shared_prefixes import stay_outside_of_graphs
from rondo.runtime.errors import ConfigError


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """In place: what their `forward` is now is compiled when it is first called."""
    stay_outside_of_graphs()
    for layer in layers:
        layer.forward = torch.compile(MethodType(_own_forward(type(layer)), layer))


def _own_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """Without what transformers wraps around it for a checkpointing of its own, which is off here: once more in the class that
    FSDP2 makes, and each of them is frames to compile."""
    return inspect.unwrap(kind.forward, stop=lambda one: one.__code__.co_name != "forward_with_checkpointing")


def check_compiler(device: str | torch.device) -> None:
    """ConfigError where torch.compile makes no code for `device` on this machine. Takes seconds."""
    try:
        torch.compile(lambda x: torch.sin(x) + x)(torch.ones(2, device=device))
    except Exception as error:  # whatever a compiler, or its absence, raises
        told = str(error).strip().splitlines()
        raise ConfigError(
            f"train.compile must be False where torch.compile has no working compiler for {device}, got True "
            f"({type(error).__name__}: {told[0] if told else 'no message'}). Install one (g++ for the CPU, Triton and gcc for a "
            "GPU), or set it to False"
        ) from error
