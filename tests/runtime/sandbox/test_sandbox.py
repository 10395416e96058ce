"""What a sandbox stops, what is left behind a command, and who else may run commands."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rondo.runtime.config import SandboxConfig
from rondo.runtime.errors import ConfigError
from rondo.runtime.processes.process import below, processes
from rondo.runtime.processes.subreaper import END
from rondo.runtime.sandbox import sandbox as runs
from rondo.runtime.sandbox.sandbox import Limits, Ran, Sandbox, SandboxFailed

SMALL = Limits(deadline_s=60.0, memory_bytes=256 << 20, num_processes=16, output_bytes=4096, disk_bytes=1 << 20)


@pytest.fixture
async def box() -> Sandbox:
    found = Sandbox()
    if await found.isolates() != "namespaces":
        pytest.skip("this kernel allows no namespaces")
    return found


async def python(box: Sandbox, code: str, limits: Limits = SMALL, stdin: bytes = b"") -> Ran:
    return await box.run({"main.py": code.encode()}, ["python", "-S", "main.py"], stdin, limits)


async def test_a_command_has_its_files_and_its_input_and_is_told_as_it_ended(box: Sandbox) -> None:
    files = {
        "main.py": b"import sys; print(open('deep/er/a.txt').read(), sys.stdin.read()); sys.exit(3)",
        "deep/er/a.txt": b"6",
    }
    assert await box.run(files, ["python", "main.py"], b"7", SMALL) == Ran("6 7\n", "", 3)
    killed = await box.run({}, ["sh", "-c", "echo no >&2; kill -9 $$"], limits=SMALL)
    assert (killed.output, killed.errors, killed.exit, killed.why) == ("", "no\n", -9, None)
    missing = await box.run({}, ["no_such_program"], limits=SMALL)
    assert missing.exit == 127 and "no_such_program: No such file" in missing.errors
    for name in ("../out", "/out", ""):
        with pytest.raises(ConfigError, match="below the sandbox's folder"):
            await box.run({name: b""}, ["true"])


async def test_nothing_of_the_machine_is_seen_but_programs_which_stay_as_they_are(box: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "secret").chmod(0o666)
    code = f"""
import os, socket, sys
def tried(attempt):
    try:
        attempt()
    except OSError:
        return "no"
    return "YES"
os.symlink({str(tmp_path / "secret")!r}, "link")
os.mkfifo("fifo")
print(
    tried(lambda: open({str(tmp_path / "secret")!r})), tried(lambda: open("link")), tried(lambda: open("/etc/passwd")),
    tried(lambda: open(sys.prefix + "/mine", "w")), tried(lambda: open("/usr/mine", "w")),
    tried(lambda: os.kill({os.getpid()}, 0)),
    tried(lambda: socket.create_connection(("127.0.0.1", 22), 1)), tried(lambda: socket.create_connection(("1.1.1.1", 53), 1)),
    tried(lambda: os.setuid(0)), tried(lambda: os.chroot(".")), tried(lambda: open("/proc/1/environ")),
    tried(lambda: open("/proc/sys/kernel/hostname", "w")),
    sorted(os.environ), len([p for p in os.listdir("/proc") if p.isdigit()]),
)
"""
    ran = await python(box, code)
    assert "YES" not in ran.output and ran.output.startswith("no " * 12) and ran.output.endswith(" 2\n"), ran
    assert "HOME" in ran.output and "PYTEST_CURRENT_TEST" not in ran.output


@pytest.mark.parametrize(
    ("code", "limits", "why"),
    [
        ("import time\nwhile True: time.sleep(9)", Limits(deadline_s=1.0), "deadline"),
        ("import signal, os\nos.kill(os.getpid(), signal.SIGSTOP)", Limits(deadline_s=1.0), "deadline"),
        ("import os\nos.mkfifo('f'); open('f')", Limits(deadline_s=1.0), "deadline"),
        ("while True: print('x' * 1000)", SMALL, "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", SMALL, "output"),
        (
            "import os, time\nfor i in range(8):\n    if os.fork() == 0: a = b'x' * (99 << 20); time.sleep(99)\nos.wait()",
            SMALL,
            "memory",
        ),
    ],
)
async def test_what_goes_on_too_long_says_too_much_or_takes_too_much_is_ended(
    box: Sandbox, code: str, limits: Limits, why: str
) -> None:
    ran = await python(box, code, limits)
    assert ran.why == why and ran.exit != 0 and len(ran.output) <= limits.output_bytes


def test_pages_that_forked_processes_share_count_once() -> None:
    code = """
