"""An answer of /generate that comes in parts.

Owns what the parts are together. A server tells all tokens so far with each part, or, started with
incremental-streaming-output, those that are new; which of the two is seen from the number of tokens that each part names. Owns
no call and no meaning.

    growing = Growing()
    growing.take([b'{"output_ids": [7], "meta_info": {...}}'])      # True: there is more than before
    growing.so_far()                                                # Prefix of one token
    growing.whole()                                                 # after the last part: as though it had been the only one

Invariant: a token keeps the version that it was first told with. A part names one version, that of the server when it told
the part, and a server changes it before it samples on: what is told as an old version was sampled under it, and what is told as a
new one may have been sampled shortly before. The spans of the last part, which `whole` has, are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from rondo.roles.rollout.engine import Prefix
from rondo.roles.rollout.sglang.answers import top_of, version_of
from rondo.runtime.errors import ProtocolError

_LOG_PROBS, _TOP = "output_token_logprobs", "output_top_logprobs"


class Growing:
    """One answer, until its last part."""

    def __init__(self) -> None:
        self._told: dict[str, list[Any]] = {_LOG_PROBS: [], _TOP: []}
        self._versions: list[int] = []
        self._last: dict[str, Any] = {}

    def take(self, events: Sequence[bytes]) -> bool:
        """Parts as JSON, one at least. Whether tokens came and the answer goes on. Raises ProtocolError for what is no part."""
        before = len(self._versions)
        newest = _parsed(events[-1])
        meta = newest["meta_info"]
        if len(meta.get(_LOG_PROBS) or ()) != meta.get("completion_tokens"):
            for event in events[:-1]:
                self._add(_parsed(event))
        self._add(newest)  # where it tells all, those that came with it need not be read
        return len(self._versions) > before and meta.get("finish_reason") is None

    def _add(self, part: dict[str, Any]) -> None:
        meta: Mapping[str, Any] = part["meta_info"]
        new = meta.get(_LOG_PROBS) or []
        total = meta.get("completion_tokens", len(new))
        known = self._told[_LOG_PROBS]
        if len(new) == total >= len(known):
            self._told = {name: list(meta.get(name) or ()) for name in self._told}
        elif len(known) + len(new) == total:
            for name, values in self._told.items():
                values += meta.get(name) or ()
        else:
            raise ProtocolError(
                f"a part of an answer must tell all {total} tokens or those that are new, got {len(new)} after {len(known)}"
            )
        self._versions += [version_of(str(meta.get("weight_version", "")))] * (total - len(self._versions))
        self._last = part

    def so_far(self) -> Prefix:
        """What was sampled, at least one token."""
        triples = self._told[_LOG_PROBS]
        return Prefix(
            np.array([triple[1] for triple in triples], np.int32),
            np.array([triple[0] for triple in triples], np.float32),
            np.array(self._versions, np.int32),
            top_of(self._told[_TOP], len(triples)),
        )

    def whole(self) -> dict[str, Any]:
        """The answer, as one that came in one part."""
        if not self._last:
            raise ProtocolError("a streamed answer must have a part, got none")
        ids = [triple[1] for triple in self._told[_LOG_PROBS]]
        told = list(self._last.get("output_ids") or ())
        if told == ids[len(ids) - len(told) :]:
            told = ids
        return self._last | {"output_ids": told, "meta_info": self._last["meta_info"] | self._told}


def _parsed(event: bytes) -> dict[str, Any]:
    try:
        part = orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"a part of an answer must be JSON, got {event[:200]!r}") from error
    if not isinstance(part, dict) or not isinstance(part.get("meta_info"), dict):
        raise ProtocolError(f"a part of an answer must have meta_info, got {event[:200]!r}")
    return part
