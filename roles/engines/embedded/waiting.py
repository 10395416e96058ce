"""The requests of an engine that wait for a slot, in the order in which they get one.

Owns that order: those that are to be computed anew, then the highest priority, then the oldest. Owns no slot. Pure.

    waiting.add(request)          # behind those of its priority
    waiting.first()               # whose turn it is; it stays until it is taken out
"""

from __future__ import annotations

import math
from collections import OrderedDict

from rondo.roles.engines.engine import Request


class Waiting:
    """Requests by their ids."""

    def __init__(self) -> None:
        self._lines: dict[float, OrderedDict[str, Request]] = {}  # none of them is empty
        self._line_of: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._line_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._line_of

    def add(self, request: Request) -> None:
        self._line(request, request.priority)[request.id] = request

    def put_first(self, request: Request) -> None:
        """Before all others, whatever their priority."""
        line = self._line(request, math.inf)
        line[request.id] = request
        line.move_to_end(request.id, last=False)

    def first(self) -> Request:
        """Somebody must wait."""
        return next(iter(self._lines[max(self._lines)].values()))

    def pop(self, request_id: str) -> Request | None:
        """Takes one out; None if it is not here."""
        if request_id not in self._line_of:
            return None
        at = self._line_of.pop(request_id)
        request = self._lines[at].pop(request_id)
        if not self._lines[at]:
            del self._lines[at]
        return request

    def clear(self) -> None:
        self._lines.clear()
        self._line_of.clear()

    def _line(self, request: Request, at: float) -> OrderedDict[str, Request]:
        self._line_of[request.id] = at
        return self._lines.setdefault(at, OrderedDict())
