"""The guard: what it starts dies with its parent, whatever kills that."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from rondo.runtime.processes import guard

RUN = [sys.executable, "-I", "-S", guard.__file__]
# A parent that starts a guarded child, says its pid, and then sleeps until it is killed.
PARENT = (
    "import subprocess, sys, os, time\n"
    "child = subprocess.Popen([*sys.argv[1:-1], '--parent', str(os.getpid()), '--', sys.executable, '-S', '-c',"
    " sys.argv[-1]], stdout=-1, start_new_session=True)\n"
    "child.stdout.readline(); print(child.pid, flush=True); time.sleep(60)"
)
CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def died(descriptor: int) -> bool:
    """Whether a pidfd's process ends; waits for it, since the signal of the kernel takes a moment."""
    return bool(select.select([descriptor], [], [], 60)[0])


def test_a_guarded_child_dies_with_its_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-S", "-c", PARENT, *RUN, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    watch = os.pidfd_open(int(parent.stdout.readline()))
    assert not select.select([watch], [], [], 0)[0]
    parent.send_signal(signal.SIGKILL)
    assert died(watch)
    parent.wait(60)
    parent.stdout.close()
    os.close(watch)


def test_a_child_whose_parent_is_gone_already_never_runs() -> None:
    done = subprocess.run([*RUN, "--parent", "1", "--", sys.executable, "-c", "print('ran')"], capture_output=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def test_the_command_keeps_the_guards_pid_and_finds_it_in_its_environment() -> None:
    code = "import os; print(os.environ['RONDO_PARENT_PID'] == str(os.getpid()), os.getppid())"
    done = subprocess.run(
        [sys.executable, "-m", "rondo.runtime.processes.guard", "--parent", str(os.getpid()), "--", sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.split() == ["True", str(os.getpid())]


def test_a_deaf_command_and_what_it_starts_ignore_what_is_meant_for_the_supervisor_until_they_say_otherwise() -> None:
    code = """
import os, signal, subprocess, sys
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    os.kill(os.getpid(), number)
asks = "import os, signal; signal.signal(15, signal.SIG_DFL); os.kill(os.getpid(), 1); os.kill(os.getpid(), 15)"
print(subprocess.run([sys.executable, "-S", "-c", asks]).returncode)
"""
    line = [*RUN, "--parent", str(os.getpid()), "--deaf", "--", sys.executable, "-c", code]
    assert subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout == "-15\n"


def test_a_grandchild_that_asks_dies_with_the_guarded_process() -> None:
    inner = (
        "import os, time; from rondo.runtime.processes.process import die_with_parent; die_with_parent();"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    child = subprocess.Popen(
        [*RUN, "--parent", str(os.getpid()), "--", sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    watch = os.pidfd_open(int(child.stdout.readline()))
    child.kill()
    assert died(watch)
    child.wait(60)
    child.stdout.close()
    os.close(watch)


def test_wrong_usage_and_a_missing_program_have_their_own_exit_codes() -> None:
    wrong = subprocess.run([*RUN, "--parent", "x"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (2, f"{guard._USAGE}\n")
    missing = subprocess.run([*RUN, "--parent", str(os.getpid()), "--", "/no/such"], capture_output=True, text=True)
    assert missing.returncode == 127
    assert missing.stderr == "/no/such must be a program that can run, got No such file or directory. Check the path\n"
