"""Fetching: media come from where the settings allow, and never with more bytes than they allow."""

from __future__ import annotations

import base64
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rondo.models.media import fetch
from rondo.models.media.config import MediaConfig
from rondo.models.media.errors import MediaError
from rondo.models.media.refs import MediaRef


class _Answers(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path == "/missing":
            self.send_error(404)
        else:
            body = b"x" * int(self.path.split("/")[2])
            self.send_response(200)
            if self.path.startswith("/short/"):
                self.send_header("Content-Length", str(2 * len(body)))
            elif self.path.startswith("/digits/"):
                self.send_header("Content-Length", "9" * len(body))
            elif self.path.startswith("/said/"):
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:  # the reader had enough
                self.close_connection = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as running:
        running.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def _url(server: ThreadingHTTPServer, path: str, host: str = "127.0.0.1") -> str:
    return f"http://{host}:{server.server_address[1]}{path}"


def test_a_relative_path_starts_at_the_root(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cat 1.png").write_bytes(b"cat")
    config = MediaConfig(root=tmp_path)
    assert fetch.read(MediaRef("image", "a/cat 1.png"), config) == b"cat"
    assert fetch.read(MediaRef("image", str(tmp_path / "a/cat 1.png")), config) == b"cat"
    assert fetch.read(MediaRef("image", f"file://{tmp_path}/a/cat%201.png"), config) == b"cat"


def test_without_a_root_paths_are_those_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"cat")
    monkeypatch.chdir(tmp_path)
    assert fetch.read(MediaRef("image", "a.png"), MediaConfig()) == b"cat"
    assert fetch.read(MediaRef("image", str(tmp_path / "a.png")), MediaConfig()) == b"cat"


@pytest.mark.parametrize("source", ["../secret", "{outside}", "file://{outside}", "link"])
def test_a_path_cannot_leave_the_root(tmp_path: Path, source: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "secret"
    root.mkdir()
    outside.write_bytes(b"secret")
    (root / "link").symlink_to(outside)
    with pytest.raises(MediaError, match=r"must lie inside media\.root"):
        fetch.read(MediaRef("image", source.format(outside=outside)), MediaConfig(root=root))


def test_only_files_that_can_be_read_are_read(tmp_path: Path) -> None:
    config = MediaConfig(root=tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for source, problem in (
        ("pipe", "must be a file, got something else"),
        (".", "must be a file, got something else"),
        ("missing", "No such file or directory"),
        ("nul\0byte", "null byte"),
        ("empty", "must hold data, got 0 bytes"),
        ("ftp://127.0.0.1/a", "got another scheme"),
        ("file://elsewhere/a", "must lie on this machine"),
    ):
        with pytest.raises(MediaError, match=problem) as error:
            fetch.read(MediaRef("image", source), config)
        assert str(error.value).startswith(f"image {source[:80]} must ")


def test_a_file_has_at_most_the_bytes_of_the_limit(tmp_path: Path, server: ThreadingHTTPServer) -> None:
    config = MediaConfig(root=tmp_path, max_file_bytes=1000, allowed_hosts=("127.0.0.1",))
    (tmp_path / "fits").write_bytes(b"x" * 1000)
    (tmp_path / "large").write_bytes(b"x" * 1001)
    data_uri = "data:image/png;base64," + base64.b64encode(b"x" * 1001).decode()
    assert len(fetch.read(MediaRef("image", "fits"), config)) == 1000
    assert len(fetch.read(MediaRef("image", _url(server, "/said/1000")), config)) == 1000
    assert len(fetch.read(MediaRef("image", _url(server, "/silent/1000")), config)) == 1000
    for source in (
        "large",
        b"x" * 1001,
        data_uri,
        _url(server, "/said/1001"),
        _url(server, "/silent/9000000"),
        _url(server, "/digits/6000"),
    ):
        with pytest.raises(MediaError, match=r"at most media\.max_file_bytes = 1000 bytes") as error:
            fetch.read(MediaRef("image", source), config)
        assert len(str(error.value)) < 300


def test_a_data_uri_holds_base64() -> None:
    body = bytes(range(256))
    encoded = base64.b64encode(body).decode()
    assert fetch.read(MediaRef("audio", f"data:audio/wav;base64,{encoded}"), MediaConfig()) == body
    assert fetch.read(MediaRef("audio", f"DATA:;base64,{encoded[:80]}\n{encoded[80:]}"), MediaConfig()) == body
    for source in ("data:image/png,plain", "data:image/png;base64", "data:image/png;base64,a$b", "data:;base64,abc"):
        with pytest.raises(MediaError, match="base64"):
            fetch.read(MediaRef("image", source), MediaConfig())


def test_only_allowed_hosts_are_asked(server: ThreadingHTTPServer) -> None:
    source = _url(server, "/said/10")
    port = server.server_address[1]
    for allowed in (("127.0.0.1",), ("other.example", f"127.0.0.1:{port}")):
        assert fetch.read(MediaRef("image", source), MediaConfig(allowed_hosts=allowed)) == b"x" * 10
    asked = list(server.asked)  # type: ignore[attr-defined]
    assert asked == ["/said/10"] * 2
    for denied in ((), ("other.example",), (f"127.0.0.1:{port + 1}",), ("0.0.1",)):
        with pytest.raises(
            MediaError, match=r"must come from a host in media\.allowed_hosts, got a URL of '127\.0\.0\.1'"
        ):
            fetch.read(MediaRef("image", source), MediaConfig(allowed_hosts=denied))
    assert server.asked == asked  # type: ignore[attr-defined]


@pytest.mark.parametrize("netloc", ["allowed@{real}", "allowed\\@{real}", "{real}%2f.allowed"])
def test_a_url_that_hides_its_host_is_refused(server: ThreadingHTTPServer, netloc: str) -> None:
    url = f"http://{netloc.format(real=f'127.0.0.1:{server.server_address[1]}')}/said/10"
    with pytest.raises(MediaError, match="must name its host plainly"):
        fetch.read(MediaRef("image", url), MediaConfig(allowed_hosts=("allowed", "127.0.0.1")))
    assert server.asked == []  # type: ignore[attr-defined]


def test_a_redirect_goes_to_allowed_hosts_only(server: ThreadingHTTPServer) -> None:
    config = MediaConfig(allowed_hosts=("127.0.0.1",))
    followed = _url(server, "/to/" + _url(server, "/said/10"))
    assert fetch.read(MediaRef("image", followed), config) == b"x" * 10
    server.asked.clear()  # type: ignore[attr-defined]
    with pytest.raises(MediaError, match="got a redirect to 'localhost'"):
        fetch.read(MediaRef("image", _url(server, "/to/" + _url(server, "/said/10", "localhost"))), config)
    with pytest.raises(MediaError, match="'file:///etc/hostname' is not allowed"):
        fetch.read(MediaRef("image", _url(server, "/to/file:///etc/hostname")), config)
    assert len(server.asked) == 2  # type: ignore[attr-defined]


def test_an_answer_that_fails_or_breaks_off_is_refused(server: ThreadingHTTPServer) -> None:
    config = MediaConfig(allowed_hosts=("127.0.0.1",))
    with pytest.raises(MediaError, match="must be answered by its host, got HTTP Error 404"):
        fetch.read(MediaRef("image", _url(server, "/missing")), config)
    with pytest.raises(MediaError, match="must arrive whole, got 10 of 20 bytes"):
        fetch.read(MediaRef("image", _url(server, "/short/10")), config)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(MediaError, match=r"must be answered by its host, got .*refused"):
            fetch.read(MediaRef("image", f"http://127.0.0.1:{taken.getsockname()[1]}/said/1"), config)


def test_frames_count_together_against_the_limit() -> None:
    ref = MediaRef("video", [b"x" * 400, b"y" * 600])
    assert fetch.read_video(ref, MediaConfig(max_file_bytes=1000)) == ref.source
    assert fetch.read_video(MediaRef("video", b"mp4"), MediaConfig()) == b"mp4"
    with pytest.raises(
        MediaError, match=r"^video of 2 frames must have at most media\.max_file_bytes = 999 bytes, got 1000"
    ):
        fetch.read_video(ref, MediaConfig(max_file_bytes=999))
