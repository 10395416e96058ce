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

from rondo.runtime import process

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


def test_scan_by_session_needs_no_marker() -> None:
    with started(SLEEPER, start_new_session=True) as child:
        assert [found.pid for found in process.scan({b"RONDO_TEST=no"}, {child.pid})] == [child.pid]


def test_a_subreaper_sees_and_collects_orphans() -> None:
    code = (
        "import os, sys\n"
        "from rondo.runtime import process\n"
        "process.set_child_subreaper()\n"
        "r, w = os.pipe()\n"
        "middle = os.fork()\n"
        "if middle == 0:\n"
        "    if os.fork(): os._exit(0)\n"
        "    os.read(r, 1); os._exit(5)\n"
        "os.waitpid(middle, 0)\n"
        "orphan = [p for p in process.processes() if p.parent == os.getpid()]\n"
        "assert len(orphan) == 1, orphan\n"
        "os.write(w, b'x')\n"
        "os.waitid(os.P_PID, orphan[0].pid, os.WEXITED | os.WNOWAIT)\n"
        "assert process.reap_orphans({orphan[0].pid}) == 0\n"
        "assert process.reap_orphans(frozenset()) == 1\n"
        "assert process.reap_orphans(frozenset()) == 0\n"
        "print('good')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("good\n", "")


def test_exit_codes_read_like_words() -> None:
    assert [process.exit_text(code) for code in (0, 3, -9, None)] == [
        "exit code 0",
        "exit code 3",
        "killed by SIGKILL",
        "ended without a word",
    ]
