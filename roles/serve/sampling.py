"""Sampling: one set of parameters out of the words of both dialects, and prompts out of text.

Owns which parameters there are. What an engine cannot do is refused, since leaving it out would change the answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rondo.roles.serve.fields import Fields, shown
from rondo.roles.serve.limits import MAX_SAMPLES, MAX_TOPS
from rondo.roles.serve.requests import Ask
from rondo.runtime.errors import ConfigError

_DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the `num_samples` samples of a request are drawn. `max_new_tokens` None: as many as fit."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    seed: int
    num_samples: int
    ignore_eos: bool = False
    keep_stop: bool = False
    skip_special_tokens: bool = True


def read_sglang(body: Any) -> Sampling:
    """SGLang's `sampling_params`. Unknown names are refused, as there."""
    fields = Fields(body, "sampling_params")
    found = _read(fields, limit="max_new_tokens", default=_DEFAULT_NEW_TOKENS, seed="sampling_seed")
    found = replace(found, keep_stop=fields.flag("no_stop_trim"))
    fields.off("min_new_tokens", 0)
    fields.off("spaces_between_special_tokens", True)
    fields.off("custom_params", {})
    for name in ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "beam_width", "watermark", "choice"):
        fields.off(name)
    fields.refuse_rest({"stream_interval"})
    return found


def read_openai(fields: Fields) -> Sampling:
    """The sampling fields that both of OpenAI's endpoints share; the rest stays in `fields`."""
    return _read(fields, limit="max_tokens", default=None, seed="seed")


def _read(fields: Fields, *, limit: str, default: int | None, seed: str) -> Sampling:
    """What both dialects have, `limit` and `seed` under their names there."""
    found = Sampling(
        max_new_tokens=fields.integer(limit, default, least=1),
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=fields.integer("top_k", -1),
        stops=fields.stops("stop"),
        stop_token_ids=fields.integers("stop_token_ids"),
        seed=_seed(fields.integer(seed)),
        num_samples=require_samples(fields.integer("n", 1, least=1)),
        ignore_eos=fields.flag("ignore_eos"),
        skip_special_tokens=fields.flag("skip_special_tokens", True),
    )
    fields.off("presence_penalty", 0)
    fields.off("frequency_penalty", 0)
    fields.off("repetition_penalty", 1)
    fields.off("min_p", 0)
    fields.off("logit_bias", {})
    return found


def token_ids(value: Any, name: str, most: int) -> np.ndarray:
    """A list of at most `most` token ids as int32 [T]."""
    if not isinstance(value, list):
        raise ConfigError(f"{name} must be a list of token ids, got {type(value).__name__}. Tokenize the prompt")
    if len(value) > most:
        raise ConfigError(f"{name} must have at most {most} tokens, got {len(value)}. Shorten it")
    if not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ConfigError(f"{name} must be a list of token ids, got {shown(value)}. Tokenize the prompt")
    return np.asarray(value, np.int32)


def require_samples(count: int) -> int:
    """The count. ConfigError for a request of too many samples, over all of its prompts."""
    if count > MAX_SAMPLES:
        raise ConfigError(f"n must be at most {MAX_SAMPLES} over all prompts, got {count}. Ask again for the rest")
    return count


def require_tops(asks: Sequence[Ask]) -> None:
    """ConfigError for a request whose samples could have more likeliest tokens told than anybody reads."""
    count = sum(ask.params.max_new_tokens * ask.params.num_top for ask in asks)
    if count > MAX_TOPS:
        raise ConfigError(
            f"top_logprobs of all tokens of all samples must be at most {MAX_TOPS}, got {count}. Ask for fewer, or set max_tokens"
        )


def _seed(seed: int | None) -> int:
    return secrets.randbits(63) if seed is None else seed & (2**63 - 1)
