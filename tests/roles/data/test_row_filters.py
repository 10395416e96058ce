"""Filters of rows: what they may say, and what becomes of rows that they leave out, wherever rows lie."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rondo.roles.config import CurriculumConfig, DataConfig, SourceConfig
from rondo.roles.data.datasets import RowError, open_dataset, open_splits, train_order
from rondo.roles.data.next_rows import next_rows
from rondo.roles.data.row_filters import Filtered
from tests.roles.data.test_mixtures import files, job, weighed

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
HERE = __file__


def rows() -> list[dict[str, str]]:
    return [{"prompt": str(number), "label": ""} for number in range(10)]


def small(row: dict[str, Any]) -> bool | str:
    number = int(row["prompt"].split()[-1])
    return "too  large" if number > 5 else number % 2 == 0


def raises(row: dict[str, Any]) -> bool:
    return row["level"] > 3


def silent(row: dict[str, Any]) -> None: ...


def of(keeps: str, **options: Any) -> DataConfig:
    return DataConfig(rows=f"{HERE}:rows", filter=f"{HERE}:{keeps}", **options)


def said(keeps: str) -> list[str]:
    data, found = open_dataset(of(keeps)), []
    for at in range(len(data)):
        try:
            found.append(data.row(at).prompt)
        except Filtered as error:
            found.append(error.reason)
    return found


def test_a_filter_says_that_a_row_is_used_or_why_it_is_not_and_one_that_raises_makes_it_unusable() -> None:
    assert said("small") == ["0", "small", "2", "small", "4", "small", *["too large"] * 4]
    with pytest.raises(
        RowError, match=r"row 0: data.filter must answer for every row, got KeyError: 'level' from raises"
    ):
        said("raises")
    with pytest.raises(RowError, match=r"row 0: data.filter must return True, False or a reason, got None from silent"):
        said("silent")


def test_what_comes_next_is_the_same_wherever_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSONL that stays in its file, in a mixture, and parquet that stays on disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rondo.roles.data.sources._HELD_BYTES", 1)
    pq.write_table(
        pa.Table.from_pylist([{"prompt": f"p {i}", "label": i} for i in range(24)]),
        tmp_path / "p.parquet",
        row_group_size=4,
    )
    sources = files(tmp_path, a=12, b=7) | {"p": SourceConfig(path=str(tmp_path / "p.parquet"), filter=f"{HERE}:small")}
    config = job(DataConfig(sources=weighed(sources, a=2, b=1, p=1), filter=f"{HERE}:small", held_out=3))
    data, _ = open_splits(config)
    order = train_order(config, data)
    for source in sources:
        size = order.num_rows_of(source)
        whole = [
            each for at in range(0, 3 * size, size) for each in next_rows(data, order, source, at, 99, filtered=True)
        ]
        assert len(whole) == 3 * size and {data.row(row).source for row, why in whole if not why} == {source}
        assert {why for _, why in whole} == {"", "small", "too large"}
        again = train_order(config, open_splits(config)[0])
        for number in (0, 1, size - 1, size + 2):
            found = next_rows(data, again, source, number, 2, filtered=True)
            assert found == whole[number : number + len(found)] and [why for _, why in found].count("") == 2
    # The row of a position is its source's number; without a mixture the pass ends the data.
    assert [order.locate(at) for at in range(50)] == [order.row_of(*order.source_at(at)) for at in range(50)]
    alone = job(of("small", num_passes=1))
    data, _ = open_splits(alone)
    assert len(next_rows(data, train_order(alone, data), "", 8, 9, filtered=False)) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"data": of("small", curriculum=CurriculumConfig()), "debug": {"train_only": "runs/x"}},
            "debug.train_only must be",
        ),
        ({"data": {"rows": f"{HERE}:rows", "curriculum": {"solved": 0.5, "hopeless": 0.5}}}, "hopeless must be below"),
        ({"data": {"rows": f"{HERE}:rows", "curriculum": {"solved": None, "hopeless": None}}}, "got neither"),
        (
            {"data": of("small"), "evaluation": {"data": of("small", curriculum=CurriculumConfig())}},
            "evaluation.data.curriculum must be None",
        ),
    ],
)
def test_settings_that_do_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        job(**options)


def level(row: dict[str, Any]) -> bool:
    return row["level"] > 3


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_a_filter_sees_every_column_whatever_the_form_of_the_file(tmp_path: Path, form: str) -> None:
    many = [{"prompt": str(at), "label": "", "level": at} for at in range(8)]
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(many), path)
    elif form == "arrow":
        with pa.ipc.new_stream(str(path), pa.Table.from_pylist(many).schema) as out:
            out.write_table(pa.Table.from_pylist(many))
    elif form == "csv":
        path.write_text("prompt,label,level\n" + "".join(f"{at},,{at}\n" for at in range(8)))
    else:
        path.write_text("\n".join(map(json.dumps, many)))
    keeps = "int_level" if form == "csv" else "level"
    data, kept = open_dataset(DataConfig(path=str(path), filter=f"{HERE}:{keeps}")), []
    for at in range(len(data)):
        with contextlib.suppress(Filtered):
            kept.append(data.row(at).prompt)
    assert kept == ["4", "5", "6", "7"]


def int_level(row: dict[str, Any]) -> bool:
    return int(row["level"]) > 3
