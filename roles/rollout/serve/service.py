"""Service: what every route of the server stands on, and how answers are written.

Owns the facts of one server (engine, tokenizer, names, limits) and the wire form: JSON, server-sent events, errors. Owns no
route.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from rondo.roles.rollout.engine import Engine
from rondo.roles.rollout.serve.desk import Desk
from rondo.roles.rollout.serve.errors import TurnedDown
from rondo.roles.rollout.serve.trajectory import MAX_NAME, Trajectories
from rondo.runtime.errors import ConfigError, RondoError

SESSION = "X-Rondo-Session"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Service:
    """One server. `control`: whether who asks may pause it and change its weights; not so where a run owns the engine.

    `seeds`: whether the engine's draws are decided by the seed of a request. `tells_experts`: whether its answers have their
    routed experts. `max_length` is in tokens, prompt included.
    """

    engine: Engine
    tokenizer: Any
    desk: Desk
    trajectories: Trajectories
    model_name: str
    model_path: str
    max_length: int
    stop_token_ids: tuple[int, ...]
    control: bool
    seeds: bool
    tells_experts: bool
    started: float = field(default_factory=time.time)

    def require_model(self, name: str | None) -> None:
        """TurnedDown (404) for a model that is not served here."""
        if name not in (None, self.model_name, "default"):
            raise TurnedDown(404, f"model must be {self.model_name!r}, the one that is served, got {name!r}. Change it")


def session_of(request: web.Request) -> str | None:
    """The session that a call belongs to, as its header says."""
    name = request.headers.get(SESSION)
    if name is not None and not (1 <= len(name) <= MAX_NAME and name.isascii() and name.isprintable()):
        raise ConfigError(f"{SESSION} must be 1 to {MAX_NAME} printable ASCII characters, got {len(name)}. Change it")
    return name


def json_answer(data: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> web.Response:
    return web.Response(body=dumps(data), status=status, headers=headers, content_type="application/json")


def dumps(data: Any) -> bytes:
    return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def error_answer(error: Exception) -> web.Response:
    """What is wrong, in the form that both dialects have: {"error": {"message", "type", "code"}}."""
    status = status_of(error)
    return json_answer(_told(error, status), status=status)


def status_of(error: Exception) -> int:
    if isinstance(error, TurnedDown):
        return error.status
    if isinstance(error, web.HTTPException):
        return error.status
    return 400 if isinstance(error, ConfigError) else 503


def _told(error: Exception, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    words = error.reason if isinstance(error, web.HTTPException) else str(error)
    return {"error": {"message": words, "type": kind, "param": None, "code": status}}


async def stream_events(
    request: web.Request,
    events: AsyncGenerator[Any, None],
    headers: Mapping[str, str] | None = None,
) -> web.StreamResponse:
    """Each event as one `data:` line, then [DONE]. An error before the first is an ordinary answer, a later one an event.

    `events` is closed in every end: so a caller that leaves takes its request out of the engine.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", **(headers or {})}
    )
    try:
        try:
            async for event in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b"data: " + dumps(event) + b"\n\n")
            if not response.prepared:
                await response.prepare(request)
        except RondoError as error:
            if not response.prepared:
                raise
            await response.write(b"data: " + dumps(_told(error, status_of(error))) + b"\n\n")
        await response.write(DONE)
    except ConnectionError:
        pass  # whoever asked has left, and there is nobody to tell
    finally:
        await events.aclose()
    return response
