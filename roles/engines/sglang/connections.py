"""HTTP/1.1 calls to one origin over connections that are kept alive: whole requests, whole answers, nothing else.

Owns sockets and the reading of answers. Does not own what is asked or what an error status means (`client.py`). A generation call
costs its two system calls and little more: a third of what a general client takes, which at hundreds of calls in flight is a
core's worth.

    pool = Connections("http://127.0.0.1:30000", {"Authorization": "Bearer ..."})
    status, body = await pool.call("POST", "/generate", b'{"input_ids": [1]}')

Invariant: a connection carries one call at a time, and is used again only after an answer that was read to its end. A call that
is cancelled closes its connection, which ends its request at the server. Raises OSError where there is no answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

from rondo.runtime.errors import ConfigError

_KEEP_S = 2.0
"""A connection idle for longer is not used again: servers close theirs after 5 s, and a call on one that was just closed would
look like the server's end."""
_MAX_HEAD_BYTES = 1 << 16
_MAX_BODY_BYTES = 1 << 32
_JOINED_BYTES = 1 << 16
"""A longer body is not copied behind its head."""


class Connections:
    """As many connections to `url` as there are calls at a time. Used on one event loop; `close` ends the calls under way."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ConfigError(
                f"the address of a server must look like http://127.0.0.1:30000, got {url!r}. Write it like that"
            )
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **headers}
        if any(character in text for pair in lines.items() for text in pair for character in "\r\n"):
            raise ConfigError(
                "a header of a server must be one line, got a line break. Remove it from the key or address"
            )
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")
        self._idle: list[tuple[float, _Connection]] = []
        self._all: set[_Connection] = set()
        self._closed = False

    async def call(
        self, method: str, path: str, body: bytes | None, *, on_body: Callable[[bytes], None] | None = None
    ) -> tuple[int, bytes]:
        """(status, body). `body` is JSON. With `on_body` that of a 200 is handed over in pieces while it comes, and is
        empty at the end; what `on_body` raises ends the call."""
        connection = self._take() or await self._connect()
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode() + self._headers
        if body is None:
            message = [head + b"\r\n"]
        else:
            head = b"%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (head, len(body))
            message = [head + body] if len(body) < _JOINED_BYTES else [head, body]
        answer: tuple[int, bytes] | None = None
        try:
            if on_body is None:
                answer = await connection.ask(message)
            else:
                answer = await connection.ask_along(message, on_body)
        finally:
            if answer is None or not connection.reusable:
                self._all.discard(connection)
                connection.transport.abort()
        self._idle.append((time.monotonic(), connection))
        return answer

    def close(self) -> None:
        self._closed = True
        for connection in self._all:
            connection.transport.abort()
        self._all.clear()
        self._idle.clear()

    def _take(self) -> _Connection | None:
        oldest = time.monotonic() - _KEEP_S
        while self._idle:
            since, connection = self._idle.pop()  # the one used last: those that are not needed grow old
            if since >= oldest and connection.reusable:
                return connection
            self._all.discard(connection)
            connection.transport.abort()
        return None

    async def _connect(self) -> _Connection:
        if self._closed:
            raise ConnectionAbortedError("the client is closed")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=True if self._tls else None
        )
        self._all.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One connection, and the answer that it is reading."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._received = bytearray()
        self._answered: asyncio.Future[tuple[int, bytes]] | None = None
        self._status = 0
        self._length: int | None = (
            None  # of the body; None while the head is read, -1 in chunks, -2 to the connection's end
        )
        self._keeps = True
        self._chunks: list[bytes] = []
        self._come: asyncio.Event | None = None  # of an answer that is handed over while it comes
        self._lost = False

    @property
    def reusable(self) -> bool:
        """No answer is under way, and the server keeps the connection."""
        return self._answered is None and self._keeps and not self._lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def ask(self, message: list[bytes]) -> asyncio.Future[tuple[int, bytes]]:
        self._answered = answered = asyncio.get_running_loop().create_future()
        self.transport.writelines(message)
        return answered

    async def ask_along(self, message: list[bytes], on_body: Callable[[bytes], None]) -> tuple[int, bytes]:
        """As `ask`; the body of a 200 goes to `on_body`, in the task that waits: the chunks that came since it was told last."""
        self._come = come = asyncio.Event()
        answered = self.ask(message)
        answered.add_done_callback(lambda _: come.set())
        try:
            while not answered.done():
                await come.wait()
                come.clear()
                if self._status == 200 and self._chunks:
                    piece = b"".join(self._chunks)
                    self._chunks.clear()
                    on_body(piece)
            status, body = answered.result()
            if status == 200 and body:
                on_body(body)
                body = b""
            return status, body
        finally:
            answered.cancel()
            self._come = None

    def data_received(self, data: bytes) -> None:
        if self._answered is None:  # nobody asked: whatever this is, the connection is of no use
            self._keeps = False
            self.transport.abort()
            return
        self._received += data
        try:
            self._read()
        except ValueError as error:
            self._fail(ConnectionError(f"an answer must be HTTP/1.1, got {error}"))

    def eof_received(self) -> None:
        self._keeps = False
        if self._answered is not None and self._length == -2:
            self._done(bytes(self._received))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        if self._answered is not None:
            if self._length == -2 and exc is None:
                self._done(bytes(self._received))
            else:
                self._fail(ConnectionResetError(f"the connection ended before the answer ({exc or 'closed'})"))

    def _read(self) -> None:
        """Takes what has come. Raises ValueError on what is no answer."""
        received = self._received
        while self._length is None:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                if len(received) > _MAX_HEAD_BYTES:
                    raise ValueError(f"a head of more than {_MAX_HEAD_BYTES} bytes")
                return
            self._read_head(bytes(received[:end]))
            del received[: end + 4]
        if self._length >= 0:
            if len(received) >= self._length:
                body = bytes(received[: self._length])
                del received[: self._length]
                self._done(body)
        elif self._length == -1:
            self._read_chunks()

    def _read_head(self, head: bytes) -> None:
        first, _, rest = head.partition(b"\r\n")
        if not first.startswith(b"HTTP/1."):
            raise ValueError(f"{first[:80]!r}")
        self._status = int(first[9:12])
        if self._status < 200:  # an interim answer; the real one follows
            return
        length: int | None = None
        chunked = False
        for line in rest.lower().split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                chunked = value.strip() == b"chunked"
            elif name == b"connection":
                self._keeps = value.strip() != b"close"
        if first.startswith(b"HTTP/1.0"):
            self._keeps = False
        if length is not None and not 0 <= length <= _MAX_BODY_BYTES:
            raise ValueError(f"a body of {length} bytes")
        if chunked:
            self._length = -1
        elif self._status in (204, 304):
            self._length = 0
        else:
            self._length = -2 if length is None else length

    def _read_chunks(self) -> None:
        received = self._received
        while (end := received.find(b"\r\n")) >= 0:
            size = int(bytes(received[:end]).partition(b";")[0], 16)
            if not 0 <= size <= _MAX_BODY_BYTES:
                raise ValueError(f"a chunk of {size} bytes")
            if size == 0:
                trailer = received.find(b"\r\n\r\n", end)
                if trailer < 0:
                    return
                del received[: trailer + 4]
                self._done(b"".join(self._chunks))
                return
            if len(received) < end + 2 + size + 2:
                return
            self._chunks.append(bytes(received[end + 2 : end + 2 + size]))
            del received[: end + 2 + size + 2]
            if self._come is not None:
                self._come.set()

    def _done(self, body: bytes) -> None:
        answered, self._answered = self._answered, None
        if self._received:  # more than was asked for
            self._keeps = False
        self._length, self._chunks = None, []
        if answered is not None and not answered.done():
            answered.set_result((self._status, body))

    def _fail(self, error: Exception) -> None:
        answered, self._answered = self._answered, None
        self._keeps = False
        if answered is not None and not answered.done():
            answered.set_exception(error)
