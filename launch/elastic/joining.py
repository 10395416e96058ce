"""Joining: engines that run already come to a run by their addresses, or leave it: what is asked of which replica, and what
follows when one of them cannot. A pure state machine, the part of `requests.py` for requests with `engine_urls`.

Owns which engines are attached, as far as replicas have said. Does not own attaching one (`roles/engines/sglang/attached.py`),
nor the calls (`scaler.py`).

    out    Attach each that is not there  ->  ACTIVE, PARTIAL, or what came is detached again: FAILED
    in     Detach each that is there      ->  COMPLETED or FAILED
    cancelled: calls under way are given up, which undoes them; those that have ended are undone by the opposite

All are attached to the oldest replica, the one that stays when others leave.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

from rondo.launch.elastic.request import Request, Status


@dataclass(frozen=True, slots=True)
class Attach:
    """A replica is to have an engine, within `deadline_s`."""

    name: str
    url: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Detach:
    """A replica is to let an engine go, whose requests have `drain_s` to end there."""

    name: str
    url: str
    drain_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The call about an engine is no longer wanted; it ends with all as it was."""

    url: str


Call = Attach | Detach | GiveUp


class Joining:
    """Of one request. `attached` (address -> replica) is kept true by it. `home`: the replica that new ones are attached to."""

    def __init__(self, request: Request, home: str, attached: MutableMapping[str, str], drain_s: float) -> None:
        self._attached, self._home, self._drain_s = attached, home, drain_s
        self._comes = request.action == "scale_out"
        self._timeout_s = 0.0 if request.force and not self._comes else request.timeout_s
        self._policy = request.policy
        self.urls = tuple(url for url in request.engine_urls if (url in attached) != self._comes)
        self._waiting: dict[str, bool] = {}  # a call under way -> whether it attaches
        self._then: Status | None = None
        self.failed: dict[str, str] = {}

    @property
    def done(self) -> tuple[str, ...]:
        """Those that are as the request wants them."""
        return tuple(url for url in self.urls if (url in self._attached) == self._comes and url not in self._waiting)

    def begin(self) -> list[Call]:
        return self._calls(self.urls, attach=self._comes, limit_s=self._timeout_s)

    def _calls(self, urls: tuple[str, ...], *, attach: bool, limit_s: float) -> list[Call]:
        self._waiting |= dict.fromkeys(urls, attach)
        if attach:
            return [Attach(self._home, url, limit_s) for url in urls]
        return [Detach(self._attached[url], url, limit_s) for url in urls]

    def told(self, url: str, why: str) -> None:
        """A call has ended; `why` it failed, empty where it did not."""
        attached = self._waiting.pop(url)
        if not why and attached:
            self._attached[url] = self._home
        elif not why:
            self._attached.pop(url, None)
        elif self._then is None or attached != self._comes:  # else it was given up
            self.failed[url] = why

    def advance(self) -> tuple[Status | None, list[Call]]:
        """What the request ends as, once it does; what is to be asked next."""
        if self._waiting:
            return None, []
        if self._then is not None:  # what was given up may have ended well before
            calls = self._undo()
            return (None, calls) if calls else (self._then, [])
        if not self.failed:
            return Status.ACTIVE if self._comes else Status.COMPLETED, []
        if not self._comes:
            return Status.FAILED, []
        if self._policy == "keep_partial" and self.done:
            return Status.PARTIAL, []
        self._then = Status.FAILED
        return self.advance()

    def cancel(self) -> list[Call]:
        self._then = Status.CANCELLED
        under_way: list[Call] = [GiveUp(url) for url in self._waiting]
        return under_way + self._undo()

    def _undo(self) -> list[Call]:
        urls = tuple(url for url in self.done if url not in self.failed)
        return self._calls(urls, attach=not self._comes, limit_s=self._drain_s)
