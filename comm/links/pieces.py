"""Pieces: a ring cut where its host part and its payload part, so that each can cross on its own way.

Owns that cut. Does not own what is offered when (`Origin`) nor how it crosses (`collective.py`).

    log      | header, descriptor | payload ................ | pad ....
    pieces   |        host        | payload | payload | pay. | host (64 bytes)

Invariant: no piece has bytes of both, or of two records; what the mirror has already is in none.
"""

from __future__ import annotations

from typing import NamedTuple

from rondo.comm.links.origin import Origin
from rondo.comm.ring.records import HEADER_BYTES, PAD, align
from rondo.comm.ring.words import PEEK_IS_SAFE


class Piece(NamedTuple):
    """`num_bytes` of the log at `pos`; of a payload, or of header and descriptor."""

    pos: int
    num_bytes: int
    is_payload: bool


class Pieces(Origin):
    """An origin for links that carry payloads apart. `again` is for pieces of a payload."""

    _payload_pos = 0

    def piece(self, chunk_bytes: int, credit: int) -> Piece | None:
        """The next one; None when there is none below `credit`. Raises CorruptData at a broken record."""
        if self._again:
            return Piece(*self._again.pop(0), True)
        if PEEK_IS_SAFE and self._next == self._seen:
            self.look()
        end = min(self._seen, credit)
        while self._next < end:
            if self._have and self._have[0][0] <= self._next:
                self._next = max(self._next, self._have.pop(0)[1])
            elif self._walked <= self._next:
                pos = self._walked
                header, _ = self._header(pos)
                self._payload_pos = pos + align(HEADER_BYTES + header.descriptor_bytes)
                if self._walk() == PAD:
                    first, self._next = self._next, max(self._next, self._walked)
                    if first == pos:
                        return Piece(pos, HEADER_BYTES, False)
            else:
                return self._part(chunk_bytes, end)
        return None

    def _part(self, chunk_bytes: int, end: int) -> Piece:
        pos = self._next
        is_payload = pos >= self._payload_pos
        stop = min(pos + chunk_bytes, self._walked if is_payload else self._payload_pos, end)
        if self._have:
            stop = min(stop, self._have[0][0])
        self._next = stop
        return Piece(pos, stop - pos, is_payload)
