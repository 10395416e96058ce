"""Processes as the kernel shows them, and killing with proof. Every test starts real ones and leaves none."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rondo.runtime.processes import process

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"


@contextlib.contextmanager
def started(code: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A Python child that has printed its first line, dead and collected afterwards."""
    command = [sys.executable, "-S", "-c", code]
    child: subprocess.Popen[str] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    assert child.stdout is not None
    try:
        child.first = child.stdout.readline().strip()  # type: ignore[attr-defined]
        yield child
    finally:
        child.kill()
        child.wait(60)
        child.stdout.close()


def test_stat_names_this_process() -> None:
    found = process.stat(os.getpid())
    assert found is not None
    assert (found.parent, found.session, found.alive) == (os.getppid(), os.getsid(0), True)
    assert found.rss_bytes > 1 << 20 and found.start_time == process.start_time(os.getpid())


def test_stat_of_a_process_whose_name_has_brackets_and_spaces() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') R 1 (x', 0, 0, 0); " + SLEEPER
    with started(code) as child:
        found = process.stat(child.pid)
        assert found is not None and found.parent == os.getpid()


def test_a_zombie_is_not_alive_and_still_tells_its_exit_status() -> None:
    with started("print('up', flush=True); raise SystemExit(3)") as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        found = process.stat(child.pid)
        assert found is not None and not found.alive
        assert process.exit_code(found.exit_status) == 3


def test_kill_does_not_hit_a_later_process_with_the_same_pid() -> None:
    with started(SLEEPER) as child:
        born = process.start_time(child.pid)
        assert not process.kill(child.pid, born + 1)
        assert child.poll() is None
        assert process.kill(child.pid, born)
        assert child.wait(60) == -signal.SIGKILL
        assert not process.kill(child.pid, born)


def test_kill_session_reaches_stopped_processes_of_other_groups() -> None:
    code = (
        "import subprocess, sys, os, signal\n"
        f"inner = subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}], process_group=0, stdout=-1)\n"
        "inner.stdout.readline(); os.kill(inner.pid, signal.SIGSTOP)\n"
        "print(inner.pid, flush=True); inner.wait()"
    )
    with started(code, start_new_session=True) as child:
        inner = int(child.first)
        watch = os.pidfd_open(inner)
        assert process.kill_session(child.pid) == 2
        assert child.wait(60) == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            while True:  # ends when the kernel has taken the process down
                signal.pidfd_send_signal(watch, 0)
                found = process.stat(inner)
                if found is None or not found.alive:
                    raise ProcessLookupError
        os.close(watch)


def test_kill_session_refuses_its_own() -> None:
    with pytest.raises(ValueError, match="session must not be this process's own"):
        process.kill_session(os.getsid(0))


def test_scan_finds_what_left_its_session_and_its_parent() -> None:
    marker = f"RONDO_TEST={secrets.token_hex(8)}"
    environment = {**os.environ, "RONDO_TEST": marker.partition("=")[2]}
    code = (
        "import os, time, sys\n"
        "r, w = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.write(w, str(os.getpid()).encode()); time.sleep(60)\n"
        "print(os.read(r, 20).decode(), flush=True)"
    )
    with started(code, env=environment) as child:
        child.wait(60)
        found = process.scan({marker.encode()})
        assert [hidden.pid for hidden in found] == [int(child.first)]
        assert process.kill(found[0].pid, found[0].start_time)
    assert process.scan({b"RONDO_TEST=another"}) == []


