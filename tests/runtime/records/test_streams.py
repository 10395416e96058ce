"""Standard streams that are closed, full, or gone: what is written to them is dropped, and the command goes on."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, subprocess, sys
from rondo.runtime.records import streams
from rondo.runtime.records.telling import PROCESS
streams.guard_streams()
said = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o600)
sys.stdin.readline() if len(sys.argv) > 2 else None     # until the reader has left
for _ in range(3):
    print("x" * 9000, flush=True)
    print("y" * 9000, file=sys.stderr, flush=True)
subprocess.run(["echo", "of a child"], check=False)
os.write(said, f"went on, {said > 2} {sorted(PROCESS.counts())}".encode())
"""


def went_on(folder: Path, redirection: str) -> str:
    line = f'exec "$0" -c "$1" {folder}/said {redirection}'
    done = subprocess.run(["bash", "-c", line, sys.executable, CODE], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stdout + done.stderr
    return (folder / "said").read_text()


@pytest.mark.parametrize(
    ("redirection", "failed"),
    [
        ("", []),
        (">&-", []),
        ("2>&-", []),
        ("<&- >&- 2>&-", []),
        (">/dev/full", ["stdout"]),
        ("2>/dev/full", ["stderr"]),
        ("1</dev/null", ["stdout"]),
    ],
)
def test_a_stream_that_takes_nothing_is_counted_and_no_other_file_takes_its_place(
    tmp_path: Path, redirection: str, failed: list[str]
) -> None:
    assert went_on(tmp_path, redirection) == f"went on, True {failed}"


def test_a_command_goes_on_when_the_reader_of_its_pipe_leaves(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, f"{tmp_path}/said", "waits"]
    read, write = os.pipe()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write, stderr=subprocess.PIPE) as process:
        os.close(write)
        os.close(read)
        assert b"Traceback" not in process.communicate(b"\n")[1] and process.returncode == 0
    assert (tmp_path / "said").read_text() == "went on, True ['stdout']"


def test_a_command_goes_on_when_its_terminal_goes_away(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", CODE, f"{tmp_path}/said", "waits"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        os.close(ours)
        process.communicate(b"\n")
        assert process.returncode == 0
    assert (tmp_path / "said").read_text() == "went on, True ['stderr', 'stdout']"
