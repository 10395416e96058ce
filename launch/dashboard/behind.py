"""Behind a run's admin port: `/ui` is the page of the dashboard that shows this run alone, while there is one.

Owns the note by which the leader finds it, and what is passed on. Does not own either server, nor who may ask: the admin
endpoint's guard does, by the scopes that the routes have at the dashboard. Invariants: what is passed on comes from the process
that holds the note's lock, so from nobody who got its port later; a dashboard that is gone, or late, is a 503 here and nothing
else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web
from yarl import URL

from rondo.launch.dashboard.blocks import open_own
from rondo.runtime.admin.endpoint import AdminServer
from rondo.runtime.admin.guard import Scope, TurnedDown

NOTE = "view.json"
"""In the run directory, while a dashboard shows that run alone (mode 0600)."""
_ANSWER = aiohttp.ClientTimeout(total=30.0, connect=2.0)
_PASSED = (
    "Content-Type", "Content-Encoding", "Content-Security-Policy", "X-Content-Type-Options", "Referrer-Policy", "Cache-Control",
)  # fmt: skip
_ROUTES: tuple[tuple[str, Scope], ...] = (
    ("/ui/", "open"),
    ("/ui/assets/{name}", "open"),
    ("/ui/api/runs/{run}/{what:samples|group|tokens|media|log|stacks}", "content"),
    ("/ui/api/runs/{run}/{what:names|series|evaluations|health|flow|timeline|memory}", "read"),
    ("/ui/api/runs/{run}", "read"),
    ("/ui/api/runs", "read"),
)


@contextlib.contextmanager
def noted(run: Path, url: str, token: str) -> Iterator[None]:
    """While the body lasts, the leader of that run finds this dashboard; not where another is there already."""
    fd = -1
    with contextlib.suppress(OSError):
        fd = open_own(run / NOTE)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, orjson.dumps({"url": url, "token": token}), 0)
    try:
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _find(run: Path) -> tuple[str, str] | None:
    """(address, token) of the dashboard that holds the note."""
    try:
        fd = os.open(run / NOTE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(orjson.JSONDecodeError, KeyError, TypeError):
            told = orjson.loads(os.pread(fd, 4096, 0))
            return told["url"], told["token"]
    finally:
        os.close(fd)
    return None


def mount(admin: AdminServer, run: Path) -> None:
    """Adds `/ui` to the endpoint of that run."""

    async def slash(request: web.Request) -> web.StreamResponse:
        return web.Response(status=308, headers={"Location": "/ui/"})

    async def pass_on(request: web.Request) -> web.StreamResponse:
        found = _find(run)
        if found is None:
            raise TurnedDown(503, f"a dashboard must show this run alone, got none. Start it: rondo view {run}")
        url, token = found
        sent = await request.read() if request.method == "POST" else None
        headers = {
            "Authorization": f"Bearer {token}",
            "Accept-Encoding": request.headers.get("Accept-Encoding", "identity"),
            "Content-Type": request.headers.get("Content-Type", "application/json"),
        }
        # As it was sent: what is decoded here could be another path there, of another scope.
        place = URL(url + request.rel_url.raw_path.removeprefix("/ui"), encoded=True)
        place = place.with_query(request.query)
        try:
            async with (
                aiohttp.ClientSession(timeout=_ANSWER, auto_decompress=False, trust_env=False) as session,
                session.request(request.method, place, headers=headers, data=sent, allow_redirects=False) as answer,
            ):
                body = await answer.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise TurnedDown(503, f"the dashboard must answer, got {type(error).__name__}. Start it again") from error
        passed = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
        return web.Response(status=answer.status, body=body, headers=passed)

    admin.route("GET", "/ui", slash, scope="open", operation=None)
    for path, scope in _ROUTES:
        admin.route("GET", path, pass_on, scope=scope, operation=None)
    admin.route("POST", "/ui/api/runs/{run}/act", pass_on, scope="content", operation=None)
