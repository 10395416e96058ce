"""MCP servers as tools: those of `environment.mcp`, over standard input and output or streamable HTTP, by the official package.

Owns their processes and connections, the schemas of their tools, and what a result is to the policy. Does not own deadlines and
statistics of calls (`environments.py`), or how a turn calls (`tools.py`).

    schemas_of({"files": {"command": ["python", "server.py"]}}, 60)       # as a chat template takes them
    async with McpServers(settings, 60) as servers:
        await servers.tools["read"](path="a.txt")                         # text, or parts of a message with media among them

Invariant: a server belongs to a rollout process and ends with it, with all that it started. One that dies, or whose connection
breaks, fails the calls that it had; it is started again and counted, and later calls wait for it until their deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson

from rondo.runtime.errors import ConfigError
from rondo.runtime.processes.guard import module_command
from rondo.runtime.reference import in_one_line
from rondo.runtime.values import read_json, write_json
from rondo.runtime.waits import happens

_SETTING = "rollout.environment.mcp"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
"""Before a server that cannot be started is tried again: twice the last one each time."""


class ToolError(Exception):
    """What a server says went wrong in a call, for the policy."""


class McpServers:
    """Those of a rollout process. ConfigError at the start for one that cannot be asked for its tools within `limit_s`."""

    def __init__(self, settings: Mapping[str, Mapping[str, Any]], limit_s: float) -> None:
        self._servers = {name: _Server(name, each) for name, each in settings.items()}
        self._limit_s = limit_s
        self.tools: dict[str, Callable[..., Awaitable[Any]]] = {
            schema["function"]["name"]: _tool(self._servers[name], schema["function"]["name"])
            for name, each in settings.items()
            for schema in schemas_of({name: each}, limit_s)
        }

    def restarts(self) -> dict[str, int]:
        """By server: how often it was started again."""
        return {name: server.restarts for name, server in self._servers.items()}

    async def __aenter__(self) -> McpServers:
        async with AsyncExitStack() as stack:
            for server in self._servers.values():
                stack.push_async_callback(server.close)
                await server.open(self._limit_s)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()


def schemas_of(settings: Mapping[str, Mapping[str, Any]], limit_s: float) -> list[dict[str, Any]]:
    """Of their tools, asked once in a process, in a child of it. ConfigError for a server that does not tell them."""
    return [each for name, server in settings.items() for each in _asked(name, orjson.dumps(server), limit_s)]


@functools.cache
def _asked(name: str, settings: bytes, limit_s: float) -> list[dict[str, Any]]:
    own = module_command("rondo.roles.sampling.mcp_servers")
    line = module_command("rondo.runtime.processes.command", str(os.getpid()), *own)
    try:
        ran = subprocess.run(line, input=settings, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{_SETTING}.{name} must tell its tools within {limit_s:g} s, got no end. Run it alone"
        ) from error
    if ran.returncode:
        words = " | ".join(ran.stderr.decode(errors="replace").strip().splitlines()[-3:])
        raise ConfigError(f"{_SETTING}.{name} must tell its tools, got {words or 'nothing'}. Run it alone")
    found: list[dict[str, Any]] = read_json(ran.stdout)
    only = orjson.loads(settings)["only"]
    names = [each["function"]["name"] for each in found]
    if missing := sorted({*(only or ())} - {*names}):
        raise ConfigError(
            f"{_SETTING}.{name}.only must name tools of the server, {', '.join(names)}, got {missing[0]}. Correct it"
        )
    return [each for each in found if only is None or each["function"]["name"] in only]


def _tool(server: _Server, name: str) -> Callable[..., Awaitable[Any]]:
    async def call(**arguments: Any) -> Any:
        return await server.call(name, arguments)

    call.__name__ = name
    return call


class _Server:
    """One, and the task that connects to it: whoever opens a connection of the package must close it."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._name, self._settings = name, settings
        self._client: Any = None
        self._connected, self._broken = asyncio.Event(), asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._why = "nothing"
        self.restarts = 0

    async def open(self, limit_s: float) -> None:
        self._keeping = asyncio.create_task(self._keep(), name=f"mcp {self._name}")
        if not await happens(self._connected, limit_s):
            raise ConfigError(
                f"{_SETTING}.{self._name} must answer within {limit_s:g} s, got {self._why}. Run it alone"
            )

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        await self._connected.wait()
        client, broken = self._client, self._broken
        asking = asyncio.ensure_future(client.call_tool(name, dict(arguments)))
        breaking = asyncio.ensure_future(broken.wait())
        try:
            await asyncio.wait((asking, breaking), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise ToolError(f"the server {self._name} has ended")
            return _said(asking.result())
        except ToolError:
            raise
        except Exception as error:
            if _is_refusal(error):
                raise ToolError(str(error)) from error
            broken.set()
            raise ToolError(f"the server {self._name} cannot be reached") from error
        finally:
            asking.cancel()
            breaking.cancel()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait((self._keeping,))

    async def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._broken = asyncio.Event()
            try:
                async with _connected(self._settings, self._broken) as self._client:
                    self._connected.set()
                    pause_s = _FIRST_PAUSE_S
                    await self._broken.wait()
                    self._connected.clear()
            except Exception as error:  # noqa: BLE001 - of a server of somebody else's, and told where somebody waits for it
                self._why = _cause(error)
            self._connected.clear()
            self._broken.set()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self.restarts += 1


@asynccontextmanager
async def _connected(settings: Mapping[str, Any], broken: asyncio.Event) -> AsyncIterator[Any]:
    """A client of the package. `broken` is set when its server has ended."""
    try:
        from mcp import Client, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import streamable_http_client
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"mcp must be installed for {_SETTING}, got no such package. Run: pip install 'rondo-rl[mcp]'"
        ) from error
    if settings["url"] is not None:
        transport: Any = streamable_http_client(settings["url"])
    else:
        program, *line = module_command("rondo.runtime.processes.command", str(os.getpid()), *settings["command"])
        variables = {**os.environ, **settings["environment"]}
        transport = stdio_client(StdioServerParameters(command=program, args=line, env=variables))
    async with Client(_watched(transport, broken)) as client:
        yield client


