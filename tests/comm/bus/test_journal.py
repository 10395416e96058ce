from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.comm.bus.journal import Journal, encode, files, read
from rondo.runtime.errors import CorruptData
from rondo.runtime.formats import JOURNAL, stamp

WRITER = """
import sys
from pathlib import Path
from rondo.comm.bus.journal import Journal
journal = Journal(Path(sys.argv[1]))
for number in range(1 << 30):
    journal.append([{"event": "admit", "group": number}])
    if number == 100:
        print("started", flush=True)
"""


def test_what_was_appended_is_replayed_in_order(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        assert journal.empty
        journal.append([{"event": "admit", "group": group} for group in range(3)])
        journal.append([{"event": "commit", "version": 1}])
    with Journal(tmp_path) as again:
        assert [event.get("group", -1) for event in again.replay()] == [0, 1, 2, -1]


def test_a_torn_last_line_is_cut_off_and_appending_goes_on(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append([{"event": "admit", "group": 0}])
        path = journal.path
    for cut in range(1, len(encode({"event": "admit", "group": 1}))):
        with path.open("ab") as file:
            file.write(encode({"event": "admit", "group": 1})[:cut])
        with Journal(tmp_path) as journal:
            assert [event["group"] for event in journal.replay()] == [0]
    with Journal(tmp_path) as journal:
        journal.append([{"event": "admit", "group": 2}])
        assert [event["group"] for event in journal.replay()] == [0, 2]


def test_a_changed_line_in_the_middle_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.append([{"event": "admit", "group": group} for group in range(3)])
        path = journal.path
    path.write_bytes(path.read_bytes().replace(b'"group":1', b'"group":7'))
    with pytest.raises(CorruptData, match="line 2 must match its checksum"):
        list(read(path))


def test_events_for_which_there_is_no_room_leave_nothing_behind_and_can_be_written_again(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    batch = [{"event": "admit", "group": group} for group in range(1, 4)]
    with Journal(tmp_path) as journal:
        journal.append([{"event": "admit", "group": 0}])
        size = journal.path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 60, limits[1]))  # in the middle of the second line of three
        try:
            with pytest.raises(OSError, match="too large"):
                journal.append(batch)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (journal.path.stat().st_size, journal.num_events) == (size, 1)
        journal.append(batch)
    assert [event["group"] for path in files(tmp_path) for event in read(path)] == [0, 1, 2, 3]


def test_a_rotated_journal_begins_with_its_snapshot_and_all_but_the_last_old_file_go(tmp_path: Path) -> None:
    (tmp_path / "00000001.journal").write_bytes(encode({"event": "admit", "group": 0}))  # whose writer died between two
    (tmp_path / "00000002.journal").touch()
    with Journal(tmp_path) as journal:
        journal.append([{"event": "admit", "group": 1}])
        journal.rotate({"event": "snapshot", "state": {"version": 3, **stamp(JOURNAL)}})
        journal.append([{"event": "commit", "version": 4}])
    with Journal(tmp_path) as again:
        assert [event["event"] for event in again.replay()] == ["snapshot", "commit"]
    assert [path.name for path in files(tmp_path)] == ["00000002.journal", "00000003.journal"]


def test_a_writer_killed_at_any_moment_leaves_a_prefix(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"started\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    with Journal(tmp_path) as journal:
        groups = [event["group"] for event in journal.replay()]
    assert len(groups) > 100 and groups == list(range(len(groups)))
