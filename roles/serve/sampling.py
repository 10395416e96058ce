"""Sampling: how samples are drawn, in the words that both dialects have, and how much one request may ask for.

Owns which parameters there are. What an engine cannot do is refused, since leaving it out would change the answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import AfterValidator, Field

from rondo.roles.serve.fields import Count, Fields, Integers, Stops, shown
from rondo.roles.serve.limits import MAX_SAMPLES, MAX_TOPS
from rondo.roles.serve.requests import Ask
from rondo.runtime.errors import ConfigError


def require_samples(count: int) -> int:
    """The count. ConfigError for a request of too many samples, over all of its prompts."""
    if count > MAX_SAMPLES:
        raise ConfigError(f"n must be at most {MAX_SAMPLES} over all prompts, got {count}. Ask again for the rest")
    return count


def any_seed() -> int:
    return secrets.randbits(63)


Seed = Annotated[int, AfterValidator(lambda seed: seed & (2**63 - 1))]


class Sampling(Fields):
    """How the `n` samples of a prompt are drawn. `max_new_tokens` None: as many as fit."""

    off: ClassVar = {
        "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,), "logit_bias": ({},),
    }  # fmt: skip
    max_new_tokens: Count | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: Stops = ()
    stop_token_ids: Integers = ()
    seed: Seed = Field(default_factory=any_seed)
    n: Annotated[Count, AfterValidator(require_samples)] = 1
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True


def token_ids(value: Any, name: str, most: int) -> np.ndarray:
    """A list of at most `most` token ids as int32 [T]."""
    if not isinstance(value, list):
        raise ConfigError(f"{name} must be a list of token ids, got {type(value).__name__}. Tokenize the prompt")
    if len(value) > most:
        raise ConfigError(f"{name} must have at most {most} tokens, got {len(value)}. Shorten it")
    if not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ConfigError(f"{name} must be a list of token ids, got {shown(value)}. Tokenize the prompt")
    return np.asarray(value, np.int32)


def require_tops(asks: Sequence[Ask]) -> None:
    """ConfigError for a request whose samples could have more likeliest tokens told than anybody reads."""
    count = sum(ask.params.max_new_tokens * ask.params.num_top for ask in asks)
    if count > MAX_TOPS:
        raise ConfigError(
            f"top_logprobs of all tokens of all samples must be at most {MAX_TOPS}, got {count}. Ask for fewer, or set max_tokens"
        )
