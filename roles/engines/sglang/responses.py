"""What a server answers to /generate, as arrays.

Owns the reading: tokens, log-probs, versions, finish reason, routed experts. Pure. Owns no request and no meaning: what an
"abort" means depends on who asked for it (`one_server.py`); nor what a single number must look like (`numbers.py`).

    answer = read_answer(told, num_before=len(request.sequence), most=64, vocabulary=151_936, experts=None)
    answer.tokens, answer.log_probs, answer.versions       # int32 [R], float32 [R], int32 [R]

Invariant: every token has a log-prob and a version, all of which are believable, or the answer is refused with ProtocolError.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rondo.roles.engines.engine import Prefix, Top, experts_of_whole
from rondo.roles.engines.sglang.capabilities import Experts
from rondo.roles.engines.sglang.numbers import check_tokens, integer, sampled, version_of
from rondo.runtime.errors import ProtocolError


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


def read_answer(told: Any, *, num_before: int, most: int, vocabulary: int | None, experts: Experts | None) -> Answer:
    """`told` is the JSON of one request for `most` tokens; `num_before` were there before the first one of the answer."""
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
    tokens, log_probs = sampled(triples, vocabulary)
    num_tokens = len(tokens)
    if num_tokens > most:
        raise ProtocolError(f"an answer must have the {most} tokens that were asked for at most, got {num_tokens}")
    if kind != "abort" and (
        list(ids) != tokens.tolist() or integer(meta, "completion_tokens", num_tokens) != num_tokens
    ):
        raise ProtocolError(
            f"every token of an answer must have a log-prob, got {len(ids)} ids, {meta.get('completion_tokens')} counted and "
            f"{num_tokens} log-probs"
        )
    if integer(meta, "prompt_tokens", num_before) != num_before:
        raise ProtocolError(
            f"an answer must be to all {num_before} tokens that were sent, got one to {meta['prompt_tokens']}. "
            "Start the server without --allow-auto-truncate"
        )
    matched = finish.get("matched")
    return Answer(
        tokens,
        log_probs,
        _versions(meta, num_tokens),
        kind,
        str(finish.get("message") or ""),
        matched if isinstance(matched, int) else None,
        _routed(meta.get("routed_experts"), num_before + num_tokens - 1, experts),
        top_of(meta.get("output_top_logprobs"), num_tokens, vocabulary),
    )


def _versions(meta: Mapping[str, Any], num_tokens: int) -> np.ndarray:
    """int32 [R]. Where no spans are told, all tokens have the one version that is."""
    found = np.full(num_tokens, version_of(meta.get("weight_version")), np.int32)
    spans = meta.get("weight_versions")
    if spans is None:
        return found
    covered = 0
    try:
        for span in spans:
            start, end = integer(span, "start"), integer(span, "end")
            if start != covered or end < start:
                raise ProtocolError("they must follow each other")
            covered = end
            found[start:end] = version_of(span["version"])
        if covered < num_tokens:
            raise ProtocolError(f"they end at {covered}")
    except (ProtocolError, TypeError, KeyError, AttributeError) as error:
        raise ProtocolError(
            f"the spans of weight versions must cover all {num_tokens} tokens, got {spans!r:.300} ({error})"
        ) from error
    return found


def top_of(
    told: Sequence[Sequence[Sequence[Any]]] | None, num_tokens: int, vocabulary: int | None, num: int | None = None
) -> Top | None:
    """The likeliest tokens at each of `num_tokens` places, of an answer that was asked for them: `num`, or as many as it has."""
    if not told or not num_tokens:
        return None
    if len(told) != num_tokens:
        raise ProtocolError(f"the likeliest tokens must be told at {num_tokens} places, got {len(told)}")
    try:
        num = max(map(len, told)) if num is None else num
        tokens, log_probs = np.full((num_tokens, num), -1, np.int64), np.full((num_tokens, num), np.nan, np.float32)
        for place, triples in enumerate(each[:num] for each in told):
            tokens[place, : len(triples)] = [triple[1] for triple in triples]
            log_probs[place, : len(triples)] = [triple[0] for triple in triples]
    except (TypeError, ValueError, LookupError, OverflowError) as error:
        raise ProtocolError(
            f"the likeliest tokens must be told as [log-prob, token, text], got {told!r:.300}"
        ) from error
    check_tokens(tokens[tokens != -1], vocabulary)
    return Top(tokens.astype(np.int32), log_probs)


def _routed(told: str | None, num_rows: int, experts: Experts | None) -> np.ndarray | None:
    """The experts of all tokens but the last: base64 of little-endian int32 [rows, layers, top_k]."""
    if told is None or experts is None or num_rows <= 0:
        return None
    try:
        flat = np.frombuffer(base64.b64decode(told, validate=True), "<i4")
        rows = flat.reshape(-1, experts.num_layers, experts.top_k)
    except (binascii.Error, ValueError, TypeError) as error:
        raise ProtocolError(f"routed experts must be whole rows of {experts}, got {told!r:.40}") from error
    if len(rows) < num_rows:
        raise ProtocolError(f"routed experts must be told for {num_rows} tokens, got {len(rows)} rows")
    rows = rows[:num_rows]
    if rows.size and not (rows.min() >= 0 and rows.max() < experts.num):
        raise ProtocolError(f"routed experts must be below {experts.num}, got {rows.min()} to {rows.max()}")
    return rows.astype(np.uint8 if experts.num <= 256 else np.int16)


def joined(before: Prefix | None, answer: Answer) -> Prefix | None:
    """What there was, and what came."""
    if not len(answer.tokens):
        return before
    whole = extended(before, Prefix(answer.tokens, answer.log_probs, answer.versions, answer.top))
    return replace(whole, routed_experts=experts_of_whole(before, answer.experts))


def extended(before: Prefix | None, new: Prefix) -> Prefix:
    """What there was, and `new` after it."""
    if before is None:
        return new
    return Prefix(
        np.concatenate([before.tokens, new.tokens]),
        np.concatenate([before.log_probs, new.log_probs]),
        np.concatenate([before.policy_versions, new.policy_versions]),
        _with_top(before, new),
    )


def _with_top(before: Prefix, new: Prefix) -> Top | None:
    """What is known of the likeliest tokens at all places; a prefix that came without them has none."""
    if new.top is None:
        return None
    num = new.top.tokens.shape[1]
    tokens = np.full((len(before.tokens), num), -1, np.int32)
    log_probs = np.full((len(before.tokens), num), np.nan, np.float32)
    if before.top is not None:
        known = min(num, before.top.tokens.shape[1])
        tokens[:, :known], log_probs[:, :known] = before.top.tokens[:, :known], before.top.log_probs[:, :known]
    return Top(np.concatenate([tokens, new.top.tokens]), np.concatenate([log_probs, new.top.log_probs]))