import os, signal
data = b"x" * (64 << 20)
for _ in range(8):
    if os.fork() == 0: signal.pause()
print("up", flush=True)
signal.pause()
"""
    command = [sys.executable, "-m", "rondo.runtime.processes.command", str(os.getpid()), sys.executable, "-Sc", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as root:
        assert root.stdout is not None and root.stdout.readline() == b"up\n"
        assert sum(process.rss_bytes for process in below(root.pid)) > 500 << 20
        assert runs._why(root.pid, Limits(memory_bytes=200 << 20), math.inf, []) is None
        assert runs._why(root.pid, Limits(memory_bytes=60 << 20), math.inf, []) == "memory"
        root.send_signal(END)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "import os\ntry:\n    for _ in range(99): os.fork() or signal.pause()\nexcept OSError: print('no more')",
            "no more",
        ),
        ("try: b'x' * (1 << 30)\nexcept MemoryError: print('no more')", "no more"),
        ("try:\n    with open('f', 'wb') as f: f.write(b'x' * (2 << 20))\nexcept OSError: print('no more')", "no more"),
        (
            "try:\n    for i in range(20000): open(str(i), 'wb').close()\nexcept OSError: print('no more')",
            "no more",
        ),
    ],
)
async def test_processes_memory_and_files_have_limits_that_a_command_meets(box: Sandbox, code: str, said: str) -> None:
    ran = await python(box, "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + code)
    assert ran.output.split("\n")[0] == said, ran


def _alive(mark: str) -> list[int]:
    found = []
    for each in processes():
        try:
            if each.alive and mark.encode() in Path(f"/proc/{each.pid}/cmdline").read_bytes():
                found.append(each.pid)
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


@pytest.mark.parametrize("how", ["namespaces", "limits", "container", "cancelled"])
async def test_what_left_its_session_and_its_parent_ends_with_its_command_and_so_does_the_folder(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = f"86{uuid.uuid4().int % 10**9}"
    begins = f"(setsid sh -c 'sleep {mark} & sleep {mark}' &) ; mkdir -p a/b; chmod 000 a; sleep"
    shell = f"{begins} {'0.3' if how != 'cancelled' else '300'}"
    box = Sandbox(command=("env",)) if how == "container" else Sandbox(isolation=None if how == "cancelled" else how)  # type: ignore[arg-type]
    if how == "namespaces" and await Sandbox().isolates() != "namespaces":
        pytest.skip("this kernel allows no namespaces")
    if how == "limits":
        run = box._here("limits", {}, ["sh", "-c", shell], b"", SMALL)
    else:
        run = box.run({}, ["sh", "-c", shell], b"", SMALL)
    task = asyncio.create_task(run)
    if how == "cancelled":
        until = time.monotonic() + 60
        while not _alive(mark) and time.monotonic() < until:  # noqa: ASYNC110 - of a process
            await asyncio.sleep(0.02)
        assert _alive(mark)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        ran = await task
        assert ran.exit == 0, ran
    assert not _alive(mark) and not any(tmp_path.iterdir())  # noqa: ASYNC240


async def test_limits_alone_hold_memory_time_and_processes_and_a_command_of_roots_is_nobody() -> None:
    code = "try: b'x' * (1 << 30)\nexcept MemoryError: print('no more')"
    program = [
        "/usr/bin/env",
        "sh",
        "-c",
        "ulimit -v; grep 'Max processes' /proc/self/limits; id -u; touch mine; ls; env",
    ]
    ran = await Sandbox()._here("limits", {"main.py": code.encode()}, program, b"", SMALL)
    memory, num_processes, user, *rest = ran.output.split("\n")
    assert memory == str(SMALL.memory_bytes >> 10) and "PYTEST_CURRENT_TEST" not in ran.output
    if os.geteuid() == 0:
        assert int(user) >= 1 << 30 and num_processes.split()[2] == "16"
    assert rest[:2] == ["main.py", "mine"]
    late = await Sandbox()._here("limits", {}, ["sleep", "99"], b"", Limits(deadline_s=1.0))
    assert late.why == "deadline" and late.exit != 0


async def test_what_the_kernel_refuses_is_said_and_limits_are_taken_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    async def here(self: Sandbox, isolation: str, *_: object) -> Ran:
        tried.append(isolation)
        if isolation == "namespaces":
            raise SandboxFailed("unshare: Operation not permitted")
        return Ran("", "", 0)

    monkeypatch.setattr(Sandbox, "_here", here)
    monkeypatch.setattr(runs, "_tried", {})
    assert await Sandbox().isolates() == "limits" and await Sandbox().isolates() == "limits"
    assert tried == ["namespaces", "limits"]
    with pytest.raises(SandboxFailed, match=r"namespaces: unshare: Operation not permitted\. Set sandbox\.command"):
        await Sandbox(isolation="namespaces").isolates()


async def test_a_jail_that_did_not_begin_is_no_fault_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(SandboxFailed, match="its process ended with 1"):
        await Sandbox()._here("namespaces", {}, ["true"], b"", SMALL)


async def test_a_container_is_asked_by_a_command_and_finds_files_and_limits_in_it() -> None:
    box = Sandbox(command=("sh", "-c", 'cd {folder} && echo {memory_mb} {num_processes} {deadline_s} && "$@"', "run"))
    ran = await box.run({"a/b": b"6"}, ["cat", "a/b", "-"], b" 7", SMALL)
    assert ran == Ran("256 16 60\n6 7", "", 0)


async def test_a_server_is_asked_as_sandboxfusion_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, object]] = []
    answers = [
        {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "42\n", "stderr": ""}},
        {
            "status": "Failed",
            "run_result": {"status": "TimeLimitExceeded", "return_code": None, "stdout": None, "stderr": ""},
        },
        {"status": "SandboxError", "message": "no room", "run_result": None},
        ["what?"],
    ]

    async def answer(request: web.Request) -> web.Response:
        said.append(await request.json())
        return web.json_response(answers[len(said) - 1])

    app = web.Application()
    app.router.add_post("/run_code", answer)
    async with TestServer(app) as server:
        box = Sandbox(url=str(server.make_url("")).rstrip("/"))
        assert await box.run({"a.py": b"x"}, ["python", "a b.py"], b"in", SMALL) == Ran("42\n", "", 0)
        assert (await box.run({}, ["true"], b"", SMALL)) == Ran("", "", -9, "deadline")
        for message in ("no room", "as SandboxFusion"):
            with pytest.raises(SandboxFailed, match=message):
                await box.run({}, ["true"])
    with pytest.raises(SandboxFailed, match="ClientConnectorError"):
        await box.run({}, ["true"])
    assert said[0] == {
        "code": "python 'a b.py'", "language": "bash", "stdin": "in", "run_timeout": 60.0, "memory_limit_MB": 256,
        "files": {"a.py": base64.b64encode(b"x").decode()},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"url": "http://a", "command": ["docker"]}, "sandbox.command must be set without sandbox.url"),
        ({"url": "ftp://a"}, "sandbox.url must be of http"),
        ({"url": "http://me:word@a"}, "sandbox.url must be of http"),
        ({"paths": ["data"]}, "sandbox.paths must be absolute"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], refused: str) -> None:
    with pytest.raises(ValueError, match=refused):
        SandboxConfig(**settings)  # type: ignore[arg-type]


def test_a_process_has_the_sandbox_that_its_settings_say() -> None:
    config = SandboxConfig(isolation="limits", deadline_s=3, paths=("/opt",))
    settings = json.loads(json.dumps(config.settings))
    assert settings == {"isolation": "limits", "paths": ["/opt"], "limits": {"deadline_s": 3.0}}
    make: Callable[[], Sandbox] = runs.sandbox
    try:
        runs.use(settings)
        assert make() == Sandbox(**settings) and runs.used() == settings
    finally:
        runs.use({})
    assert make() == Sandbox() and SandboxConfig().settings == {}
