"""Whatever arrives at a socket: frames, packets of the segment server, HTTP at the admin endpoint.

After each storm the server still answers, nothing was raised on its loop or its threads, and nobody is left connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rondo.launch.provider import TRACE
from rondo.runtime.actors import transport as wire
from rondo.runtime.actors.actor import Actor, endpoint, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.admin.endpoint import AdminServer
from rondo.runtime.admin.openapi import QUERY
from rondo.runtime.config import AdminConfig
from rondo.runtime.errors import TRAVELLERS, DeadlineExceeded
from rondo.runtime.memory.segments import SegmentClient, SegmentServer
from rondo.runtime.waits import waiter
from tests.runtime.actors.test_transport import MAGIC, PREFIX
from tests.runtime.admin.test_endpoint import RUN_TOKEN, Numbers, ask
from tests.strength import strength

TOKEN = "a token of this run"
PATIENCE_S = 30.0
SILENT_S = 0.05
FEW = settings(max_examples=strength(quick=8, full=300))

json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def edited(valid: bytes) -> st.SearchStrategy[bytes]:
    """Something that was right: cut off anywhere, with some bytes replaced, taken out or put in."""
    edit = st.tuples(st.integers(0, len(valid)), st.integers(0, 8), st.binary(max_size=8))

    def apply(edits: list[tuple[int, int, bytes]], end: int) -> bytes:
        data = valid
        for at, taken, put in edits:
            data = data[:at] + put + data[at + taken :]
        return data[:end]

    return st.builds(apply, st.lists(edit, max_size=4), st.integers(0, len(valid) + 8))


# ---------------------------------------------------------------------------------------------- frames


class Echo(Actor):
    @endpoint
    async def echo(self, value: Any) -> Any:
        return value


def hello(token: str = TOKEN, version: int = wire.PROTOCOL_VERSION, most: int = 1 << 20, name: bytes = b"me") -> bytes:
    return wire.HELLO.pack(wire.HELLO_MAGIC, version, len(name), most, wire.token_digest(token), name)


def frame(kind: int, number: int, header: bytes, buffers: tuple[bytes, ...] = ()) -> bytes:
    sizes = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    return PREFIX.pack(MAGIC, kind, len(buffers), len(header), number) + sizes + header + b"".join(buffers)


CALLS = b"".join(
    [
        frame(wire.CALL, 1, orjson.dumps(["echo", [1], {}])),
        frame(wire.CALL, 2, orjson.dumps(["echo", [{"\0buffer": [0, "<i4", [2]]}], {}]), (b"12345678",)),
        frame(wire.CANCEL, 1, b""),
        frame(wire.CALL, 3, orjson.dumps(["rondo.waits", [], {}])),
    ]
)
SIZES = st.integers(0, 40) | st.sampled_from([2**16, 2**24, 2**24 + 1, 2**31, 2**32 - 1])
PREFIXES = st.builds(
    lambda kind, num, header, number, rest: PREFIX.pack(MAGIC, kind, num, header, number) + rest,
    st.integers(0, 255),
    SIZES,
    SIZES,
    st.integers(0, 2**64 - 1),
    st.binary(max_size=80),
)
CLAIMS = st.builds(
    lambda sizes, rest: PREFIX.pack(MAGIC, wire.CALL, len(sizes), 2, 1) + struct.pack(f"<{len(sizes)}Q", *sizes) + rest,
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4),
    st.binary(max_size=40),
)
VALUES = st.builds(
    lambda value, buffers: frame(wire.CALL, 9, orjson.dumps(value), tuple(buffers)),
    st.builds(
        lambda name, args, more: [name, args, more], st.just("echo") | json, st.lists(json, max_size=2) | json, json
    )
    | st.builds(lambda spec: ["echo", [{"\0buffer": spec}], {}], json | st.lists(json, max_size=3))
    | json,
    st.lists(st.binary(max_size=9), max_size=2),
)
STREAMS = (
    st.binary(max_size=400)
    | edited(hello() + CALLS)
    | st.builds(lambda *parts: b"".join(parts), st.just(hello()), st.one_of(PREFIXES, CLAIMS, VALUES, edited(CALLS)))
    | st.sampled_from([hello("another"), hello(version=2), hello(most=0) + CALLS, hello(most=2**64 - 1) + CALLS])
)


async def storm(streams: list[bytes]) -> None:
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    with tempfile.TemporaryDirectory(prefix="rondo-") as folder:
        async with await serve(
            Echo(), f"unix:{folder}/echo", token=TOKEN, name="echo", max_frame_bytes=1 << 16
        ) as server:
            for data in streams:
                reader, writer = await asyncio.open_unix_connection(f"{folder}/echo")
                with contextlib.suppress(ConnectionError):  # it was refused before it had sent all
                    writer.write(data)
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(), PATIENCE_S)
                writer.close()
            with ActorRef(server.address, token=TOKEN, peer="echo") as ref:
                assert await ref.call("echo", "still here", deadline_s=PATIENCE_S) == "still here"
            while server.stats().num_callers or server.stats().num_running:  # noqa: ASYNC110 - only the server tells
                await asyncio.sleep(0)
    assert raised == []


@FEW
@given(st.lists(STREAMS, min_size=1, max_size=20))
def test_an_actor_answers_after_whatever_its_socket_got(streams: list[bytes]) -> None:
    asyncio.run(storm(streams))


WELCOME = frame(wire.WELCOME, 0, orjson.dumps({"window": 8, "max_frame_bytes": 1 << 20}))
ANSWERED = frame(wire.REPLY, 1, orjson.dumps("here")) + frame(
    wire.REPLY, 2, orjson.dumps([{"\0buffer": [0]}]), (b"12345",)
)
ERRORS = ["ConfigError", "DeadlineExceeded", "RemoteError", "NotYet", "PeerGone", "nobody's"]
SAID = (
    st.binary(max_size=200)
    | edited(WELCOME + ANSWERED)
    | st.builds(lambda value: frame(wire.WELCOME, 0, orjson.dumps(value)) + ANSWERED, json)
    | st.builds(
        lambda window, most: (
            frame(wire.WELCOME, 0, orjson.dumps({"window": window, "max_frame_bytes": most})) + ANSWERED
        ),
        st.integers(-1, 2) | json,
        st.integers(-1, 2**64 - 1) | json,
    )
    | st.builds(lambda value: WELCOME + frame(wire.REFUSAL, 0, orjson.dumps(value)), json)
    | st.builds(
        lambda kind, arguments, text: (
            WELCOME + frame(wire.ERROR, 1, orjson.dumps({"type": kind, "args": arguments, "traceback": text}))
        ),
        st.sampled_from(ERRORS) | json,
        st.lists(json, max_size=4) | json,
        st.text(max_size=8) | json,
    )
    | st.builds(lambda rest: WELCOME + rest, st.one_of(PREFIXES, CLAIMS, VALUES, edited(ANSWERED)))
)


async def asked_of(said: list[bytes]) -> None:
    """Calls an actor that says this, whatever it was asked, and hangs up."""
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    left = list(said)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readexactly(wire.HELLO.size)
            writer.write(left.pop())
            writer.write_eof()
            await reader.read()
        writer.close()

    with tempfile.TemporaryDirectory(prefix="rondo-") as folder:
        async with await asyncio.start_unix_server(answer, f"{folder}/echo"):
            for _ in said:
                with ActorRef(f"unix:{folder}/echo", token=TOKEN, peer="echo") as ref:
                    try:
                        await asyncio.wait_for(ref.call("echo", "x", deadline_s=PATIENCE_S), 2 * PATIENCE_S)
                    except tuple({*TRAVELLERS.values()}) as error:
                        assert not isinstance(error, DeadlineExceeded) or error.waiter != waiter()  # no hang
    assert raised == []


@FEW
@example([frame(wire.WELCOME, 0, b"[]"), frame(wire.WELCOME, 0, b'{"window": "8", "max_frame_bytes": 1}')])
@example([WELCOME + frame(wire.REFUSAL, 0, b"[1]"), frame(wire.REFUSAL, 0, b"3")])
@given(st.lists(SAID, min_size=1, max_size=10))
def test_a_caller_gets_an_answer_or_a_typed_error_whatever_its_actor_says(said: list[bytes]) -> None:
    asyncio.run(asked_of(said))


# ---------------------------------------------------------------------------------------------- segments

ASKS = st.sampled_from(["segment", "doorbell", "drop", "register", "other"]) | json
NAMES = st.sampled_from(["ring", "slab", "", "x" * 200, "x" * 201, "a\0b", "\u00fc" * 150]) | json
NUMBERS = st.sampled_from([0, -1, 1, 4096, 1 << 20, 1 << 30, 1 << 62, 2**64 - 1, 4096.0, "4096", True]) | json
PROCESS = {"group": "a", "incarnation": 1, "rank": 0, "pid": os.getpid(), "start_time": 1, "session": 1}
REQUESTS = st.fixed_dictionaries(
    {},
    optional={
        "ask": ASKS,
        "name": NAMES,
        "num_bytes": NUMBERS,
        "process": json
        | st.just(PROCESS)
        | st.builds(lambda name, value: {**PROCESS, name: value}, st.sampled_from(list(PROCESS)), json),
    },
)
PACKETS = st.binary(min_size=1, max_size=64) | st.builds(orjson.dumps, REQUESTS | json)


@pytest.fixture
def thread_errors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    found: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", found.append)
    yield found


def test_the_segment_server_answers_after_whatever_its_socket_got(thread_errors: list[Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="rondo-") as folder:
        server = SegmentServer(Path(folder) / "s", TOKEN, lambda _: None, free=lambda: (1 << 22, "the cgroup"))
        server.start()
        before = len(list(Path("/proc/self/fd").iterdir()))

        @FEW
        @given(st.booleans(), st.lists(PACKETS, min_size=1, max_size=8))
        @example(True, [b'{"ask":"segment","name":[1],"num_bytes":0}'])
        @example(True, [b'{"ask":"segment","name":"ring","num_bytes":4096.0}'] * 4)
        def one(welcome: bool, packets: list[bytes]) -> None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                raw.settimeout(PATIENCE_S)
                raw.connect(str(server.path))
                for packet in [TOKEN.encode(), *packets] if welcome else packets:
                    try:
                        raw.send(packet)
                        data, fds, _, _ = socket.recv_fds(raw, 1 << 16, 4)
                    except (BrokenPipeError, ConnectionResetError):
                        data, fds = b"", []
                    for fd in fds:
                        os.close(fd)
                    if not data:
                        assert not welcome
                        break
                    assert isinstance(orjson.loads(data), dict) and (welcome or b"Refused" in data)
            with SegmentClient(server.path, TOKEN) as client, client.segment("mine", 4096) as mine:
                assert mine.num_bytes == 4096
            server.clear()

        one()
        due = time.monotonic() + PATIENCE_S
        while (held := len(list(Path("/proc/self/fd").iterdir()))) > before and time.monotonic() < due:
            os.sched_yield()  # each connection is closed by a thread of its own, once that hears that its client is gone
        server.close()
    assert thread_errors == [] and held <= before


# ---------------------------------------------------------------------------------------------- admin

METHODS = st.sampled_from(["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "get", "G\0T", ""])
PATHS = st.sampled_from(
    [
        "/livez",
        "/readyz",
        "/healthz",
        "/roles",
        "/waits",
        "/bus",
        "/weights",
        "/samples",
        "/metrics",
        "/stop",
        "/timeline",
        "/",
        "*",
        "//",
        "/../token",
        "/roles/../samples",
        "/timeline?steps=1:2",
        "/timeline?steps=x",
        "/timeline?steps=%ff",
        "/%00",
        "/roles?" + "a" * 9000,
        "/\u00fc",
    ]
)
HEADERS = st.lists(
    st.sampled_from(
        [
            b"Authorization: Bearer " + RUN_TOKEN.encode(),
            b"Authorization: Bearer \xff\xfe",
            b"Authorization: Basic x",
            b"Authorization:",
            b"Host: evil.example",
            b"Host: \xff",
            b"Host: [::1]:1",
            b"Host: localhost:x",
            b"Content-Length: 3",
            b"Content-Length: -1",
            b"Content-Length: 99999999999999999999",
            b"Transfer-Encoding: chunked",
            b"Transfer-Encoding: odd",
            b"Content-Encoding: gzip",
            b"Content-Type: \xff",
            b"Expect: 100-continue",
            b"Upgrade: websocket",
            b"X: " + b"y" * 9000,
            b"no colon",
            b"\xff: \xff",
            b"Connection: keep-alive, upgrade",
            b"Range: bytes=0-1",
        ]
    ),
    max_size=4,
)
BODIES = st.sampled_from(
    [b"", b"{}", b"{", b'{"reason": 1}', b'{"reason": "enough"}', b"[]", b"5\r\nhello\r\n0\r\n\r\n", b"\xff" * 40]
) | (st.builds(orjson.dumps, json))
ASKED = st.builds(
    lambda method, path, headers, body: b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), *headers, b"", body]),
    METHODS,
    PATHS,
    HEADERS,
    BODIES,
)
LARGE = b"POST /stop HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n"


async def asked(port: int, data: bytes) -> bytes:
    """The beginning of what comes back; nothing where the server waits for more, and then we hang up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(1 << 16), SILENT_S)
    except (ConnectionError, TimeoutError):
        return b""
    finally:
        writer.close()


