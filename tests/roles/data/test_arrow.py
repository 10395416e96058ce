"""Files of Arrow and parquet: rows of every size and schema, their order and digest, and files that are changed or not whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import Dataset, RowError, open_dataset
from rondo.runtime.errors import Fatal

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three shards of 20 rows, which are too large for memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rondo.roles.data.sources._HELD_BYTES", 1)
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        write(folder, number)
    return folder


def write(folder: Path, number: int, sign: str = "") -> None:
    rows = [{"prompt": f"{sign}{20 * number + at}", "label": str(at), "other": at} for at in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), folder / f"{number}.parquet", row_group_size=8)


def prompts(data: Dataset) -> list[object]:
    return [data.row(at).prompt for at in range(len(data))]


def test_rows_that_stay_on_disk_are_those_of_the_files(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = open_dataset(DataConfig(path=str(shards)))
    assert prompts(streamed) == [str(at) for at in range(60)]
    assert prompts(open_dataset(DataConfig(path=f"{shards}@[25:50]"))) == [str(at) for at in range(25, 50)]
    monkeypatch.undo()
    held = open_dataset(DataConfig(path=str(shards)))
    assert [held.row(at) for at in (0, 19, 20, 59)] == [streamed.row(at) for at in (0, 19, 20, 59)]
    assert held.row(20).name == "1.parquet row 0"


def test_the_arrow_file_of_a_shard_is_written_once_for_each_state_of_it(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_dataset(DataConfig(path=str(shards)))
    [first, *_] = kept = sorted((tmp_path / "cache").rglob("*.arrow"))
    times = [path.stat().st_mtime_ns for path in kept]
    open_dataset(DataConfig(path=str(shards)))
    assert [path.stat().st_mtime_ns for path in kept] == times and len(kept) == 3
    for number in range(3):
        write(shards, number, sign="-")
    assert prompts(open_dataset(DataConfig(path=str(shards))))[0] == "-0"
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 3 and not first.exists()


def test_a_cache_that_cannot_be_written_is_named_with_the_way_out(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(Fatal, match=r"must have room for a copy of .*0.parquet in .* Make room, or set XDG_CACHE_HOME"):
        open_dataset(DataConfig(path=str(shards)))


def test_the_digest_is_of_what_the_rows_are_and_not_of_what_comes_behind_them(shards: Path) -> None:
    config = DataConfig(path=str(shards), limit=40)
    before = open_dataset(config).fingerprint()
    write(shards, 2, sign="-")
    assert open_dataset(config).fingerprint() == before
    write(shards, 1, sign="-")
    assert open_dataset(config).fingerprint() != before


@pytest.mark.parametrize("held", [1, 1 << 28], ids=["on disk", "in memory"])
def test_shards_that_are_removed_or_written_over_while_they_are_open_keep_their_rows(
    shards: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rondo.roles.data.sources._HELD_BYTES", held)
    data = open_dataset(DataConfig(path=str(shards)))
    (shards / "0.parquet").unlink()
    (shards / "1.parquet").write_bytes(b"PAR1")
    assert prompts(data) == [str(at) for at in range(60)]


def test_a_torn_shard_is_refused_by_name(shards: Path) -> None:
    (shards / "3.parquet").write_bytes((shards / "1.parquet").read_bytes()[:-9])
    with pytest.raises(Fatal, match=r"must name whole \.parquet files, got .*3.parquet"):
        open_dataset(DataConfig(path=str(shards)))


def array(values: list[Any], kind: Any) -> Any:
    return pa.array(values, kind)


SHARDS: dict[str, tuple[Any, Any]] = {
    "null": (array([None], pa.null()), array(["x"], pa.string())),
    "an empty list": (array([[]], pa.list_(pa.null())), array([[{"a": 1}]], None)),
    "large_string": (array(["a"], pa.string()), array(["b"], pa.large_string())),
    "string_view": (array(["a"], pa.string()), array(["b"], pa.string_view())),
    "dictionary": (array(["a"], pa.dictionary(pa.int8(), pa.string())), array(["b"], pa.string())),
    "an integer's width": (array([1], pa.int8()), array([1 << 40], pa.int64())),
    "an integer's sign": (array([1], pa.uint8()), array([-1], pa.int32())),
    "large_list": (array([["a"]], pa.list_(pa.string())), array([["b"]], pa.large_list(pa.large_string()))),
    "fields of a struct": (array([{"a": 1}], None), array([{"a": 1, "b": "x"}], None)),
    "a number's kind": (array([1], pa.int64()), array([1.5], pa.float32())),
}


@pytest.mark.parametrize("held", [1, 1 << 28], ids=["on disk", "in memory"])
def test_shards_whose_schemas_differ_give_the_rows_of_each(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rondo.roles.data.sources._HELD_BYTES", held)
    for at in range(2):
        columns = {name: both[at] for name, both in SHARDS.items()} | {"prompt": pa.array([str(at)])}
        pq.write_table(pa.table(columns | ({"later": pa.array(["z"])} if at else {})), tmp_path / f"{at}.parquet")
    data = open_dataset(DataConfig(path=str(tmp_path), label=None))
    assert [data.row(at).columns["later"] for at in range(2)] == [None, "z"]
    for name, both in SHARDS.items():
        assert [data.row(at).columns[name] for at in range(2)] == [part[0].as_py() for part in both]


def test_a_column_in_later_shards_alone_is_none_in_the_rows_of_the_others(shards: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"], "label": ["y"], "level": [3]}), shards / "3.parquet")
    data = open_dataset(DataConfig(path=str(shards)))
    assert (data.row(0).columns["level"], data.row(60).columns["level"], data.row(60).columns["other"]) == (
        None,
        3,
        None,
    )


def test_a_shard_without_a_column_that_every_row_must_have_is_refused_by_name(shards: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"], "picture": [None]}), shards / "3.parquet")
    with pytest.raises(
        RowError, match=r"^3.parquet must have the column 'label' that data.label names, got 'prompt', 'picture'"
    ):
        open_dataset(DataConfig(path=str(shards)))
    media = {"media_columns": {"image": "picture"}, "apply_chat_template": True}
    assert open_dataset(DataConfig(path=str(shards), label=None, **media)).row(0).media == ()


def test_a_value_that_cannot_be_decoded_is_told_where_its_column_is_named_and_harms_nobody_else(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    odd = {
        "time": pa.array([2**60], pa.timestamp("us")),
        "zone": pa.array([0], pa.timestamp("us", "Nowhere/Town")),
        "twice": pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())),
        "text": pa.array([b"\xff"], pa.binary()).view(pa.string()),
    }
    pq.write_table(pa.table({"prompt": ["p"], "label": ["l"]} | odd), tmp_path / "odd.parquet")
    config = DataConfig(path=str(tmp_path / "odd.parquet"))
    assert open_dataset(config).fingerprint() == open_dataset(config).fingerprint()
    assert open_dataset(config).row(0).prompt == "p"
    for column in odd:
        with pytest.raises(RowError, match=rf"odd.parquet row 0: '{column}' must be a value of its type"):
            open_dataset(config.model_copy(update={"label": column}))
