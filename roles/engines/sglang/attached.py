"""Servers that are attached to a run while it goes on, by their address, and detached again.

Owns which ones this process has, the steps until one serves, and the way back where one of them fails. Does not own whether a
server suits the run (`suitable.py`), how it is asked and given weights (`open.py`, the dispatcher), nor which process of a run is
told of an address.

    connecting --> checking --> weights --> active --> leaving --> gone          any step that fails, or is cancelled: as before
      answers       suits        proved      routable    drained

    async with attachable(dispatcher, make, record, tell) as attached:
        await attached.attach("http://10.0.0.9:30000", deadline_s=600)      # it serves the newest weights
        await attached.detach("http://10.0.0.9:30000", drain_s=300)         # what it had has ended, or went elsewhere

Invariant: no request reaches a server that has not proved the weights that the run serves. What is attached is written down
beside the run's sockets, so that a process in the place of this one tries the same servers, for ever; it goes with the job, and
a resumed run begins with the servers of its settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rondo.roles.engines.dispatch import Dispatcher
from rondo.roles.engines.sglang.requirements import address_of
from rondo.roles.engines.sglang.restarts import KeptEngine
from rondo.runtime.errors import Refused
from rondo.runtime.records.record import write_whole
from rondo.runtime.waits import finished, wait_for

Tell = Callable[[str, Mapping[str, Any]], Awaitable[None]]


@dataclass(slots=True)
class _Attached:
    engine: KeptEngine
    state: str = "connecting"
    keeping: asyncio.Task[None] | None = None


class AttachedServers:
    """Those of one process. `make` makes the engine over the server of an address; `record` is the file that names them."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        make: Callable[[str], KeptEngine],
        record: Path,
        tell: Tell,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._dispatcher, self._make, self._record, self._tell = dispatcher, make, record, tell
        self._tasks = tasks
        self._servers: dict[str, _Attached] = {}

    def states(self) -> dict[str, str]:
        """Of every address: "connecting", "weights", "active" or "leaving"."""
        return {url: each.state for url, each in self._servers.items()}

    def resume(self) -> None:
        """Those of the process before this one are there as soon as they answer."""
        for url in _read(self._record):
            self._servers[url] = server = _Attached(self._make(url), "active")
            self._add(url, server)

    async def attach(self, address: str, *, deadline_s: float) -> bool:
        """Until the server serves the newest weights; False where it is attached already. Raises ConfigError for one that does
        not suit the run, DeadlineExceeded, and what it failed with: it is as before then, as it is where this is cancelled."""
        url = address_of(address)
        if url in self._servers:
            return self._known(url, "attached", "active")
        self._servers[url] = server = _Attached(self._make(url))
        try:
            await wait_for(self._join(url, server, deadline_s), name="attach engine", peer=url, deadline_s=deadline_s)
        except BaseException:
            await finished(self._forget(url))
            raise
        server.state = "active"
        self._write()
        await self._tell("engine_attached", {"engine": url, "version": server.engine.version})
        return True

    async def _join(self, url: str, server: _Attached, deadline_s: float) -> None:
        if (error := await server.engine.begin()) is not None:
            raise error
        server.state = "weights"
        self._add(url, server)
        await self._dispatcher.serves(url, deadline_s=deadline_s)

    async def detach(self, address: str, *, drain_s: float) -> bool:
        """Nothing new is sent to the server; what it has in flight has `drain_s` seconds to end, and goes elsewhere then. False
        where it is not attached. Cancelled while it drains, it stays."""
        url = address_of(address)
        server = self._servers.get(url)
        if server is None:
            return False
        self._known(url, "detached", "active")
        server.state = "leaving"
        self._write()
        try:
            await self._dispatcher.drain(url, deadline_s=drain_s)
        except BaseException:
            server.state = "active"
            self._write()
            raise
        await finished(self._forget(url))
        await self._tell("engine_detached", {"engine": url})
        return True

    def _known(self, url: str, what: str, state: str) -> bool:
        """False for one in this state; Refused for one that something else is done with."""
        if (found := self._servers[url].state) != state:
            raise Refused(f"the engine {url} must be left alone to be {what}, got one that is {found}. Ask again later")
        return False

    def _add(self, url: str, server: _Attached) -> None:
        self._dispatcher.add(url, server.engine)
        server.keeping = self._tasks.create_task(server.engine.keep(), name=f"keep {url}")

    async def _forget(self, url: str) -> None:
        server = self._servers[url]
        if server.keeping is None:  # it did not come so far
            await server.engine.close()
        else:
            server.keeping.cancel()
            await asyncio.wait([server.keeping])
            await self._dispatcher.remove(url)
        del self._servers[url]

    def close(self) -> None:
        """Nothing is started again; the dispatcher closes the engines that it has."""
        for server in self._servers.values():
            if server.keeping is not None:
                server.keeping.cancel()

    def _write(self) -> None:
        urls = [url for url, each in self._servers.items() if each.state == "active"]
        write_whole(self._record, orjson.dumps(urls))


@asynccontextmanager
async def attachable(
    dispatcher: Dispatcher, make: Callable[[str], KeptEngine], record: Path, tell: Tell
) -> AsyncIterator[AttachedServers]:
    """While the body runs, servers can be attached; those that the record names are, from the beginning."""
    async with asyncio.TaskGroup() as tasks:
        attached = AttachedServers(dispatcher, make, record, tell, tasks)
        attached.resume()
        try:
            yield attached
        finally:
            attached.close()


def _read(record: Path) -> list[str]:
    try:
        found: list[str] = orjson.loads(record.read_bytes())
    except FileNotFoundError:
        return []
    return found
