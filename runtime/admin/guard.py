"""Guard: whose token a request must show, and how often who asks may be wrong.

Owns the comparison of tokens, in constant time, and the count of failures. Does not own sockets, or which route needs which
scope.

    scope      on loopback               on another address
    open       anybody                   anybody
    read       anybody                   a token file's token, or an own one
    content    a token file's, or own    a token file's, or own
    control    an own one                an own one

An own token is one that a process of ours has drawn: 256 bits, which nobody guesses. A token file's is what a user has written.
Invariant: whoever shows wrong tokens is soon told to wait (429), and while he waits no token of a file helps him; an own one
always does, so that a neighbour on the machine cannot lock the owner of a run out by being wrong on purpose.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

from rondo.runtime.errors import Refused

Scope = Literal["open", "read", "content", "control"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
Who = Literal["own", "file"]


class TurnedDown(Refused):
    """A request that is not carried out. `status` is HTTP's: 404 unknown, 409 not now, 501 not supported, 503 not any more.
    `why` is what programs know it by."""

    def __init__(
        self, status: int, words: str, headers: Mapping[str, str] | None = None, *, why: str | None = None
    ) -> None:
        super().__init__(words)
        self.status, self.why = status, why
        self.headers = dict(headers or {})


class Rate:
    """`most` at once, then one every `every_s`, for each name. Names beyond `max_names` are forgotten, the quietest first.

    `clock` gives monotonic seconds."""

    def __init__(self, most: int, every_s: float, max_names: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._every_s, self._max_names, self._clock = most, every_s, max_names, clock
        self._quiet_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._quiet_at)

    def wait_s(self, name: str) -> float:
        """Until the next of that name; 0 for now."""
        return max(0.0, self._quiet_at.get(name, -math.inf) - (self._most - 1) * self._every_s - self._clock())

    def add(self, name: str) -> None:
        """One of that name."""
        quiet_at = max(self._quiet_at.pop(name, -math.inf), self._clock())
        self._quiet_at[name] = quiet_at + self._every_s
        if len(self._quiet_at) > self._max_names:
            del self._quiet_at[next(iter(self._quiet_at))]


class Guard:
    """Of one server. `own`: tokens that its process has drawn; `given`: those of files. `open_reads`: reading needs none."""

    def __init__(
        self,
        own: Sequence[str],
        given: Sequence[str] = (),
        *,
        open_reads: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own, self._given = [token.encode() for token in own], [token.encode() for token in given]
        self._open_reads = open_reads
        self.failures = Rate(10, 6.0, 4096, clock)

    def needs(self, scope: Scope) -> bool:
        """Whether anybody must show anything."""
        return scope != "open" and not (scope == "read" and self._open_reads)

    def who(self, scope: Scope, what: str, authorization: str | None, peer: str) -> Who | None:
        """Whose token was shown; None where none is needed. TurnedDown: 401 without a right one, 429 from a peer that has been
        wrong too often. `what` is asked for, `peer` an address."""
        if not self.needs(scope):
            return None
        peer = _network(peer)
        kind, _, shown = (authorization or "").partition(" ")
        # Headers of other encodings arrive with surrogates.
        token = shown.encode(errors="surrogateescape") if kind.lower() == "bearer" else b""
        if _is_one_of(token, self._own):
            return "own"
        wait_s = self.failures.wait_s(peer) if authorization is not None else 0.0
        if wait_s > 0:
            words = f"tokens from {peer} must be right, got too many that were not. Ask again in {math.ceil(wait_s)} s"
            raise TurnedDown(429, words, {"Retry-After": str(math.ceil(wait_s))})
        if _is_one_of(token, self._given):
            return "file"
        if authorization is not None:
            self.failures.add(peer)
        words = f"{what} must be asked with a valid token. Send 'Authorization: Bearer TOKEN'"
        raise TurnedDown(401, words, {"WWW-Authenticate": "Bearer"})

    def allow(self, scope: Scope, what: str, who: Who | None) -> None:
        """TurnedDown (403) where that token is not enough."""
        if scope == "control" and who != "own":
            raise TurnedDown(403, f"{what} must be asked with the run's own token, got the token file's. Use `rondo`")


def _is_one_of(token: bytes, accepted: Sequence[bytes]) -> bool:
    return any(hmac.compare_digest(token, each) for each in accepted)


def _network(peer: str) -> str:
    """The address; of version 6 the network, which one machine has whole."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if address.version == 4 or address.is_loopback:
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False).network_address)
