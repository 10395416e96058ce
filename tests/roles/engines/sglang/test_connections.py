"""Calls over kept connections: every form an answer comes in, and every way it does not come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.connections import Connections
from rondo.roles.engines.sglang.server import held_port
from rondo.runtime.errors import ConfigError, PeerGone


class Server:
    """Answers every request on a connection with the next of its answers; None closes the connection."""

    def __init__(self, *answers: bytes | None, piece: int | None = None) -> None:
        self.answers, self.piece = list(answers), piece
        self.asked: list[bytes] = []
        self.num_connections = 0
        self.gone = asyncio.Event()
        self.got_one = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(x[15:]) for x in head.split(b"\r\n") if x.startswith(b"Content-Length:")), 0)
                self.asked.append(head + await reader.readexactly(length))
                self.got_one.set()
                if not self.answers:
                    await reader.read()  # never answers; until the client leaves
                    break
                answer = self.answers.pop(0)
                if answer is None:
                    break
                for at in range(0, len(answer), self.piece or len(answer)):
                    writer.write(answer[at : at + (self.piece or len(answer))])
                    await writer.drain()
                    if self.piece:
                        await asyncio.sleep(0)
                if b"close" in answer or b"HTTP/1.0" in answer:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.gone.set()
            writer.close()


@contextlib.asynccontextmanager
async def serving(*answers: bytes | None, piece: int | None = None) -> AsyncIterator[tuple[Server, Connections]]:
    it = Server(*answers, piece=piece)
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    pool = Connections(f"http://{host}:{port}", {"Authorization": "Bearer k"})
    try:
        async with asyncio.timeout(60):
            yield it, pool
    finally:
        pool.close()
        server.close()


PLAIN = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n2\r\nlo\r\n0\r\nA: b\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello"
TO_THE_END = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"
OLD = b"HTTP/1.0 200 OK\r\n\r\nhello"
FORMS = {
    "plain": PLAIN,
    "chunked": CHUNKED,
    "interim": INTERIM,
    "closing": CLOSING,
    "to the end": TO_THE_END,
    "1.0": OLD,
}


@pytest.mark.parametrize("piece", [None, 1], ids=["whole", "byte by byte"])
@pytest.mark.parametrize("form", FORMS)
async def test_an_answer_is_read_in_whatever_form_and_pieces_it_comes(form: str, piece: int | None) -> None:
    async with serving(FORMS[form], PLAIN, piece=piece) as (server, pool):
        assert await pool.call("POST", "/a", b"{}") == (200, b"hello")
        assert await pool.call("GET", "/b", None) == (200, b"hello")
        assert server.num_connections == (1 if form in ("plain", "chunked", "interim") else 2)
        first, second = server.asked
        assert first.startswith(b"POST /a HTTP/1.1\r\n") and first.endswith(b"Content-Length: 2\r\n\r\n{}")
        assert second.startswith(b"GET /b HTTP/1.1\r\n") and b"\r\nAuthorization: Bearer k\r\n" in second


async def test_calls_at_a_time_have_a_connection_each_and_leave_it_to_the_next() -> None:
    async with serving(*[PLAIN] * 40) as (server, pool):
        for _ in range(5):
            await asyncio.gather(*(pool.call("GET", "/", None) for _ in range(8)))
        assert server.num_connections == 8


async def test_an_error_status_is_an_answer_and_keeps_the_connection() -> None:
    async with serving(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", PLAIN) as (server, pool):
        assert await pool.call("GET", "/", None) == (503, b"")
        assert await pool.call("GET", "/", None) == (200, b"hello")
        assert server.num_connections == 1


CUT = b"HTTP/1.1 200 OK\r\nX: close\r\nContent-Length: 5\r\n\r\nhel"
NEGATIVE = b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n"
STRANGE = {
    "closed": None,
    "cut": CUT,
    "not http": b"SSH-2.0-x\r\n\r\n",
    "negative": NEGATIVE,
    "endless head": b"x" * 70_000,
}


@pytest.mark.parametrize("form", STRANGE)
async def test_what_is_no_answer_is_an_error_and_the_next_call_has_a_new_connection(form: str) -> None:
    async with serving(STRANGE[form], PLAIN) as (server, pool):
        with pytest.raises(OSError, match=r"the connection ended before the answer|an answer must be HTTP/1\.1, got"):
            await pool.call("GET", "/", None)
        assert await pool.call("GET", "/", None) == (200, b"hello")
        assert server.num_connections == 2


async def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    async with serving(CLOSING.replace(b"Connection", b"Later"), PLAIN) as (server, pool):
        assert (await pool.call("GET", "/", None))[1] == b"hello"
        await server.gone.wait()
        while pool._idle[0][1].clean:  # noqa: ASYNC110 - the end is on its way, and tells nobody else
            await asyncio.sleep(0)
        assert (await pool.call("GET", "/", None))[1] == b"hello"
        assert server.num_connections == 2


async def test_bytes_that_nobody_asked_for_end_a_connection() -> None:
    async with serving(PLAIN + PLAIN, PLAIN) as (server, pool):
        assert (await pool.call("GET", "/", None))[1] == b"hello"
        assert (await pool.call("GET", "/", None))[1] == b"hello"
        assert server.num_connections == 2


async def test_a_cancelled_call_closes_its_connection() -> None:
    async with serving() as (server, pool):
        task = asyncio.create_task(pool.call("POST", "/generate", b"{}"))
        await server.got_one.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await server.gone.wait()


async def test_closing_ends_the_calls_under_way_and_refuses_new_ones() -> None:
    async with serving() as (server, pool):
        task = asyncio.create_task(pool.call("POST", "/generate", b"{}"))
        await server.got_one.wait()
        pool.close()
        with pytest.raises(OSError, match="the connection ended before the answer"):
            await task
        with pytest.raises(OSError, match="the client is closed"):
            await pool.call("GET", "/", None)


async def test_a_long_body_arrives_whole() -> None:
    async with serving(PLAIN) as (server, pool):
        body = bytes(range(256)) * 8192
        await pool.call("POST", "/", body)
        assert server.asked[0].endswith(body) and len(server.asked[0]) > len(body)


async def test_addresses_and_keys_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"the address of a server must look like http://127\.0\.0\.1:30000, got 'x:1'"
    ):
        SGLangClient("x:1")
    with pytest.raises(ConfigError, match="a header of a server must be one line"):
        SGLangClient("http://x", api_key="a\r\nb")


async def test_a_server_that_is_not_there_is_gone() -> None:
    with held_port() as port:
        async with SGLangClient(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(PeerGone, match=r"must answer /ready, got ConnectionRefusedError"):
                await client.get("/ready", deadline_s=30)
