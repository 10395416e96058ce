"""The timeline as a process writes it: whole lines, bounded files, waits among the spans."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from rondo.runtime import waits
from rondo.runtime.records import timeline
from rondo.runtime.records.timeline import Timeline, span

S = 1_000_000_000


class Clock:
    """Nanoseconds that move when they are told to."""

    def __init__(self) -> None:
        self.now = 5 * S

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorded(tmp_path: Path, clock: Clock) -> Iterator[Timeline]:
    made = Timeline(tmp_path, "actor-0", 1, 2, 3, clock=clock)
    yield made
    made.close()


def lines(run: Path) -> list[Any]:
    """Every line of every file of a run's timeline."""
    files = sorted((run / timeline.FOLDER).glob("*/*.jsonl"))
    return [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]


def spans(run: Path) -> list[list[Any]]:
    return [line for line in lines(run) if isinstance(line, list)]


def test_a_span_is_one_line_with_lane_times_step_and_what_was_told(
    tmp_path: Path, recorded: Timeline, clock: Clock
) -> None:
    with recorded.span("train", "actor", step=3, rows=64) as training:
        clock.now += 250
        training.tell(loss=0.5)
    recorded.flush()
    (header, *_) = lines(tmp_path)
    assert {name: header[name] for name in ("group", "rank", "incarnation", "attempt", "monotonic_ns")} == {
        "group": "actor-0", "rank": 1, "incarnation": 2, "attempt": 3, "monotonic_ns": 5 * S,
    }  # fmt: skip
    assert spans(tmp_path) == [["train", "actor", 5 * S, 250, 3, {"rows": 64, "loss": 0.5}, 0]]


def test_a_span_that_ends_with_an_error_is_recorded_and_the_error_goes_on(tmp_path: Path, recorded: Timeline) -> None:
    with pytest.raises(KeyError), recorded.span("train", "actor"):
        raise KeyError("x")
    recorded.flush()
    assert [line[0] for line in spans(tmp_path)] == ["train"]


def test_what_lasts_is_written_while_it_lasts_and_once_more_with_its_end(
    tmp_path: Path, recorded: Timeline, clock: Clock
) -> None:
    with recorded.span("load", "actor"):
        clock.now += 3 * S
        recorded.flush()
        clock.now += S
    recorded.flush()
    assert spans(tmp_path) == [
        ["load", "actor", 5 * S, 3 * S, None, None, 1],
        ["load", "actor", 5 * S, 4 * S, None, None, 0],
    ]


