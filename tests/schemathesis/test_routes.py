"""What schemathesis finds in the documents that our servers tell of themselves, and in what they answer then: nothing.

Runs where SCHEMATHESIS names the program, which `make fuzz` installs into an environment of its own; is skipped elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.launch.provider import TRACE
from rondo.launch.report.status import ask, url_of
from rondo.launch.rundir import supervisor_record
from rondo.models.tiny.qwen3 import build
from rondo.runtime.admin.endpoint import AdminServer
from rondo.runtime.config import AdminConfig
from tests.e2e.runs import command, finish, left_behind, over_behind_it, read_until, start
from tests.runtime.actors.test_fuzz import trace
from tests.runtime.admin.test_endpoint import RUN_TOKEN, Numbers
from tests.strength import strength

PROGRAM = os.environ.get("SCHEMATHESIS", "")
LIMIT_S = 2700.0
"""A live run answers 100 examples an operation in about half an hour, on two cores."""
pytestmark = [
    pytest.mark.skipif(not PROGRAM, reason="SCHEMATHESIS names no program: `make fuzz` installs it"),
    pytest.mark.timeout(2 * LIMIT_S),
]
ENDLESS = ("/events",)
SAID = ("/readyz", "/healthz")
"""503 while a role starts again."""
NOT_LOOKED_AT = "positive_data_acceptance,ignored_auth"
"""What no document says: steps of a trace that are not there, prompts that a template refuses; and that an address that has shown
too many wrong tokens is told to wait, and not that the next is wrong too."""


def asking(url: str, token: str, *options: str, leaves: tuple[str, ...] = ()) -> list[str]:
    examples = str(strength(quick=10, full=100))
    excluded = [part for path in leaves for part in ("--exclude-path", path)]
    return [
        PROGRAM, "run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {token}", "--no-color", "--seed", "1",
        "--max-examples", examples, "--request-timeout", "60", *excluded, *options,
    ]  # fmt: skip


def finds_nothing(line: list[str], folder: Path) -> None:
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr


async def test_every_route_of_the_endpoint_with_the_runs_own_token(tmp_path: Path) -> None:
    provider = Numbers()
    provider.roles = provider.waits = list  # type: ignore[method-assign]  # which have the types of a run's
    server = AdminServer(AdminConfig(), provider, token=RUN_TOKEN)
    server.route("GET", "/timeline", trace, scope="read", operation=TRACE)
    await server.start()
    try:
        await asyncio.to_thread(finds_nothing, asking(server.url, RUN_TOKEN, leaves=ENDLESS), tmp_path)
    finally:
        await server.close()


def test_a_live_run_goes_on_with_whatever_its_endpoint_is_asked(tmp_path: Path) -> None:
    """With its own token, which opens what changes it too: replicas come, leave and start again, and evaluations are asked for. A
    stop alone is left out."""
    with over_behind_it():
        sets = ("num_steps=100000", "autoscale={'max_replicas': 2}")
        running = start(command(tmp_path, sets=sets), tmp_path)
        read_until(running, "step=1/")
        record = supervisor_record(tmp_path / "quickstart")
        assert record is not None
        token = Path(record.token_path).read_text().strip()
        line = asking(url_of(record), token, "--exclude-checks", NOT_LOOKED_AT, leaves=(*ENDLESS, *SAID, "/stop"))
        finds_nothing(line, tmp_path)
        step = ask(record, "/healthz")["step"]
        while ask(record, "/healthz")["step"] < step + 3:
            read_until(running, "step=")
        ask(record, "/stop", {"reason": "enough"})
        assert finish(running, tmp_path / "quickstart").code == 75
    assert left_behind(tmp_path) == []


def test_rondo_serve(tmp_path: Path) -> None:
    """A paused server answers nobody."""
    build(tmp_path / "model", hidden_size=32, num_heads=2, num_kv_heads=1)
    line = [
        sys.executable,
        "-m",
        "rondo.launch.cli",
        "serve",
        str(tmp_path / "model"),
        "--port",
        "0",
        "--max-length",
        "64",
    ]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            found = re.fullmatch(r"serving \S+ at (\S+)  token: (\S+)\n", process.stdout.readline())
            assert found is not None, process.stderr.read()
            token = Path(found[2]).read_text().strip()
            options = ("--exclude-checks", NOT_LOOKED_AT)
            finds_nothing(asking(found[1], token, *options, leaves=("/pause_generation",)), tmp_path)
        finally:
            process.terminate()
            _, told = process.communicate(timeout=LIMIT_S)
    assert "Traceback" not in told, told[-4000:]
