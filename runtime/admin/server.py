"""Server: what our HTTP servers have in common, the endpoint of a run and a model's: routes, who may ask, limits, errors, audit.

Owns connections and their limits, the way of a request to its handler, and the form of failures. Does not own any route.

    request -> connection: how many, how long a head takes and is -> a name of this machine -> token and scope (`guard.py`)
            -> length of the body -> query and body (`openapi.py`) -> handler -> answer, or an error in JSON with a type -> audit

Invariant: every answer that is no success says what went wrong in JSON, with a type, from whatever depth it comes; a caller's
mistake is told to him alone (`http_log.py`); no caller holds memory, a connection or the loop for longer than the limits say.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import resource
import socket
import ssl
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import orjson
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_urldispatcher import AbstractRoute
from pydantic import BaseModel

from rondo.runtime.admin import openapi
from rondo.runtime.admin.guard import SCOPES, Guard, Rate, Scope, TurnedDown, Who
from rondo.runtime.admin.handshake import HANDSHAKE_S, Handshakes
from rondo.runtime.admin.http_log import HTTP_LOG, WRONGLY_ASKED
from rondo.runtime.admin.openapi import BODY, Mounted, Operation
from rondo.runtime.config import is_loopback
from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.formats import version_of
from rondo.runtime.section import show_value

Handler = Callable[[web.Request], Any]
"""Gives an answer, or what is told as JSON; at once, or to be awaited."""
Audit = Callable[[dict[str, Any]], None]
Form = Callable[[int, str, str], BaseModel]
"""(status, type, words) of a failure -> what is told."""

_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_CLOSE_S = 1.0
_STALLED_S = 30
"""A caller that takes nothing of its answer for so long is hung up on."""
_LINGER_S = 2.0
_MAX_LINE, _MAX_FIELD = 8190, 8192
_OTHER_FILES = 128
"""Descriptors that a process needs beside its connections."""
_MAX_REFUSED = 32
"""So many connections beyond the limit are told so at a time, each for `_LINGER_S` at most; the oldest gives way to the next."""


class Limits(NamedTuple):
    """Bytes of a body; connections at a time; seconds that a head may take, and an idle connection stays."""

    max_body_bytes: int
    max_connections: int = 1 << 16
    idle_s: float = 75.0


class HttpServer:
    """Routes are added before `start`; `close` ends all connections. `form` makes what a failure tells, a `failed`. `host`: where
    it listens; on loopback the Host header must name this machine too where reading is open, so that a web page cannot read
    through a name that resolves to 127.0.0.1. `audit` gets one record for every call of scope control, without any token.
    `options`: aiohttp's."""

    def __init__(
        self,
        title: str,
        guard: Guard,
        form: Form,
        failed: type[BaseModel],
        limits: Limits,
        *,
        host: str,
        tls: ssl.SSLContext | None = None,
        audit: Audit = lambda record: None,
        **options: Any,
    ) -> None:
        self._title, self._guard, self._limits = title, guard, limits
        self._form, self._failed_type = form, failed
        self._host, self._tls, self._audit = host, tls, audit
        self._checks_name = is_loopback(host) and not guard.needs("read")
        self._refused = Rate(60, 1.0, 1)
        self._num_unlogged = 0
        self._refusing: dict[asyncio.WriteTransport, None] = {}
        """Connections beyond the limit, the oldest first."""
        self._app = web.Application(middlewares=[self._answer], client_max_size=limits.max_body_bytes)
        self._app.on_response_prepare.append(self._in_form)
        self._mounted: dict[AbstractRoute, Mounted] = {}
        self._options = {"access_log": None, "logger": HTTP_LOG, "shutdown_timeout": _CLOSE_S} | options
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._handshakes: Handshakes | None = None
        self.port = 0
        self.route(
            "GET", "/openapi.json", self._openapi, scope="read", operation=Operation("This document.", dict[str, Any])
        )

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'http' if self._tls is None else 'https'}://{host}:{self.port}"

    def route(self, method: str, path: str, handler: Handler, *, scope: Scope, operation: Operation | None) -> None:
        """Mounts a handler, which finds what was sent, as its `operation` has it, in request[QUERY] and request[BODY]; what it
        gives that is no answer yet becomes one, in JSON, with the operation's status. Errors
        that it raises as RondoError come back as JSON. `operation` None: it is not told of. ConfigError for a method or scope
        that is none."""
        methods = _METHODS if operation is not None else (*_METHODS, "*")
        for what, given, known in (("method", method, methods), ("scope", scope, SCOPES)):
            if given not in known:
                raise ConfigError(f"the {what} of {path} must be one of {', '.join(known)}, got {given!r}. Correct it")
        status = 200 if operation is None else operation.status

        async def answer(request: web.Request) -> web.StreamResponse:
            found = handler(request)
            found = await found if inspect.isawaitable(found) else found
            return found if isinstance(found, web.StreamResponse) else json_answer(found, status)

        route = self._app.router.add_route(method, path, answer)
        self._mounted[route] = Mounted(method, route, scope, operation, self._guard.needs(scope))

    async def start(self, listening: socket.socket) -> None:
        """Answers on a socket that listens."""
        loop = asyncio.get_running_loop()
        self._runner = web.AppRunner(self._app, **self._options)
        await self._runner.setup()
        listening.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STALLED_S * 1000
        )  # its connections have it too
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(1, min(self._limits.max_connections, files - _OTHER_FILES))
        factory = functools.partial(self._connection, most)
        self.port = listening.getsockname()[1]
        if self._tls is None:
            self._server = await loop.create_server(factory, sock=listening, backlog=1024)
            return
        listening.listen(1024)
        limit_s = min(HANDSHAKE_S, self._limits.idle_s)
        # Beyond the limit one at a time is shaken hands with all the same: whoever is refused is told so.
        room = lambda: max(1, most - self._num_connected)  # noqa: E731
        self._handshakes = Handshakes(self._tls, factory, room, limit_s)
        self._handshakes.start(listening)

    async def close(self) -> None:
        """Safe to call twice."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._handshakes is not None:
            await self._handshakes.close()
            self._handshakes = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def _num_connected(self) -> int:
        manager = None if self._runner is None else self._runner.server
        return 0 if manager is None else len(manager.connections)

    def _connection(self, most: int) -> asyncio.Protocol:
        """What aiohttp makes of one more connection, or what hangs up on it."""
        manager = None if self._runner is None else self._runner.server
        if manager is None or self._num_connected >= most:
            words = f"at most {most} callers must be connected, got one more. Ask again"
            return _Full(self._told(503, "Refused", words, {"Retry-After": "1"}), self._refusing)
        return _Connection(
            manager, loop=asyncio.get_running_loop(), failed=self._told, logger=HTTP_LOG, access_log=None,
            keepalive_timeout=self._limits.idle_s, lingering_time=_LINGER_S, max_line_size=_MAX_LINE, max_field_size=_MAX_FIELD,
        )  # fmt: skip

    # ---- the way of a request -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        mounted = self._mounted.get(request.match_info.route)
        scope = "read" if mounted is None else mounted.scope  # what is not there is told to those alone who may read
        who: Who | None = None
        status, outcome = 500, "InternalError"
        try:
            if self._checks_name and not _names_this_machine(request.host):
                raise TurnedDown(403, f"Host must name this machine, got {show_value(request.host)}. Use {self.url}")
            authorization, peer = request.headers.get("Authorization"), request.remote or ""
            who = self._guard.who(scope, request.path, authorization, peer)
            self._guard.allow(scope, request.path, who)
            if "\0" in request.path + "".join(request.query.values()):  # no name of a file, and no text, has one
                raise ConfigError(f"the path and query of {request.method} must have no NUL, got one. Remove it")
            most = self._limits.max_body_bytes
            if (request.content_length or 0) > most:
                raise TurnedDown(413, f"a body must have at most {most} bytes, got more. Send less")
            if mounted is not None and mounted.operation is not None:
                await openapi.read(request, mounted.operation)
            answer = await handler(request)
            status, outcome = answer.status, "done"
            return answer
        except (RondoError, web.HTTPException, *WRONGLY_ASKED) as error:
            failed = self._failed(request, error)
            status, outcome = failed.status, type(error).__name__
            return failed
        finally:
            if scope == "control":
                self._write_down(request, who, status, outcome)

    def _failed(self, request: web.Request, error: Exception) -> web.Response:
        headers: Mapping[str, str] = {}
        what, why = f"{request.method} {request.path}", None
        if isinstance(error, RondoError):
            headers, why = (error.headers, error.why) if isinstance(error, TurnedDown) else ({}, None)
            words = str(error)
        elif isinstance(error, web.HTTPException):
            headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            words = f"{what}: {error.reason}"
        else:
            words = f"{what} must arrive whole, got {type(error).__name__}. Ask again"
        status = status_of(error)
        if status >= 500 and not isinstance(error, RondoError):
            HTTP_LOG.error("a request failed path=%s", request.path, exc_info=error)
        kind = "HTTPError" if isinstance(error, web.HTTPException) else why or type(error).__name__
        return self._told(status, kind, words, headers)

    def _told(self, status: int, kind: str, words: str, headers: Mapping[str, str] | None = None) -> web.Response:
        return json_answer(self._form(status, kind, words).model_dump(), status, headers)

    async def _in_form(self, request: web.Request, answer: web.StreamResponse) -> None:
        """What aiohttp tells without us, such as 417, has our form too."""
        if isinstance(answer, web.HTTPException):
            answer.content_type = "application/json"
            told = self._form(answer.status, "HTTPError", f"{request.method} {request.path}: {answer.reason}")
            answer.body = body = dumps(told.model_dump())
            answer.headers["Content-Length"] = str(len(body))  # it was counted before

    def _write_down(self, request: web.Request, who: Who | None, status: int, outcome: str) -> None:
        """Whoever has no token cannot fill the disk."""
        if who is None:
            if self._refused.wait_s("refused"):
                self._num_unlogged += 1
                return
            self._refused.add("refused")
        unlogged, self._num_unlogged = self._num_unlogged, 0
        body = request.get(BODY)
        asked = {} if body is None else {"asked": show_value(body.model_dump(exclude_unset=True))}
        self._audit(
            {"who": who or "nobody", "peer": request.remote, "what": f"{request.method} {show_value(request.path)[1:-1]}"}
            | asked | {"status": status, "outcome": outcome} | ({"unlogged": unlogged} if unlogged else {})
        )  # fmt: skip

    def _openapi(self, request: web.Request) -> dict[str, Any]:
        return openapi.document(self._title, version_of("rondo-rl") or "", self._mounted.values(), self._failed_type)


class _Connection(web.RequestHandler):
    """aiohttp's, whose failures outside of a request have our form."""

    __slots__ = ("_failed",)

    def __init__(self, manager: web.Server, *, failed: Callable[[int, str, str], web.Response], **options: Any) -> None:
        super().__init__(manager, **options)
        self._failed = failed

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)  # which tells the log, and whom half an answer was sent
        kind, words = "InternalError", "a request must be answered, got an error of ours. See the log of the run"
        if isinstance(exc, LineTooLong):
            is_path = exc.args[1] == _MAX_LINE
            status, kind = (414 if is_path else 431), "HTTPError"
            words = f"{'a request line' if is_path else 'a header'} must have at most {exc.args[1]} bytes, got more. Send less"
        elif status < 500:
            status, kind = (431 if (message or "").startswith("Too many headers") else status), "HTTPError"
            words = f"a request must be HTTP, got {type(exc).__name__}. Correct it"
        answer = self._failed(status, kind, words)
        answer.force_close()
        return answer


