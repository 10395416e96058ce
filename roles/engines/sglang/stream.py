"""An answer of /generate that comes in parts.

Owns what the parts are together. A server started with incremental-streaming-output, as rondo starts its own, tells with each
part the tokens that are new; any other tells all tokens so far. Which of the two is seen from the number of tokens that each
part names. Owns no call and no meaning.

    growing = Growing()
    growing.take([b'{"output_ids": [7], "meta_info": {...}}'])      # True: there is more than before
    growing.so_far()                                                # Prefix of one token
    growing.whole()                                                 # after the last part: as though it had been the only one

Invariant: a token keeps what it was first told with, its version too. A part names one version, that of the server when it told
the part, and a server changes it before it samples on: what is told as an old version was sampled under it, and what is told as a
new one may have been sampled shortly before. The spans of the last part, which `whole` has, are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from rondo.roles.engines.engine import Prefix, Top
from rondo.roles.engines.sglang.numbers import integer, sampled, version_of
from rondo.roles.engines.sglang.responses import top_of
from rondo.runtime.errors import ProtocolError

_LOG_PROBS, _TOP = "output_token_logprobs", "output_top_logprobs"
_FIRST_ROOM = 256


class Growing:
    """One answer, until its last part, of a model with so large a `vocabulary` (None: not known). `num_top`: how many of the
    likeliest tokens were asked for at each place."""

    def __init__(self, num_top: int = 0, vocabulary: int | None = None) -> None:
        self._vocabulary = vocabulary
        self._told: dict[str, list[Any]] = {_LOG_PROBS: [], _TOP: []}
        self._tokens, self._log_probs = _Column(np.int32), _Column(np.float32)
        self._versions = _Column(np.int32)
        self._top = (_Column(np.int32, num_top), _Column(np.float32, num_top)) if num_top else None
        self._last: dict[str, Any] = {}

    @property
    def num_tokens(self) -> int:
        """So far."""
        return self._tokens.size

    def take(self, events: Sequence[bytes]) -> bool:
        """Parts as JSON, one at least. Whether tokens came and the answer goes on. Raises ProtocolError for what is no part."""
        before = self._tokens.size
        newest = _parsed(events[-1])
        meta = newest["meta_info"]
        if len(_listed(meta, _LOG_PROBS)) != meta.get("completion_tokens"):
            for event in events[:-1]:
                self._add(_parsed(event))
        self._add(newest)  # where it tells all, those that came with it need not be read
        return self._tokens.size > before and meta.get("finish_reason") is None

    def _add(self, part: dict[str, Any]) -> None:
        meta: Mapping[str, Any] = part["meta_info"]
        triples = _listed(meta, _LOG_PROBS)
        total = integer(meta, "completion_tokens", len(triples))
        known = self._tokens.size
        # A server that aborts tells all tokens once more, and joins that to what it had not sent yet.
        from_end = known - total
        whole = known <= total <= len(triples)
        if not whole and known + len(triples) != total:
            raise ProtocolError(
                f"a part of an answer must tell all {total} tokens or those that are new, got {len(triples)} after {known}"
            )
        top = _listed(meta, _TOP)
        if from_end:
            self._grow(triples[from_end:], top[from_end:], version_of(meta.get("weight_version")))
        self._last = part

    def _grow(self, triples: list[Any], top: list[Any], version: int) -> None:
        """By tokens that are new."""
        num_new = len(triples)
        tokens, log_probs = sampled(triples, self._vocabulary)
        self._tokens.add(tokens)
        self._log_probs.add(log_probs)
        self._versions.add(np.full(num_new, version, np.int32))
        self._told[_LOG_PROBS] += triples
        self._told[_TOP] += top
        if self._top is not None and (found := top_of(top, num_new, self._vocabulary, self._top[0].width)) is not None:
            self._top[0].add(found.tokens)
            self._top[1].add(found.log_probs)

    def so_far(self) -> Prefix:
        """What was sampled, at least one token. Its arrays are views of what does not change any more."""
        top = None
        if self._top is not None and self._top[0].size == self._tokens.size:
            top = Top(self._top[0].all(), self._top[1].all())
        return Prefix(self._tokens.all(), self._log_probs.all(), self._versions.all(), top)

    def whole(self) -> dict[str, Any]:
        """The answer, as one that came in one part."""
        if not self._last:
            raise ProtocolError("a streamed answer must have a part, got none")
        ids = self._tokens.all().tolist()
        told = _listed(self._last, "output_ids")
        if told == ids[len(ids) - len(told) :]:
            told = ids
        return self._last | {"output_ids": told, "meta_info": self._last["meta_info"] | self._told}


class _Column:
    """Numbers that only become more: [N], or [N, width]. Each is copied a few times at most, however long it gets."""

    def __init__(self, dtype: type, width: int | None = None) -> None:
        self.width = width
        self.size = 0
        self._room: np.ndarray = np.empty(_FIRST_ROOM if width is None else (_FIRST_ROOM, width), dtype)

    def add(self, values: np.ndarray) -> None:
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
    if not isinstance(part, dict) or not isinstance(part.get("meta_info"), dict):
        raise ProtocolError(f"a part of an answer must have meta_info, got {event[:200]!r}")
    return part


def _listed(told: Mapping[str, Any], name: str) -> list[Any]:
    """A list of `told`, empty where it is not there."""
    found = told.get(name) or []
    if not isinstance(found, list):
        raise ProtocolError(f"{name} of an answer must be a list, got {found!r:.200}")
    return found
