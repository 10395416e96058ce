"""Which models train here: the others are refused when they are opened, and by `rondo check` before.

Owns what a model is asked: that no token sees those behind it, and that a packed micro-batch gives the log-probs that its own
forward gives each sequence alone. Asked of the model itself, on a few tokens in float32; `rondo check`, which has no weights,
asks a small one of the same config (`stand_in.py`), whose windows are shorter than these. The kernel that reads its batches in
the precision of the run is proved beside that (`attention.py`). Engines are asked by `roles/engines/embedded/hf_forward.py`.

    packing = accept(model, attn="auto", dtype="bfloat16")
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rondo.models.attention import choose, choose_for_towers
from rondo.models.logprobs import response_log_probs, response_values
from rondo.models.packing import Packing, Sequence
from rondo.models.towers import listening
from rondo.models.trials import differs, logits_of, trial
from rondo.models.value_head import value_head_of
from rondo.runtime.errors import ConfigError

_PROMPT, _ANSWERS = 5, (13, 13, 4)
_NATS = 1e-3


def accept(model: Any, *, attn: str = "sdpa", dtype: str = "float32") -> Packing:
    """How `model` (whole, or cut; on its device) wants its sequences, once it computes in `dtype` with the attention `attn`.
    Raises ConfigError with the reason where it cannot be trained: Failed where its own forward computes nothing."""
    name = type(model).__name__
    if model.get_output_embeddings() is None:
        raise ConfigError(f"{name} must have an output layer, got none. Choose a causal LM")
    device = next(model.parameters()).device
    places = [(seed, np.arange(_PROMPT + answer)) for seed, answer in enumerate(_ANSWERS)]
    tokens = [(at * (1 + seed) + at // 3) % 3 + 1 for seed, at in places]  # of equal ones places would not matter
    tokens[1][:-1] = tokens[0][:-1]  # they differ in the last one
    tokens[1][-1] = tokens[0][-1] % 3 + 1
    with trial(model):
        alone = [logits_of(model, input_ids=torch.from_numpy(one)[None].to(device))[0] for one in tokens]
        if not all(bool(logits.isfinite().all()) for logits in alone):
            raise ConfigError(f"{name} must give finite logits, got others on a few tokens. Check its weights")
        if problem := differs(alone[0][:-1], alone[1][:-1]):
            raise ConfigError(
                f"the tokens of {name} must not see those behind them, got others after another last token ({problem}). "
                "Choose a causal LM"
            )
        choose(model, attn, dtype)
        packing = Packing.of(model)
        rows = [Sequence(one.astype(np.int32), len(one) - _PROMPT) for one in tokens]
        try:
            packed = replace(packing, attn="sdpa").pack(rows, train=True).to(device)
            with listening(model) as calls:
                values = value_head_of(model) is not None
                found = (
                    response_values(model, packed) if values else response_log_probs(model, packed, chunk_tokens=7)[0]
                )
        except (
            IndexError,
            RuntimeError,
            TypeError,
        ) as error:  # its output layer gets something else than hidden states
            raise ConfigError(
                f"{name} must compute a packed micro-batch, got {type(error).__name__}: {error}. Choose a model of another family"
            ) from error
    choose_for_towers(model, calls, dtype)
    expected = []  # log-probs of each sequence's answer, or what a value head gives there
    for logits, one in zip(alone, tokens, strict=True):
        answer = logits[_PROMPT - 1 : -1]
        if not values:
            answer = torch.log_softmax(answer, -1).gather(1, torch.from_numpy(one)[_PROMPT:, None].to(device))
        expected.append(answer[:, 0])
    gap = float((found - torch.cat(expected)).abs().max())
    if not gap <= _NATS:
        raise ConfigError(
            f"log-probs of a micro-batch must be those that {name} gives each sequence alone, got some {gap:.2g} nats off. "
            "Choose a model of another family"
        )
    return packing
