"""What a server answers to /generate, as arrays.

Owns the reading: tokens, log-probs, versions, finish reason, routed experts. Pure. Owns no request and no meaning: what an
"abort" means depends on who asked for it (`engine.py`).

    answer = read_answer(told, num_before=len(request.sequence), experts=None)
    answer.tokens, answer.log_probs, answer.versions       # int32 [R], float32 [R], int32 [R]

Invariant: every token has a log-prob and a version, or the answer is refused with ProtocolError.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rondo.roles.rollout.engine import Top
from rondo.roles.rollout.sglang.capabilities import Experts
from rondo.runtime.errors import ProtocolError

STRANGE = -1
"""The version of weights that have no number: those that a server was started with."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`matched` is the token that ended it, with "stop". `experts` uint8 or int16 [tokens before + R - 1, layers, top_k]."""

    tokens: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish: Literal["stop", "length", "abort"]
    why: str = ""
    matched: int | None = None
    experts: np.ndarray | None = field(default=None, repr=False)
    top: Top | None = field(default=None, repr=False)


def read_answer(told: Any, *, num_before: int, experts: Experts | None) -> Answer:
    """`told` is the JSON of one request; `num_before` tokens were there before the first one of the answer."""
    try:
        meta: Mapping[str, Any] = told["meta_info"]
        finish = meta["finish_reason"]
        # A request that ends before its first token has neither.
        triples: Sequence[Sequence[Any]] = meta.get("output_token_logprobs") or ()
        kind = finish["type"]
        ids = told.get("output_ids") or ()
    except (TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(
            f"an answer of /generate must have meta_info and finish_reason, got {told!r:.300}"
        ) from error
    if kind not in ("stop", "length", "abort"):
        raise ProtocolError(f"a finish reason must be stop, length or abort, got {kind!r}")
    tokens = np.array([triple[1] for triple in triples], np.int32)
    log_probs = np.array([triple[0] for triple in triples], np.float32)
    if kind != "abort" and list(ids) != tokens.tolist():
        raise ProtocolError(
            f"every token of an answer must have a log-prob, got {len(ids)} ids and {len(tokens)} log-probs"
        )
    matched = finish.get("matched")
    return Answer(
        tokens,
        log_probs,
        _versions(meta, len(tokens)),
        kind,
        str(finish.get("message") or ""),
        matched if isinstance(matched, int) else None,
        _routed(meta.get("routed_experts"), num_before + len(tokens) - 1, experts),
        top_of(meta.get("output_top_logprobs"), len(tokens)),
    )


def version_of(text: str) -> int:
    """A weight version's number; STRANGE for one that this run did not give."""
    return int(text) if text.removeprefix("-").isdigit() else STRANGE


def _versions(meta: Mapping[str, Any], num_tokens: int) -> np.ndarray:
    """int32 [R]. Where no spans are told, all tokens have the one version that is."""
    found = np.full(num_tokens, version_of(str(meta.get("weight_version", ""))), np.int32)
    spans = meta.get("weight_versions")
    if spans is None:
        return found
    covered = 0
    for span in spans:
        if span["start"] != covered:
            raise ProtocolError(
                f"the spans of weight versions must follow each other, got {spans} for {num_tokens} tokens"
            )
        covered = span["end"]
        found[span["start"] : covered] = version_of(str(span["version"]))
    if covered < num_tokens:
        raise ProtocolError(f"the spans of weight versions must cover all {num_tokens} tokens, got {spans}")
    return found


def top_of(told: Sequence[Sequence[Sequence[Any]]] | None, num_tokens: int, num: int | None = None) -> Top | None:
    """The likeliest tokens at each of `num_tokens` places, of an answer that was asked for them: `num`, or as many as it has."""
    if not told or not num_tokens:
        return None
    if len(told) != num_tokens:
        raise ProtocolError(f"the likeliest tokens must be told at {num_tokens} places, got {len(told)}")
    num = max(map(len, told)) if num is None else num
    tokens, log_probs = np.full((num_tokens, num), -1, np.int32), np.full((num_tokens, num), np.nan, np.float32)
    for place, triples in enumerate(each[:num] for each in told):
        tokens[place, : len(triples)] = [triple[1] for triple in triples]
        log_probs[place, : len(triples)] = [triple[0] for triple in triples]
    return Top(tokens, log_probs)


def _routed(told: str | None, num_rows: int, experts: Experts | None) -> np.ndarray | None:
    """The experts of all tokens but the last: base64 of little-endian int32 [rows, layers, top_k]."""
    if told is None or experts is None or num_rows <= 0:
        return None
    try:
        flat = np.frombuffer(base64.b64decode(told, validate=True), "<i4")
        rows = flat.reshape(-1, experts.num_layers, experts.top_k)
    except (binascii.Error, ValueError) as error:
        raise ProtocolError(f"routed experts must be whole rows of {experts}, got {len(told)} characters") from error
    if len(rows) < num_rows:
        raise ProtocolError(f"routed experts must be told for {num_rows} tokens, got {len(rows)} rows")
    rows = rows[:num_rows]
    if rows.size and not (rows.min() >= 0 and rows.max() < experts.num):
        raise ProtocolError(f"routed experts must be below {experts.num}, got {rows.min()} to {rows.max()}")
    return rows.astype(np.uint8 if experts.num <= 256 else np.int16)
