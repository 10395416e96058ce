"""Server: `rondo view RUN...`, the page of one or several runs and the JSON behind it.

Owns the routes, and what a query may be. Does not own what is told (`run.py`, `metrics.py`, `samples.py`), nor who may ask:
that is as at a run's admin endpoint (`runtime/admin/guard.py`). Reading needs no token on loopback; prompts, answers and logs
need one wherever it listens: on loopback it is drawn, and stands behind the `#` of the address that is printed, which a
browser sends nowhere.

    GET /  /assets/NAME                              open     the page; nothing of a run
    GET /api/runs                                    read     every run: state, step, reward, pace, who waits for whom
    GET /api/runs/ID                                 read     one of them
    GET /api/runs/ID/names                           read     its curves
    GET /api/runs/ID/series?names=&first=&last=&points= read     some of them, thinned out
    GET /api/runs/ID/evaluations                     read     by version and set
    GET /api/runs/ID/health                          read     role groups, restarts, waits, events, names of logs
    GET /api/runs/ID/flow                            read     bus and weights
    GET /api/runs/ID/timeline?step=&num=             read     spans of all processes over some steps
    GET /api/runs/ID/samples?kind=&first=&last=&least=&most=&failed=&search=&before=&limit=    content
    GET /api/runs/ID/group?row=                      content  a sample whole, and those of its prompt group
    GET /api/runs/ID/tokens?step=&group=             content  trained samples of a prompt group, token by token
    GET /api/runs/ID/media?name=                     content  one of its images, sounds or videos, as it came
    GET /api/runs/ID/log?file=                       content  the end of a log
    GET /api/runs/ID/memory                          read     processes and devices
    GET /api/runs/ID/stacks?process=                 content  where a live process stands
    POST /api/runs/ID/act                            content  stop, restart, scale: with the run's own token in the body

Invariant: reading goes on in threads, one for each run; the loop answers meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import uvloop
from aiohttp import web
from pydantic import BeforeValidator, Field

from rondo.launch.dashboard.behind import noted
from rondo.launch.dashboard.media import read
from rondo.launch.dashboard.run import Run
from rondo.launch.dashboard.samples import Wanted
from rondo.launch.rundir import existing_run, runs_below
from rondo.runtime.admin.endpoint import Failed, failed
from rondo.runtime.admin.guard import Guard, Scope, TurnedDown
from rondo.runtime.admin.openapi import BODY, QUERY, Nothing, Operation
from rondo.runtime.admin.server import HttpServer, Limits, bind, dumps
from rondo.runtime.admin.tls import server_context
from rondo.runtime.admin.tokens import read_token_file
from rondo.runtime.config import is_loopback
from rondo.runtime.errors import ConfigError
from rondo.runtime.section import Section

ASSETS = Path(__file__).parent / "assets"
PAGE = "index.html"
NICE = 10
"""Of the command: a run on the same cores goes first, and a page beside one that leaves none idle still gets a tenth of one."""
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_LIMITS = Limits(max_body_bytes=1 << 16, max_connections=128, idle_s=30.0)
_COMPRESSED_BYTES = 2048


def _read(value: Any) -> Any:
    """A number or a truth that stands in a query, which is text."""
    try:
        return orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError:
        return value


Whole = Annotated[int, BeforeValidator(_read)]
Number = Annotated[float, BeforeValidator(_read)]
Truth = Annotated[bool, BeforeValidator(_read)]
_STEP = Field(None, ge=0, le=1 << 31)


class Series(Section):
    """`names`: curves, with commas between them. `first`, `last`: steps. `points`: buckets of each curve at most."""

    names: str = Field(min_length=1, max_length=8000)
    first: Whole | None = _STEP
    last: Whole | None = _STEP
    points: Whole = Field(600, ge=1, le=5000)


class Find(Section):
    """`kind`: "trained", or an evaluation's label. `least`, `most`: of the reward. `before`: the "next" of the answer
    before."""

    kind: str | None = Field(None, max_length=200)
    first: Whole | None = _STEP
    last: Whole | None = _STEP
    least: Number | None = None
    most: Number | None = None
    failed: Truth = False
    search: str = Field("", max_length=1000)
    before: Whole | None = _STEP
    limit: Whole = Field(20, ge=1, le=200)


class Row(Section):
    row: Whole = Field(ge=0, le=1 << 31)


class Group(Section):
    """`group`: of the samples that were trained in `step`."""

    step: Whole = Field(ge=0, le=1 << 31)
    group: Whole = Field(ge=0, le=1 << 62)


class Medium(Section):
    """`name`: as `/tokens` tells it."""

    name: str = Field(pattern="^[0-9a-f]{32}$")


class Steps(Section):
    """`step`: the first; by default the newest. `num`: how many."""

    step: Whole | None = _STEP
    num: Whole = Field(1, ge=1, le=50)


class LogOf(Section):
    file: str = Field(max_length=500)


class StacksOf(Section):
    process: str = Field(pattern="^[A-Za-z0-9_.-]{1,120}$")


class Act(Section):
    """`token`: the run's own, of which nothing is kept here; whether it is enough the run says."""

    what: Literal["stop", "restart", "scale_out", "scale_in"]
    role: str | None = Field(None, pattern="^[a-z][a-z_]{0,60}$")
    num_replicas: int | None = Field(None, ge=0, lt=2**31)
    token: str = Field(pattern="^[A-Za-z0-9_-]{1,500}$")


