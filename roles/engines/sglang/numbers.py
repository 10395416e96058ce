"""Numbers that a server tells, before any of them is believed.

Owns what a token, a log-prob, a count and a version of weights must look like. Pure. Owns no answer and no meaning
(`responses.py`, `stream.py`, `capabilities.py`).

    sampled([[-0.5, 17, None], [-1.2, 4, None]], vocabulary=32)      # int32 [17, 4], float32 [-0.5, -1.2]
    sampled([[None, 17, None]], vocabulary=32)                       # ProtocolError: a NaN would reach the trainer

Invariant: what is returned is finite and in range; all else is a ProtocolError that says what the server told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rondo.roles.engines.ranges import TOKEN
from rondo.runtime.errors import ProtocolError

STRANGE = -1
"""The version of weights that have no number: those that a server was started with, or that this run did not give."""
_ROUNDING = 1e-3
_LOWEST = -1e4
"""A log-prob below is of a token that no sampler draws: float32 knows no probability below exp(-104)."""
_VERSION_DIGITS = 9
_SHOWN = 200


def sampled(triples: Sequence[Sequence[Any]], vocabulary: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int32 [R] and log-probs float32 [R] of R triples (log-prob, token, text)."""
    try:
        told = [triple[0] for triple in triples]
        tokens = _array([triple[1] for triple in triples], "i")
        log_probs = _array(told, "fi")
    except (TypeError, ValueError, LookupError) as error:
        raise ProtocolError(
            f"sampled tokens must be told as [log-prob, token, text], got {triples!r:.{_SHOWN}}"
        ) from error
    check_tokens(tokens, vocabulary)
    wrong = ~((log_probs >= _LOWEST) & (log_probs <= _ROUNDING))
    if wrong.any():
        place = int(wrong.argmax())
        raise ProtocolError(
            f"the log-prob of a sampled token must be from {_LOWEST:g} to 0, got {told[place]!r} at place {place} of {len(told)}"
        )
    return tokens.astype(np.int32), log_probs.astype(np.float32)


def check_tokens(tokens: np.ndarray, vocabulary: int | None) -> None:
    """ProtocolError unless all integers are tokens of the vocabulary, where it is known."""
    most = TOKEN.most if vocabulary is None else vocabulary - 1
    if tokens.size and not (tokens.min() >= 0 and tokens.max() <= most):
        raise ProtocolError(f"told tokens must be from 0 to {most:g}, got {tokens.min()} to {tokens.max()}")


def integer(told: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A count of `told`, 0 or more; `default` where it is not there, which it must be without one."""
    value = told.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ProtocolError(f"{name} of a server must be a count, got {value!r:.{_SHOWN}}")
    return value


def version_of(text: object) -> int:
    """A weight version's number; STRANGE for one that this run did not give."""
    return (
        int(text)
        if isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) <= _VERSION_DIGITS
        else STRANGE
    )


def _array(values: list[Any], kinds: str) -> np.ndarray:
    """[N] of these kinds of numbers; ValueError for anything else, None among them included."""
    found = np.array(values) if values else np.zeros(0, np.int64)
    if found.dtype.kind not in kinds or found.ndim != 1:
        raise ValueError(f"numbers must be of kind {kinds}, got {found.dtype} {found.shape}")
    return found
