"""The server: an aiohttp application over any engine, and the socket that it listens on.

Owns who may ask (a bearer token, compared in constant time), how large a body may be, the routes, and the end: drain, then close.
Does not own the engine, which whoever made it closes.

    app = server(Service(engine, tokenizer, work, "m", max_length=4096), token)
    async with listening(app, "127.0.0.1", 0) as url: ...

Invariant: without the token nobody learns more than whether the server is up. A caller that leaves takes its request along.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from aiohttp import web

from rondo.roles.serve import control as own
from rondo.roles.serve.answering import answered
from rondo.roles.serve.errors import TurnedDown
from rondo.roles.serve.generate import generate
from rondo.roles.serve.limits import BODY_BYTES_A_TOKEN, MIN_BODY_BYTES
from rondo.roles.serve.openai import chat, completions
from rondo.roles.serve.service import Service, error_answer
from rondo.runtime.admin.http_log import HTTP_LOG, WRONGLY_ASKED
from rondo.runtime.errors import ConfigError, RondoError

SERVICE: web.AppKey[Service] = web.AppKey("service", Service)
DRAIN_S = 30.0
log = logging.getLogger("rondo.serve")
_OPEN = ("/health", "/ready", "/ping")
_CLOSE_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = Callable[[Service, web.Request], Awaitable[web.StreamResponse]]


def server(service: Service, *tokens: str) -> web.Application:
    """The application. Any of the tokens must be shown."""
    most = service.max_body_bytes or max(MIN_BODY_BYTES, BODY_BYTES_A_TOKEN * service.max_length)
    app = web.Application(middlewares=[_guard(tokens)], client_max_size=most)
    app[SERVICE] = service
    for method, path, route in _ROUTES:
        app.router.add_route(method, path, _with_service(service, route))
    for name in _not_supported:
        app.router.add_route("*", f"/{name}", _with_service(service, _refuse))
    return app


@asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, *, earlier: int = 0, drain_s: float = DRAIN_S
) -> AsyncIterator[str]:
    """Serves while the body lasts; the value is the URL. At the end what is in flight has `drain_s` seconds to be answered.

    ConfigError when the address cannot be had. `port` 0 takes a free one, `earlier` if it is free.
    """
    runner = web.AppRunner(app, access_log=None, logger=HTTP_LOG, handler_cancellation=True, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    try:
        await _listen(runner, host, port, earlier)
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{runner.addresses[0][1]}"
        try:
            await asyncio.wait_for(app[SERVICE].requests.drain(), drain_s)
        except TimeoutError:
            app[SERVICE].requests.abort(None)  # they are answered with what they have
    finally:
        await runner.cleanup()


async def _listen(runner: web.AppRunner, host: str, port: int, earlier: int) -> None:
    if earlier:
        with suppress(OSError):
            await web.TCPSite(runner, host, earlier).start()
            return
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise ConfigError(
            f"port must be free on {host}, got {port} ({error.strerror}). Take 0 for a free one, or stop who uses it"
        ) from error


def _guard(tokens: Sequence[str]) -> Any:
    """Checks the token, and turns errors into JSON."""
    accepted = [token.encode() for token in tokens]

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path not in _OPEN:
                _check_token(request, accepted)
            return await handler(request)
        except WRONGLY_ASKED as error:
            return error_answer(ConfigError(f"a request must arrive whole, got {type(error).__name__}. Ask again"))
        except (web.HTTPException, RondoError) as error:
            answer = error_answer(error)
            if answer.status == 500:
                log.error("a request failed path=%s", request.path, exc_info=error)
            return answer

    return guard


def _check_token(request: web.Request, accepted: Sequence[bytes]) -> None:
    kind, _, shown = request.headers.get("Authorization", "").partition(" ")
    if kind != "Bearer" or not any(
        hmac.compare_digest(shown.encode(errors="surrogateescape"), token) for token in accepted
    ):
        raise TurnedDown(401, f"{request.path} must be asked with a valid token. Send 'Authorization: Bearer TOKEN'")


def _with_service(service: Service, route: Route) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await route(service, request)

    return handler


_refuse, _not_supported = own.not_supported, own.NOT_SUPPORTED
_ROUTES: tuple[tuple[str, str, Route], ...] = (
    ("POST", "/v1/chat/completions", partial(answered, read=chat)),
    ("POST", "/v1/completions", partial(answered, read=completions)),
    ("GET", "/v1/models", own.models),
    ("GET", "/v1/models/{model:.+}", own.models),
    ("POST", "/generate", partial(answered, read=generate)),
    ("PUT", "/generate", partial(answered, read=generate)),
    ("POST", "/abort_request", own.abort_request),
    ("POST", "/pause_generation", own.pause_generation),
    ("POST", "/continue_generation", own.continue_generation),
    ("GET", "/flush_cache", own.flush_cache),
    ("POST", "/flush_cache", own.flush_cache),
    ("POST", "/update_weights_from_disk", own.update_weights_from_disk),
    ("GET", "/health", own.health),
    ("GET", "/ping", own.health),
    ("GET", "/ready", own.ready),
    ("GET", "/health_generate", own.health_generate),
    ("GET", "/model_info", own.model_info),
    ("GET", "/get_model_info", own.model_info),
    ("GET", "/server_info", own.server_info),
    ("GET", "/get_server_info", own.server_info),
    ("GET", "/v1/loads", own.loads),
    ("GET", "/rondo/trajectories", own.trajectories),
    ("GET", "/rondo/trajectories/{session:.+}", own.trajectory),
    ("DELETE", "/rondo/trajectories/{session:.+}", own.forget),
)
