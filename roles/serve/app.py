"""The server: an aiohttp application over any engine, and the socket that it listens on.

Owns the routes, how large a body may be, and the end: drain, then close. Does not own who may ask and the way of a request
(`runtime/admin/server.py`), nor the engine, which whoever made it closes.

    async with listening(Service(engine, tokenizer, work, "m", max_length=4096), [token], "127.0.0.1", 0) as url: ...

Invariant: without the token nobody learns more than whether the server is up. A caller that leaves takes its request along.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from aiohttp import web

from rondo.roles.serve import control
from rondo.roles.serve.answering import answered
from rondo.roles.serve.generate import generate
from rondo.roles.serve.limits import BODY_BYTES_A_TOKEN, MIN_BODY_BYTES
from rondo.roles.serve.openai import chat, completions
from rondo.roles.serve.service import Failed, Service, failed
from rondo.runtime.admin.guard import Guard
from rondo.runtime.admin.server import HttpServer, Limits, bind
from rondo.runtime.errors import ConfigError

DRAIN_S = 30.0
_OPEN = ("/health", "/ready", "/ping")

Route = Callable[[Service, web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listening(
    service: Service,
    own: Sequence[str],
    host: str,
    port: int,
    *,
    given: Sequence[str] = (),
    earlier: int = 0,
    drain_s: float = DRAIN_S,
) -> AsyncIterator[str]:
    """Serves while the body lasts; the value is the URL. An `own` token must be shown, or a `given` one (`guard.py`). At the end
    what is in flight has `drain_s` seconds to be answered.

    ConfigError when the address cannot be had. `port` 0 takes a free one, `earlier` if it is free.
    """
    most = service.max_body_bytes or max(MIN_BODY_BYTES, BODY_BYTES_A_TOKEN * service.max_length)
    guard = Guard(own, given)
    server = HttpServer("rondo: a model", guard, failed, Failed, Limits(most), host=host, handler_cancellation=True)
    for method, path, route in _ROUTES:
        server.route(
            method, path, partial(route, service), scope="open" if path in _OPEN else "content", operation=None
        )
    for name in control.NOT_SUPPORTED:
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


_ROUTES: tuple[tuple[str, str, Route], ...] = (
    ("POST", "/v1/chat/completions", partial(answered, read=chat)),
    ("POST", "/v1/completions", partial(answered, read=completions)),
    ("GET", "/v1/models", control.models),
    ("GET", "/v1/models/{model:.+}", control.models),
    ("POST", "/generate", partial(answered, read=generate)),
    ("PUT", "/generate", partial(answered, read=generate)),
    ("POST", "/abort_request", control.abort_request),
    ("POST", "/pause_generation", control.pause_generation),
    ("POST", "/continue_generation", control.continue_generation),
    ("GET", "/flush_cache", control.flush_cache),
    ("POST", "/flush_cache", control.flush_cache),
    ("POST", "/update_weights_from_disk", control.update_weights_from_disk),
    ("POST", "/weights_checker", control.weights_checker),
    ("GET", "/health", control.health),
    ("GET", "/ping", control.health),
    ("GET", "/ready", control.ready),
    ("GET", "/health_generate", control.health_generate),
    ("GET", "/model_info", control.info),
    ("GET", "/get_model_info", control.info),
    ("GET", "/server_info", control.info),
    ("GET", "/get_server_info", control.info),
    ("GET", "/v1/loads", control.loads),
    ("GET", "/rondo/trajectories", control.trajectories),
    ("GET", "/rondo/trajectories/{session:.+}", control.trajectory),
    ("DELETE", "/rondo/trajectories/{session:.+}", control.forget),
)
