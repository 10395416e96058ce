"""The embedded engine: a slot engine behind the asyncio `Engine` protocol, computing on a thread that it does not own.

Owns the futures of its callers and the order of what reaches the slot engine. Does not own the thread: `compute` is a
coroutine function that runs a function on the process's one compute thread, for example `WorkerContext.compute`.

Invariant: the slot engine is touched inside a turn only, and at most one turn runs. A turn first carries out what arrived,
in order, then decodes, and between any two decode steps carries out what arrived since; so weights flip and requests end
between steps. Every `generate` ends: with its completion, with the error that a step raised, or with Closed.

    generate / cancel / update_weights --> inbox --> turn on the compute thread (steps for about turn_s) --> futures
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import torch

from rondo.roles.rollout.engine import Completion, EngineStats, Request
from rondo.roles.rollout.hf_forward import HFForward
from rondo.roles.rollout.qwen3_forward import Qwen3Forward, is_plain_qwen3
from rondo.roles.rollout.slots import Forward, SlotEngine
from rondo.runtime.errors import Closed, ConfigError

Compute = Callable[..., Awaitable[Any]]
Path = Literal["auto", "fused", "hf"]


def slot_engine(
    model: Any,
    *,
    num_slots: int,
    max_length: int,
    forward: Path = "auto",
    max_prefill_tokens: int = 8192,
    fixed_shapes: bool = False,
    version: int = 0,
) -> SlotEngine:
    """A slot engine over a transformers causal LM, which it puts into evaluation mode and whose weights it may replace.

    `forward`: "auto" takes the fused path for plain Qwen3 and the Hugging Face path for the rest; "fused" and "hf" force
    one. Raises ConfigError if the forced path cannot compute the model. The rest is as in `SlotEngine`.
    """
    if forward not in ("auto", "fused", "hf"):
        raise ConfigError(f"forward must be auto, fused or hf, got {forward!r}. Use auto.")
    fused = is_plain_qwen3(model)
    if forward == "fused" and not fused:
        raise ConfigError(
            f"forward='fused' must come with a plain dense Qwen3, got {type(model).__name__}. Use forward='auto'."
        )
    model.eval()
    make: type[Qwen3Forward] | type[HFForward] = Qwen3Forward if fused and forward != "hf" else HFForward
    path: Forward = make(model, num_slots=num_slots, max_length=max_length, fixed_shapes=fixed_shapes)
    return SlotEngine(
        path,
        num_slots=num_slots,
        max_length=max_length,
        max_prefill_tokens=max_prefill_tokens,
        fixed_shapes=fixed_shapes,
        version=version,
    )
