"""MCP servers as tools, against a server that the official package makes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rondo.roles.config import McpConfig
from rondo.roles.sampling.mcp_servers import McpServers, ToolError, schemas_of
from rondo.roles.sampling.tools import schemas
from rondo.runtime.errors import ConfigError
from tests.roles.sampling.test_environments import call, job, played

pytest.importorskip("mcp", reason="`make test-environments` installs mcp")

SERVER = str(Path(__file__).with_name("mcp_server.py"))
COMMAND = (sys.executable, SERVER)


async def test_tools_of_a_server_are_shown_called_and_end_with_the_run() -> None:
    found = await played(
        job(mcp={"numbers": McpConfig(command=COMMAND, only=("add", "end", "pid"))}),
        call("add", '{"a": 1, "b": 2}') + call("pid", "{}"),
        call("add", '{"a": "one", "b": 2}') + call("end", "{}"),
        call("add", '{"a": 40, "b": 2}') + call("sleep", "{}"),
        "42",
    )
    assert "Adds two numbers." in found.prompts[0] and '"integer"' in found.prompts[0]
    assert "tool\n3<|im_end|>" in found.prompts[1]
    pid = int(found.prompts[1].rpartition("tool\n")[2].partition("<")[0])
    assert not psutil.pid_exists(pid)
    assert "should be a valid integer" in found.prompts[2]
    assert "Error: ToolError: the server numbers" in found.prompts[2]
    assert "tool\n42<|im_end|>" in found.prompts[3]
    assert "there is no tool 'sleep'. There are: add, end, pid" in found.prompts[3]
    assert found.made[0].error is None and found.made[0].rows[-1].completion.finish_reason == "stop"
    assert found.stats["numbers"].restarts == 1 and found.stats["add"].steps == 3


async def test_a_call_beyond_its_deadline_is_an_error_for_the_policy_and_the_server_goes_on() -> None:
    found = await played(
        job(mcp={"numbers": McpConfig(command=COMMAND)}, deadline_s=15),
        call("sleep", "{}") + call("add", '{"a": 1, "b": 2}'),
        "3",
    )
    assert "sleep must return within 15 s" in found.prompts[1] and "tool\n3<|im_end|>" in found.prompts[1]
    assert found.stats["sleep"].timeouts == 1 and found.stats["numbers"].restarts == 0


async def test_a_server_elsewhere_that_is_gone_is_found_again_and_shows_pictures() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    def serving() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([*COMMAND, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return process
            except ConnectionRefusedError:
                pass
        raise AssertionError("the server did not start")

    process = await asyncio.to_thread(serving)
    settings = {"there": McpConfig(url=f"http://127.0.0.1:{port}/mcp").model_dump()}
    try:
        async with McpServers(settings, 60) as servers:
            assert await servers.tools["add"](a=1, b=2) == "3"
            words, picture = await servers.tools["pixel"]()
            assert words == {"type": "text", "text": "here:"}
            assert picture["type"] == "image" and picture["image"].startswith("data:image/png;base64,iVBOR")
            process.kill()
            process.wait()
            with pytest.raises(ToolError, match="the server there"):
                await servers.tools["add"](a=1, b=2)
            process = await asyncio.to_thread(serving)
            async with asyncio.timeout(60):
                assert await servers.tools["add"](a=2, b=2) == "4"
            assert servers.restarts()["there"] >= 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"command": ("/not/there",)}, "servers.bad must tell its tools, got"),
        ({"command": ("false",)}, "servers.bad must tell its tools, got"),
        (
            {"command": COMMAND, "only": ("zip",)},
            "only must name tools of the server, add, end, sleep, pixel, pid, got zip",
        ),
    ],
)
def test_a_server_that_cannot_be_asked_is_refused_before_a_run(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        schemas_of({"bad": McpConfig(**given).model_dump()}, 60)
    assert said.replace("servers.", "mcp.") in str(refused.value)


def test_a_silent_server_is_refused_at_the_deadline_and_ended(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    command = ("sh", "-c", f"echo $$ > {told}; exec sleep 1000")
    with pytest.raises(ConfigError, match="must tell its tools within 10 s"):
        schemas_of({"bad": McpConfig(command=command).model_dump()}, 10)
    left = [each for each in psutil.process_iter() if each.pid == int(told.read_text())]
    assert psutil.wait_procs(left, 10)[1] == []


def test_two_tools_of_one_name_are_refused() -> None:
    servers = {name: McpConfig(command=COMMAND, only=("add",)) for name in ("one", "two")}
    with pytest.raises(ConfigError, match="tools of different names, got two of add"):
        schemas(job(mcp=servers))
