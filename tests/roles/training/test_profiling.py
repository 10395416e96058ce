"""The window of steps that is profiled: which steps a file holds, and what becomes of one that cannot be written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from rondo.roles.config import DebugConfig, ProfileConfig
from rondo.roles.training.profiling import Window


def steps(window: Window, *, stopped_at: int = 5) -> list[str | None]:
    told = []
    for step in range(stopped_at + 1):
        window.begin(step)
        torch.ones(4) @ torch.ones(4)
        told.append(window.end(step, leaves=step == stopped_at))
    return told


def test_a_file_holds_the_steps_of_the_window_or_those_before_an_end(tmp_path: Path) -> None:
    assert set(steps(Window(ProfileConfig(first=1, last=2, memory=True), tmp_path, 3))) == {None}
    steps(Window(ProfileConfig(first=4, last=9), tmp_path, 0))
    names = ["steps_000001_to_000002_rank_3.json.gz", "steps_000004_to_000005_rank_0.json.gz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    events = json.loads(gzip.decompress((tmp_path / names[0]).read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::dot" for event in events) == 2


def test_one_that_cannot_be_written_says_why_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file in its place")
    told = steps(Window(ProfileConfig(first=1, last=1), tmp_path / "profile", 0))
    assert [bool(each) for each in told] == [False, True, False, False, False, False]


def test_a_window_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(ValueError, match=r"debug\.profile\.last must be debug\.profile\.first or later, got 1 and 2"):
        DebugConfig(profile=ProfileConfig(first=2, last=1))
