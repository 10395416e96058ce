"""The live view on a terminal and the plain lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from rondo.launch.report.view import LiveView, PlainView, Progress, duration, open_view, sparkline


@dataclass(frozen=True)
class Group:
    name: str
    state: str = "running"
    restarts: int = 0
    rss_bytes: int = 300 << 20


def step(number: int, reward: float, **more: Any) -> dict[str, Any]:
    time_s = 1000.0 + number
    return {"time": time_s, "source": "actor-0", "kind": "metrics", "step": number, "reward_mean": reward, **more}


def without_clock(line: str) -> str:
    return line.partition(" ")[2]


def test_a_step_is_one_line_of_pairs() -> None:
    line = Progress(num_steps=40).add(step(2, 0.41234, loss=-0.5, staleness_max=1, text="no", notes={}))
    assert line is not None
    assert without_clock(line) == "step=3/40 reward=0.412 loss=-0.5 staleness_max=1"
    line = Progress(num_steps=40).add(step(2, 0.41234, num_samples=64, num_failed=3))
    assert line is not None and without_clock(line) == "step=3/40 reward=0.412 (of 64, 3 failed)"


def test_the_line_of_a_step_has_what_the_critic_told_last() -> None:
    progress = Progress(num_steps=40)
    own = {"kind": "metrics", "critic": {"step": 2, "loss": 9.0, "explained_variance": 0.5, "value_loss": 0.25}}
    line = progress.add(own) or progress.add(step(2, 0.5, loss=1.0))
    assert line is not None
    assert without_clock(line) == "step=3/40 reward=0.500 loss=1 explained_variance=0.5 value_loss=0.25"


def test_an_evaluation_and_any_other_event_are_lines_and_other_metrics_are_not() -> None:
    progress = Progress(num_steps=40)
    evaluation = {"kind": "metrics", "evaluation": {"version": 0, "reward": 0.25, "num_prompts": 8}}
    restart = {"kind": "restart", "source": "supervisor", "group": "actor-0", "why": "exit code 1"}
    lines = [progress.add(record) for record in (evaluation, restart, {"kind": "metrics", "tokens": 4})]
    assert [without_clock(line) if line is not None else None for line in lines] == [
        "evaluation version=0 reward=0.25 num_prompts=8",
        "restart source=supervisor group=actor-0 why='exit code 1'",
        None,
    ]


def test_a_repeated_step_takes_the_place_of_what_it_repeats() -> None:
    progress = Progress(num_steps=40)
    for record in (step(0, 0.1), step(1, 0.2), step(2, 0.3), step(1, 0.4)):
        progress.add(record)
    assert (progress.num_done, progress.rewards) == (2, [0.1, 0.4])


def test_the_time_left_follows_the_pace_of_the_last_steps() -> None:
    progress = Progress(num_steps=10)
    assert progress.seconds_left() is None
    for number in range(4):
        progress.add(step(number, 0.1))
    assert progress.seconds_left() == 6.0


def test_the_picture_shows_progress_rewards_groups_and_events() -> None:
    console = Console(record=True, width=100, force_terminal=True, file=io.StringIO())
    view = LiveView("demo", 40, lambda: [Group("actor-0", "RUNNING", 1), Group("rollout-0", "starting")], console)
    view.on_event(step(0, 0.1))
    view.on_event(step(1, 0.5, loss=0.25))
    view.on_event({"kind": "metrics", "evaluation": {"version": 0, "reward": 0.031}})
    view.on_event({"kind": "restart", "source": "supervisor", "group": "actor-0"})
    console.print(view.render())
    text = console.export_text()
    for part in ("demo step 2/40", "reward 0.500 ▁█", "loss=0.25", "version 0: 0.031", "restart source=supervisor"):
        assert part in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "-0 " in line}
    assert rows["actor-0"] == ["running", "1", "300", "MiB"]
    assert rows["rollout-0"] == ["starting", "0", "300", "MiB"]


def test_the_picture_before_the_first_event_is_no_error() -> None:
    console = Console(record=True, width=100, force_terminal=True, file=io.StringIO())
    console.print(LiveView("demo", 40, lambda: [], console).render())
    assert "step 0/40" in console.export_text()


async def test_the_live_view_draws_until_it_is_cancelled_and_gives_the_cursor_back() -> None:
    file = io.StringIO()
    drawn = asyncio.Event()

    def groups() -> list[Group]:
        drawn.set()
        return [Group("actor-0")]

    with LiveView("demo", 40, groups, Console(file=file, force_terminal=True, width=80)) as view:
        task = asyncio.create_task(view.run())
        await drawn.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert "actor-0" in file.getvalue()
    assert file.getvalue().rindex("\x1b[?25h") > file.getvalue().rindex("\x1b[?25l")


def test_plain_lines_are_printed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with open_view("demo", 40, lambda: [], console=Console(file=io.StringIO())) as view:
        assert isinstance(view, PlainView)
        view.on_event(step(0, 0.5))
    out = capsys.readouterr().out
    assert without_clock(out) == "step=1/40 reward=0.500\n"
    assert "\x1b" not in out


def test_plain_can_be_asked_for_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(open_view("demo", 40, lambda: [], plain=True, console=console), PlainView)
    assert isinstance(open_view("demo", 40, lambda: [], console=console), LiveView)


SHOW = """
from rondo.launch.report.view import open_view
with open_view("demo", 40, lambda: []) as view:
    view.on_event({"time": 0.0, "source": "actor-0", "kind": "metrics", "step": 0, "reward_mean": 0.5})
    print("printed meanwhile")
"""


def test_a_real_terminal_gets_the_picture_and_a_pipe_gets_lines() -> None:
    environment: Mapping[str, str] = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    piped = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, env=environment)
    assert piped.stdout.splitlines()[1:] == ["printed meanwhile"]
    assert piped.stdout.splitlines()[0].endswith("step=1/40 reward=0.500")
    ours, theirs = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", SHOW], stdout=theirs, check=True, env=environment)
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "step 1/40" in shown
    assert "printed meanwhile" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_a_sparkline_keeps_the_course_in_a_bounded_width() -> None:
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([1.0, 1.0]) == "▁▁"
    line = sparkline([index / 1000 for index in range(1000)])
    assert len(line) == 40
    assert sorted(line) == list(line)


@pytest.mark.parametrize(("seconds", "text"), [(42.9, "42 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")])
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_an_evaluation_of_named_sets_is_one_line_with_the_figures_of_each() -> None:
    progress = Progress(num_steps=4)
    sets = {"easy": {"mean@2": 0.5, "num_prompts": 4}, "hard": {"pass@1": 0.25, "num_prompts": 4}}
    record = {"kind": "metrics", "evaluation": {"version": 2, "reward": 0.375, "num_prompts": 8, "sets": sets}}
    line = progress.add(record)
    assert line is not None
    assert line.endswith("evaluation version=2 reward=0.375 num_prompts=8 easy.mean@2=0.5 hard.pass@1=0.25")
