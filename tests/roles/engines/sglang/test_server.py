from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rondo.roles.engines.sglang.capabilities import probe
from rondo.roles.engines.sglang.client import ServerError, SGLangClient
from rondo.roles.engines.sglang.requirements import require_version
from rondo.roles.engines.sglang.server import AttachedServer, Launch, SGLangServer, held_port
from rondo.roles.engines.sglang.shared_memory import FOLDER
from rondo.runtime.errors import ConfigError, DeadlineExceeded, WorkerDied
from tests.roles.engines.sglang.pretender import launch

START_S = 60.0
_STARTER = """
import asyncio, sys
from pathlib import Path
from rondo.roles.engines.sglang.server import SGLangServer
from tests.roles.engines.sglang.pretender import launch

async def main(folder):
    server = SGLangServer(launch(folder), log=folder / "log", folder=folder)
    client = await server.start(60)
    info = await client.get("/server_info", deadline_s=60)
    print(server.pid, info["child"], flush=True)
    await asyncio.sleep(600)

asyncio.run(main(Path(sys.argv[1])))
"""


def server(folder: Path, **environment: str) -> SGLangServer:
    return SGLangServer(launch(folder, **environment), log=folder / "log", folder=folder, grace_s=0.2)


def gone(pid: int, deadline_s: float = 60.0) -> bool:
    """Waits for its end; a zombie has ended."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def files_with(text: str, folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file() and text in path.read_text()}


def private(path: Path) -> bool:
    return path.stat().st_mode & 0o077 == 0


async def test_a_server_is_started_answers_and_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    made = server(tmp_path, PRETEND_DEAF="1")  # neither launcher nor child leaves when it is asked to
    client = await made.start(START_S)
    child = (await client.get("/server_info", deadline_s=60))["child"]
    pid = made.pid
    assert pid is not None and psutil.pid_exists(child)
    await client.__aexit__()
    await made.close()
    assert gone(pid) and gone(child) and made.pid is None
    await made.close()
    assert files_in(tmp_path) == {"pretended", "log"}


async def test_its_key_is_its_own_and_in_private_files_alone(tmp_path: Path) -> None:
    made = server(tmp_path)
    client = await made.start(START_S)
    try:
        assert made.pid is not None
        process = psutil.Process(made.pid)
        assert made.key not in " ".join([*process.cmdline(), *process.environ().values()])
        assert files_with(made.key, tmp_path) == {"sglang.yaml"}
        assert private(tmp_path / "sglang.yaml") and private(made.log)
        async with SGLangClient(client.url, api_key="another") as other:
            with pytest.raises(ServerError, match="401"):
                await other.post("/generate", {}, deadline_s=60)
    finally:
        await client.__aexit__()
        await made.close()


def test_no_key_reads_as_an_option_of_the_server(tmp_path: Path) -> None:
    told = launch(tmp_path)
    keys = [SGLangServer(told, log=tmp_path / "log", folder=tmp_path).key for _ in range(64)]
    assert len(set(keys)) == 64 and all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)


async def test_a_killed_server_is_told_with_how_it_ended_and_can_be_started_again(tmp_path: Path) -> None:
    made = server(tmp_path)
    first = await made.start(START_S)
    child = (await first.get("/server_info", deadline_s=60))["child"]
    names = [Path(name) for name in await first.get("/names", deadline_s=60)]
    assert made.pid is not None and len(names) == 2 and all(name.exists() for name in names)
    os.kill(made.pid, signal.SIGKILL)
    assert await made.gone() == "killed by SIGKILL"
    await first.__aexit__()
    second = await made.start(START_S)
    assert gone(child) and not any(name.exists() for name in names)
    assert (await second.get("/server_info", deadline_s=60))["version"] == "0.5.23"
    await second.__aexit__()
    await made.close()


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    made = server(tmp_path, PRETEND_FAIL="no memory left for the cache")
    with pytest.raises(WorkerDied, match=r"(?s)exit code 3.*no memory left for the cache"):
        await made.start(START_S)
    assert made.pid is None


async def test_a_server_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    made = server(tmp_path)
    with pytest.raises(DeadlineExceeded, match="start of sglang"):
        await made.start(0.0)
    assert made.pid is None


def has_open(pid: int, file: Path) -> bool:
    return str(file) in Path(f"/proc/{pid}/maps").read_text()


async def test_what_a_server_has_in_shared_memory_goes_with_it_also_where_it_never_answered(tmp_path: Path) -> None:
    loads = FOLDER / f"sglang_loads_{os.getpid()}_5e4d.shm"
    loads.write_bytes(bytes(16))
    made = server(tmp_path, PRETEND_STARTING=str(loads))
    starting = asyncio.create_task(made.start(START_S))
    while made.pid is None or not has_open(made.pid, loads):  # noqa: ASYNC110 - that is no event
        await asyncio.sleep(0.01)
    starting.cancel()  # it leaves when it is asked to, and takes nothing with it
    await asyncio.wait([starting])
    assert made.pid is None and not loads.exists()


def test_a_held_port_is_the_server_s_alone() -> None:
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server, socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
            with pytest.raises(OSError, match="in use"):
                socket.create_server(("127.0.0.1", port))


def test_a_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert starter.stdout is not None
    pids = list(map(int, starter.stdout.readline().split()))
    assert len(pids) == 2
    starter.kill()
    starter.communicate()
    assert all(map(gone, pids))


@pytest.mark.parametrize(("version", "takes"), [("0.5.10", False), ("0.5.16", True), ("0.5.23", True)])
async def test_a_server_that_is_too_old_for_positions_of_media_takes_text_alone(
    tmp_path: Path, version: str, takes: bool
) -> None:
    made = server(tmp_path, PRETEND_VERSION=version)
    client = await made.start(START_S)
    try:
        assert (await probe(client, processed_media=True)).takes_processed_media is takes
        assert not (await probe(client)).takes_processed_media
    finally:
        await client.__aexit__()
        await made.close()


async def test_an_attached_server_is_neither_started_nor_ended(tmp_path: Path) -> None:
    made = server(tmp_path)
    own = await made.start(START_S)
    attached = AttachedServer(own.url, key=made.key)
    client = await attached.start(START_S)
    assert (await client.post("/generate", {"sampling_params": {"max_new_tokens": 1}}, deadline_s=60))["output_ids"]
    await client.__aexit__()
    await attached.close()
    assert made.pid is not None and psutil.pid_exists(made.pid)
    await own.__aexit__()
    await made.close()


def test_arguments_of_the_user_win_but_not_over_address_and_key() -> None:
    given = {"mem_fraction_static": 0.5, "enable-return-routed-experts": True, "host": "0.0.0.0", "api-key": "mine"}
    found = Launch("python", "/model", dtype="bfloat16", max_running=8, max_tokens=99, arguments=given).settings(7, "k")
    assert found["mem-fraction-static"] == 0.5 and "mem_fraction_static" not in found
    assert found["enable-return-routed-experts"] is True and found["dtype"] == "bfloat16"
    assert (found["host"], found["port"], found["api-key"]) == ("127.0.0.1", 7, "k")
    assert (found["max-running-requests"], found["max-total-tokens"], found["device"]) == (8, 99, "cpu")


def test_a_server_on_gpus_takes_those_of_its_replica() -> None:
    found = Launch("python", "/model", tensor_parallel=2, first_device=4, max_running=8, max_tokens=99).settings(7, "k")
    assert (found["tp-size"], found["base-gpu-id"]) == (2, 4)
    assert not {"device", "attention-backend", "mem-fraction-static", "max-total-tokens"} & found.keys()


def test_the_environment_of_a_server_is_not_that_of_the_rollout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTHONPATH", "PYTHONHOME"):
        monkeypatch.setenv(name, "ours")
    monkeypatch.setenv("HF_HOME", "/hub")
    found = Launch("python", "/model", environment={"OMP_NUM_THREADS": "4"}).surroundings(Path("/tmp/x"))
    assert "ours" not in found.values() and found["HF_HOME"] == "/hub"
    assert (found["OMP_NUM_THREADS"], found["SGLANG_USE_CPU_ENGINE"], found["TMPDIR"]) == ("4", "1", "/tmp/x")
    assert "SGLANG_USE_CPU_ENGINE" not in Launch("python", "/model", first_device=0).surroundings(Path("/tmp/x"))
    assert "TMPDIR" not in Launch("p", "m").surroundings(Path("/tmp") / ("x" * 90)) or os.environ.get("TMPDIR")


@pytest.mark.parametrize("text", ["0.5.9", "0.4.10.post2"])
def test_a_server_that_reads_strangers_pickles_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"must be 0.5.10 or newer.*pickles.*got {text}"):
        require_version(text, "http://there")


def test_versions_of_both_sides_of_the_change_of_updates_are_taken() -> None:
    assert require_version("0.5.10.post1", "x") == (0, 5, 10)
    assert require_version("0.5.23", "x") == (0, 5, 23)
    with pytest.raises(ConfigError, match="must look like"):
        require_version("main", "x")
