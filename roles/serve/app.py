"""The server: an aiohttp application over any engine, and the socket that it listens on.

Owns who may ask (a bearer token, compared in constant time), how large a body may be, the routes, and the end: drain, then close.
Does not own the engine, which whoever made it closes.

    async with listening(Service(engine, tokenizer, work, "m", max_length=4096), [token], "127.0.0.1", 0) as url: ...

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

from rondo.roles.serve import control
from rondo.roles.serve.answering import answered
from rondo.roles.serve.errors import TurnedDown
from rondo.roles.serve.generate import generate
from rondo.roles.serve.limits import BODY_BYTES_A_TOKEN, MIN_BODY_BYTES
from rondo.roles.serve.openai import chat, completions
from rondo.roles.serve.service import Service, error_answer
from rondo.runtime.admin.http_log import HTTP_LOG, WRONGLY_ASKED
from rondo.runtime.errors import ConfigError, RondoError

DRAIN_S = 30.0
log = logging.getLogger("rondo.serve")
_OPEN = ("/health", "/ready", "/ping")
_CLOSE_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = Callable[[Service, web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def listening(
    service: Service, tokens: Sequence[str], host: str, port: int, *, earlier: int = 0, drain_s: float = DRAIN_S
) -> AsyncIterator[str]:
    """Serves while the body lasts; the value is the URL. Any of the tokens must be shown. At the end what is in flight has
    `drain_s` seconds to be answered.

    ConfigError when the address cannot be had. `port` 0 takes a free one, `earlier` if it is free.
    """
    most = service.max_body_bytes or max(MIN_BODY_BYTES, BODY_BYTES_A_TOKEN * service.max_length)
    app = web.Application(middlewares=[_guard(tokens)], client_max_size=most)
    for method, path, route in _ROUTES:
        app.router.add_route(method, path, partial(route, service))
    for name in control.NOT_SUPPORTED:
        app.router.add_route("*", f"/{name}", partial(control.not_supported, service))
    runner = web.AppRunner(app, access_log=None, logger=HTTP_LOG, handler_cancellation=True, shutdown_timeout=_CLOSE_S)
    await runner.setup()
    try:
        await _listen(runner, host, port, earlier)
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{runner.addresses[0][1]}"
        try:
            await asyncio.wait_for(service.requests.drain(), drain_s)
        except TimeoutError:
            service.requests.abort(None)  # they are answered with what they have
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