class _Full(asyncio.Protocol):
    """Answers the request of a connection beyond the limit, and leaves the hanging up to the caller for a while: the kernel
    resets a connection that is closed with bytes unread, and the caller would lose the answer."""

    def __init__(self, told: web.Response, refusing: dict[asyncio.WriteTransport, None]) -> None:
        self._told, self._refusing = told, refusing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._answered = cast(asyncio.WriteTransport, transport), False  # uvloop's is no subclass
        self._refusing[self._transport] = None
        if len(self._refusing) > _MAX_REFUSED:
            next(iter(self._refusing)).abort()
        self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self._end)

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return
        self._answered = True
        assert isinstance(self._told.body, bytes)
        headers = dict(self._told.headers) | {"Content-Length": str(len(self._told.body)), "Connection": "close"}
        head = [
            f"HTTP/1.1 {self._told.status} {self._told.reason}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self._transport.write("\r\n".join([*head, "", ""]).encode() + self._told.body)
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._refusing.pop(self._transport, None)

    def _end(self) -> None:
        self.data_received(b"")  # who has sent nothing yet is told all the same
        self._transport.close()


def status_of(error: Exception) -> int:
    """HTTP's, of what a handler raised."""
    if isinstance(error, TurnedDown | web.HTTPException):
        return error.status
    if isinstance(error, RondoError):
        return 400 if isinstance(error, ConfigError) else 503
    return 400


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A socket that listens there. ConfigError, which names the setting, when it cannot be had."""
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        raise ConfigError(
            f"{setting} must be free on {host}, got {port} ({error.strerror}). "
            f"Set {setting} to 0 for a free one, or stop the program that uses it"
        ) from error


def json_answer(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=dumps(data), status=status, headers=headers, content_type="application/json")


def dumps(data: Any) -> bytes:
    return orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _names_this_machine(host: str) -> bool:
    name, colon, port = host.rpartition(":")
    return is_loopback((name if colon and port.isdecimal() else host).strip("[]"))
