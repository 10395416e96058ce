"""One SGLang server over HTTP: a call, its deadline, and its answer or error.

Owns the session, the bearer key, and the reading of errors, which the server words in three ways. Does not own what the
endpoints mean. The server's contract is that of SGLang 0.5.10 to 0.5.23.

    async with SGLangClient("http://127.0.0.1:30000", api_key=key) as client:
        info = await client.get("/model_info", deadline_s=5)
        await client.post("/pause_generation", {"mode": "in_place"}, deadline_s=5)

Invariant: a call ends with the server's JSON, `ServerError` (it answered, and said no), `PeerGone` (no answer: it is not
there, or left before it answered) or `DeadlineExceeded`. Cancelling a call closes its connection, which ends its request there.
"""

from __future__ import annotations

from typing import Any, Self

import orjson

from rondo.roles.rollout.sglang.connections import Connections
from rondo.runtime.errors import PeerGone, Refused
from rondo.runtime.waits import wait_for

_MAX_TEXT = 2000


class ServerError(Refused):
    """The server answered with an error: `status` of HTTP, `path`, and its words."""

    def __init__(self, url: str, path: str, status: int, words: str) -> None:
        super().__init__(f"{path} of the SGLang server {url} must succeed, got HTTP {status}: {words}")
        self.path = path
        self.status = status
        self.words = words


class SGLangClient:
    """Calls to one server. Use it inside `async with`; connections are kept alive and not limited in number."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._connections = Connections(self.url, headers)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._connections.close()

    async def get(self, path: str, *, deadline_s: float | None) -> Any:
        return await self._bounded("GET", path, None, deadline_s)

    async def post(self, path: str, body: object | None = None, *, deadline_s: float | None) -> Any:
        """The answer as JSON (None where it is empty, text where it is not JSON)."""
        return await self._bounded("POST", path, {} if body is None else body, deadline_s)

    async def _bounded(self, method: str, path: str, body: object, deadline_s: float | None) -> Any:
        calling = self._call(method, path, body)
        return await wait_for(calling, name=f"sglang {path}", peer=self.url, deadline_s=deadline_s)

    async def _call(self, method: str, path: str, body: object) -> Any:
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            status, content = await self._connections.call(method, path, data)
        except OSError as error:  # ConnectionError is one
            raise PeerGone(
                f"the SGLang server {self.url} must answer {path}, got {type(error).__name__}: {error}. Read its log"
            ) from error
        told = _read(content)
        if status != 200:
            raise ServerError(self.url, path, status, _words(told))
        return told


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
