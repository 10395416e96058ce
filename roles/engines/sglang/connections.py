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
MAX_BODY_BYTES = 1 << 32
_JOINED_BYTES = 1 << 16
"""A longer body is not copied behind its head."""


class Connections:
    """As many connections to `url` as there are calls at a time. Used on one event loop; `close` ends the calls under way."""

    def __init__(self, url: str, headers: Mapping[str, str], max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._most = max_body_bytes
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
        self.num_heard = 0
        """Answers, and parts of those that are handed over while they come."""

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
        keeps = False

        def tell(piece: bytes) -> None:
            assert on_body is not None
            self.num_heard += 1
            on_body(piece)

        try:
            connection.transport.writelines(message)
            status, answer, keeps = await _answer(connection, None if on_body is None else tell, self._most)
            self.num_heard += 1
        finally:
            if keeps and connection.clean:
                self._idle.append((time.monotonic(), connection))
            else:
                self._drop(connection)
        return status, answer

    def close(self) -> None:
        self._closed = True
        for connection in list(self._all):
            self._drop(connection)
        self._idle.clear()

    def _drop(self, connection: _Connection) -> None:
        self._all.discard(connection)
        connection.transport.abort()

    def _take(self) -> _Connection | None:
        oldest = time.monotonic() - _KEEP_S
        while self._idle:
            since, connection = self._idle.pop()  # the one used last: those that are not needed grow old
            if since >= oldest and connection.clean:
                return connection
            self._drop(connection)
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
    """The bytes of one connection, as they come: `received` has those that nobody has read."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.received = bytearray()
        self.ended = False
        self._broken: Exception | None = None
        self._come: asyncio.Future[None] | None = None

    @property
    def clean(self) -> bool:
        """It stands, and nothing came that was not asked for."""
        return not (self.ended or self.received)

    async def more(self) -> None:
        """Until bytes come, or the end, after which it raises ConnectionResetError."""
        if self.ended:
            raise ConnectionResetError(f"the connection ended before the answer ({self._broken or 'closed'})")
        self._come = asyncio.get_running_loop().create_future()
        await self._come

    async def read(self, num_bytes: int) -> bytes:
        while len(self.received) < num_bytes:
            await self.more()
        found = bytes(self.received[:num_bytes])
        del self.received[:num_bytes]
        return found

    async def read_head(self) -> bytes:
        """Up to the empty line behind it."""
        while (end := self.received.find(b"\r\n\r\n")) < 0:
            if len(self.received) > _MAX_HEAD_BYTES:
                raise _strange(f"a head of more than {_MAX_HEAD_BYTES} bytes")
            await self.more()
        return await self.read(end + 4)

    async def read_all(self, most: int) -> bytes:
        """Until the server ends the connection in order."""
        while not self.ended or self._broken is not None:
            _bounded(len(self.received), most)
            await self.more()
        return bytes(self.received)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._wake()

    def eof_received(self) -> None:
        self.ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended, self._broken = True, exc
        self._wake()

    def _wake(self) -> None:
        if self._come is not None and not self._come.done():
            self._come.set_result(None)


async def _answer(
    connection: _Connection, on_body: Callable[[bytes], None] | None, most: int
) -> tuple[int, bytes, bool]:
    """(status, body, whether the server keeps the connection)."""
    status = 0
    while status < 200:  # interim answers come before the real one
        first, *lines = (await connection.read_head()).lower().split(b"\r\n")
        if not first.startswith(b"http/1."):
            raise _strange(repr(first[:80]))
        status = _number(first[9:12], 10, 999)
    fields = {name: value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    keeps = fields.get(b"connection") != b"close" and not first.startswith(b"http/1.0")
    tell = on_body if status == 200 else None
    if fields.get(b"transfer-encoding") == b"chunked":
        body = await _chunks(connection, tell, most)
    elif b"content-length" in fields:
        body = await connection.read(_number(fields[b"content-length"], 10, most))
    elif status in (204, 304):
        body = b""
    else:
        body = await connection.read_all(most)
    if tell is not None and body:
        tell(body)
        body = b""
    return status, body, keeps


async def _chunks(connection: _Connection, tell: Callable[[bytes], None] | None, most: int) -> bytes:
    """Those that came together at a time are told together; what nobody was told at the end."""
    received, found, total = connection.received, list[bytes](), 0
    while True:
        at = 0
        while (end := received.find(b"\r\n", at)) >= 0:
            size = _number(bytes(received[at:end]).partition(b";")[0], 16, most)
            if size == 0 and (trailer := received.find(b"\r\n\r\n", end)) >= 0:
                del received[: trailer + 4]
                return b"".join(found)
            if size == 0 or len(received) < end + size + 4:
                break
            found.append(bytes(received[end + 2 : end + 2 + size]))
            total += size
            _bounded(total if tell is None else 0, most)
            at = end + size + 4
        del received[:at]
        if tell is not None and found:
            tell(b"".join(found))
            found.clear()
        await connection.more()


def _bounded(num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise _strange(f"more than {most} bytes")


def _number(text: bytes, base: int, most: int) -> int:
    try:
        found = int(text, base)
    except ValueError:
        found = -1
    if not 0 <= found <= most:
        raise _strange(f"{text[:80]!r} for a number of at most {most}")
    return found


def _strange(what: str) -> ConnectionError:
    return ConnectionError(f"an answer must be HTTP/1.1, got {what}")
