"""What our HTTP servers hold every caller to, and the form of every answer that is no success: over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import uvloop
from aiohttp import web
from pydantic import SecretStr

from rondo.runtime.admin import openapi
from rondo.runtime.admin.endpoint import Failed, failed
from rondo.runtime.admin.guard import Guard, TurnedDown
from rondo.runtime.admin.openapi import Operation
from rondo.runtime.admin.server import HttpServer, Limits, bind, json_answer
from rondo.runtime.errors import ConfigError, PeerGone, Refused
from rondo.runtime.section import Section

TOKEN = "o" * 64
PATIENCE_S = 30.0
DONE = Operation("Done.", dict[str, Any])
RAISED = {
    "config": ConfigError("x must be y, got z"),
    "gone": PeerGone("the engine must answer, got nothing"),
    "refused": Refused("no"),
    "conflict": TurnedDown(409, "not now", {"Retry-After": "3"}),
    "bug": KeyError("secret"),
}


class Keys(Section):
    num: int = 0
    key: SecretStr = SecretStr("")


@contextlib.asynccontextmanager
async def serving(
    limits: Limits = Limits(1 << 10, idle_s=PATIENCE_S),  # noqa: B008
    audited: list[dict[str, Any]] | None = None,
    tls: ssl.SSLContext | None = None,
    listening: socket.socket | None = None,
) -> AsyncIterator[HttpServer]:
    async def done(request: web.Request) -> web.StreamResponse:
        return json_answer({"done": True})

    async def raises(request: web.Request) -> web.StreamResponse:
        raise RAISED[request.match_info["what"]]

    audit = (lambda record: None) if audited is None else audited.append
    guard = Guard([TOKEN], ["f" * 16], open_reads=True)
    server = HttpServer("test", guard, failed, Failed, limits, host="127.0.0.1", audit=audit, tls=tls)
    server.route("GET", "/done", done, scope="read", operation=DONE)
    server.route("GET", "/raise/{what}", raises, scope="read", operation=DONE)
    server.route("POST", "/keys", done, scope="control", operation=Operation("Keys.", dict[str, Any], takes=Keys))
    server.route("POST", "/open", done, scope="read", operation=Operation("Keys.", dict[str, Any], takes=Keys))
    server.route("POST", "/raise/{what}", raises, scope="control", operation=DONE)
    await server.start(listening or bind("127.0.0.1", 0, "port"))
    try:
        yield server
    finally:
        await server.close()


async def sent(server: HttpServer, data: bytes) -> bytes:
    """All that comes back until the server hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()


def head(what: str, *headers: str, token: str | None = None) -> bytes:
    shown = [] if token is None else [f"Authorization: Bearer {token}"]
    lines = [f"{what} HTTP/1.1", "Host: localhost", "Connection: close", *shown, *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def told(answer: bytes) -> tuple[int, Any, dict[str, str]]:
    top, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["Content-Length"]) == len(body)
    return int(status.split()[1]), orjson.loads(body), headers


@pytest.mark.parametrize(
    ("request_", "status", "kind"),
    [
        (head("GET /nothing"), 404, "HTTPError"),
        (head("DELETE /done"), 405, "HTTPError"),
        (head("GET /done", "Expect: odd"), 417, "HTTPError"),
        (head("GET /nothing", "Expect: odd"), 417, "HTTPError"),
        (head("GET /" + "x" * 9000), 414, "HTTPError"),
        (head("GET /done", "X: " + "y" * 9000), 431, "HTTPError"),
        (head("GET /done", *(f"X{n}: y" for n in range(200))), 431, "HTTPError"),
        (b"\x16\x03\x01 not HTTP\r\n\r\n", 400, "HTTPError"),
        (b"GET /done HTTP/1.1\r\nno colon\r\n\r\n", 400, "HTTPError"),
        (head("POST /open", "Content-Length: 99999"), 413, "TurnedDown"),
        (
            head("POST /open", "Transfer-Encoding: chunked") + b"800\r\n" + b" " * 2048 + b"\r\n0\r\n\r\n",
            413,
            "HTTPError",
        ),
        (head("POST /open", "Content-Length: 9") + b"{", 408, "TurnedDown"),
        (head("POST /open", "Content-Length: 2", "Content-Encoding: gzip") + b"{}", 400, "RequestPayloadError"),
        (head("POST /keys", "Content-Length: 2") + b"{}", 401, "TurnedDown"),
        (head("POST /keys", "Content-Length: 2", token="f" * 16) + b"{}", 403, "TurnedDown"),
        (head("GET /done").replace(b"localhost", b"evil.example"), 403, "TurnedDown"),
        (head("GET /raise/config"), 400, "ConfigError"),
        (head("GET /raise/gone"), 503, "PeerGone"),
        (head("GET /raise/refused"), 503, "Refused"),
        (head("GET /raise/conflict"), 409, "TurnedDown"),
        (head("GET /raise/bug"), 500, "InternalError"),
    ],
)
async def test_every_answer_that_is_no_success_has_a_type_and_words(
    request_: bytes, status: int, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(openapi, "BODY_S", 0.02 if status == 408 else PATIENCE_S)
    async with serving() as server:
        found, body, headers = told(await sent(server, request_))
    assert (found, body["error"]["status"], body["error"]["type"]) == (status, status, kind), body
    assert len(body["error"]["message"]) < 300 and "secret" not in body["error"]["message"]
    assert headers["Content-Type"].startswith("application/json")
    assert headers.get("Allow") == ("GET" if status == 405 else None)
    assert headers.get("WWW-Authenticate") == ("Bearer" if status == 401 else None)
    assert headers.get("Retry-After") == ("3" if status == 409 else None)
    assert bool(caplog.get_records("call")) == (status == 500)  # a caller's mistake is no event of ours


async def test_a_head_that_does_not_end_and_a_caller_that_says_nothing_are_hung_up_on() -> None:
    async with serving(Limits(1 << 10, idle_s=0.05)) as server:
        for begun in (
            b"",
            b"GET /done HTTP/1.1\r\nX: ",
            b"GET /do",
            head("GET /done").replace(b"Connection: close\r\n", b""),
        ):
            assert b"HTTP/1.1 200" in (answer := await sent(server, begun)) or answer == b""


def test_connections_beyond_the_limit_are_told_so_and_there_is_room_again_when_one_leaves() -> None:
    async def ask() -> None:
        async with serving(Limits(1 << 10, max_connections=2, idle_s=PATIENCE_S)) as server:
            held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
            for reader, writer in held:
                writer.write(head("GET /done").replace(b"Connection: close\r\n", b""))
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            # Whoever has sent more than was read is told too: a reset would take the answer from him.
            status, body, headers = told(await sent(server, head("POST /open") + b"x" * (1 << 20)))
            assert (status, body["error"]["type"], headers["Retry-After"]) == (503, "Refused", "1")
            held[0][1].close()
            while (await sent(server, head("GET /done"))).startswith(b"HTTP/1.1 503"):
                pass
            held[1][1].close()

    uvloop.run(ask())  # as a run does: its transports are none of asyncio's classes


def test_many_silent_connections_beyond_the_limit_keep_nobody_from_being_told() -> None:
    async def ask() -> None:
        async with serving(Limits(1 << 10, max_connections=1, idle_s=PATIENCE_S)) as server:
            held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]
            status, body, _ = told(await sent(server, head("GET /done")))
            assert (status, body["error"]["type"]) == (503, "Refused")
            for _, writer in held:
                writer.close()

    uvloop.run(ask())  # as a run does: its transports are none of asyncio's classes


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"num": 1, "num": 2}', "must have each name once, got 'num' twice"),
        (b'{"num": 1, "key": "a", "key": "a"}', "must have each name once, got 'key' twice"),
        (b'{"key": {"a": 1, "\\u0061": 2}}', "must have each name once, got 'a' twice"),
        (b"[" * 1000, "must be JSON of some depth, got too many levels"),
    ],
)
async def test_a_second_value_of_a_name_is_refused_wherever_it_stands(body: bytes, words: str) -> None:
    async with serving() as server:
        length = f"Content-Length: {len(body)}\r\n\r\n".encode()
        status, answer, _ = told(await sent(server, head("POST /open")[:-2] + length + body))
    assert status == 400 and words in answer["error"]["message"]


