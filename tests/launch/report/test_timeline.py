"""Reading a timeline back, and its Chrome trace."""

from __future__ import annotations

import json
import os
from pathlib import Path

import orjson
import pytest

from rondo.launch.cli import main
from rondo.launch.report.timeline import (
    Figures,
    Reader,
    chrome_trace,
    newest_steps,
    parse_steps,
    spans_between,
    spans_of_steps,
    whole_spans,
)
from rondo.launch.rundir import RunDir
from rondo.runtime.errors import ConfigError
from rondo.runtime.records.timeline import FOLDER, Timeline
from tests.launch.hand import TENTH, crossing, one_step, span


def test_what_is_read_again_is_only_what_has_come_since(tmp_path: Path) -> None:
    made = Timeline(tmp_path, "actor-0")
    reader = Reader(tmp_path / FOLDER)
    for name in ("load", "train"):
        with made.span(name, "actor", step=1, rows=2):
            pass
        made.flush()
        (read,) = reader.read()
        assert (read.name, read.process, read.role, read.step, read.args) == (
            name,
            "actor-0.0",
            "actor",
            1,
            {"rows": 2},
        )
    assert reader.read() == []
    made.close()
    assert {figures.name for figures in reader.figures} == {"cpu"}


def test_a_part_of_a_line_is_left_until_it_is_whole(tmp_path: Path) -> None:
    made = Timeline(tmp_path, "actor-0")
    made.close()
    (path,) = (tmp_path / FOLDER).glob("*/*.jsonl")
    reader = Reader(tmp_path / FOLDER)
    line = orjson.dumps(["train", "actor", 1, 2, None, None, 0]) + b"\n"
    with path.open("ab", buffering=0) as file:
        file.write(line[:10])
        assert reader.read() == []
        file.write(line[10:])
    assert [read.name for read in reader.read()] == ["train"]


def test_processes_that_share_a_clock_stay_exact_although_wall_time_was_set_between_their_starts(
    tmp_path: Path,
) -> None:
    for group, shift in (("actor-0", 0), ("rollout-0", 7_000_000_000)):
        made = Timeline(tmp_path, group, clock=lambda: 1000)
        made.add(("work", "x", 5000, 10, None, None, 0))
        made.close()
        (path,) = (tmp_path / FOLDER / f"{group}.0").iterdir()
        header, *rest = path.read_bytes().splitlines(keepends=True)
        fields = orjson.loads(header)
        fields["wall_ns"] += shift
        path.write_bytes(orjson.dumps(fields) + b"\n" + b"".join(rest))
    one, other = Reader(tmp_path / FOLDER).read()
    assert {one.process, other.process} == {"actor-0.0", "rollout-0.0"} and one.start == other.start


def test_a_span_that_was_open_counts_once_with_its_end() -> None:
    seen = [span("actor-0.0", "load", 1, 4), span("actor-0.0", "load", 1, 6), span("actor-0.0", "load", 2, 3)]
    assert [(s.start, s.end) for s in whole_spans(seen)] == [(TENTH, 6 * TENTH), (2 * TENTH, 3 * TENTH)]


def test_the_trace_has_a_row_for_each_process_and_lane_and_its_spans_nest() -> None:
    spans = one_step() + one_step(100, 1)
    trace = orjson.loads(orjson.dumps(chrome_trace(spans)))
    events = trace["traceEvents"]
    named = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(named) == ["actor-0.0", "reference-0.0", "rollout-0.0"]
    rows = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == named["rollout-0.0"]]
    assert rows == ["rollout", "rollout/leases", "rollout/reward"]
    (training, _) = [event for event in events if event["name"] == "train"]
    assert (training["ts"], training["dur"], training["args"]) == (6_000_000.0, 3_000_000.0, {"step": 0})
    assert len([event for event in events if event["ph"] == "X"]) == len(spans)
    assert crossing(trace) == []


