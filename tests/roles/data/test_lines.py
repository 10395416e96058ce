"""Where lines begin: indexes that are kept of large files, and what becomes of them when files or folders change."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import Dataset, RowError, open_dataset


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """Indexes are kept of files of any size, in a folder of the test's; lists them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rondo.roles.data.lines._KEPT_FROM_BYTES", 1)
    monkeypatch.setattr("rondo.roles.data.lines._SCAN_BYTES", 50)
    return lambda: sorted((tmp_path / "cache").rglob("*.index"))


def lines(numbers: range) -> str:
    return "".join(f'{{"prompt": "{number}", "label": ""}}\n' + "  \n" * (number % 7 == 0) for number in numbers)


def read(data: Dataset) -> list[tuple[str, str]]:
    rows = [data.row(at) for at in range(len(data))]
    return [(str(row.prompt), row.name) for row in rows]


def opened(path: Path) -> Dataset:
    return open_dataset(DataConfig(path=str(path)))


def test_a_file_is_scanned_once_and_read_from_its_index_after_that(
    tmp_path: Path, kept: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text(lines(range(20)))
    first = opened(tmp_path / "a.jsonl")
    assert len(kept()) == 1
    monkeypatch.setattr("rondo.roles.data.lines._scan", None)  # nobody scans again
    second = opened(tmp_path / "a.jsonl")
    monkeypatch.undo()
    alone = opened(tmp_path / "a.jsonl")  # small files have no index
    assert read(first) == read(second) == read(alone)
    assert read(first)[:3] == [("0", "a.jsonl:1"), ("1", "a.jsonl:3"), ("2", "a.jsonl:4")]
    assert first.fingerprint() == second.fingerprint() == alone.fingerprint()


def test_an_index_of_a_file_that_has_changed_is_not_read_and_goes(
    tmp_path: Path, kept: Callable[[], list[Path]]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(range(20)))
    before = opened(path)
    [old] = kept()
    killed, writing = (old.with_name(f"{old.name}.{name}.part") for name in "ab")
    for left in (killed, writing):
        left.write_text("an index that is not whole yet")
    os.utime(killed, (1, 1))
    with path.open("a") as file:
        file.write('{"prompt": "torn')
    assert len(opened(path)) == 21 and old not in kept() and len(kept()) == 1
    assert writing.exists() and not killed.exists()
    with pytest.raises(RowError, match=r"a.jsonl:24: row must be JSON, got b'\{\"prompt\": \"torn'"):
        opened(path).row(20)
    assert len(read(before)) == 20


@pytest.mark.parametrize("harm", ["torn", "words", "empty"])
def test_an_index_that_is_not_whole_is_made_again(tmp_path: Path, kept: Callable[[], list[Path]], harm: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(lines(range(20)))
    whole = read(opened(path))
    [index] = kept()
    text = index.read_bytes()
    index.write_bytes({"torn": text[:-8], "words": b"x" * len(text), "empty": b""}[harm])
    assert read(opened(path)) == whole and kept()[0].read_bytes() == text


def test_where_no_index_can_be_written_lines_are_known_in_memory(
    tmp_path: Path, kept: Callable[[], list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("no folder")
    (tmp_path / "a.jsonl").write_text(lines(range(20)))
    assert len(read(opened(tmp_path / "a.jsonl"))) == 20 and not kept()
    assert "stays in memory" in caplog.text


def test_a_file_that_changes_while_it_is_scanned_has_no_index(
    tmp_path: Path, kept: Callable[[], list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rondo.roles.data import lines as module

    path, scan = tmp_path / "a.jsonl", module._scan
    path.write_text(lines(range(20)))

    def beside_a_writer(file: module.File) -> object:
        for found in scan(file):
            with path.open("a") as text:
                text.write(lines(range(1)))
            os.utime(path, ns=(1, 1))
            yield found

    monkeypatch.setattr(module, "_scan", beside_a_writer)
    assert len(opened(path)) == 20 and not kept()