def _find(run: Run, query: Find) -> dict[str, Any]:
    run.samples.advance()
    wanted = Wanted(query.kind, query.first, query.last, query.least, query.most, query.failed, query.search)
    return run.samples.find(wanted, query.before, query.limit)


def _series(run: Run, query: Series) -> dict[str, Any]:
    run.metrics.advance()
    series = run.metrics.series(query.names.split(","), query.first, query.last, query.points)
    return {"series": series, "share": run.metrics.share}


def _names(run: Run, query: Section) -> dict[str, Any]:
    run.metrics.advance()
    return {"names": run.metrics.names(), "share": run.metrics.share}


def _evaluations(run: Run, query: Section) -> list[dict[str, Any]]:
    run.metrics.advance()
    return run.metrics.evaluations()


_OF_RUN: tuple[tuple[str, Scope, type[Section], Callable[[Run, Any], Any], str], ...] = (
    ("", "read", Nothing, lambda run, query: run.overview(), "How a run is doing."),
    ("/names", "read", Nothing, _names, "The names of its curves."),
    ("/series", "read", Series, _series, "Curves, thinned out."),
    ("/evaluations", "read", Nothing, _evaluations, "Evaluations by version."),
    ("/health", "read", Nothing, lambda run, query: run.health(), "Role groups, restarts, waits, events."),
    ("/flow", "read", Nothing, lambda run, query: run.flow(), "Bus and weights."),
    ("/timeline", "read", Steps, lambda run, query: run.timeline(query.step, query.num), "What each process did when."),
    ("/samples", "content", Find, _find, "Samples, newest first."),
    ("/group", "content", Row, lambda run, query: run.samples.group(query.row), "A sample and its prompt group."),
    ("/memory", "read", Nothing, lambda run, query: run.memory(), "Memory of processes, and devices."),
    ("/stacks", "content", StacksOf, lambda run, query: run.stacks(query.process), "Where a live process stands."),
    ("/tokens", "content", Group, lambda run, query: run.tokens.group(query.step, query.group), "A group by token."),
    ("/log", "content", LogOf, lambda run, query: run.log(query.file), "The end of a log."),
)


