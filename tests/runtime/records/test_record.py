"""Records: whole lines of JSON, and log lines that a person and a program can read."""

from __future__ import annotations

import logging
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson

from rondo.runtime.records.record import JsonLines, KeyValueFormatter, last_lines, pairs, read_lines
from rondo.runtime.records.telling import PROCESS


def test_a_record_is_one_line_with_its_time(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "events.jsonl", clock=lambda: 12.5) as events:
        assert events.write({"kind": "died", "group": "actor-0"}) == {"time": 12.5, "kind": "died", "group": "actor-0"}
        events.write({"time": 1.0, "loss": np.float32(0.5), "rows": {1: 2}})
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assert lines == [b'{"time":12.5,"kind":"died","group":"actor-0"}', b'{"time":1.0,"loss":0.5,"rows":{"1":2}}']


def test_records_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from pathlib import Path; from rondo.runtime.records.record import JsonLines\n"
        "lines = JsonLines(Path(sys.argv[1]))\n"
        "for number in range(300): lines.write({'who': sys.argv[2], 'number': number, 'fill': 'x' * 3000})"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), who]) for who in "ab"]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    with path.open("rb") as file:  # one that opens it while the other writes may take what it sees for torn, and end it
        records = list(read_lines(file, path))
    for who in "ab":
        assert [record["number"] for record in records if record["who"] == who] == list(range(300))


def test_a_line_that_was_torn_is_ended_before_the_next_and_left_out_by_readers(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"time":1,"kind":"started"}\n{"time":2,"kind":"com')
    for kind in ("died", "ready"):
        with JsonLines(path, clock=lambda: 3.0) as events:
            events.write({"kind": kind})
    with path.open("rb") as file:
        assert [record["kind"] for record in read_lines(file, path)] == ["started", "died", "ready"]


def test_a_last_line_that_is_still_written_and_a_hole_of_a_power_loss_are_left_out(tmp_path: Path) -> None:
    lines = [b'{"a":1}\n', b"\0" * 40 + b"\n", b"\n", b'{"a":2}\n', b'{"a":3']
    assert list(read_lines(lines, tmp_path)) == [{"a": 1}, {"a": 2}]


def test_a_full_disk_costs_records_and_nothing_else(tmp_path: Path) -> None:
    lost = PROCESS.counts().get("full", 0)
    with JsonLines(Path("/dev/full"), clock=lambda: 1.0, what="full") as events:
        assert events.write({"kind": "died"}) == {"time": 1.0, "kind": "died"}
        events.write({"kind": "ready"})
    assert PROCESS.counts()["full"] == lost + 2


def test_a_record_that_was_cut_off_by_a_full_disk_does_not_spoil_the_next(tmp_path: Path) -> None:
    path, limits = tmp_path / "events.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with JsonLines(path, clock=lambda: 1.0) as events:
        events.write({"number": 0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limits[1]))
        try:
            events.write({"number": 1})
            events.write({"number": 2})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        events.write({"number": 3})
    assert path.read_bytes() == b'{"time":1.0,"number":0}\n{"tim\n{"time":1.0,"number":3}\n'


def test_a_file_whose_folder_comes_back_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with JsonLines(folder / "metrics.jsonl") as metrics:
        metrics.write({"step": 0})
        shutil.rmtree(folder)
        metrics.write({"step": 1})
        folder.mkdir()
        metrics.write({"step": 2})
    assert [orjson.loads(line)["step"] for line in (folder / "metrics.jsonl").read_bytes().splitlines()] == [2]


def test_pairs_quote_what_would_not_read_back() -> None:
    assert pairs({"a": 1, "b": 0.1234567, "c": "x y", "d": "", "e": 'say "hi"'}) == (
        'a=1 b=0.123457 c="x y" d="" e="say \\"hi\\""'
    )


def test_a_log_line_names_its_process_and_fields() -> None:
    record = logging.LogRecord("rondo.actor", logging.WARNING, "f.py", 1, "step %d", (3,), None)
    record.fields = {"loss": 0.25}
    line = KeyValueFormatter({"group": "actor-0", "rank": 1}).format(record)
    assert line.partition(" ")[2] == 'level=warning logger=rondo.actor group=actor-0 rank=1 message="step 3" loss=0.25'


def test_the_last_lines_of_a_log_skip_empty_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n\n" for number in range(100)) + "the end")
    assert last_lines(log, num_lines=2) == ("line 99", "the end")
    assert last_lines(tmp_path / "none") == ()
