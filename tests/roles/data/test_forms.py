"""The forms in which files hold rows: the same rows in each form are the same rows."""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import json
import lzma
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from rondo.models.media.refs import MediaRef
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.config import DataConfig, DpoConfig, SftConfig
from rondo.roles.data.datasets import Dataset, RowError, open_dataset, row_of
from rondo.roles.training.preference import pair_encoder
from rondo.roles.training.sft import encoder
from rondo.runtime.errors import Fatal

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
datasets = pytest.importorskip("datasets")

ROWS = [
    {"prompt": f"What is {i}, ü?", "label": str(i), "source": "ab"[i % 2], "note": "" if i else "x" * 200_000}
    for i in range(7)
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def lines() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def array() -> bytes:
    return json.dumps(ROWS, indent=1).encode()


def table(kind: Any = None) -> Any:
    return pa.Table.from_pylist(ROWS).cast(pa.schema(dict.fromkeys(ROWS[0], kind or pa.string())))


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)


def write_zst(path: Path) -> None:
    """In two frames, as programs write that compress a part at a time."""
    for part in (lines()[:100], lines()[100:]):
        with path.open("ab") as file, pa.CompressedOutputStream(file, "zstd") as out:
            out.write(part)


def write_arrow(path: Path, new: Callable[..., Any]) -> None:
    with new(str(path), table().schema) as out:
        out.write_table(table(), max_chunksize=3)


FORMS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "JSON lines": ("a.jsonl", lambda path: path.write_bytes(lines())),
    "JSON lines in .json": ("a.json", lambda path: path.write_bytes(lines())),
    "JSON lines with a mark of byte order": ("a.json", lambda path: path.write_bytes(b"\xef\xbb\xbf" + lines())),
    "a JSON array": ("a.json", lambda path: path.write_bytes(array())),
    "CSV": ("a.csv", write_csv),
    "gz": ("a.jsonl.gz", lambda path: path.write_bytes(gzip.compress(lines()))),
    "gz of an array": ("a.json.gz", lambda path: path.write_bytes(gzip.compress(array()))),
    "bz2": ("a.jsonl.bz2", lambda path: path.write_bytes(bz2.compress(lines()))),
    "xz": ("a.jsonl.xz", lambda path: path.write_bytes(lzma.compress(lines()))),
    "zst": ("a.jsonl.zst", write_zst),
    "parquet": ("a.parquet", lambda path: pq.write_table(table(), path)),
    "parquet of large_string": ("a.parquet", lambda path: pq.write_table(table(pa.large_string()), path)),
    "parquet of dictionaries": ("a.parquet", lambda path: pq.write_table(table(pa.dictionary(pa.int32(), pa.string())), path)),
    "an Arrow stream": ("a.arrow", lambda path: write_arrow(path, pa.ipc.new_stream)),
    "an Arrow file": ("a.arrow", lambda path: write_arrow(path, pa.ipc.new_file)),
    "save_to_disk": ("a", lambda path: datasets.Dataset.from_list(ROWS).save_to_disk(path, num_shards=2)),
    "a folder": ("a", lambda path: (path.mkdir(), (path / "1.jsonl.gz").write_bytes(gzip.compress(lines())))),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("held", [1, 1 << 28], ids=["on disk", "in memory"])
def test_the_same_rows_are_read_from_every_form(
    tmp_path: Path, form: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rondo.roles.data.sources._HELD_BYTES", held)
    name, write = FORMS[form]
    write(tmp_path / name)
    data = open_dataset(DataConfig(path=str(tmp_path / name)))
    rows = [data.row(at) for at in range(len(data))]
    assert [(row.prompt, row.label, dict(row.columns)) for row in rows] == [
        (row["prompt"], row["label"], row) for row in ROWS
    ]
    assert rows[0].name.startswith("1.jsonl.gz:" if form == "a folder" else name)


TYPES: dict[str, tuple[Any, Any]] = {
    "int8": (pa.array([7], pa.int8()), 7),
    "uint64": (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    "float16": (pa.array([1.5], pa.float16()), 1.5),
    "decimal": (pa.array([Decimal("12.50")], pa.decimal128(10, 2)), 12.5),
    "whole decimal": (pa.array([Decimal("12")], pa.decimal128(38, 0)), 12),
    "dictionary": (pa.array(["a"], pa.dictionary(pa.int8(), pa.string())), "a"),
    "large_list": (pa.array([["a"]], pa.large_list(pa.large_string())), ["a"]),
    "fixed_size_list": (pa.array([[1, 2]], pa.list_(pa.int16(), 2)), [1, 2]),
    "map": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), {"a": 1}),
    "date": (pa.array([datetime.date(2026, 1, 2)], pa.date32()), datetime.date(2026, 1, 2)),
    "timestamp[ns]": (
        pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")), datetime.datetime(2023, 11, 14, 22, 13, 20, 123456),
    ),
    "duration[ns]": (pa.array([1_500_000_001], pa.duration("ns")), datetime.timedelta(seconds=1.5)),
    "times in a list of structs": (
        pa.array([[{"at": 0, "n": Decimal("0.1")}]], pa.list_(pa.struct({"at": pa.timestamp("ns"), "n": pa.decimal128(3, 1)}))),
        [{"at": datetime.datetime(1970, 1, 1), "n": 0.1}],
    ),
    "null": (pa.array([None], pa.timestamp("ns")), None),
}  # fmt: skip


