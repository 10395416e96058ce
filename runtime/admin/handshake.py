"""Handshake: connections over TLS, accepted and shaken hands with, so many at a time, each within its own time.

Owns a connection from its acceptance to the end of its handshake. Does not own certificates (`tls.py`) nor what comes then.

    accepted -> handshake, at most `limit_s` -> the protocol that `after` makes
                   `-> hung up on, also where there is no room and it is the oldest

Invariant: who opens connections and says nothing, or no TLS, has no more of a process's descriptors than connections may have,
no more of its loop than one of them a turn, and keeps nobody out who speaks.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

HANDSHAKE_S = 10.0
_NO_ROOM_S = 1.0
"""Before the next is accepted where the system has no descriptor or memory for one."""


class Handshakes:
    """Accepts from a socket that listens, until `close`. `room`: how many may stand beside those behind their handshake."""

    def __init__(
        self, tls: ssl.SSLContext, after: Callable[[], asyncio.Protocol], room: Callable[[], int], limit_s: float
    ) -> None:
        self._tls, self._after, self._limit_s = tls, after, limit_s
        self._room = room
        self._under_way: dict[asyncio.Task[None], None] = {}
        """The oldest first."""

    def start(self, listening: socket.socket) -> None:
        listening.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listening), name="tls accept")

    async def close(self) -> None:
        """Accepts no more and hangs up on those under way. The socket is closed."""
        ended = [self._accepting, *self._under_way]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listening:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except ConnectionAbortedError:  # gone before it was accepted
                    continue
                except OSError:
                    await asyncio.sleep(_NO_ROOM_S)
                    continue
                if len(self._under_way) >= self._room():
                    if not self._under_way:
                        connection.close()
                        continue
                    self._under_way.pop(oldest := next(iter(self._under_way)))
                    oldest.cancel()
                task = loop.create_task(self._shake(connection), name="tls handshake")
                self._under_way[task] = None
                task.add_done_callback(lambda done: self._under_way.pop(done, None))
                await asyncio.sleep(0)

    async def _shake(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):  # no TLS, no end of it in time, or a hanging up: nobody is there to be told
            await loop.connect_accepted_socket(
                self._after, connection, ssl=self._tls, ssl_handshake_timeout=self._limit_s
            )
