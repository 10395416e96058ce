"""Admin: the HTTP endpoint of a run, in the leader's event loop. What it shows comes from a `Provider`.

Owns the routes, and the form of what is shown (JSON, Prometheus text, server-sent events). Does not own any number it shows,
nor who may ask and how much: `server.py` and `guard.py` do. Invariant: nobody reads from another machine, reads samples or
changes a run without a token, whatever route they take.

    GET  /livez /readyz                               open: probes: 200 or 503, no data
    GET  /healthz /roles /waits /bus /weights         read: JSON
    GET  /openapi.json                                read: what all routes take and give, those of other folders too
    GET  /metrics                                     read: Prometheus text
    GET  /events                                      read: server-sent events, one `data:` line of JSON each
    GET  /samples                                     content: JSON: prompts and answers
    POST /stop {"reason": ...}                        control: save and leave

A route is mounted with its scope and its `Operation`; there is none without either.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from aiohttp import web
from pydantic import BaseModel, ConfigDict

from rondo.runtime.admin.guard import Guard, Scope, TurnedDown
from rondo.runtime.admin.openapi import BODY, EVENTS, TEXT, Operation
from rondo.runtime.admin.server import Audit, Handler, HttpServer, Limits, bind, dumps, json_answer
from rondo.runtime.admin.tls import server_context
from rondo.runtime.admin.tokens import read_token_file
from rondo.runtime.config import AdminConfig, is_loopback
from rondo.runtime.errors import ConfigError
from rondo.runtime.section import Section
from rondo.runtime.supervision.spec import GroupView
from rondo.runtime.waits import Pending

_KEEP_ALIVE_S = 15.0
_MAX_STREAMS = 64
_LIMITS = Limits(max_body_bytes=1 << 20, max_connections=512, idle_s=15.0)


class Failure(BaseModel):
    """What went wrong: HTTP's status, the error's type, and words."""

    status: int
    type: str
    message: str


class Failed(BaseModel):
    """Every answer that is no success."""

    error: Failure


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


@dataclass(frozen=True, slots=True)
class Family:
    """All numbers of one name, as Prometheus has it: labels by name, in their order, and the value."""

    name: str
    kind: Literal["gauge", "counter", "untyped"]
    help: str
    samples: dict[tuple[tuple[str, str], ...], float]


class Provider(Protocol):
    """What the endpoint shows. Plain methods that return JSON-able data at once; called in the event loop."""

    def health(self) -> Mapping[str, Any]:
        """At least "ready" and "healthy" (bool); /readyz and /healthz answer 503 where they are false."""

    def roles(self) -> Any: ...

    def waits(self) -> Any: ...

    def bus(self) -> Any: ...

    def weights(self) -> Any: ...

    def samples(self) -> Any: ...

    def metrics(self) -> Iterable[Family]:
        """Numbers, each name once."""

    def subscribe(self) -> AsyncIterator[dict[str, Any]]: ...

    def stop(self, reason: str, *, quick: bool) -> None: ...


class AdminServer(HttpServer):
    """The running endpoint. `token` is the run's own, `audit` takes a record of every call that may change the run. Routes are
    added before `start`; `close` ends all connections."""

    def __init__(
        self, config: AdminConfig, provider: Provider, *, token: str, audit: Audit = lambda record: None
    ) -> None:
        self._config = config
        self._provider = provider
        given = [] if config.token_file is None else [read_token_file(config.token_file)]
        guard = Guard([token], given, open_reads=is_loopback(config.host))
        tls = server_context(config.tls_cert, config.tls_key)
        super().__init__("rondo: a run", guard, failed, Failed, _LIMITS, host=config.host, tls=tls, audit=audit)
        self._closing = asyncio.Event()
        self._num_streams = 0
        self._mount_own()

    async def start(self, listening: socket.socket | None = None) -> None:
        """Answers on `listening`, which `listen` gave; without it, on the settings' address."""
        await super().start(listen(self._config) if listening is None else listening)

    async def close(self) -> None:
        """Ends event streams and connections. Safe to call twice."""
        self._closing.set()
        await super().close()

    def _mount_own(self) -> None:
        provider, text = self._provider, (TEXT,)
        groups = Operation("Role groups and services, with their processes.", list[GroupView])
        alive = Operation("Whether it answers.", str, media_types=text)
        ready = Operation("Whether all is up.", str, media_types=text, also={503: "Not ready."})
        health = Operation("How it is.", Health, also={503: "Not healthy."})
        bus = Operation("Prompt groups, rows and rings.", dict[str, Any])
        weights = Operation("Versions committed and proved.", dict[str, Any])
        samples = Operation("The newest samples.", list[dict[str, Any]])
        told: tuple[tuple[str, str, Handler, Scope, Operation], ...] = (
            ("GET", "/roles", lambda _: provider.roles(), "read", groups),
            ("GET", "/waits", lambda _: provider.waits(), "read", Operation("Who waits for what.", list[Pending])),
            ("GET", "/bus", lambda _: provider.bus(), "read", bus),
            ("GET", "/weights", lambda _: provider.weights(), "read", weights),
            ("GET", "/samples", lambda _: provider.samples(), "content", samples),
            ("GET", "/livez", lambda _: web.Response(text="ok\n"), "open", alive),
            ("GET", "/readyz", self._readyz, "open", ready),
            ("GET", "/healthz", self._healthz, "read", health),
            ("GET", "/metrics", self._metrics, "read", Operation("Numbers for Prometheus.", str, media_types=text)),
            ("GET", "/events", self._events, "read", Operation("What happens.", str, media_types=(EVENTS,))),
            ("POST", "/stop", self._stop, "control", Operation("Save and leave.", Stopping, takes=Stop, status=202)),
        )
        for verb, path, handler, scope, operation in told:
            self.route(verb, path, handler, scope=scope, operation=operation)

    def _readyz(self, request: web.Request) -> web.Response:
        ready = bool(self._provider.health()["ready"])
        return web.Response(text="ok\n" if ready else "not ready\n", status=200 if ready else 503)

    def _healthz(self, request: web.Request) -> web.Response:
        health = self._provider.health()
        return json_answer(health, status=200 if health["healthy"] else 503)

    def _metrics(self, request: web.Request) -> web.Response:
        text = "\n".join(prometheus_lines(self._provider.metrics())) + "\n"
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def _stop(self, request: web.Request) -> dict[str, Any]:
        asked: Stop = request[BODY]
        self._provider.stop(asked.reason, quick=asked.now)
        return {"stopping": True, "reason": asked.reason}

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self._num_streams == _MAX_STREAMS:  # each takes its part of the loop with every event
            words = f"at most {_MAX_STREAMS} callers must follow the events, got one more. Ask again"
            raise TurnedDown(503, words, {"Retry-After": "5"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        self._num_streams += 1
        try:
            await response.prepare(request)
            return await self._follow(response)
        finally:
            self._num_streams -= 1

    async def _follow(self, response: web.StreamResponse) -> web.StreamResponse:
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
                data = dumps(record.result())
                record = asyncio.ensure_future(anext(records, None))
                await response.write(b"data: " + data + b"\n\n")
        except ConnectionError:  # who asked has left
            return response
        finally:
            record.cancel()
            closing.cancel()


def listen(config: AdminConfig) -> socket.socket:
    """The socket of an endpoint, before there is anything to show. ConfigError when it cannot be had, nor the token or the
    certificate be read, and where a name that says loopback is none."""
    if config.token_file is not None:
        read_token_file(config.token_file)
    server_context(config.tls_cert, config.tls_key)
    listening = bind(config.host, config.port, "admin.port")
    if config.token_file is None and not is_loopback(host := listening.getsockname()[0]):
        listening.close()
        raise ConfigError(f"admin.host must be loopback without admin.token_file, got {config.host}: {host}. Set it")
    return listening


def prometheus_lines(families: Iterable[Family]) -> Iterator[str]:
    """Numbers as Prometheus text, each family's behind each other."""
    for family in families:
        words = family.help.replace("\\", "\\\\").replace("\n", " ")
        yield f"# HELP {family.name} {words}"
        yield f"# TYPE {family.name} {family.kind}"
        for labels, value in family.samples.items():
            shown = ",".join(f'{name}="{_escape(text)}"' for name, text in labels)
            yield f"{family.name}{{{shown}}} {_number(value)}" if shown else f"{family.name} {_number(value)}"


def _number(value: float) -> str:
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def failed(status: int, kind: str, words: str) -> Failed:
    return Failed(error=Failure(status=status, type=kind, message=words))