def test_values_of_every_arrow_type_are_plain(tmp_path: Path) -> None:
    columns = {name: array for name, (array, _) in TYPES.items()}
    pq.write_table(pa.table({"prompt": ["a"], **columns}), tmp_path / "a.parquet")
    row = open_dataset(DataConfig(path=str(tmp_path / "a.parquet"), label=None)).row(0).columns
    for name, (_, value) in TYPES.items():
        assert row[name] == value, name
        assert type(row[name]) is type(value), name


def opened(path: Path) -> Dataset:
    return open_dataset(DataConfig(path=str(path)))


def test_several_files_of_json_or_csv_are_one_data_set(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(array())
    (tmp_path / "b.json").write_bytes(lines())
    data = opened(tmp_path / "*.json")
    assert [data.row(at).label for at in range(len(data))] == [row["label"] for row in (*ROWS, *ROWS)]
    assert (data.row(6).name, data.row(7).name) == ("a.json row 6", "b.json:1")


def test_a_compressed_file_is_unpacked_once(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines()))
    opened(tmp_path / "a.jsonl.gz")
    [unpacked] = cache.rglob("*.unpacked")
    before = unpacked.stat().st_mtime_ns
    opened(tmp_path / "a.jsonl.gz")
    assert unpacked.stat().st_mtime_ns == before


