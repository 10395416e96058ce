"""A whole run that a test began is over with the test."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import over_behind_it, read_until, start

ENDLESS = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print("child", child.pid, flush=True)
signal.pause()
"""


def test_a_failed_assertion_leaves_no_run_behind(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="too early"), over_behind_it():
        running = start([sys.executable, "-c", ENDLESS], tmp_path)
        child = int(read_until(running, "child").split()[1])
        raise AssertionError("too early")
    assert running.returncode == -9 and not psutil.pid_exists(child)
