"""Logs of child processes: whole while they are small, the first and the last part of them beyond, and no error for the child."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.runtime.records import logs
from rondo.runtime.records.logs import Logs


def ran(kept: Logs, path: Path, code: str) -> int:
    with kept.open(path) as fd:
        return subprocess.run([sys.executable, "-c", code], stdout=fd, stderr=fd, check=False).returncode


def test_what_a_child_and_its_children_write_is_in_the_file_in_order(tmp_path: Path) -> None:
    kept, path = Logs(), tmp_path / "made" / "actor-0.1.log"
    code = "import os, sys; print('one', flush=True); os.system('echo two; echo three >&2'); sys.exit('four')"
    assert ran(kept, path, code) == 1
    assert kept.last_lines(path) == ("one", "two", "three", "four")
    assert path.read_text() == "one\ntwo\nthree\nfour\n"
    assert ran(kept, path, "print('five')") == 0
    assert kept.last_lines(path, 2) == ("four", "five") and path.read_text().endswith("four\nfive\n")


def test_a_flood_leaves_the_first_and_the_last_of_it_and_says_how_much_lies_between(tmp_path: Path) -> None:
    kept, path = Logs(), tmp_path / "log"
    code = "for n in range(9): print(f'line {n} ' + 'x' * 20_000_000 + f' end of {n}', flush=True)"
    assert ran(kept, path, f"print('begins')\n{code}\nprint('ends')") == 0
    assert kept.last_lines(path)[-1] == "ends"
    size = path.stat().st_size
    text = path.read_bytes()
    assert size <= logs.MOST_BYTES and text.startswith(b"begins\nline 0 xxx") and text.endswith(b" end of 8\nends\n")
    told = [
        int(line.split()[1])
        for line in text.splitlines()
        if line.startswith(b"... ") and line.endswith(b" left out ...")
    ]
    whole = len("begins\nends\n") + 9 * (20_000_000 + len("line 0  end of 0\n"))
    assert len(told) == 1 and size - len(b"\n... %d bytes left out ...\n" % told[0]) + told[0] == whole


def test_a_file_that_cannot_be_made_costs_its_lines_alone(tmp_path: Path) -> None:
    kept, path = Logs(), tmp_path / "folder" / "log"
    (tmp_path / "folder").write_text("in the way")
    assert ran(kept, path, "print('not written')") == 0
    assert kept.last_lines(path) == ("not written",)
    (tmp_path / "folder").unlink()
    assert ran(kept, path, "print('written')") == 0
    assert kept.last_lines(path) == ("not written", "written")
    assert path.read_text() == "\n... 12 bytes left out: they could not be written ...\nwritten\n"


def test_a_file_that_somebody_removed_is_made_anew_and_one_of_another_process_is_read(tmp_path: Path) -> None:
    kept, path = Logs(), tmp_path / "log"
    with kept.open(path) as fd:
        os.write(fd, b"one\n")
        kept.settle()
        path.unlink()
        os.write(fd, b"two\n")
        kept.settle()
    assert path.read_text() == "two\n" and Logs().last_lines(path) == ("two",)


def test_ended_logs_leave_no_descriptor(tmp_path: Path) -> None:
    kept = Logs()
    ran(kept, tmp_path / "first", "print('x')")
    kept.settle()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for number in range(5):
        ran(kept, tmp_path / f"{number}", "print('x')")
        kept.settle()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize("num_bytes", [logs.MOST_BYTES - 1, logs.MOST_BYTES])
def test_a_log_up_to_the_limit_is_whole(tmp_path: Path, num_bytes: int) -> None:
    kept, path = Logs(), tmp_path / "log"
    ran(kept, path, f"import sys; sys.stdout.write('x' * {num_bytes})")
    kept.settle()
    assert path.read_bytes() == b"x" * num_bytes