SUBREAPER = """
import os, subprocess, sys
from rondo.runtime.processes import process

process.set_child_subreaper()
hidden = '''
import os, time
middle = os.fork()
if middle:
    os.waitpid(middle, 0)
else:
    os.setsid()
    pid = os.fork()
    if pid:
        print(pid, flush=True)
    else:
        os.close(1)
        time.sleep(60)
'''
command = [sys.executable, "-S", "-c", hidden]
pid = int(subprocess.run(command, env={}, stdout=subprocess.PIPE, check=True).stdout)
(orphan,) = process.orphans(frozenset())
assert orphan.pid == pid and orphan.parent == os.getpid() and orphan.session not in (os.getsid(0), pid)
assert process.orphans({pid}) == [] and [found.pid for found in process.below(os.getpid())] == [pid]
assert process.kill_below(os.getpid()) == 1
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
assert process.kill_below(os.getpid()) == 0
assert process.reap(process.orphans({pid})) == 0
assert process.reap(process.orphans(frozenset())) == 1
assert process.orphans(frozenset()) == process.children(os.getpid()) == []
print("good")
"""


def test_below_a_subreaper_is_what_wiped_its_environment_and_left_its_session_and_its_parent() -> None:
    done = subprocess.run([sys.executable, "-c", SUBREAPER], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("good\n", "")


DIES_WHILE_LOOKED_AT = """
import os, subprocess, sys
from rondo.runtime.processes import process

process.set_child_subreaper()
code = '''
import subprocess
inner = subprocess.Popen(["sleep", "60"], stdout=-3, start_new_session=True)
print(inner.pid, flush=True)
inner.wait()
'''
outer = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
inner, stat = int(outer.stdout.readline()), process.stat

def dies_first(pid):
    if pid == outer.pid and outer.pid not in died:
        died.append(pid)
        outer.kill()
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return stat(pid)

died, process.stat = [], dies_first
process.end_below()
print(died == [outer.pid] and not stat(inner).alive and "good")
"""


def test_what_a_process_leaves_behind_that_dies_while_it_is_looked_at_is_ended_too() -> None:
    code = DIES_WHILE_LOOKED_AT
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("good\n", "")


def test_what_is_below_a_process_costs_by_that_and_not_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    stat = process.stat
    monkeypatch.setattr(process, "stat", lambda pid: asked.append(pid) or stat(pid))
    monkeypatch.setattr(process, "processes", lambda: pytest.fail("every process of the machine was looked at"))
    with started(SLEEPER, start_new_session=True) as child:
        assert child.pid in [found.pid for found in process.below(os.getpid())]
        assert child.pid in [found.pid for found in process.orphans(frozenset())]
        asked.clear()
        assert process.kill_below(child.pid) == 0 and asked == []


def test_leaves_are_killed_before_what_they_are_below() -> None:
    inner = f"subprocess.Popen([sys.executable, '-S', '-c', {SLEEPER!r}], stdout=-1)"
    with started(f"import subprocess, sys; inner = {inner}; print(inner.pid, flush=True); inner.wait()") as child:
        ended: list[int] = []

        def find() -> list[process.Stat]:
            found = process.stat(child.pid)
            ended.extend(below.pid for below in process.below(child.pid) if below.pid not in ended)
            return [found] if found is not None and found.alive else []

        assert process.end_all(find, deadline_s=60) == []
        assert ended == [int(child.first)]  # type: ignore[attr-defined]
        assert process.stat(int(child.first)) is None  # type: ignore[attr-defined]


def test_exit_codes_read_like_words() -> None:
    assert [process.exit_text(code) for code in (0, 3, -9, None)] == [
        "exit code 0",
        "exit code 3",
        "killed by SIGKILL",
        "ended without a word",
    ]


@pytest.mark.cuda
def test_what_a_killed_process_held_of_a_device_is_free_once_it_is_dead() -> None:
    """The kernel closes a process's files, those of a device's driver too, before it shows as dead."""
    import torch

    torch.zeros(1, device="cuda:0")
    free_bytes, _ = torch.cuda.mem_get_info(0)
    code = "import time, torch; held = torch.ones(1 << 30, dtype=torch.uint8, device='cuda:0'); " + SLEEPER
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline().strip() == "up"
        assert torch.cuda.mem_get_info(0)[0] <= free_bytes - (1 << 30)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert torch.cuda.mem_get_info(0)[0] >= free_bytes
