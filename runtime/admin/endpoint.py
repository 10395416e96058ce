"""Admin: the HTTP endpoint of a run, in the leader's event loop. What it shows comes from a `Provider`.

Owns the server, who may ask, and the wire form (JSON, Prometheus text, server-sent events). Does not own any number it
shows. Invariant: nobody reads from another machine, reads samples or changes a run without a token, whatever route they take.

    GET  /livez /readyz                               probes: 200 or 503, no data, no token
    GET  /healthz /roles /waits /bus /weights         JSON
    GET  /samples                                     JSON: prompts and answers
    GET  /metrics                                     Prometheus text
    GET  /events                                      server-sent events, one `data:` line of JSON each
    POST /stop {"reason": ...}                        control: save and leave

    scope      on loopback      on another address
    read       open             token file's, or the run's token
    content    token file's, or the run's token: what data and policy say, which other users of this machine may not see
    control    the run's token  the run's token

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
from typing import Any, Literal, Protocol

import orjson
from aiohttp import web
from aiohttp.web_urldispatcher import AbstractRoute

from rondo.runtime.admin.http_log import HTTP_LOG, WRONGLY_ASKED
from rondo.runtime.admin.tokens import read_token_file
from rondo.runtime.config import AdminConfig, is_loopback
from rondo.runtime.errors import ConfigError, RondoError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Scope = Literal["open", "read", "content", "control"]

_KEEP_ALIVE_S = 15.0
_CLOSE_S = 1.0
_NAME = re.compile(r"[^a-zA-Z0-9_]")


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
        self._app = web.Application(middlewares=[self._guard], client_max_size=1 << 20)
        self._scopes: dict[AbstractRoute, Scope] = {}
        self._runner: web.AppRunner | None = None
        self._closing = asyncio.Event()
        self.port = 0
        self._mount_own()

    @property
    def url(self) -> str:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self.port}"

    def route(self, method: str, path: str, handler: Handler, *, scope: Scope) -> None:
        """Mounts another folder's handler; method "*" for any. Errors it raises as RondoError come back as JSON."""
        self._scopes[self._app.router.add_route(method, path, handler)] = scope

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
        shown: dict[str, Callable[[], Any]] = {
            "/roles": provider.roles,
            "/waits": provider.waits,
            "/bus": provider.bus,
            "/weights": provider.weights,
        }
        for path, method in shown.items():
            self.route("GET", path, _json_handler(method), scope="read")
        self.route("GET", "/samples", _json_handler(provider.samples), scope="content")
        self.route("GET", "/livez", self._livez, scope="open")
        self.route("GET", "/readyz", self._readyz, scope="open")
        self.route("GET", "/healthz", self._healthz, scope="read")
        self.route("GET", "/metrics", self._metrics, scope="read")
        self.route("GET", "/events", self._events, scope="read")
        self.route("POST", "/stop", self._stop, scope="control")

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the scope, and turns errors into JSON."""
        scope = self._scopes.get(request.match_info.route)  # none of what is not there
        if scope is not None and not self._allowed(request, scope):
            status = 401 if "Authorization" not in request.headers else 403
            return _error(
                status, f"{request.path} must be asked with a valid token. Send 'Authorization: Bearer TOKEN'"
            )
        if self._loopback and not _names_this_machine(request.host):
            return _error(403, f"Host must name this machine, got {request.host!r}. Use {self.url}")
        try:
            return await handler(request)
        except WRONGLY_ASKED as error:
            return _error(
                400, f"{request.method} {request.path} must arrive whole, got {type(error).__name__}. Ask again"
            )
        except web.HTTPException as error:
            return _error(error.status, f"{request.method} {request.path}: {error.reason}")
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
        return _json(health, status=200 if health["healthy"] else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = "\n".join(prometheus_lines(self._provider.metrics())) + "\n"
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _stop(self, request: web.Request) -> web.Response:
        body = await request.read()
        try:
            fields = orjson.loads(body) if body else {}
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"the body of /stop must be JSON, got {error}") from error
        fields = fields if isinstance(fields, dict) else {"": fields}
        reason, now = fields.get("reason", "asked over HTTP"), fields.get("now", False)
        if not isinstance(reason, str) or not isinstance(now, bool) or set(fields) - {"reason", "now"}:
            raise ConfigError('the body of /stop must be {"reason": text, "now": true or false}, got other fields')
        self._provider.stop(reason, quick=now)
        return _json({"stopping": True, "reason": reason}, status=202)

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
        return _json(method())

    return handler


def _json(data: Any, status: int = 200) -> web.Response:
    return web.Response(body=_dumps(data), status=status, content_type="application/json")


def _dumps(data: Any) -> bytes:
    return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _error(status: int, message: str, kind: str = "HTTPError") -> web.Response:
    return _json({"error": {"status": status, "type": kind, "message": message}}, status=status)
