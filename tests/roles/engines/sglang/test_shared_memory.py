"""What a server's processes leave in shared memory when they are killed, and what is not theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo.roles.engines.sglang.shared_memory import FOLDER, SharedNames

_PROGRAM = """
import multiprocessing, os, sys
from multiprocessing.shared_memory import SharedMemory

def child(lock, names):
    mine = multiprocessing.get_context("spawn").Lock()
    names.put(mine._semlock.name)
    lock.acquire()

if __name__ == "__main__":
    spawning = multiprocessing.get_context("spawn")
    lock, names = spawning.Lock(), spawning.SimpleQueue()
    lock.acquire()
    started = spawning.Process(target=child, args=(lock, names))
    started.start()
    block = SharedMemory(f"sgl_shm_mm_{os.getpid()}_abc", create=True, size=8)
    print(os.getpid(), started.pid, lock._semlock.name, names.get(), block.name, *sys.argv[1:], flush=True)
    lock.acquire()
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "making_names.py").write_text(_PROGRAM)
    yield tmp_path


def in_memory(name: str) -> Path:
    return FOLDER / (f"sem.{name[1:]}" if name.startswith("/") else name)


def start(names: SharedNames, folder: Path) -> tuple[subprocess.Popen[str], list[str]]:
    """The program, begun as a server is, and the words that it says."""
    process = subprocess.Popen(
        [sys.executable, *names.begin, "making_names", "an argument"],
        env=os.environ | {"PYTHONPATH": str(folder)}, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def killed(process: subprocess.Popen[str]) -> None:
    """With all it started, so that none of them takes a name away."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_killed_servers_names_go_with_it_and_those_of_others_stay(program: Path) -> None:
    names, other = SharedNames(), SharedNames()
    process, (pid, child, *made, block, _, _) = start(names, program)
    second, (*_, theirs, _, _, _) = start(other, program)
    try:
        assert len(made) == 2 and all(in_memory(each).exists() for each in [*made, theirs, block])
        assert all(Path(each).name.startswith("rondo_server_") for each in made)
        names.saw([int(pid), int(child)])
        killed(process)
        names.remove()
        assert not any(in_memory(each).exists() for each in [*made, block]) and in_memory(theirs).exists()
    finally:
        killed(second)
        other.saw([second.pid])
        other.remove()
    assert not in_memory(theirs).exists()


def test_what_a_process_left_that_was_killed_with_its_server_goes_when_the_next_server_starts(program: Path) -> None:
    names, loads = SharedNames(), f"sglang_loads_{os.getpid()}_5e4d.shm"
    process, (pid, _, *made, block, _, _) = start(names, program)
    (FOLDER / loads).touch()
    names.saw([int(pid)], [loads])
    killed(process)
    assert SharedNames().remove() is None and in_memory(made[0]).exists()  # its owner lives
    os.close(names._file)  # as the kernel does for one that is killed
    SharedNames().remove()
    assert not any(in_memory(each).exists() for each in [*made, block, loads]) and not names._path.exists()


def test_blocks_of_what_was_killed_go_before_its_parent_asks_how_it_ended(program: Path) -> None:
    names = SharedNames()
    process, (pid, _, *_, block, _, _) = start(names, program)
    names.saw([int(pid)])
    os.killpg(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    names.remove()
    assert Path(f"/proc/{pid}").exists() and not in_memory(block).exists()
    process.communicate()


def test_a_block_of_a_process_that_lives_is_left_alone() -> None:
    names, block = SharedNames(), FOLDER / f"sgl_shm_mm_{os.getpid()}_abc"
    block.touch()
    try:
        names.saw([os.getpid()])
        names.remove()
        assert block.exists() and not names._path.exists()
    finally:
        block.unlink()
