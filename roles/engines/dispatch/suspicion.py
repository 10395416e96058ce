"""Whether a request is what its engines died of: who is suspected, who is cleared, and who is found out.

Owns the judgement of one request, as a pure fold. Does not own where it is tried: a suspect is alone among suspects at its engine
that has answered since (`places.py`), so a second death under it is no chance of the company it was in.

    at its engine's death        first                          second                 third
    it had no token there yet    suspected until it has one     found out
    it had some                  -                              suspected to its end   found out

Requests kill at their beginning (what a server cannot parse, place or prefill), so that those which an engine has begun with are
innocent of a first death, and go on elsewhere at once; the few others are tried one at a time, which takes as long as a first
token does. One that kills later is found out one engine later.

Invariant: whoever only shared engines with others is never found out, however often these die.
"""

from __future__ import annotations


class Suspicion:
    """Of one request. `most`: deaths at its beginning that find it out, one more for later ones."""

    __slots__ = ("_early", "_late", "_most")

    def __init__(self, most: int) -> None:
        self._most = most
        self._early = self._late = 0

    @property
    def suspected(self) -> bool:
        """It is given an engine that has no other suspect."""
        return self._early > 0 or self._late >= self._most

    @property
    def found_out(self) -> bool:
        return self._early >= self._most or self._late > self._most

    def died(self, *, begun: bool) -> None:
        """Its engine did; `begun`: it had made a token of this request."""
        if begun:
            self._late += 1
        else:
            self._early += 1

    def has_token(self) -> bool:
        """An engine has begun with it. Whether it is cleared by that."""
        self._early = 0
        return not self.suspected
