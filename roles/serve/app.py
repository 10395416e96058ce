"""The server: an aiohttp application over any engine, and the socket that it listens on.

Owns the routes, how large a body may be, and the end: drain, then close. Does not own who may ask and the way of a request
(`runtime/admin/server.py`), nor the engine, which whoever made it closes.

    async with listening(Service(engine, tokenizer, work, "m", max_length=4096), [token], "127.0.0.1", 0) as url: ...

Invariant: without the token nobody learns more than whether the server is up. A caller that leaves takes its request along.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from aiohttp import web

from rondo.roles.serve import control
from rondo.roles.serve.answering import answered
from rondo.roles.serve.control import ControlBody
from rondo.roles.serve.fields import Fields
from rondo.roles.serve.generate import GenerateBody, generate
from rondo.roles.serve.limits import BODY_BYTES_A_TOKEN, MIN_BODY_BYTES
from rondo.roles.serve.openai import ChatBody, TextBody, chat, completions
from rondo.roles.serve.service import Failed, Service, failed
from rondo.runtime.admin.guard import Guard, Scope
from rondo.runtime.admin.openapi import EVENTS, JSON, TEXT, Operation
from rondo.runtime.admin.server import HttpServer, Limits, bind
from rondo.runtime.errors import ConfigError

DRAIN_S = 30.0
_OPEN = ("/health", "/ready", "/ping")

Object = dict[str, Any]
Route = Callable[[Service, web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listening(
    service: Service,
    own: Sequence[str],
    host: str,
    port: int,
    *,
    given: Sequence[str] = (),
    tls: ssl.SSLContext | None = None,
    earlier: int = 0,
    drain_s: float = DRAIN_S,
) -> AsyncIterator[str]:
    """Serves while the body lasts; the value is the URL. An `own` token must be shown, or a `given` one (`guard.py`). At the end
    what is in flight has `drain_s` seconds to be answered.

    ConfigError when the address cannot be had. `port` 0 takes a free one, `earlier` if it is free.
    """
    most = service.max_body_bytes or max(MIN_BODY_BYTES, BODY_BYTES_A_TOKEN * service.max_length)
    guard = Guard(own, given)
    server = HttpServer(
        "rondo: a model", guard, failed, Failed, Limits(most), host=host, tls=tls, handler_cancellation=True
    )
    routes = _ROUTES if service.samples is None else _OF_SAMPLES
    if own and service.samples is not None:
        routes = (*routes, _EPISODES)
    for method, path, route, operation in routes:
        # A session's key is not the server's: who has one is looked at where the session is looked for.
        by_key = service.samples is not None and path != _EPISODES[1]
        scope: Scope = "open" if path in _OPEN or by_key else "content"
        server.route(method, path, partial(route, service), scope=scope, operation=operation)
    for name in control.NOT_SUPPORTED if service.samples is None else ():
        server.route("*", f"/{name}", partial(control.not_supported, service), scope="content", operation=None)
    try:
        await server.start(_listening(host, port, earlier))
        yield server.url
        try:
            await asyncio.wait_for(service.requests.drain(), drain_s)
        except TimeoutError:
            service.requests.abort(None)  # they are answered with what they have
    finally:
        await server.close()


def _listening(host: str, port: int, earlier: int) -> socket.socket:
    if earlier:
        with suppress(ConfigError):
            return bind(host, earlier, "port")
    return bind(host, port, "port")


def _told(
    summary: str, gives: Any = Object, takes: type[Fields] | None = None, media_types: tuple[str, ...] = (JSON,)
) -> Operation:
    """What a route says of itself. The dialects judge what they are sent themselves (`fields.py`)."""
    return Operation(summary, gives, takes, query=None, media_types=media_types)


_CHAT = _told("An answer to a conversation, as OpenAI gives it.", takes=ChatBody, media_types=(JSON, EVENTS))
_TEXT = _told("Texts that go on, as OpenAI gives them.", takes=TextBody, media_types=(JSON, EVENTS))
_GENERATE = _told("Samples, as SGLang gives them.", Object | list[Object], GenerateBody, (JSON, EVENTS))
_INFO = _told("What model and server are, as SGLang says it.")
_FLUSH = _told("Nothing is kept beyond what is in flight.", str, None, (TEXT,))
_SESSION = "/rondo/trajectories/{session:.+}"
_ROUTES: tuple[tuple[str, str, Route, Operation], ...] = (
    ("POST", "/v1/chat/completions", partial(answered, read=chat), _CHAT),
    ("POST", "/v1/completions", partial(answered, read=completions), _TEXT),
    ("GET", "/v1/models", control.models, _told("The model.")),
    ("GET", "/v1/models/{model:.+}", control.models, _told("The model.")),
    ("POST", "/generate", partial(answered, read=generate), _GENERATE),
    ("PUT", "/generate", partial(answered, read=generate), _GENERATE),
    ("POST", "/abort_request", control.abort_request, _told("End a request.", None, ControlBody)),
    ("POST", "/pause_generation", control.pause_generation, _told("Stop sampling.", takes=ControlBody)),
    ("POST", "/continue_generation", control.continue_generation, _told("Sample again.")),
    ("GET", "/flush_cache", control.flush_cache, _FLUSH),
    ("POST", "/flush_cache", control.flush_cache, _FLUSH),
    ("POST", "/update_weights_from_disk", control.update_weights_from_disk, _told("Take weights.", takes=ControlBody)),
    ("POST", "/weights_checker", control.weights_checker, _told("Checksums of the weights.")),
    ("GET", "/health", control.health, _told("Whether requests are taken.", None)),
    ("GET", "/ping", control.health, _told("Whether requests are taken.", None)),
    ("GET", "/ready", control.ready, _told("Whether requests are worked on.", None)),
    ("GET", "/health_generate", control.health_generate, _told("Whether a token can be sampled.", None)),
    ("GET", "/model_info", control.info, _INFO),
    ("GET", "/get_model_info", control.info, _INFO),
    ("GET", "/server_info", control.info, _INFO),
    ("GET", "/get_server_info", control.info, _INFO),
    ("GET", "/v1/loads", control.loads, _told("How much there is to do.")),
    ("GET", "/rondo/trajectories", control.trajectories, _told("Sessions.")),
    ("GET", _SESSION, control.trajectory, _told("A session's calls and rows.")),
    ("DELETE", _SESSION, control.forget, _told("Forget a session.")),
)
_OF_SAMPLES = (
    *(each for each in _ROUTES if each[1].startswith("/v1/") or each[1] in _OPEN),
    (
        "POST",
        "/sessions/{session:.+}/reward",
        control.reward,
        _told("What a session is worth, which ends it.", takes=None),
    ),
)
_EPISODES = ("POST", "/episodes", control.episode, _told("A sample to make.", takes=control.EpisodeBody))