def test_spans_of_a_lane_that_cross_get_rows_of_their_own() -> None:
    spans = [span("rollout-0.0", "generate", start, start + 10, group=start) for start in (0, 5, 9, 10, 16)]
    trace = chrome_trace(spans)
    rows = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert rows == ["rollout", "rollout 2", "rollout 3"]
    assert crossing(trace) == []


def test_processor_time_is_a_graph_of_cores() -> None:
    looks = [
        Figures("actor-0.0", "cpu", at * TENTH, {"process": used, "loop": 0.0}) for at, used in ((0, 1.0), (20, 2.5))
    ]
    trace = chrome_trace([span("actor-0.0", "train", 0, 100)], looks)
    (graph,) = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert (graph["ts"], graph["args"]) == (0.0, {"process": 0.75, "loop": 0.0})


def test_steps_are_named_as_a_range() -> None:
    texts = ("3:5", "3:", ":5", "3", None)
    assert [parse_steps(text) for text in texts] == [(3, 5), (3, None), (None, 5), (3, 4), (None, None)]
    for text in ("²", "", "a:b", "5:3", "3:3", "-1:2"):
        with pytest.raises(ConfigError, match="--steps must"):
            parse_steps(text)


def test_only_what_happened_in_the_steps_that_were_asked_for_is_shown() -> None:
    spans = [s for number in range(4) for s in one_step(number * 100.0, number)]
    shown = spans_of_steps(spans, 1, 3)
    assert {s.step for s in shown if s.name == "train"} == {1, 2}
    assert newest_steps(spans, 2) == (2, None)
    with pytest.raises(ConfigError, match=r"--steps must name steps of the timeline, got 7:9. It holds 0 to 3"):
        spans_of_steps(spans, 7, 9)


def test_the_command_writes_a_trace_and_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDir.create(tmp_path, "demo", {}) as run:
        path = str(run.path)
        for verb in ("timeline", "explain"):
            assert main([verb, path]) == 2
            assert f"RUN must have a timeline, got none in {run.path / FOLDER}." in capsys.readouterr().err
        made = Timeline(run.path, "actor-0")
        with made.span("load", "actor"):
            pass
        made.close()
        assert main(["explain", path]) == 2
        assert "RUN must have trained a step to be explained, got none" in capsys.readouterr().err
        assert main(["timeline", path, "--out", str(tmp_path / "none" / "t.json")]) == 2
        assert "--out must be a file to write" in capsys.readouterr().err
        assert main(["timeline", path]) == 0
        assert f"{run.path / 'trace.json'}: 1 spans of 1 processes" in capsys.readouterr().out
        events = orjson.loads((run.path / "trace.json").read_bytes())["traceEvents"]
        assert [event["name"] for event in events if event["ph"] == "X"] == ["load"]


def test_files_that_were_written_before_or_begun_after_a_time_are_not_read_unless_nothing_else_is_there(
    tmp_path: Path,
) -> None:
    folder = tmp_path / FOLDER / "actor-0.0"
    folder.mkdir(parents=True)
    anchor = {
        "timeline": 1,
        "group": "actor-0",
        "rank": 0,
        "incarnation": 1,
        "wall_ns": 0,
        "monotonic_ns": 0,
        "boot": "b",
    }
    for number in range(3):  # a minute each, and a span that all files have
        spans = [
            ["train", "actor", number * 60_000_000_000, 10**9, number, {}, 0],
            ["load", "actor", 0, 10**12, number, {}, 0],
        ]
        path = folder / f"000001.{number:06d}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in (anchor, *spans)))
        os.utime(path, (60 * (number + 1), 60 * (number + 1)))
    begin, end = 70_000_000_000, 80_000_000_000
    assert {span.step for span in spans_between(tmp_path, begin, end)} == {1}
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    assert {span.step for span in spans_between(tmp_path, begin, end)} == {2}  # the last that was read
    assert spans_between(tmp_path, 10**13, 10**13 + 1) == []
