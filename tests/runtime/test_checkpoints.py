"""Which folders of checkpoints count, and what rotation leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.runtime.checkpoints import (
    MARKER,
    complete,
    folder_of,
    goes_on_from,
    newest_complete,
    resets,
    rotate,
    set_aside,
)
from rondo.runtime.errors import ConfigError


def made(checkpoints: Path, version: int, *, marked: bool = True) -> Path:
    folder = folder_of(checkpoints, version)
    folder.mkdir(parents=True)
    (folder / "shards").write_text("weights")
    if marked:
        (folder / MARKER).touch()
    return folder


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def test_only_marked_folders_count_and_the_newest_by_number_is_picked(tmp_path: Path) -> None:
    for version in (2, 10, 999_999, 1_000_000):
        made(tmp_path, version)
    made(tmp_path, 1_000_001, marked=False)
    (tmp_path / ".step_1000002.partial").mkdir()
    assert [path.name for path in complete(tmp_path)] == ["step_000002", "step_000010", "step_999999", "step_1000000"]
    assert newest_complete(tmp_path) == tmp_path / "step_1000000"
    assert newest_complete(tmp_path / "nowhere") is None


def test_rotation_keeps_the_newest_and_takes_what_a_killed_one_left_half_removed(tmp_path: Path) -> None:
    made(tmp_path, 1, marked=False)  # its marker went first; then its remover was killed
    for version in (2, 3, 4, 6):
        made(tmp_path, version)
    made(tmp_path, 8, marked=False)  # younger than what is whole: somebody may be writing it
    (tmp_path / ".step_000008.partial").mkdir()
    rotate(tmp_path, keep=2, held={2})
    left = [".step_000008.partial", "step_000002", "step_000004", "step_000006", "step_000008"]
    assert names(tmp_path) == left
    rotate(tmp_path, keep=2)
    left.remove("step_000002")
    assert names(tmp_path) == left


def test_what_a_run_goes_back_behind_counts_no_more_and_stays(tmp_path: Path) -> None:
    for version in (2, 4, 6):
        made(tmp_path, version)
    assert set_aside(tmp_path, 2) == [tmp_path / "set_aside" / f"step_00000{version}" for version in (4, 6)]
    assert [path.name for path in complete(tmp_path)] == ["step_000002"] and set_aside(tmp_path, 2) == []
    made(tmp_path, 6)
    assert set_aside(tmp_path, 2) == [tmp_path / "set_aside" / "step_000006"]
    rotate(tmp_path, keep=1)
    assert names(tmp_path) == ["set_aside", "step_000002"]


def test_nothing_is_removed_where_nothing_is_whole(tmp_path: Path) -> None:
    made(tmp_path, 1, marked=False)
    rotate(tmp_path, keep=2)
    assert names(tmp_path) == ["step_000001"]


def test_the_newest_is_refused_where_only_a_newer_release_can_read_it(tmp_path: Path) -> None:
    made(tmp_path, 2)
    (made(tmp_path, 4) / MARKER).write_text('{"version": 4, "format": 99, "release": "9.9.9"}')
    with pytest.raises(
        ConfigError, match=rf"^{tmp_path}/step_000004 must be of format \d+ or older, got 99, which rondo 9.9.9"
    ):
        newest_complete(tmp_path)


@pytest.mark.parametrize("text", ["", "4\n", '{"version": 4, "format": 0}'])
def test_a_marker_of_the_first_releases_is_read(tmp_path: Path, text: str) -> None:
    (made(tmp_path, 4) / MARKER).write_text(text)
    assert newest_complete(tmp_path) == tmp_path / "step_000004"


def test_resets_of_the_optimizer_last_and_those_that_a_run_goes_back_behind_are_forgotten(tmp_path: Path) -> None:
    goes_on_from(tmp_path, 4, reset=False)
    assert resets(tmp_path) == [] and names(tmp_path) == []
    for version, reset, left in ((4, True, [4]), (4, False, [4]), (6, True, [4, 6]), (5, False, [4]), (2, False, [])):
        goes_on_from(tmp_path, version, reset=reset)
        assert resets(tmp_path) == left
