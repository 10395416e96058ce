"""A nursery with jobs of its own, in a process that stands where the supervisor stands: no janitor sweeps behind it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import psutil
import pytest

from rondo.runtime.errors import WorkerDied
from rondo.runtime.processes import process
from rondo.runtime.supervision import nursery as module
from rondo.runtime.supervision.launcher import Job, Surroundings
from rondo.runtime.supervision.nursery import Nursery

ROOT = Path(__file__).parents[3]
PATIENCE_S = 120.0


def tell() -> None:
    """A job: what it finds itself to be, then the end that its first argument says."""
    found = {
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "arguments": sys.argv[1:],
        "environment": {name: os.environ.get(name) for name in ("WORD", "ONLY_OF_THE_SUPERVISOR", "RONDO_PARENT_PID")},
        "has": [_same_file(int(fd), int(sys.argv[2])) for fd in os.listdir("/proc/self/fd")].count(True),  # noqa: PTH208
        "loaded": [name in sys.modules for name in ("torch", "xml.dom.pulldom")],
    }  # fmt: skip
    sys.stdout.write(orjson.dumps(found).decode() + "\n")
    sys.stdout.flush()
    if sys.argv[1] == "wait":
        signal.pause()
    sys.exit({"late": 7}.get(sys.argv[1]) or int(sys.argv[1]))


def _same_file(one: int, inode: int) -> bool:
    try:
        return os.fstat(one).st_ino == inode
    except OSError:
        return False


async def drive(folder: Path) -> None:
    """Two jobs to their ends, one of which keeps a descriptor; one of a nursery that is stopped, and of the next one; then one
    that is there when this process is killed."""
    around = Surroundings(folder, folder, ("127.0.0.1", 1))
    with tempfile.TemporaryFile() as kept, Nursery() as nursery:
        (folder / "before").mkdir()
        nursery.belong(Surroundings(folder / "before", folder, ("127.0.0.1", 1)).place("nursery", 0))

        def job(end: str, fds: tuple[int, ...] = ()) -> Job:
            inode = str(os.fstat(kept.fileno()).st_ino)
            environment = {**os.environ, "WORD": end}
            del environment["ONLY_OF_THE_SUPERVISOR"]
            return Job(
                "tests.runtime.supervision.test_nursery:tell", (end, inode), environment, folder / f"{end}.log", fds
            )

        one, two = await asyncio.gather(nursery.start(job("0", (kept.fileno(),))), nursery.start(job("3")))
        ended = [await one.ended(), two.wait(), one.poll(), two.poll()]
        (pid,) = nursery.pids.values()
        nursery.belong(around.place("nursery", 0), ["xml.dom.pulldom", "there_is_no_such_module"])
        ended.append((await nursery.start(job("4"))).wait())
        assert nursery.pids == {"nursery": pid}
        os.kill(pid, signal.SIGSTOP)
        late = asyncio.create_task(nursery.start(job("late")))
        given_up = asyncio.create_task(nursery.start(job("given_up")))
        await asyncio.sleep(0)
        turns = [await asyncio.sleep(0, turn) for turn in range(100) if not late.done()]
        given_up.cancel()
        await asyncio.wait([given_up])
        os.kill(pid, signal.SIGCONT)
        four = await late
        os.kill(pid, signal.SIGSTOP)
        patience_s, module.ANSWER_S, silence = module.ANSWER_S, 0.1, ""
        try:
            await nursery.start(job("0"))
        except WorkerDied as error:
            silence = str(error)
        module.ANSWER_S = patience_s
        three = await nursery.start(job("wait"))
        stopped, (pid,) = pid, nursery.pids.values()
        threads = len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
        told = {
            "ended": ended, "pid": os.getpid(), "nursery": pid, "threads": threads, "three": three.pid,
            "policy": psutil.Process(pid).environ()["OMP_WAIT_POLICY"],
        }  # fmt: skip
        told |= {"silence": silence, "stopped": stopped, "turns": len(turns), "late": four.wait()}
        sys.stdout.write(orjson.dumps(told).decode() + "\n")
        sys.stdout.flush()
        signal.pause()


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the driver and its jobs have told; it was killed, and what it had is gone."""
    folder = tmp_path_factory.mktemp("nursery")
    driver = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.supervision.test_nursery", str(folder)], cwd=ROOT, stdout=subprocess.PIPE,
        env={**os.environ, "ONLY_OF_THE_SUPERVISOR": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    with driver:
        assert driver.stdout is not None
        told: dict[str, Any] = orjson.loads(driver.stdout.readline())
        log = folder / "wait.log"
        while not log.exists() or not log.read_bytes().endswith(b"\n"):
            assert driver.poll() is None
        told["given_up"] = (folder / "given_up.log").stat().st_size > 0
        told["jobs"] = {end: orjson.loads((folder / f"{end}.log").read_bytes()) for end in ("0", "3", "4", "wait")}
        logs = [folder / place / "logs" / "attempt_0" / "nursery.1.log" for place in ("before", ".")]
        told["logs"] = ["there_is_no_such_module is not loaded" in log.read_text() for log in logs]
        watched = [os.pidfd_open(told[name]) for name in ("nursery", "three")]
        driver.kill()
        told["gone"] = [bool(select.select([descriptor], [], [], PATIENCE_S)[0]) for descriptor in watched]
        for descriptor in watched:
            os.close(descriptor)
    return told


def test_a_job_is_a_child_of_the_supervisor_with_a_session_and_an_environment_of_its_own(
    driven: dict[str, Any],
) -> None:
    for end, job in driven["jobs"].items():
        assert job["parent"] == driven["pid"] and job["session"] == job["pid"] != driven["nursery"]
        assert job["arguments"][0] == end
        assert job["environment"] == {
            "WORD": end, "ONLY_OF_THE_SUPERVISOR": None, "RONDO_PARENT_PID": str(job["pid"]),
        }  # fmt: skip


def test_how_a_job_ended_is_told_as_of_any_child(driven: dict[str, Any]) -> None:
    assert driven["ended"] == [0, 3, 0, 3, 4]


def test_a_job_has_the_descriptors_that_it_names_and_no_other_s(driven: dict[str, Any]) -> None:
    assert [driven["jobs"][end]["has"] for end in ("0", "3", "wait")] == [1, 0, 0]
    assert len(driven["jobs"]["0"]["arguments"]) == 3  # the number of its descriptor is the last


def test_a_nursery_comes_to_belong_to_a_run_and_loads_what_that_needs(driven: dict[str, Any]) -> None:
    loaded = {end: job["loaded"] for end, job in driven["jobs"].items()}
    assert loaded == {"0": [True, False], "3": [True, False], "4": [True, True], "wait": [True, True]}
    assert driven["logs"] == [False, True]


def test_a_nursery_has_one_thread_so_that_forks_are_whole(driven: dict[str, Any]) -> None:
    assert driven["threads"] == 1


def test_threads_of_a_role_that_have_nothing_to_do_leave_their_cores_to_other_roles(driven: dict[str, Any]) -> None:
    assert driven["policy"] == "PASSIVE"


def test_while_a_nursery_stands_still_others_go_on_and_a_late_job_has_an_owner(driven: dict[str, Any]) -> None:
    assert (driven["turns"], driven["late"]) == (100, 7)


def test_a_job_that_was_given_up_never_begins(driven: dict[str, Any]) -> None:
    assert driven["given_up"] is False


def test_a_nursery_that_stands_still_is_killed_and_replaced(driven: dict[str, Any]) -> None:
    assert driven["silence"].startswith("the nursery must start what it is told, got silence. ")
    assert driven["stopped"] != driven["nursery"] and process.stat(driven["stopped"]) is None


def test_the_nursery_and_its_jobs_die_with_the_supervisor(driven: dict[str, Any]) -> None:
    assert driven["gone"] == [True, True]


async def test_a_nursery_that_loads_for_too_long_is_replaced_with_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def slow(command: object, environment: object, log: object, fds: list[int]) -> subprocess.Popen[bytes]:
        begun.append(subprocess.Popen(["sleep", "1000"], pass_fds=fds))
        return begun[-1]

    monkeypatch.setattr(module, "start", slow)
    with Nursery() as nursery:
        nursery.belong(lambda _: (tmp_path / "log", {}), load_s=0.001)
        for _ in range(2):
            with pytest.raises(WorkerDied, match="the nursery must start what it is told, got silence"):
                await nursery.start(Job("any:thing", (), {}, tmp_path / "log"))
    assert [each.returncode for each in begun] == [-signal.SIGKILL, -signal.SIGKILL]


async def test_a_job_that_is_killed_before_it_begins_fails_alone(tmp_path: Path) -> None:
    nursery: Any = Nursery()
    loop = asyncio.get_running_loop()
    nursery._process = SimpleNamespace(poll=lambda: None)  # without `kill`: it has done nothing
    nursery._orders, theirs = socket.socketpair()

    def forked_and_killed() -> None:
        _, (descriptor,), _, _ = socket.recv_fds(theirs, 1, 1)
        with socket.socket(fileno=descriptor) as job:
            job.recv(1 << 16)
            job.sendall(b"1234")

    loop.add_reader(theirs, forked_and_killed)
    with nursery._orders, theirs:
        with pytest.raises(WorkerDied, match="got the end of pid 1234"):
            await nursery.start(Job("any:thing", (), {}, tmp_path / "log"))
        loop.remove_reader(theirs)


def test_a_nursery_that_fails_is_gone_at_once_and_takes_down_nothing_that_it_has_loaded() -> None:
    """Else it lives for seconds behind a socket that is closed, and the next start is lost to it."""
    own = (
        "import atexit; from rondo.runtime.supervision import nursery as own; "
        "own.load = lambda modules: atexit.register(print, 'taken down'); own.main()"
    )
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            line = [sys.executable, "-c", own, str(theirs.fileno())]
            failing = subprocess.Popen(line, pass_fds=[theirs.fileno()], stdout=-1, stderr=-1, text=True)
        ours.send(b"no order")
        out, told = failing.communicate(timeout=PATIENCE_S)
    assert (failing.returncode, out) == (1, "") and "TypeError" in told


if __name__ == "__main__":
    process.set_child_subreaper()
    asyncio.run(drive(Path(sys.argv[1])))


def test_a_module_that_cannot_be_loaded_for_all_is_told_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_broken_module.py").write_text("raise RuntimeError('of another CUDA')\n")
    monkeypatch.syspath_prepend(tmp_path)
    module.load(["a_broken_module", "there_is_no_such_module"])
    told = capfd.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in told] == [
        "a_broken_module is not loaded for all",
        "there_is_no_such_module is not loaded for all",
    ]
    assert told[0].endswith("RuntimeError: of another CUDA")
