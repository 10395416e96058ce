"""Parquet that is too large to be held in memory: its rows, order and digest, and what becomes of files that change or vanish."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rondo.roles.config import DataConfig, SourceConfig
from rondo.roles.data.cursor import Order, Windows
from rondo.roles.data.datasets import Dataset, RowError, open_dataset, windows_of
from rondo.runtime.errors import ConfigError, Fatal

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three shards of 20 rows, in groups of 8, of which one may be in memory."""
    monkeypatch.setattr("rondo.roles.data.sources._HELD_BYTES", 1)
    for number in range(3):
        write(tmp_path, number)
    return tmp_path


def write(folder: Path, number: int, sign: str = "") -> None:
    rows = [{"prompt": f"{sign}{20 * number + at}", "label": str(at), "other": at} for at in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{number}.parquet", row_group_size=8)


def prompts(data: Dataset) -> list[object]:
    return [data.row(at).prompt for at in range(len(data))]


def order_of(path: Path, **settings: object) -> Order:
    config = DataConfig(path=str(path), **settings)
    data = open_dataset(config)
    return Order(len(data), 7, num_passes=2, windows=windows_of(config, data))


def test_rows_that_stay_in_their_files_are_those_of_the_files(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = open_dataset(DataConfig(path=str(shards)))
    assert prompts(streamed) == [str(at) for at in range(60)]
    assert prompts(open_dataset(DataConfig(path=f"{shards}@[25:50]"))) == [str(at) for at in range(25, 50)]
    monkeypatch.undo()
    held = open_dataset(DataConfig(path=str(shards)))
    assert [held.row(at) for at in (0, 19, 20, 59)] == [streamed.row(at) for at in (0, 19, 20, 59)]


def test_the_digest_is_of_what_the_rows_are_and_not_of_what_comes_behind_them(shards: Path) -> None:
    config = DataConfig(path=str(shards), limit=40)
    before = open_dataset(config).fingerprint()
    write(shards, 2, sign="-")
    assert open_dataset(config).fingerprint() == before
    write(shards, 1, sign="-")
    assert open_dataset(config).fingerprint() != before


def test_a_shard_that_is_removed_still_has_its_rows_and_one_that_is_written_over_has_errors(shards: Path) -> None:
    data = open_dataset(DataConfig(path=str(shards)))
    (shards / "0.parquet").unlink()
    assert data.row(19).prompt == "19"
    with (shards / "1.parquet").open("r+b") as file:
        file.write(b"PAR2")
    os.utime(shards / "1.parquet", ns=(1, 1))
    with pytest.raises(RowError) as caught:
        data.row(20)
    assert str(caught.value) == (
        f"{shards.name}/*.parquet row 20: row must be read as when {shards}/1.parquet was opened, got another file. Restore the "
        "file; a run reads its data until it ends"
    )
    assert data.row(59).prompt == "59"


def test_a_torn_shard_and_one_of_another_schema_are_refused_by_name(shards: Path) -> None:
    (shards / "3.parquet").write_bytes((shards / "1.parquet").read_bytes()[:-9])
    with pytest.raises(Fatal, match=r"must name whole parquet files, got .*3.parquet"):
        open_dataset(DataConfig(path=str(shards)))
    pq.write_table(pa.table({"prompt": [1], "label": ["1"]}), shards / "3.parquet")
    with pytest.raises(Fatal, match=r"must have one schema, got .* in .*3.parquet and"):
        open_dataset(DataConfig(path=str(shards)))


def test_a_pass_takes_groups_in_windows_each_row_once_and_differently_each_time(shards: Path) -> None:
    order = order_of(shards, shuffle_groups=2)
    rows = [order.locate(position).row for position in range(120)]
    assert sorted(rows[:60]) == sorted(rows[60:]) == list(range(60)) and rows[:60] != rows[60:]
    ends = [0, 8, 16, 20, 28, 36, 40, 48, 56, 60]
    groups = [sum(row >= end for end in ends[1:]) for row in rows[:60]]
    # A window's rows are of two groups, in no order of the file.
    sizes = [ends[at + 1] - ends[at] for at in range(9)]
    at, opened = 0, list(dict.fromkeys(groups))
    while opened:
        taken = groups[at : at + sum(sizes[group] for group in opened[:2])]
        assert set(taken) == set(opened[:2])
        at, opened = at + len(taken), opened[2:]
    assert rows[:60] != sorted(rows[:60], key=lambda row: groups.index(sum(row >= end for end in ends[1:])))
    again = order_of(shards, shuffle_groups=2)
    assert [again.locate(position).row for position in (119, 3, 61)] == [rows[119], rows[3], rows[61]]


def test_a_group_is_decoded_once_a_pass_where_windows_are_shuffled(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, read = [], pq.ParquetFile.read_row_group
    monkeypatch.setattr("rondo.roles.data.sources._HELD_BYTES", 300)
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda self, at, **of: decoded.append(at) or read(self, at, **of)
    )
    config = DataConfig(path=str(shards), shuffle_groups=2)
    data = open_dataset(config)
    order = Order(len(data), 7, windows=windows_of(config, data))
    decoded.clear()
    for position in range(60):
        data.row(order.locate(position).row)
    assert len(decoded) == 9


def test_what_is_held_out_is_in_no_window_and_each_source_has_windows_of_its_own(shards: Path) -> None:
    config = DataConfig(
        sources={
            "a": SourceConfig(path=f"{shards}/0.parquet", weight=1),
            "b": SourceConfig(path=f"{shards}/[12].parquet", weight=1),
        },
        shuffle_groups=2,
    )
    train, held_out = open_dataset(config).split(10, 3)
    windows = windows_of(config, train)
    rows = {name: sorted(each.at(number, 0) for number in range(each._firsts[-1])) for name, each in windows.items()}
    assert {name: len(each) for name, each in rows.items()} == {
        name: len(each) for name, each in train.rows_of().items()
    }
    assert all(each == list(range(len(each))) for each in rows.values()) and len(held_out) == 10


def test_windows_without_groups_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "label": ""}\n')
    config = DataConfig(path=str(tmp_path / "a.jsonl"), shuffle_groups=4)
    with pytest.raises(ConfigError, match="shuffle_groups must come with parquet that is too large to be held"):
        windows_of(config, open_dataset(config))
    with pytest.raises(ValueError, match=r"shuffle_groups must be None with data\.shuffle=False"):
        DataConfig(path="a", shuffle=False, shuffle_groups=4)


def test_one_group_of_one_row_is_a_window() -> None:
    assert [Windows([0, 1], 5).at(0, passed) for passed in range(3)] == [0, 0, 0]
