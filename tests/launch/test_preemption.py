"""A notice that the machine is to be taken away: a file, looked for until it is there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rondo.launch.preemption import watch, within_s
from rondo.runtime.records.telling import PROCESS

SAYINGS = [("", ""), ("spot: reclaimed\nat noon", ": spot: reclaimed"), ("x" * 300, ": " + "x" * 200)]


@pytest.mark.parametrize(("text", "said"), SAYINGS)
async def test_a_file_that_appears_is_one_notice_with_its_first_line_as_the_reason(
    tmp_path: Path, text: str, said: str
) -> None:
    file, told = tmp_path / "notice", list[str]()
    watching = asyncio.create_task(watch(file, told.append, period_s=0))
    await asyncio.sleep(0)
    assert told == []
    file.with_name("aside").write_text(text)
    file.with_name("aside").rename(file)
    await asyncio.wait_for(watching, 30)
    assert told == [f"notice in {file}{said}"]


async def test_what_cannot_be_looked_at_is_told_and_is_no_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = asyncio.Event()
    monkeypatch.setattr(PROCESS, "listener", lambda *_: failed.set())
    file, told = tmp_path / "notice", list[str]()
    file.mkdir()
    watching = asyncio.create_task(watch(file, told.append, period_s=0))
    await asyncio.wait_for(failed.wait(), 30)
    file.rmdir()
    file.write_text("now")
    await asyncio.wait_for(watching, 30)
    assert told == [f"notice in {file}: now"]


def test_a_run_is_gone_before_the_time_is_over_that_a_notice_leaves() -> None:
    assert [within_s(grace_s) for grace_s in (None, 120.0, 6.0)] == [None, 115.0, 3.0]
