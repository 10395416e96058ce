"""What a request is told when it is turned down: a status of HTTP and words."""

from __future__ import annotations

from rondo.runtime.errors import Refused


class TurnedDown(Refused):
    """A request that is not carried out. `status` is HTTP's: 404 unknown, 409 not now, 501 not supported, 503 not any more."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status
