"""The bytes of a medium: from a path, a URL or a data URI.

Owns where media may come from and how many bytes they may have. Does not look at the bytes: `decode.py` does. Blocks its
thread, so it runs in a worker process with a deadline. Imports the standard library only.

    fetch.read(MediaRef("image", "cats/7.png"), MediaConfig(root="data"))    # data/cats/7.png
    fetch.read(MediaRef("audio", "https://host/a.wav"), MediaConfig(allowed_hosts=("host",)))

Invariants: nothing outside `root` is read where a root is set; no request goes to a host that is not allowed, also not after a
redirect; at most `max_file_bytes` + 1 bytes are held.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import stat
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from rondo.models.media.config import MediaConfig
from rondo.models.media.errors import MediaError, reason
from rondo.models.media.refs import MediaRef

_CHUNK_BYTES = 1 << 20


def read(ref: MediaRef, config: MediaConfig) -> bytes:
    """The file of a ref whose source is text (path, `file:`, `http:`, `https:` or `data:` URI) or bytes already.

    Raises MediaError for a source that is not allowed, not there, empty or too large.
    """
    source = ref.source
    assert not isinstance(source, list), "frames are read by read_video"
    if isinstance(source, bytes):
        _check_size(ref, len(source), config)
        data = source
    else:
        scheme = source.split(":", 1)[0].lower() if ":" in source[:8] else ""
        if scheme == "data":
            data = _from_data_uri(ref, source, config)
        elif scheme in ("http", "https"):
            data = _from_url(ref, source, config)
        elif "://" in source[:16] and scheme != "file":
            raise MediaError(
                f"{ref} must be a path, or a file, http, https or data URI, got another scheme. Correct the row"
            )
        else:
            data = _from_path(ref, source, config)
    if not data:
        raise MediaError(f"{ref} must hold data, got 0 bytes. Correct or remove the row")
    return data


def read_video(ref: MediaRef, config: MediaConfig) -> bytes | list[bytes]:
    """Like `read`, for a source that may also be a list of frames: together they have at most `max_file_bytes`."""
    if isinstance(ref.source, list):
        frames: list[bytes] = []
        for frame in ref.source:
            frames.append(frame if isinstance(frame, bytes) else read(MediaRef("image", frame), config))
            _check_size(ref, sum(map(len, frames)), config)
        return frames
    return read(ref, config)


def _from_path(ref: MediaRef, source: str, config: MediaConfig) -> bytes:
    if source.lower().startswith("file:"):
        parts = urlsplit(source)
        if parts.netloc not in ("", "localhost"):
            raise MediaError(f"{ref} must lie on this machine, got host {parts.netloc!r}. Correct the row")
        source = unquote(parts.path)
    path = Path(source)
    try:
        if config.root is not None:
            root = config.root.resolve()
            path = (root / path).resolve()
            if not path.is_relative_to(root):
                raise MediaError(
                    f"{ref} must lie inside media.root, got a path outside {str(root)!r}. Move the file, or change media.root"
                )
        found = path.stat()
        # A pipe or a device has no end.
        if not stat.S_ISREG(found.st_mode):
            raise MediaError(f"{ref} must be a file, got something else at {str(path)!r}. Correct the row")
        _check_size(ref, found.st_size, config)
        with path.open("rb") as file:
            return _read_bounded(ref, file, config)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a zero byte
        if isinstance(error, MediaError):
            raise
        raise MediaError(
            f"{ref} must be a file that can be read, got {reason(error)}. Check media.root and the row"
        ) from error


def _from_data_uri(ref: MediaRef, source: str, config: MediaConfig) -> bytes:
    header, comma, body = source.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise MediaError(f"{ref} must be a base64 data URI, got one without ';base64,'. Encode the data as base64")
    _check_size(ref, len(body) * 3 // 4 - 2, config)
    try:
        data = base64.b64decode(b"".join(unquote_to_bytes(body).split()), validate=True)
    except binascii.Error as error:
        raise MediaError(f"{ref} must be valid base64, got {error}. Encode the data again") from error
    _check_size(ref, len(data), config)
    return data


def _from_url(ref: MediaRef, source: str, config: MediaConfig) -> bytes:
    _check_host(ref, source, config)
    opener = urllib.request.build_opener(_CheckedRedirects(ref, config))
    deadline = time.monotonic() + config.deadline_s
    try:
        with opener.open(source, timeout=config.deadline_s) as answer:
            told = answer.headers.get("Content-Length", "")
            length = int(told.lstrip("0")[:20] or 0) if told.isdecimal() else 0  # of its digits as many as say too much
            _check_size(ref, length, config)
            data = _read_bounded(ref, answer, config, deadline)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"{ref} must be answered by its host, got {reason(error)}. Check the URL") from error
    if len(data) < length:
        raise MediaError(f"{ref} must arrive whole, got {len(data)} of {length} bytes. Try again, or check its host")
    return data


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, ref: MediaRef, config: MediaConfig) -> None:
        self._ref = ref
        self._config = config

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        try:
            _check_host(self._ref, newurl, self._config, redirected=True)
        except MediaError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_host(ref: MediaRef, url: str, config: MediaConfig, *, redirected: bool = False) -> None:
    how = "redirect to" if redirected else "URL of"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise MediaError(f"{ref} must stay with http or https, got a {how} {parts.scheme!r}. Correct the row")
    # Parsers disagree about which host a URL with user information or a backslash names.
    if any(character in parts.netloc for character in "@\\%") or not parts.netloc.isprintable():
        raise MediaError(f"{ref} must name its host plainly, got a {how} {parts.netloc!r}. Correct the row")
    host, netloc = (parts.hostname or "").lower(), parts.netloc.lower()
    if not {host, netloc} & {allowed.lower() for allowed in config.allowed_hosts}:
        raise MediaError(
            f"{ref} must come from a host in media.allowed_hosts, got a {how} {host!r}. Add the host, or remove the row"
        )


def _read_bounded(ref: MediaRef, file: Any, config: MediaConfig, deadline: float | None = None) -> bytes:
    data = bytearray()
    while chunk := file.read(min(_CHUNK_BYTES, config.max_file_bytes + 1 - len(data))):
        data += chunk
        _check_size(ref, len(data), config)
        if deadline is not None and time.monotonic() > deadline:
            raise MediaError(
                f"{ref} must arrive within media.deadline_s = {config.deadline_s:g} s, got {len(data)} bytes by then. "
                "Raise the deadline, or remove the row"
            )
    return bytes(data)


def _check_size(ref: MediaRef, num_bytes: int, config: MediaConfig) -> None:
    if num_bytes > config.max_file_bytes:
        raise MediaError(
            f"{ref} must have at most media.max_file_bytes = {config.max_file_bytes} bytes, got {num_bytes} or more. "
            "Raise the limit, or remove the row"
        )