def test_waits_of_one_name_that_overlap_become_one_span(tmp_path: Path, recorded: Timeline) -> None:
    def waited(name: str, start_s: float, end_s: float) -> None:
        recorded.waited(waits.Wait(name, "engine", None, start_s), end_s - start_s)

    waited("generate", 1.0, 2.0)
    waited("generate", 0.5, 3.0)
    waited("round", 2.0, 3.5)
    waited("generate", 4.0, 5.0)
    recorded.flush()
    assert sorted([*line[:4], line[5]] for line in spans(tmp_path)) == [
        ["wait: generate", "waits/generate", S // 2, 5 * S // 2, {"peer": "engine"}],
        ["wait: generate", "waits/generate", 4 * S, S, {"peer": "engine"}],
        ["wait: round", "waits/round", 2 * S, 3 * S // 2, {"peer": "engine"}],
    ]


async def test_the_waits_of_a_process_that_records_are_spans_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(waits.PROCESS, "clock", lambda: now)

    async def wait(name: str, seconds: float) -> None:
        nonlocal now
        async with waits.waiting(name, peer="nobody", deadline_s=60):
            now += seconds

    await wait("before", 0.02)
    timeline.begin(tmp_path, "rollout-0")
    await wait("during", 0.02)
    await wait("too short to be shown", timeline.SHORTEST_WAIT_S / 2)
    timeline.end()
    await wait("after", 0.02)
    (found,) = [line for line in spans(tmp_path) if line[1].startswith("waits/")]
    assert found[0] == "wait: during" and found[3] == pytest.approx(0.02 * S)


def test_files_rotate_and_the_oldest_go_whichever_incarnation_wrote_them(tmp_path: Path) -> None:
    def write(incarnation: int) -> None:
        made = Timeline(tmp_path, "actor-0", 0, incarnation, file_bytes=2000, num_files=3)
        for number in range(200):
            with made.span("train", "actor", step=number):
                pass
            if number % 10 == 9:
                made.flush()
        made.close()

    write(1)
    write(2)
    files = sorted((tmp_path / timeline.FOLDER / "actor-0.0").iterdir())
    assert len(files) == 3 and {file.name[:6] for file in files} == {"000002"}
    assert sum(file.stat().st_size for file in files) < 3 * 4000
    assert all(orjson.loads(file.read_bytes().splitlines()[0])["timeline"] == timeline.FORMAT for file in files)
    assert max(line[4] for line in spans(tmp_path)) == 199


def test_more_than_can_be_held_is_dropped_and_counted(
    tmp_path: Path, recorded: Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_MOST_HELD", 3)
    for _ in range(5):
        with recorded.span("train", "actor"):
            pass
    monkeypatch.undo()
    recorded.flush()
    assert len(spans(tmp_path)) == 3
    assert [line["values"] for line in lines(tmp_path) if isinstance(line, dict) and line.get("name") == "dropped"] == [
        {"spans": 2}
    ]


def test_processor_time_is_noted_with_the_part_of_the_event_loop(tmp_path: Path, recorded: Timeline) -> None:
    recorded.flush()
    (values,) = [line["values"] for line in lines(tmp_path) if isinstance(line, dict) and line.get("name") == "cpu"]
    assert 0 < values["loop"] <= values["process"] and values.get("delayed", 0) >= 0


def test_without_a_timeline_spans_cost_nothing_and_do_no_harm() -> None:
    assert span("a", "b") is span("c", "d", step=1, rows=2)
    with span("train", "actor") as training:
        training.tell(step=1, rows=2)
    timeline.figures("cpu", {"process": 1.0})
    timeline.end()


KILLED = """
import sys
from pathlib import Path
from rondo.runtime.records import timeline
timeline.FLUSH_S = 0.005
made = timeline.begin(Path(sys.argv[1]), "actor-0")
number = 0
while True:
    with timeline.span("train", "actor", step=number, fill="x" * 200):
        number += 1
    if number % 2000 == 0:
        made.flush()
        print(number, flush=True)
"""


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "6000":
                break
        process.send_signal(signal.SIGKILL)
    files = sorted((tmp_path / timeline.FOLDER / "actor-0.0").iterdir())
    whole = b"".join(file.read_bytes() for file in files).rpartition(b"\n")[0].splitlines()
    found = [orjson.loads(line) for line in whole]
    steps = [line[4] for line in found if isinstance(line, list)]
    assert len(steps) > 1000 and steps == list(range(steps[0], steps[0] + len(steps)))


def test_a_disk_that_takes_no_more_costs_spans_and_not_the_recording(
    tmp_path: Path, clock: Clock, recorded: Timeline
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with recorded.span("train", "actor", step=0):
        pass
    recorded.flush()
    (file,) = (tmp_path / timeline.FOLDER).glob("*/*.jsonl")
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 5, limits[1]))
    try:
        for step in (1, 2):
            with recorded.span("train", "actor", step=step):
                pass
            with pytest.raises(OSError, match=r"must be written whole|File too large"):
                recorded.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with recorded.span("train", "actor", step=3):
        pass
    recorded.flush()
    assert [line[4] for line in spans(tmp_path)] == [0, 3]
    assert recorded.num_dropped >= 2


def test_a_run_directory_that_cannot_be_written_is_no_error_of_the_recording(tmp_path: Path) -> None:
    (tmp_path / timeline.FOLDER).touch()  # where the folder should be
    timeline.begin(tmp_path, "actor-0")
    with span("train", "actor"):
        pass
    timeline.end()
