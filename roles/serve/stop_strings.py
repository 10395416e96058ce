"""Stop strings: where the first of several is complete in a text that comes in pieces.

Owns the search, an automaton (Aho and Corasick, 1975) that looks at each character once, however many strings there are and
however long they are. Owns neither text nor tokens.

    search = StopSearch(("END", "STOP"))
    search.feed("so E")          # None; search.depth == 1: the last character may begin one
    search.feed("ND, and")       # 2: of this piece so many characters complete it; search.matched == "END"

Invariant: what a text says does not depend on how it is cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopSearch:
    """Reads one text. `depth`: how many of its last characters are the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._states = _automaton(tuple(stops))
        self.state = 0
        self.matched: str | None = None

    @property
    def depth(self) -> int:
        return self._states.depths[self.state]

    def feed(self, piece: str) -> int | None:
        """How many characters of the piece were read when a stop string was complete, the longest of those that end there."""
        states = self._states
        for place, character in enumerate(piece):
            self.state = states.next(self.state, character)
            if (found := states.ends[self.state]) is not None:
                self.matched = found
                return place + 1
        return None


class _States:
    """The tree of all strings; each state knows the longest end of itself that is another's beginning."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.ends: list[str | None] = [None]
        self.links = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self.children[state]:
                    self.children[state][character] = len(self.children)
                    self.children.append({})
                    self.depths.append(self.depths[state] + 1)
                    self.ends.append(None)
                    self.links.append(0)
                state = self.children[state][character]
            self.ends[state] = stop
        left = deque(self.children[0].values())
        while left:
            state = left.popleft()
            for character, child in self.children[state].items():
                self.links[child] = self.next(self.links[state], character)
                self.ends[child] = self.ends[child] or self.ends[self.links[child]]
                left.append(child)

    def next(self, state: int, character: str) -> int:
        while state and character not in self.children[state]:
            state = self.links[state]
        return self.children[state].get(character, 0)


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _States:
    return _States(stops)
