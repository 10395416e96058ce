"""What a failure says: of the request, of the engine, or of the moment.

Owns this one classification, which the dispatcher, its breakers, the HTTP endpoint and the rollout go by. Owns no reaction.

    request   refused (400, ConfigError), too long, numbers of its own that are none       it fails, and nothing else does
    engine    gone, silent, weights that nobody gave it, a key or path that it refuses     it is looked at before the next request
    moment    full (503, 429), another 5xx without its death, an answer that is none       it rests; the request goes elsewhere

Some failures tell two things. A request that one engine after another fails under, while these serve others, is the reason
(`RequestFailed`); and a request that was at an engine when that died may be (`dispatch/suspicion.py`).
"""

from __future__ import annotations

from typing import Literal

from rondo.runtime.errors import ConfigError, CorruptData, DeadlineExceeded, PeerGone, ProtocolError, WorkerDied

Fault = Literal["request", "engine", "moment"]

_REQUEST, _FULL = (400, 413, 414, 422), (429, 503)
_LATER = (408, 409, 425)


class NotThere(PeerGone):
    """The engine is not there, and what was asked did not reach it."""


class RequestFailed(ConfigError):
    """Engines fail under this very request while they serve others, or die of it: no other one is given it."""


def fault_of(error: BaseException) -> Fault:
    """Whose failure it is. Of an answer of HTTP its status decides."""
    status = getattr(error, "status", None)
    if isinstance(status, int):
        if status in _REQUEST:
            return "request"
        return "moment" if status >= 500 or status in _FULL or status in _LATER else "engine"
    if isinstance(error, (ConfigError, CorruptData)):
        return "request"
    return "moment" if isinstance(error, ProtocolError) else "engine"


def is_full(error: BaseException) -> bool:
    """Whether the engine has no room now, which says nothing of the request."""
    return getattr(error, "status", None) in _FULL


def may_have_killed(error: BaseException) -> bool:
    """Whether the engine had the request and ended, or was not heard of again."""
    return isinstance(error, (PeerGone, DeadlineExceeded, WorkerDied)) and not isinstance(error, NotThere)