@pytest.mark.parametrize("path", ["/done?x=%00", "/raise/%00", "/done%00"])
async def test_a_nul_in_a_path_or_query_is_a_400_with_words(path: str) -> None:
    async with serving() as server:
        status, answer, _ = told(await sent(server, head(f"GET {path}")))
    assert status == 400 and "must have no NUL, got one" in answer["error"]["message"]


async def test_whoever_takes_nothing_of_an_answer_is_hung_up_on_by_the_kernel() -> None:
    accepted: list[int] = []

    async def look(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        found = request.transport.get_extra_info("socket")
        accepted.append(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        return web.Response()

    server = HttpServer("test", Guard([TOKEN], open_reads=True), failed, Failed, Limits(1), host="127.0.0.1")
    server.route("GET", "/", look, scope="open", operation=None)
    await server.start(bind("127.0.0.1", 0, "port"))
    await sent(server, head("GET /"))
    await server.close()
    assert accepted == [30_000]


async def test_each_call_that_may_change_something_is_written_down_with_its_outcome_and_without_a_token() -> None:
    audited: list[dict[str, Any]] = []
    async with serving(audited=audited) as server:
        body = b'{"num": 3, "key": "hunter22"}'
        for token in (TOKEN, "f" * 16, "guess", None):
            await sent(server, head("POST /keys", f"Content-Length: {len(body)}", token=token) + body)
        await sent(server, head("POST /keys", "Content-Length: 1", token=TOKEN) + b"{")
        await sent(server, head("POST /raise/conflict", token=TOKEN))
        await sent(server, head("POST /raise/bug", token=TOKEN))
        await sent(server, head("GET /done"))
    keys = {"peer": "127.0.0.1", "what": "POST /keys"}
    asked = {"asked": "{'num': 3, 'key': SecretStr('**********')}"}
    assert audited == [
        {"who": "own", **keys, **asked, "status": 200, "outcome": "done"},
        {"who": "file", **keys, "status": 403, "outcome": "TurnedDown"},
        {"who": "nobody", **keys, "status": 401, "outcome": "TurnedDown"},
        {"who": "nobody", **keys, "status": 401, "outcome": "TurnedDown"},
        {"who": "own", **keys, "status": 400, "outcome": "ConfigError"},
        {"who": "own", "peer": "127.0.0.1", "what": "POST /raise/conflict", "status": 409, "outcome": "TurnedDown"},
        {"who": "own", "peer": "127.0.0.1", "what": "POST /raise/bug", "status": 500, "outcome": "InternalError"},
    ]


async def test_whoever_has_no_token_fills_no_disk_with_what_is_written_down() -> None:
    audited: list[dict[str, Any]] = []
    async with serving(audited=audited) as server:
        wrong = head("POST /keys", token="wrong").replace(b"Connection: close\r\n", b"")
        await sent(server, wrong * 199 + head("POST /keys", token="wrong"))
        refused = len(audited)
        await sent(server, head("POST /keys", token=TOKEN))
    assert 60 <= refused < 200  # and one more a second
    assert audited[-1]["unlogged"] == 200 - refused and audited[-1]["who"] == "own"


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