async def trace(request: web.Request) -> web.StreamResponse:
    return web.json_response({"steps": request[QUERY].steps})


async def admin_storm(requests: list[bytes]) -> None:
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    provider = Numbers()
    server = AdminServer(AdminConfig(), provider, token=RUN_TOKEN)
    server.route("GET", "/timeline", trace, scope="read", operation=TRACE)
    await server.start()
    # One that never ends its headers, and one that never sends what it has announced.
    idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
    idle[0][1].write(b"GET /roles HTTP/1.1\r\nX: ")
    idle[1][1].write(LARGE % (RUN_TOKEN.encode(), 1 << 30))
    try:
        for data in requests:
            answer = await asked(server.port, data)
            for line in answer.split(b"\r\n"):
                assert not line.startswith(b"HTTP/1.1 5"), (data, answer)
        answer = await asked(server.port, LARGE % (RUN_TOKEN.encode(), 2 << 20) + b" " * (2 << 20))
        assert answer.startswith(b"HTTP/1.1 413 ") or not answer
        assert await asyncio.wait_for(ask(server, "GET", "/roles"), PATIENCE_S) == (200, provider.roles())
    finally:
        await asyncio.wait_for(server.close(), PATIENCE_S)
        for _, writer in idle:
            writer.close()
    assert set(provider.stopped_for) <= {"enough", "asked over HTTP"} and raised == []


def test_the_admin_endpoint_answers_after_whatever_it_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    @settings(max_examples=strength(quick=4, full=60))
    @given(st.lists(ASKED, min_size=4, max_size=16))
    def one(requests: list[bytes]) -> None:
        asyncio.run(admin_storm(requests))

    with caplog.at_level(logging.WARNING):
        one()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
