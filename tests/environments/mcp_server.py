"""An MCP server for tests, over standard input and output, or HTTP on the port that it is given."""

import asyncio
import base64
import os
import sys

from mcp.server.mcpserver import Image, MCPServer

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
server = MCPServer("numbers", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def end() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
async def sleep() -> str:
    """Sleeps for an hour."""
    await asyncio.sleep(3600)
    return "over"


@server.tool(structured_output=False)
def pixel() -> list[object]:
    """A picture, with words."""
    return ["here:", Image(data=base64.b64decode(PIXEL), format="png")]


@server.tool()
def pid() -> int:
    """Which process this is."""
    return os.getpid()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
