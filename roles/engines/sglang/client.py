"""One SGLang server over HTTP: a call, its deadline, and its answer or error.

Owns the session, the bearer key, and the reading of errors, which the server words in three ways. Does not own what the
endpoints mean. The server's contract is that of SGLang 0.5.10 to 0.5.23.

    async with SGLangClient("http://127.0.0.1:30000", api_key=key) as client:
        info = await client.get("/model_info", deadline_s=5)
        await client.post("/pause_generation", {"mode": "in_place"}, deadline_s=5)

Invariant: a call ends with the server's JSON, `ServerError` (it answered, and said no), `PeerGone` (it left before it
answered), `NotThere` (it was never asked) or `DeadlineExceeded`. Cancelling a call closes its connection, which ends its request
there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import orjson

from rondo.roles.engines.faults import NotThere
from rondo.roles.engines.sglang.connections import MAX_BODY_BYTES, Connections
from rondo.runtime.errors import ConfigError, PeerGone, Refused, RondoError
from rondo.runtime.values import write_json
from rondo.runtime.waits import wait_for

_MAX_TEXT = 2000
Moved = Callable[[], float] | None


class ServerError(Refused):
    """The server answered with an error: `status` of HTTP, `path`, and its words."""

    def __init__(self, url: str, path: str, status: int, words: str, what: str = "SGLang server") -> None:
        super().__init__(f"{path} of the {what} {url} must succeed, got HTTP {status}: {words}")
        self.path = path
        self.status = status
        self.words = words


class SGLangClient:
    """Calls to one server. Use it inside `async with`; connections are kept alive and not limited in number. `what` it is, for
    messages."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        what: str = "SGLang server",
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.url, self._what = url.rstrip("/"), what
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._connections = Connections(self.url, headers, max_body_bytes)

    @property
    def num_heard(self) -> int:
        """Answers, and parts of answers."""
        return self._connections.num_heard

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connections.close()

    async def get(self, path: str, *, deadline_s: float | None) -> Any:
        return await self._bounded("GET", path, None, deadline_s)

    async def post(
        self, path: str, body: object | None = None, *, deadline_s: float | None, moved: Moved = None
    ) -> Any:
        """The answer as JSON (None where it is empty, text where it is not JSON). `moved` as in `waiting`."""
        return await self._bounded("POST", path, {} if body is None else body, deadline_s, moved)

    async def stream(
        self,
        path: str,
        body: object,
        on_events: Callable[[list[bytes]], None],
        *,
        deadline_s: float | None,
        moved: Moved = None,
    ) -> None:
        """A POST that is answered with server-sent events: `on_events` gets the data of those that came since it was told last,
        the oldest first. Returns after the last one; PeerGone where the stream ends without saying so."""
        events = _Events(self.url, path)

        def come(piece: bytes) -> None:
            if new := events.take(piece):
                on_events(new)

        calling = self._call("POST", path, body, come)
        await wait_for(calling, name=f"sglang {path}", peer=self.url, deadline_s=deadline_s, moved=moved)
        if not events.ended:
            raise PeerGone(
                f"the SGLang server {self.url} must end its stream of {path} with [DONE], got its end before"
            )

    async def _bounded(
        self, method: str, path: str, body: object, deadline_s: float | None, moved: Moved = None
    ) -> Any:
        calling = self._call(method, path, body)
        return await wait_for(calling, name=f"sglang {path}", peer=self.url, deadline_s=deadline_s, moved=moved)

    async def _call(self, method: str, path: str, body: object, on_body: Callable[[bytes], None] | None = None) -> Any:
        data = None if body is None else write_json(body, orjson.OPT_SERIALIZE_NUMPY)
        try:
            status, content = await self._connections.call(method, path, data, on_body=on_body)
        except RondoError:  # of what the parts of a stream say; some are connection errors, too
            raise
        except OSError as error:  # ConnectionError is one
            refused = isinstance(error, ConnectionRefusedError) or not isinstance(error, ConnectionError)
            raise (NotThere if refused else PeerGone)(
                f"the {self._what} {self.url} must answer {path}, got {type(error).__name__}: {error}. Read its log"
            ) from error
        told = _read(content)
        if status != 200:
            raise ServerError(self.url, path, status, _words(told), self._what)
        return told


def read_key(file: str | None, setting: str = "sglang.api_key_file") -> str | None:
    """The bearer key of servers that run already."""
    if file is None:
        return None
    try:
        found = Path(file).read_text().strip()
    except OSError as error:
        raise ConfigError(f"{setting} must be a file to read, got {file}: {error.strerror}") from error
    if not found:
        raise ConfigError(f"{setting} must hold a key, got an empty file {file}. Write the key into it")
    return found


class _Events:
    """The data of server-sent events, from pieces that end anywhere. Raises ServerError for an event that tells an error."""

    def __init__(self, url: str, path: str) -> None:
        self._url, self._path = url, path
        self._rest = b""
        self.ended = False

    def take(self, piece: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found = []
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.ended = True
            elif data.startswith(b'{"error"'):
                told = _read(data)
                code = told["error"].get("code") if isinstance(told["error"], dict) else None
                raise ServerError(self._url, self._path, code if isinstance(code, int) else 500, _words(told))
            else:
                found.append(data)
        return found


def _read(content: bytes) -> Any:
    if not content:
        return None
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def _words(told: Any) -> str:
    """What an error says: {"error": {"message"}}, {"error"}, {"success": false, "message"}, or plain text."""
    if isinstance(told, dict):
        inner = told.get("error", told)
        told = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(told)[:_MAX_TEXT]
