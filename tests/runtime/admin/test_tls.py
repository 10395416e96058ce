"""TLS by certificate files, tokens by token files: what is taken, and what is refused before anything starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import warnings
from pathlib import Path

import pytest
import uvloop

from rondo.runtime.admin.endpoint import AdminServer, listen
from rondo.runtime.admin.handshake import Handshakes
from rondo.runtime.admin.server import Limits, bind
from rondo.runtime.admin.tls import client_context, server_context
from rondo.runtime.admin.tokens import read_token_file
from rondo.runtime.config import AdminConfig
from rondo.runtime.errors import ConfigError
from tests.runtime.admin.certificates import CERT, KEY, KEY_WITH_A_PASSWORD, OTHER_CERT
from tests.runtime.admin.test_endpoint import RUN_TOKEN, Numbers
from tests.runtime.admin.test_server import serving

PATIENCE_S = 30.0


@pytest.fixture
def files(tmp_path: Path) -> Path:
    texts = {
        "cert": CERT,
        "key": KEY,
        "locked": KEY_WITH_A_PASSWORD,
        "other": OTHER_CERT,
        "none": "",
        "token": "t" * 16,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return tmp_path


async def test_an_endpoint_with_a_certificate_speaks_tls_of_today_alone(files: Path) -> None:
    server = AdminServer(AdminConfig(tls_cert=files / "cert", tls_key=files / "key"), Numbers(), token=RUN_TOKEN)
    await server.start()
    assert server.url == f"https://127.0.0.1:{server.port}"

    async def answer(context: ssl.SSLContext | None) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        found = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return found

    try:
        assert (await answer(client_context(files / "cert"))).startswith(b"HTTP/1.1 200 ")
        with pytest.raises(ssl.SSLCertVerificationError):
            await answer(client_context(files / "other"))
        old = client_context(files / "cert")
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await answer(old)
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await answer(None)
    finally:
        await server.close()


async def test_connections_that_never_speak_are_as_many_as_there_may_be_for_a_time_and_keep_nobody_out(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rondo.runtime.admin.server.HANDSHAKE_S", 10 * PATIENCE_S)
    tls = server_context(files / "cert", files / "key")
    trusting = client_context(files / "cert")
    async with serving(Limits(1 << 10, max_connections=4, idle_s=10 * PATIENCE_S), tls=tls) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(9)]
        # Of as many as there may be the oldest is hung up on; the order in which they were accepted says which.
        over = [reader for reader, _ in silent[:5]]
        assert await asyncio.wait_for(asyncio.gather(*[reader.read() for reader in over]), PATIENCE_S) == [b""] * 5
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting)
        writer.write(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).startswith(b"HTTP/1.1 4")
        assert await asyncio.wait_for(silent[5][0].read(), PATIENCE_S) == b""
        for _, each in (*silent, (reader, writer)):
            each.close()
    async with serving(Limits(1 << 10, max_connections=4, idle_s=0.05), tls=tls) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
        writer.close()


async def test_however_many_wait_to_be_accepted_the_loop_turns_with_each(files: Path) -> None:
    tls = server_context(files / "cert", files / "key")
    assert tls is not None
    made: list[asyncio.Protocol] = []

    def after() -> asyncio.Protocol:
        made.append(asyncio.Protocol())
        return made[-1]

    listening, num_turns = bind("127.0.0.1", 0, "port"), 0
    with contextlib.ExitStack() as ends:
        for _ in range(50):
            ends.enter_context(socket.create_connection(listening.getsockname()))
        handshakes = Handshakes(tls, after, lambda: 100, PATIENCE_S)
        handshakes.start(listening)
        async with asyncio.timeout(PATIENCE_S):
            while len(made) < 50:
                num_turns += 1
                await asyncio.sleep(0)
        await handshakes.close()
    assert num_turns >= 50


def test_a_caller_whose_first_words_wait_already_where_he_is_accepted_is_shaken_hands_with(files: Path) -> None:
    tls, trusting = server_context(files / "cert", files / "key"), client_context(files / "cert")

    async def run() -> bytes:
        listening = bind("127.0.0.1", 0, "port")
        with socket.create_connection(listening.getsockname()) as caller:
            from_server, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
            secure = trusting.wrap_bio(from_server, to_server)
            with pytest.raises(ssl.SSLWantReadError):
                secure.do_handshake()
            caller.sendall(to_server.read())
            caller.setblocking(False)
            async with serving(Limits(1 << 10, idle_s=PATIENCE_S), tls=tls, listening=listening):
                return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(caller, 1), PATIENCE_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(run()) == b"\x16"  # a record of the handshake


@pytest.mark.parametrize(
    ("cert", "key", "words"),
    [
        ("cert", "missing", "admin.tls_key must be readable, got "),
        ("missing", "key", "No such file"),
        ("none", "key", "admin.tls_cert and admin.tls_key must be a certificate and its key without a password"),
        ("cert", "none", "must be a certificate and its key"),
        ("cert", "locked", "must be a certificate and its key"),
        ("other", "key", "KEY_VALUES_MISMATCH"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_refused_before_the_start(
    cert: str, key: str, words: str, files: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        listen(AdminConfig(tls_cert=files / cert, tls_key=files / key))


def test_a_key_that_others_may_read_is_refused(files: Path) -> None:
    (files / "key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"admin\.tls_key must have mode 0600, got 0640\. Run: chmod 600 "):
        server_context(files / "cert", files / "key")


def test_a_certificate_comes_with_its_key_and_an_open_address_with_a_token(files: Path) -> None:
    for settings in ({"tls_cert": files / "cert"}, {"tls_key": files / "key"}):
        with pytest.raises(ValueError, match=r"admin\.tls_cert and admin\.tls_key must be set together, got "):
            AdminConfig(**settings)
    for host in ("0.0.0.0", "", "::", "10.0.0.1", "0", "example.com"):
        with pytest.raises(ValueError, match=r"admin\.token_file must be set when admin\.host is not loopback"):
            AdminConfig(host=host)


def test_a_name_of_loopback_that_leads_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere = [(2, 1, 6, "", ("0.0.0.0", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: anywhere)
    with pytest.raises(
        ConfigError, match=r"admin\.host must be loopback without admin\.token_file, got localhost: 0\.0\.0\.0"
    ):
        listen(AdminConfig(host="localhost"))


def test_what_is_no_token_is_refused(files: Path) -> None:
    token = files / "token"
    for data, words in [
        (b"\xff" * 20, "one line of ASCII"),
        (b"a b" * 10, "one line of ASCII"),
        (b"x" * 20 + b"\n" + b"y" * 20, "one line of ASCII"),
        (b"x" * 5000, "at most 4096"),
    ]:
        token.write_bytes(data)
        with pytest.raises(ConfigError, match=f"admin.token_file must hold .*{words}"):
            read_token_file(token)
    os.mkfifo(files / "pipe", 0o600)
    for path in (files / "pipe", files, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"admin\.token_file must be a file, got "):
            read_token_file(path)
