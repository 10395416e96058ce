"""What a server answers to /generate, as arrays: at once, or in parts.

Owns the reading: tokens, log-probs, versions, finish reason, routed experts. Pure. Owns no call, no request and no meaning: what
an "abort" means depends on who asked for it (`one_server.py`); nor what a single number must look like (`numbers.py`).

    growing = Growing()
    growing.take([b'{"output_ids": [7], "meta_info": {...}}'])      # True: there is more than before
    growing.so_far()                                                # Prefix of one token
    growing.answer(num_before=len(request.sequence), most=64)       # after the last part: Answer

A server started with incremental-streaming-output, as rondo starts its own, tells with each part the tokens that are new; any
other tells all tokens so far. Which of the two is seen from the number of tokens that each part names.

Invariant: every token has a log-prob and a version, all of which are believable, or the answer is refused with ProtocolError. A
token keeps what it was first told with, its version too, until the end. A part names one version, that of the server when it told
the part, and a server changes it before it samples on: what is told as an old version was sampled under it, and what is told as a
new one may have been sampled shortly before. The spans of the last part, which the answer has, are exact.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson

from rondo.roles.engines.engine import Prefix, Top, experts_of_whole
from rondo.roles.engines.sglang.capabilities import Experts
from rondo.roles.engines.sglang.numbers import check_tokens, integer, sampled, version_of
from rondo.runtime.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Answer:
    """`new`: what came, at least no token. `matched` is the token that ended it, with "stop"."""

    new: Prefix
    finish: Literal["stop", "length", "abort"]
    why: str = ""
    matched: int | None = None


class Growing:
    """One answer, until its last part, of a model with so large a `vocabulary` (None: not known). `num_top`: how many of the
    likeliest tokens were asked for at each place. `version`: of the adapter that was asked for, which a server does not tell."""

    def __init__(self, num_top: int = 0, vocabulary: int | None = None, version: int | None = None) -> None:
        self._vocabulary = vocabulary
        self._version = version
        self._tokens, self._log_probs = _Column(np.int32), _Column(np.float32)
        self._versions = _Column(np.int32)
        self._num_top = num_top
        self._top = _Column(np.int32, num_top), _Column(np.float32, num_top)
        self._last: dict[str, Any] = {}

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the last part told of the answer."""
        return self._last.get("meta_info", {})

    @property
    def num_tokens(self) -> int:
        """So far."""
        return self._tokens.size

    def take(self, events: Sequence[bytes]) -> bool:
        """Parts as JSON, one at least. Whether tokens came and the answer goes on. Raises ProtocolError for what is no part."""
        before = self.num_tokens
        newest = _parsed(events[-1])
        meta = newest["meta_info"]
        if len(_listed(meta, "output_token_logprobs")) != meta.get("completion_tokens"):
            for event in events[:-1]:
                self._add(_parsed(event))
        self._add(newest)  # where it tells all, those that came with it need not be read
        return self.num_tokens > before and meta.get("finish_reason") is None

    def take_whole(self, told: Any) -> None:
        """An answer that comes at once, as JSON values."""
        self._last = _checked(told, "an answer of /generate")
        self._grow(self._last["meta_info"], None)

    def _add(self, part: dict[str, Any]) -> None:
        meta: Mapping[str, Any] = part["meta_info"]
        num = len(_listed(meta, "output_token_logprobs"))
        total = integer(meta, "completion_tokens", num)
        known = self.num_tokens
        # A server that aborts tells all tokens once more, and joins that to what it had not sent yet.
        if not known <= total <= num and known + num != total:
            raise ProtocolError(
                f"a part of an answer must tell all {total} tokens or those that are new, got {num} after {known}"
            )
        if total > known:
            self._grow(meta, known - total)
        self._last = part

    def _grow(self, meta: Mapping[str, Any], start: int | None) -> None:
        """By tokens that are new, from `start` on."""
        triples, top = (_listed(meta, name)[start:] for name in ("output_token_logprobs", "output_top_logprobs"))
        tokens, log_probs = sampled(triples, self._vocabulary)
        self._tokens.add(tokens)
        self._log_probs.add(log_probs)
        version = version_of(meta.get("weight_version")) if self._version is None else self._version
        self._versions.add(np.full(len(tokens), version, np.int32))
        if self._num_top and (found := _top_of(top, len(tokens), self._vocabulary, self._num_top)) is not None:
            self._top[0].add(found.tokens)
            self._top[1].add(found.log_probs)

    def so_far(self) -> Prefix:
        """What was sampled. Its arrays are views of what does not change any more."""
        top = None
        if self._num_top and self._top[0].size == self.num_tokens > 0:
            top = Top(self._top[0].all(), self._top[1].all())
        return Prefix(self._tokens.all(), self._log_probs.all(), self._versions.all(), top)

    def answer(self, *, num_before: int, most: int, experts: Experts | None = None) -> Answer:
        """To a request for `most` tokens; `num_before` were there before the first one of the answer. Its `routed_experts` are
        uint8 or int16 [num_before + R - 1, layers, top_k]."""
        if not self._last:
            raise ProtocolError("a streamed answer must have a part, got none")
        meta, new, num_tokens = self.meta, self.so_far(), self.num_tokens
        finish: Any = meta.get("finish_reason")
        kind = finish.get("type") if isinstance(finish, dict) else None
        if kind not in ("stop", "length", "abort"):
            raise ProtocolError(f"a finish reason must be stop, length or abort, got {finish!r:.300}")
        if num_tokens > most:
            raise ProtocolError(f"an answer must have the {most} tokens that were asked for at most, got {num_tokens}")
        ids = _listed(self._last, "output_ids")  # in a part, perhaps those that are new
        same = ids == new.tokens[max(0, num_tokens - len(ids)) :].tolist()
        if kind != "abort" and not (same and integer(meta, "completion_tokens", num_tokens) == num_tokens):
            raise ProtocolError(
                f"every token of an answer must have a log-prob, got {len(ids)} ids, {meta.get('completion_tokens')} counted "
                f"and {num_tokens} log-probs"
            )
        if integer(meta, "prompt_tokens", num_before) != num_before:
            raise ProtocolError(
                f"an answer must be to all {num_before} tokens that were sent, got one to {meta['prompt_tokens']}. "
                "Start the server without --allow-auto-truncate"
            )
        matched = finish.get("matched")
        routed = _routed(meta.get("routed_experts"), num_before + num_tokens - 1, experts)
        versions = _versions(meta, num_tokens) if self._version is None else new.policy_versions
        whole = Prefix(new.tokens, new.log_probs, versions, new.top, routed)
        return Answer(whole, kind, str(finish.get("message") or ""), matched if isinstance(matched, int) else None)


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