def test_what_cannot_be_read_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(lines())[:-20])
    (tmp_path / "text.jsonl.gz").write_bytes(lines())
    (tmp_path / "pretty.json").write_text(json.dumps(ROWS[0], indent=1))
    (tmp_path / "torn.arrow").write_bytes(b"ARROW1")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "both")
    for name, words in {
        "torn.jsonl.gz": r"must name a whole \.gz file, got .*torn.jsonl.gz: .* Write it again",
        "text.jsonl.gz": r"must name a whole \.gz file, got .*text.jsonl.gz: .* Write it again",
        "pretty.json": "must name a .json file of a list of objects, or of one object a line, got pretty.json",
        "torn.arrow": r"must name whole \.arrow files, got .*torn.arrow",
        "both": "must name one split of what save_to_disk wrote, got .* as in .*both/train",
    }.items():
        with pytest.raises(Fatal, match=words):
            opened(tmp_path / name)
    assert len(opened(tmp_path / "both" / "train")) == 7
    (tmp_path / "more.csv").write_text("prompt,label\na,b\nc,d,e\n")
    with pytest.raises(RowError, match=r"more.csv row 1: row must have a value for each column, got more"):
        opened(tmp_path / "more.csv").row(1)
    (tmp_path / "fewer.csv").write_text("prompt,label\na,b\nc\n")
    with pytest.raises(RowError, match=r"fewer.csv row 1: row must have a value for each column, got fewer"):
        opened(tmp_path / "fewer.csv").row(1)
    for name, text, words in (
        (
            "open.csv",
            'prompt,label\na,b\n"It is 5,5\n' + "c,d\n" * 9,
            r"readable \.csv file, got open.csv \(unexpected end",
        ),
        ("twice.csv", "prompt,label,label\na,b,c\n", "with each column once, got 'label' twice in twice.csv"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(Fatal, match=words):
            opened(tmp_path / name)
    (tmp_path / "train.gz").write_bytes(gzip.compress(lines()))
    with pytest.raises(Fatal, match=r"one kind at a time, got a name without such an ending in .*train.gz"):
        opened(tmp_path / "train.gz")
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(Fatal, match=r"must not end with \.zst without pyarrow, .* pip install 'rondo-rl\[data\]'"):
        opened(tmp_path / "a.jsonl.zst")


def test_a_column_that_a_line_lacks_costs_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(lines() + b'{"prompt": "x"}\n')
    with pytest.raises(RowError, match=r"a\.json:8 must have the column 'label'"):
        opened(tmp_path / "a.json").row(7)


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


PLACED = [{"type": "image"}, text("2+2?")]
ASKED, ASKED_PARTS, ASKED_IMAGE = said("user", "2+2?"), said("user", [text("2+2?")]), said("user", PLACED)
FOUR, FOUR_PARTS, FIVE = said("assistant", "4"), said("assistant", [text("4")]), said("assistant", "5")
PICTURE = [{"bytes": b"\x89PNG", "path": None}]
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[Any, Any, Any]]] = {
    "prompt and completion": ({"prompt": "2+2?", "completion": "4"}, {"label": "completion"}, ("2+2?", "4", None)),
    "a chat and its completion": (
        {"prompt": [ASKED], "completion": [FOUR]}, {"label": "completion"}, ([ASKED], [FOUR], None),
    ),
    "parts": (
        {"prompt": [ASKED_PARTS], "completion": [FOUR_PARTS]}, {"label": "completion"}, ([ASKED_PARTS], [FOUR_PARTS], None),
    ),
    "images": (
        {"prompt": [ASKED], "completion": [FOUR_PARTS], "images": PICTURE}, {"label": "completion"},
        ([ASKED_IMAGE], [FOUR_PARTS], None),
    ),
    "a pair": (
        {"prompt": [ASKED], "chosen": [FOUR], "rejected": [FIVE]}, {"label": "chosen", "rejected": "rejected"},
        ([ASKED], [FOUR], [FIVE]),
    ),
    "a pair that repeats its prompt": (
        {"prompt": [ASKED], "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]}, {"label": "chosen", "rejected": "rejected"},
        ([ASKED], [FOUR], [FIVE]),
    ),
    "a pair without a prompt": (
        {"chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE]}, {"prompt": "chosen", "label": None, "rejected": "rejected"},
        ([ASKED, FOUR], None, [FIVE]),
    ),
    "a pair with an image": (
        {"prompt": [ASKED], "chosen": [ASKED, FOUR], "rejected": [ASKED, FIVE], "images": PICTURE},
        {"label": "chosen", "rejected": "rejected"}, ([ASKED_IMAGE], [FOUR], [FIVE]),
    ),
    "a pair of parts with an image and without a prompt": (
        {"chosen": [ASKED_IMAGE, FOUR_PARTS], "rejected": [ASKED_IMAGE, said("assistant", [text("5")])], "images": PICTURE},
        {"prompt": "chosen", "label": None, "rejected": "rejected"},
        ([ASKED_IMAGE, FOUR_PARTS], None, [said("assistant", [text("5")])]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("kind", ["rows", "parquet"])
def test_completions_and_pairs_are_read_as_trl_writes_them(tmp_path: Path, form: str, kind: str) -> None:
    row, columns, expected = PAIRS[form]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    images = {"media_columns": {"image": "images"}} if "images" in row else {}
    template = {"apply_chat_template": True} if form != "prompt and completion" else {}
    config = DataConfig(path=str(tmp_path / "a.parquet"), **columns, **images, **template)
    read = row_of(row, config, "row 0") if kind == "rows" else open_dataset(config).row(0)
    assert (read.prompt, read.label, read.rejected) == expected
    assert read.media == ((MediaRef("image", b"\x89PNG"),) if images else ())


def test_a_label_that_is_no_chat_stays_as_it_is() -> None:
    for label in ([{"input": "1", "output": None}], [["user", "x"]], {"role": "x", "a": None}, []):
        row = row_of({"prompt": "a", "label": label}, DataConfig(path="a"), "row 0")
        assert row.label == label


CHATS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"prompt": "2+2?", "completion": "4"}, {"label": "completion"}),
    ({"prompt": [ASKED], "completion": [FOUR]}, {"label": "completion"}),
    ({"prompt": [ASKED_PARTS], "completion": [FOUR_PARTS]}, {"label": "completion"}),
    ({"prompt": [ASKED], "completion": [ASKED, FOUR]}, {"label": "completion"}),
    ({"messages": [ASKED_PARTS, FOUR_PARTS]}, {"prompt": "messages", "label": None}),
)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_question_and_its_answer_are_the_same_tokens_in_every_form_of_rows(tmp_path: Path, kind: str) -> None:
    tokenizer, path, seen, pairs = build_tokenizer(), tmp_path / f"a.{kind}", list[Any](), list[Any]()
    for row, columns in (*CHATS, *(PAIRS[name][:2] for name in PAIRS if "pair" in name and "image" not in name)):
        # Messages of another row have one more field: in parquet those of this one have it too, as null.
        other = {name: [{**m, "name": "x"} for m in value] for name, value in row.items() if isinstance(value, list)}
        both = [row, row | other]
        path.write_text("".join(json.dumps(each) + "\n" for each in both))
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(both), path)
        config = DataConfig(path=str(path), apply_chat_template=True, **columns)
        if config.rejected is not None:
            own = DpoConfig(data=config, steps=1, batch_size=1)
            pair = pair_encoder(tokenizer, own, config)(open_dataset(config).row(0))
            pairs.append((pair.chosen.tokens.tolist(), pair.rejected.tokens.tolist(), pair.chosen.response))
        else:
            made = encoder(tokenizer, SftConfig(data=config, steps=1, batch_size=1), config)(
                open_dataset(config).row(0)
            )
            seen.append((made.sequence.tokens.tolist(), made.mask.tolist()))
    assert len(seen) == 5 and all(each == seen[0] for each in seen)
    assert len(pairs) == 3 and all(each == pairs[0] for each in pairs)
    assert pairs[0][0] == seen[0][0] != pairs[0][1]
