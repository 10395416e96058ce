"""Which engine is given a request: the least loaded by tokens, or the one that already has its beginning.

Owns the load that a request is, where prefixes and sessions went, and the choice. Does not own which engines may be chosen, nor
their limits. Pure: no clock, no I/O.

A request's load is its prompt and the response it is expected to have: the mean of the responses of its class so far, its own
limit until there is one. An engine's load is that of what we have there, and what it reports beyond that.

    load   A 12,000 | B 9,000    a sample of a prompt that A has, 300 tokens      -> A: 12,000 <= 1.5 x 9,000 + 8 x 300
           A 21,000 | B 9,000    the same                                         -> B, which has the prompt from now on

Affinity saves the prompt's computation and costs waiting behind what A has more than B. It holds while A carries at most
one and a half times the least load plus eight requests like this one: the first bounds the imbalance of busy
engines, the second lets the samples of one prompt stay together on idle ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from rondo.roles.engines.dispatch.fleet import Member
from rondo.roles.engines.engine import Kind, Request

_AFFINITY_RATIO, _AFFINITY_REQUESTS = 1.5, 8.0
_REMEMBERED = 65_536
"""Prefixes and sessions whose engine is known; the least recently used are forgotten."""
_WEIGHT = 0.05
"""Of the newest response in the mean of its class."""


Key = tuple[str, object]


class Placement:
    """Chooses, and remembers what it chose."""

    def __init__(self) -> None:
        self._homes: OrderedDict[Key, Member] = OrderedDict()
        self._means: dict[Kind, float] = {}

    def cost(self, request: Request) -> float:
        """Tokens: what is there and what is expected to come."""
        params = request.params
        done = 0 if request.prefix is None else len(request.prefix.tokens)
        expected = min(self._means.get(request.kind, params.max_new_tokens), params.max_new_tokens)
        return len(request.prompt) + max(done, expected)

    def ended(self, kind: Kind, num_tokens: int) -> None:
        """A response of this class came to its own end with so many tokens."""
        mean = self._means.get(kind)
        self._means[kind] = num_tokens if mean is None else mean + _WEIGHT * (num_tokens - mean)

    @staticmethod
    def key(request: Request) -> Key:
        """What is worth to stay together: the turns of a session, else the samples of one prompt."""
        if request.session is not None:
            return ("session", request.session)
        return ("prompt", hash(request.prompt.tobytes()))

    def choose(self, key: Key, cost: float, candidates: Sequence[Member]) -> Member | None:
        """One of those that have room, remembered for what has this key; None if there is none."""
        least = min(candidates, key=lambda member: member.load, default=None)
        if least is None:
            return None
        home = self._homes.get(key)
        if home is None or home is least:
            chosen = least
        else:
            bearable = _AFFINITY_RATIO * least.load + _AFFINITY_REQUESTS * cost
            chosen = home if home.load <= bearable and any(home is each for each in candidates) else least
        self._homes[key] = chosen
        self._homes.move_to_end(key)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return chosen
