"""Which folders of checkpoints count, and what rotation leaves."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rondo.runtime.checkpoints import (
    MARKER,
    complete,
    folder_of,
    goes_on_from,
    has,
    mark_again,
    newest_complete,
    newest_whole,
    publish,
    resets,
    rotate,
    set_aside,
    set_broken_aside,
    verify,
)
from rondo.runtime.errors import ConfigError, CorruptData
from tests.strength import strength

FILES = {"index.json": b'{"version": 4}', "shards/__0_0.distcp": bytes(range(256)) * 8, "shards/.metadata": b"m" * 40}
"""Of a checkpoint that was published, beside its marker."""


def made(checkpoints: Path, version: int, *, marked: bool = True) -> Path:
    folder = folder_of(checkpoints, version)
    folder.mkdir(parents=True)
    (folder / "shards").write_text("weights")
    if marked:
        (folder / MARKER).write_text("{}")
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


@pytest.mark.parametrize(
    "text", ["4\n", '{"version": 4, "format": 0}', '{"version": 4, "format": 1, "release": "0.1.0"}']
)
def test_a_marker_of_an_older_release_is_read_and_has_no_digests(tmp_path: Path, text: str) -> None:
    (made(tmp_path, 4) / MARKER).write_text(text)
    assert newest_complete(tmp_path) == tmp_path / "step_000004"
    assert not verify(tmp_path / "step_000004")


def published(checkpoints: Path, version: int = 4, **more: bytes) -> Path:
    aside, folder = checkpoints / ".partial", folder_of(checkpoints, version)
    for name, data in (FILES | more).items():
        (aside / name).parent.mkdir(parents=True, exist_ok=True)
        (aside / name).write_bytes(data)
    publish(aside, folder)
    return folder


def test_digests_that_a_writer_has_computed_are_taken_and_those_of_a_checkpoint_inside_too(tmp_path: Path) -> None:
    part = published(tmp_path / "parts")
    (tmp_path / "aside").mkdir()
    part.rename(tmp_path / "aside" / "critic")
    (tmp_path / "aside" / "critic" / "shards" / ".metadata").write_bytes(b"n" * 40)  # behind its marker's back
    (tmp_path / "aside" / "shard").write_bytes(b"abc")
    publish(tmp_path / "aside", folder := folder_of(tmp_path, 4), {"shard": (3, "0" * 32)})
    for within, named in ((("shard",), "shard"), (("critic/",), "critic/shards/.metadata")):
        with pytest.raises(
            CorruptData, match=rf"^{folder} must be a checkpoint as it was written, got {named} with other"
        ):
            verify(folder, within)


def test_files_that_are_added_are_marked_with_the_marker_as_old_as_it_was_and_others_are_left_alone(
    tmp_path: Path,
) -> None:
    folder = published(tmp_path)
    before = (folder / MARKER).stat().st_mtime_ns
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    assert verify(folder) and not has(folder, "hf") and not has(folder, "notes.txt")
    mark_again(folder)
    assert verify(folder) and has(folder, "hf") and (folder / MARKER).stat().st_mtime_ns == before
    (folder / "hf" / "config.json").write_text("[]")
    with pytest.raises(CorruptData, match=r"hf/config\.json with other bytes"):
        verify(folder)
    assert verify(folder, ("shards/", "index.json"))


@settings(max_examples=strength(quick=40, full=4000), deadline=None)
@given(
    name=st.sampled_from([*FILES, MARKER]), at=st.integers(0, 1 << 16),
    how=st.sampled_from(["bit", "four bytes", "cut", "longer", "gone"]), bit=st.integers(0, 7),
)  # fmt: skip
@example(name=MARKER, at=0, how="cut", bit=0)
@example(name=MARKER, at=11, how="bit", bit=0)
@example(name="shards/__0_0.distcp", at=0, how="bit", bit=0)
def test_any_damage_to_any_file_is_found_and_the_next_older_whole_one_is_taken(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, how: str, bit: int
) -> None:
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    older, newest = published(checkpoints, 2), published(checkpoints, 4)
    file = newest / name
    data = bytearray(file.read_bytes())
    at %= len(data)
    if how == "bit":
        data[at] ^= 1 << bit
    elif how == "four bytes":
        data[at : at + 4] = bytes(255 - byte for byte in data[at : at + 4])
    elif how == "cut":
        del data[at:]
    elif how == "longer":
        data.insert(at, data[at])
    file.write_bytes(data)
    if how == "gone":
        file.unlink()
    broken = list[Path]()
    assert newest_whole(checkpoints, lambda folder, _: broken.append(folder)) == older and broken == [newest]


def test_a_broken_checkpoint_is_set_aside_under_a_name_of_its_own_and_nothing_is_removed(tmp_path: Path) -> None:
    for number in ("", "-2", "-3"):
        folder = published(tmp_path, notes=number.encode())
        place = set_broken_aside(folder)
        assert place == tmp_path / "set_aside" / f"step_000004.broken{number}"
        assert (place / "notes").read_text() == number
    assert complete(tmp_path) == []


def test_what_a_rank_looks_at_is_its_share_of_the_digests_and_every_size(tmp_path: Path) -> None:
    folder = published(tmp_path)
    (folder / "shards" / "__0_0.distcp").write_bytes(bytes(2048))
    found = list[int]()
    for rank in range(3):
        with suppress(CorruptData):
            verify(folder, ("",), rank, 3)
            found.append(rank)
    assert len(found) == 2
    (folder / "shards" / "__0_0.distcp").write_bytes(b"")
    for rank in range(3):
        with pytest.raises(CorruptData, match="distcp of 0 bytes for 2048"):
            verify(folder, ("",), rank, 3)


def test_resets_of_the_optimizer_last_and_those_that_a_run_goes_back_behind_are_forgotten(tmp_path: Path) -> None:
    goes_on_from(tmp_path, 4, reset=False)
    assert resets(tmp_path) == [] and names(tmp_path) == ["metrics.jsonl"]
    for version, reset, left in ((4, True, [4]), (4, False, [4]), (6, True, [4, 6]), (5, False, [4]), (2, False, [])):
        goes_on_from(tmp_path, version, reset=reset)
        assert resets(tmp_path) == left