@asynccontextmanager
async def _watched(transport: Any, broken: asyncio.Event) -> AsyncIterator[Any]:
    """The transport, whose end is seen while nobody asks."""
    import anyio

    async with transport as (read, write):
        into, out = anyio.create_memory_object_stream[Any](0)

        async def pass_on() -> None:
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                async with into:
                    async for message in read:
                        await into.send(message)
            broken.set()

        passing = asyncio.create_task(pass_on())
        try:
            yield out, write
        finally:
            passing.cancel()
            await asyncio.wait((passing,))
            out.close()


def _is_refusal(error: Exception) -> bool:
    """Whether a server that is alive says no to a call."""
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return isinstance(error, MCPError) and error.error.code != CONNECTION_CLOSED


def _said(result: Any) -> Any:
    """A result as a tool of Python's would return it: text, or parts of a message. ToolError for one that says it is an error."""
    parts = []
    for block in result.content:
        if block.type in ("image", "audio"):
            parts.append({"type": block.type, block.type: f"data:{block.mime_type};base64,{block.data}"})
        elif block.type == "text":
            parts.append({"type": "text", "text": block.text})
        else:
            text = getattr(getattr(block, "resource", None), "text", None)
            parts.append({"type": "text", "text": str(getattr(block, "uri", "")) if text is None else text})
    texts = [part["text"] for part in parts if part["type"] == "text"]
    if result.is_error:
        raise ToolError("\n".join(texts))
    return "\n".join(texts) if len(texts) == len(parts) else parts


def _cause(error: BaseException) -> str:
    """Without the groups that the package puts around it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return in_one_line(error)


async def _tell() -> None:
    """What `_asked` runs: settings in, schemas out."""
    settings = orjson.loads(sys.stdin.buffer.read())
    async with _connected(settings, asyncio.Event()) as client:
        found, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            if (cursor := page.next_cursor) is None:
                break
    told = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in found
    ]
    sys.stdout.buffer.write(write_json(told))


if __name__ == "__main__":
    try:
        asyncio.run(_tell())
    except Exception as error:  # noqa: BLE001 - of a server of somebody else's: told in one line
        sys.exit(_cause(error))