def _top_of(told: Sequence[Sequence[Sequence[Any]]], num_tokens: int, vocabulary: int | None, num: int) -> Top | None:
    """The `num` likeliest tokens at each of `num_tokens` places; None of an answer without them."""
    if not told:
        return None
    if len(told) != num_tokens:
        raise ProtocolError(f"the likeliest tokens must be told at {num_tokens} places, got {len(told)}")
    try:
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


def joined(before: Prefix | None, new: Prefix) -> Prefix | None:
    """What there was, and what came after it; None where that is nothing."""
    if not len(new.tokens):
        return before
    if before is None:
        return new
    return Prefix(
        np.concatenate([before.tokens, new.tokens]),
        np.concatenate([before.log_probs, new.log_probs]),
        np.concatenate([before.policy_versions, new.policy_versions]),
        _with_top(before, new),
        experts_of_whole(before, new.routed_experts),
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


class _Column:
    """Numbers that only become more: [N], or [N, width]. Each is copied a few times at most, however long it gets."""

    def __init__(self, dtype: type, *width: int) -> None:
        self.size = 0
        self._room: np.ndarray = np.empty((0, *width), dtype)

    def add(self, values: np.ndarray) -> None:
        if not self.size:
            self._room, self.size = values, len(values)
            return
        end = self.size + len(values)
        if end > len(self._room):
            wider = np.empty((max(end, 2 * len(self._room)), *self._room.shape[1:]), self._room.dtype)
            wider[: self.size] = self.all()
            self._room = wider
        self._room[self.size : end] = values
        self.size = end

    def all(self) -> np.ndarray:
        return self._room[: self.size]


def _parsed(event: bytes) -> dict[str, Any]:
    try:
        part = orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"a part of an answer must be JSON, got {event[:200]!r}") from error
    return _checked(part, "a part of an answer")


def _checked(told: Any, what: str) -> dict[str, Any]:
    if not isinstance(told, dict) or not isinstance(told.get("meta_info"), dict):
        raise ProtocolError(f"{what} must have meta_info, got {told!r:.300}")
    return told


def _listed(told: Mapping[str, Any], name: str) -> list[Any]:
    """A list of `told`, empty where it is not there."""
    found = told.get(name) or []
    if not isinstance(found, list):
        raise ProtocolError(f"{name} of an answer must be a list, got {found!r:.200}")
    return found
