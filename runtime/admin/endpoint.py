"""Admin: the HTTP endpoint of a run, in the leader's event loop. What it shows comes from a `Provider`.

Owns the server, who may ask, and the wire form (JSON, Prometheus text, server-sent events). Does not own any number it
shows. Invariant: nobody reads from another machine, reads samples or changes a run without a token, whatever route they take.

    GET  /livez /readyz                               probes: 200 or 503, no data, no token
    GET  /healthz /roles /waits /bus /weights         JSON
    GET  /samples                                     JSON: prompts and answers
    GET  /openapi.json                                what all routes take and give, those of other folders too
    GET  /metrics                                     Prometheus text
    GET  /events                                      server-sent events, one `data:` line of JSON each
    POST /stop {"reason": ...}                        control: save and leave

    scope      on loopback      on another address
    read       open             token file's, or the run's token
    content    token file's, or the run's token: what data and policy say, which other users of this machine may not see
    control    the run's token  the run's token

A route is mounted with its scope and its `Operation`; there is none without either. What is not there is as `read`.

A token is shown as `Authorization: Bearer TOKEN` and compared in constant time. On loopback the Host header must name
this machine too, so that a web page cannot reach the endpoint through a name that resolves to 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol, get_args

import orjson
from aiohttp import web
from aiohttp.web_urldispatcher import AbstractRoute
from pydantic import BaseModel, ConfigDict

from rondo.runtime.admin import openapi
from rondo.runtime.admin.http_log import HTTP_LOG, WRONGLY_ASKED
from rondo.runtime.admin.openapi import BODY, Mounted, Operation, Scope
from rondo.runtime.admin.tokens import read_token_file
from rondo.runtime.config import AdminConfig, is_loopback
from rondo.runtime.errors import ConfigError, DeadlineExceeded, RondoError
from rondo.runtime.formats import version_of
from rondo.runtime.section import Section
from rondo.runtime.supervision.spec import GroupView
from rondo.runtime.waits import Pending

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_KEEP_ALIVE_S = 15.0
_CLOSE_S = 1.0
_NAME = re.compile(r"[^a-zA-Z0-9_]")
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_MAX_BODY_BYTES = 1 << 20


class Health(BaseModel):
    """Both false while something is in the way; what else is known stands beside them."""

    model_config = ConfigDict(extra="allow")
    ready: bool
    healthy: bool


class Stop(Section):
    """`now`: at once, without saving."""

    reason: str = "asked over HTTP"
    now: bool = False


class Stopping(BaseModel):
    stopping: bool
    reason: str


class Provider(Protocol):
    """What the endpoint shows. Plain methods that return JSON-able data at once; called in the event loop."""

    def health(self) -> Mapping[str, Any]:
        """At least "ready" and "healthy" (bool); /readyz and /healthz answer 503 where they are false."""

    def roles(self) -> Any: ...

    def waits(self) -> Any: ...

    def bus(self) -> Any: ...

    def weights(self) -> Any: ...

    def samples(self) -> Any: ...

    def metrics(self) -> Mapping[str, Any]:
        """Numbers by name. {"step": 3, "restarts": {"role": {"actor": 1}}}: an inner mapping is label, then value."""

    def subscribe(self) -> AsyncIterator[dict[str, Any]]: ...

    def stop(self, reason: str, *, quick: bool) -> None: ...


class AdminServer:
    """The running endpoint. `token` is the run's own. Routes are added before `start`; `close` ends all connections."""

    def __init__(self, config: AdminConfig, provider: Provider, *, token: str) -> None:
        self._config = config
        self._provider = provider
        self._loopback = is_loopback(config.host)
        self._run_token = token
        self._read_token = read_token_file(config.token_file) if config.token_file is not None else None
        self._app = web.Application(middlewares=[self._guard], client_max_size=_MAX_BODY_BYTES)
        self._mounted: dict[AbstractRoute, Mounted] = {}
        self._runner: web.AppRunner | None = None
        self._closing = asyncio.Event()
        self.port = 0
        self._mount_own()

    @property
    def url(self) -> str:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self.port}"

    def route(self, method: str, path: str, handler: Handler, *, scope: Scope, operation: Operation) -> None:
        """Mounts another folder's handler, which finds what was sent, as its `operation` has it, in request[QUERY] and
        request[BODY]. Errors it raises as RondoError come back as JSON. ConfigError for a method or scope that is none."""
        for what, given, known in (("method", method, _METHODS), ("scope", scope, get_args(Scope))):
            if given not in known:
                raise ConfigError(f"the {what} of {path} must be one of {', '.join(known)}, got {given!r}. Correct it")
        route = self._app.router.add_route(method, path, handler)
        guarded = scope in ("content", "control") or (scope == "read" and not self._loopback)
        self._mounted[route] = Mounted(method, route, scope, operation, guarded)

    async def start(self, listening: socket.socket | None = None) -> int:
        """Answers on `listening`, which `listen` gave; without it, on the settings' address. Returns the port."""
        listening = listen(self._config) if listening is None else listening
        self._runner = web.AppRunner(self._app, access_log=None, logger=HTTP_LOG, shutdown_timeout=_CLOSE_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listening).start()
        self.port = self._runner.addresses[0][1]
        return self.port

    async def close(self) -> None:
        """Ends event streams and connections. Safe to call twice."""
        self._closing.set()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _mount_own(self) -> None:
        provider = self._provider
        shown: tuple[tuple[str, Callable[[], Any], Scope, Operation], ...] = (
            (
                "/roles",
                provider.roles,
                "read",
                Operation("Role groups and services, with their processes.", list[GroupView]),
            ),
            ("/waits", provider.waits, "read", Operation("Who waits for what.", list[Pending])),
            ("/bus", provider.bus, "read", Operation("Prompt groups, rows and rings.", dict[str, Any])),
            ("/weights", provider.weights, "read", Operation("Versions committed and proved.", dict[str, Any])),
            ("/samples", provider.samples, "content", Operation("The newest samples.", list[dict[str, Any]])),
            ("/openapi.json", self._openapi, "read", Operation("This document.", dict[str, Any])),
        )
        for path, method, scope, operation in shown:
            self.route("GET", path, _json_handler(method), scope=scope, operation=operation)
        text = "text/plain"
        not_yet = {503: "Not ready."}
        told: tuple[tuple[str, str, Handler, Scope, Operation], ...] = (
            ("GET", "/livez", self._livez, "open", Operation("Whether it answers.", str, media_type=text)),
            (
                "GET",
                "/readyz",
                self._readyz,
                "open",
                Operation("Whether all is up.", str, media_type=text, also=not_yet),
            ),
            ("GET", "/healthz", self._healthz, "read", Operation("How it is.", Health, also={503: "Not healthy."})),
            ("GET", "/metrics", self._metrics, "read", Operation("Numbers for Prometheus.", str, media_type=text)),
            ("GET", "/events", self._events, "read", Operation("What happens.", str, media_type="text/event-stream")),
            ("POST", "/stop", self._stop, "control", Operation("Save and leave.", Stopping, takes=Stop, status=202)),
        )
        for verb, path, handler, scope, operation in told:
            self.route(verb, path, handler, scope=scope, operation=operation)

    def _openapi(self) -> dict[str, Any]:
        return openapi.document("rondo: a run", version_of("rondo-rl") or "", self._mounted.values())

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the scope, and turns errors into JSON."""
        mounted = self._mounted.get(request.match_info.route)
        if not self._allowed(request, "read" if mounted is None else mounted.scope):
            status = 401 if "Authorization" not in request.headers else 403
            return _error(
                status, f"{request.path} must be asked with a valid token. Send 'Authorization: Bearer TOKEN'"
            )
        if self._loopback and not _names_this_machine(request.host):
            return _error(403, f"Host must name this machine, got {request.host!r}. Use {self.url}")
        try:
            if mounted is not None:
                await openapi.read(request, mounted.operation)
            return await handler(request)
        except WRONGLY_ASKED as error:
            return _error(
                400, f"{request.method} {request.path} must arrive whole, got {type(error).__name__}. Ask again"
            )
        except web.HTTPException as error:
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return _error(error.status, f"{request.method} {request.path}: {error.reason}", headers=headers)
        except DeadlineExceeded as late:
            return _error(408, str(late), "DeadlineExceeded")
        except RondoError as error:
            return _error(400 if isinstance(error, ValueError) else 503, str(error), type(error).__name__)

    def _allowed(self, request: web.Request, scope: Scope) -> bool:
        if scope == "open" or (scope == "read" and self._loopback):
            return True
        kind, _, shown = request.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer":
            return False
        accepted = [self._run_token]
        if scope != "control" and self._read_token is not None:
            accepted.append(self._read_token)
        # Headers of other encodings arrive with surrogates.
        return any(hmac.compare_digest(shown.encode(errors="surrogateescape"), token.encode()) for token in accepted)

    async def _livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.Response:
        ready = bool(self._provider.health()["ready"])
        return web.Response(text="ok\n" if ready else "not ready\n", status=200 if ready else 503)

    async def _healthz(self, request: web.Request) -> web.Response:
        health = self._provider.health()
        return json_answer(health, status=200 if health["healthy"] else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = "\n".join(prometheus_lines(self._provider.metrics())) + "\n"
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _stop(self, request: web.Request) -> web.Response:
        asked: Stop = request[BODY]
        self._provider.stop(asked.reason, quick=asked.now)
        return json_answer({"stopping": True, "reason": asked.reason}, status=202)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        records, closing = self._provider.subscribe(), asyncio.ensure_future(self._closing.wait())
        record = asyncio.ensure_future(anext(records, None))
        try:
            while True:
                await asyncio.wait([record, closing], timeout=_KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if closing.done() or (record.done() and record.result() is None):
                    return response
                if not record.done():
                    await response.write(b": still here\n\n")
                    continue
                data = _dumps(record.result())
                record = asyncio.ensure_future(anext(records, None))
                await response.write(b"data: " + data + b"\n\n")
        except ConnectionError:  # who asked has left
            return response
        finally:
            record.cancel()
            closing.cancel()


def listen(config: AdminConfig) -> socket.socket:
    """The socket of an endpoint, before there is anything to show. ConfigError when it cannot be had, nor the token be read."""
    if config.token_file is not None:
        read_token_file(config.token_file)
    try:
        (family, *_, address), *_ = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"admin.port must be free on {config.host}, got {config.port} ({error.strerror}). "
            "Set admin.port to 0 for a free one, or stop the program that uses it"
        ) from error


def prometheus_lines(metrics: Mapping[str, Any], prefix: str = "rondo") -> Iterator[str]:
    """Numbers as Prometheus text. What is not a number is left out: text and lists have no place in that format."""
    for name, value in metrics.items():
        full = _NAME.sub("_", f"{prefix}_{name}")
        if isinstance(value, Mapping):
            for label, values in value.items():
                if not isinstance(values, Mapping):
                    continue
                for shown, number in values.items():
                    if _is_number(number):
                        yield f'{full}{{{_NAME.sub("_", str(label))}="{_escape(str(shown))}"}} {_number(number)}'
        elif _is_number(value):
            yield f"{full} {_number(value)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _number(value: float) -> str:
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _names_this_machine(host: str) -> bool:
    name = host[: host.rindex(":")] if re.search(r":\d+$", host) else host
    return is_loopback(name.strip("[]"))


def _json_handler(method: Callable[[], Any]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return json_answer(method())

    return handler


def json_answer(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=_dumps(data), status=status, headers=headers, content_type="application/json")


def _dumps(data: Any) -> bytes:
    return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _error(
    status: int, message: str, kind: str = "HTTPError", headers: Mapping[str, str] | None = None
) -> web.Response:
    return json_answer({"error": {"status": status, "type": kind, "message": message}}, status, headers)