class Dashboard:
    """Of these runs. `token`: one that this process has drawn; `given` of a file."""

    def __init__(
        self, paths: Sequence[Path], *, host: str, token: str, given: Sequence[str] = (), tls: Any = None
    ) -> None:
        self.runs = _named(paths)
        guard = Guard([token], given, open_reads=is_loopback(host))
        self.http = HttpServer("rondo: runs", guard, failed, Failed, _LIMITS, host=host, tls=tls)
        self._threads = {id: ThreadPoolExecutor(1, f"run-{id}") for id in self.runs}
        for path in ("/", "/assets/{name}"):
            self.http.route("GET", path, self._asset, scope="open", operation=None)
        all_runs = Operation("How all runs are doing.", list[dict[str, Any]])
        self.http.route("GET", "/api/runs", self._all, scope="read", operation=all_runs)
        for suffix, scope, query, method, text in _OF_RUN:
            told = Operation(text, Any, query=query)
            self.http.route("GET", f"/api/runs/{{run}}{suffix}", self._of_run(method), scope=scope, operation=told)
        one = Operation("An image, a sound or a video of kept samples.", bytes, query=Medium)
        media = self._of_run(lambda run, query: read(run.path, query.name), made=_file)
        self.http.route("GET", "/api/runs/{run}/media", media, scope="content", operation=one)
        act = Operation("Have a live run do something.", Any, takes=Act)
        do = self._of_run(lambda run, asked: run.act(asked.what, asked.role, asked.num_replicas, asked.token), BODY)
        self.http.route("POST", "/api/runs/{run}/act", do, scope="content", operation=act)

    async def close(self) -> None:
        await self.http.close()
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        for run in self.runs.values():
            run.close()

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("name", PAGE)
        path = ASSETS / name
        if path not in ASSETS.iterdir() or path.suffix not in _TYPES:
            raise TurnedDown(404, f"{request.path} must be a file of the page, got none. Open /")
        body = await asyncio.to_thread(path.read_bytes)
        answer = web.Response(body=body, headers=_HEADERS, content_type=_TYPES[path.suffix], charset="utf-8")
        answer.enable_compression()
        return answer

    async def _all(self, request: web.Request) -> web.StreamResponse:
        return _json(await asyncio.gather(*(self._in_thread(run, run.glance) for run in self.runs.values())))

    def _of_run(
        self,
        method: Callable[[Run, Any], Any],
        given: web.RequestKey[Any] = QUERY,
        made: Callable[[Any], web.Response] | None = None,
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(request: web.Request) -> web.StreamResponse:
            run = self.runs.get(request.match_info["run"])
            if run is None:
                raise TurnedDown(404, f"a run must be one of {', '.join(self.runs)}, got another. See /api/runs")
            return (made or _json)(await self._in_thread(run, method, run, request[given]))

        return handler

    async def _in_thread(self, run: Run, method: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads[run.id], method, *arguments)


def _json(data: Any) -> web.Response:
    body = dumps(data)
    answer = web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})
    if len(body) > _COMPRESSED_BYTES:
        answer.enable_compression()
    return answer


def _file(found: tuple[bytes, str]) -> web.Response:
    body, form = found
    headers = _HEADERS | {
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "Cache-Control": "private, max-age=3600",
    }
    return web.Response(body=body, content_type=form, headers=headers)


def _named(paths: Sequence[Path]) -> Mapping[str, Run]:
    """Return the runs by name, in order, each once: those named, and all below a folder that is no run itself."""
    found: dict[str, Run] = {}
    for path in dict.fromkeys(existing_run(run) for given in paths for run in runs_below(given) or [given]):
        id, number = path.name, 2
        while id in found:
            id, number = f"{path.name}~{number}", number + 1
        found[id] = Run(id, path)
    return found


def main(
    *, paths: Sequence[Path], host: str, port: int, token_file: Path | None, tls_cert: Path | None, tls_key: Path | None
) -> int:
    """`rondo view`: until it is stopped. ConfigError for no run, or a place that it must not listen at."""
    if not is_loopback(host) and token_file is None:
        raise ConfigError(
            f"--token-file must be given when --host is not loopback, got {host!r}. Give a file of mode 0600, or 127.0.0.1"
        )
    given = [] if token_file is None else [read_token_file(token_file, "--token-file")]
    token = secrets.token_hex(32)
    tls = server_context(tls_cert, tls_key, ("--tls-cert", "--tls-key"))
    dashboard = Dashboard(paths, host=host, token=token, given=given, tls=tls)

    async def serve() -> None:
        stopped = asyncio.Event()
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(each, stopped.set)
        listening = bind(host, port, "--port")
        if token_file is None and not is_loopback(name := listening.getsockname()[0]):
            raise ConfigError(
                f"--host must be loopback without --token-file, got {host}: {name}. Give a file of mode 0600"
            )
        await dashboard.http.start(listening)
        os.nice(NICE)
        alone = next(iter(dashboard.runs.values())).path if len(dashboard.runs) == 1 and tls is None else None
        try:
            known = "" if given else f"#token={token}"
            with contextlib.nullcontext() if alone is None else noted(alone, dashboard.http.url, token):
                print(f"runs {', '.join(dashboard.runs)}: {dashboard.http.url}/{known}", flush=True)
                await stopped.wait()
        finally:
            await dashboard.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    print("stopped", file=sys.stderr)
    return 0
