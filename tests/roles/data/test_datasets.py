"""Data sets: every source gives the same rows; what is missing is named; the split is exact."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rondo.models.media.refs import MediaRef
from rondo.roles.config import (
    DataConfig,
    EvalConfig,
    EvalSet,
    JobConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    SourceConfig,
)
from rondo.roles.data.datasets import (
    Dataset,
    Row,
    RowError,
    Without,
    demonstrations,
    open_dataset,
    open_splits,
    order_of,
    train_order,
)
from rondo.roles.data.fingerprints import DataChanged, Fingerprints
from rondo.roles.data.opening import open_source
from rondo.roles.data.sources import missing_column
from rondo.runtime.errors import ConfigError, Fatal

ROWS = [{"question": f"{i} + {i}?", "answer": str(2 * i), "info": {"level": i % 3}} for i in range(40)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(data: Dataset) -> list[Any]:
    return [data.row(i).prompt for i in range(len(data))]


def config(path: Path | str, **options: Any) -> DataConfig:
    return DataConfig(**{"path": str(path), "prompt": "question", "label": "answer"} | options)


def job(data: DataConfig, evaluation: EvalConfig | None = None, seed: int = 0) -> JobConfig:
    return JobConfig(
        name="test", seed=seed, num_steps=1, model=ModelConfig(path="unused"), data=data, evaluation=evaluation,
        reward=RewardConfig(function="m:f"),
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=2, max_prompt_tokens=8, max_new_tokens=8),
    )  # fmt: skip


def test_jsonl_rows_are_read_by_number(tmp_path: Path) -> None:
    data = open_dataset(config(write_jsonl(tmp_path / "a.jsonl", ROWS), metadata="info"))
    assert len(data) == 40
    assert data.row(39) == Row("a.jsonl:40", "39 + 39?", "78", {"level": 0})
    assert data.row(39).columns == ROWS[39]
    assert prompts(data) == [row["question"] for row in ROWS]


@pytest.mark.parametrize(
    "text",
    [
        '{"question": "a"}\n{"question": "ü\\n"}\n',
        '{"question": "a"}\n{"question": "ü\\n"}',
        '\n{"question": "a"}\r\n\r\n  \n{"question": "ü\\n"}\n\n',
        ' {"question": "a"}\n         \n\t{"question": "ü\\n"}\n' + " " * 40,
    ],
    ids=["plain", "without a last newline", "with blank lines and carriage returns", "with spaces"],
)
def test_jsonl_is_read_however_it_is_laid_out(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode())
    for num_bytes in (1 << 20, 1, 2, 7, len(text.encode())):  # of a part that is looked through
        monkeypatch.setattr("rondo.roles.data.lines._SCAN_BYTES", num_bytes)
        assert prompts(open_dataset(config(tmp_path / "a.jsonl", label=None))) == ["a", "ü\n"]


def test_numbers_of_jsonl_are_what_the_text_says(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"question": "a", "answer": [{10**30}, NaN, -Infinity, 1.5]}}\n')
    assert repr(open_dataset(config(tmp_path / "a.jsonl")).row(0).label) == f"[{10**30}, nan, -inf, 1.5]"


def test_a_row_is_named_by_its_line_also_behind_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "a"}\n\n\nnot json\n')
    data = open_dataset(config(tmp_path / "a.jsonl", label=None))
    with pytest.raises(RowError, match=r"^a.jsonl:4: row must be JSON, got b'not json'"):
        data.row(1)


def test_a_bad_row_leaves_the_others_readable(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "a"}\n[1, 2]\n{"question": 7}\n{"question": "d"}\n')
    data = open_dataset(config(tmp_path / "a.jsonl", label=None))
    with pytest.raises(RowError, match=r"a.jsonl:2: row must be a JSON object, got list"):
        data.row(1)
    with pytest.raises(RowError, match=r"a.jsonl:3: 'question' must be text or a list of chat messages, got int"):
        data.row(2)
    assert data.row(3).prompt == "d"


def test_globs_and_folders_take_files_in_order_of_their_names(tmp_path: Path) -> None:
    for name, rows in (("b", ROWS[10:]), ("a", ROWS[:10])):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "README.md").write_text("not data")
    for path in (tmp_path / "*.jsonl", tmp_path):
        data = open_dataset(config(path))
        assert prompts(data) == [row["question"] for row in ROWS]
        assert (data.row(9).name, data.row(10).name) == ("a.jsonl:10", "b.jsonl:1")


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{**row, "unused": b"\xff" * 100} for row in ROWS]
    parquet.write_table(pyarrow.Table.from_pylist(rows[:15]), tmp_path / "a.parquet", row_group_size=4)
    parquet.write_table(pyarrow.Table.from_pylist(rows[15:]), tmp_path / "b.parquet")
    theirs = open_dataset(config(tmp_path, metadata="info"))
    ours = open_dataset(config(write_jsonl(tmp_path / "a.jsonl", ROWS), metadata="info"))
    assert len(theirs) == 40
    for i in range(40):
        mine, other = ours.row(i), theirs.row(i)
        assert (mine.prompt, mine.label, mine.metadata) == (other.prompt, other.label, other.metadata)


@pytest.mark.parametrize("held", [1, 1 << 28], ids=["in files", "in memory"])
def test_a_row_of_parquet_has_every_column(tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rondo.roles.data.sources._HELD_BYTES", held)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{**row, "level": i, "long": "x" * i} for i, row in enumerate(ROWS)]
    parquet.write_table(pyarrow.Table.from_pylist(rows[:15]), tmp_path / "a.parquet", row_group_size=4)
    parquet.write_table(pyarrow.Table.from_pylist(rows[15:]), tmp_path / "b.parquet")
    data = open_dataset(config(tmp_path, metadata="info"))
    columns = [data.row(i).columns for i in range(40)]
    assert [row["level"] for row in columns] == list(range(40))
    assert list(columns[0]) == ["question", "answer", "info", "level", "long"]
    assert [dict(row) for row in columns] == rows
    with pytest.raises(KeyError):
        columns[0]["none"]


def test_parquet_without_a_named_column_is_refused(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    with pytest.raises(RowError, match=r"a.parquet must have the column 'anser' that .*, got .*Did you mean 'answer'"):
        open_dataset(config(tmp_path / "a.parquet", label="anser"))


@pytest.mark.parametrize(
    ("setting", "column", "available", "advice"),
    [
        ("data.prompt", "question", ["problem", "solution"], "Did you mean 'problem'?"),
        ("data.prompt", "qestion", ["question", "answer"], "Did you mean 'question'?"),
        ("data.label", "answer", ["problem", "solution"], "Did you mean 'solution'?"),
        ("data.label", "label", ["question", "answer", "level"], "Did you mean 'answer'?"),
        ("data.label", "label", ["question", "ground_truth"], "Did you mean 'ground_truth'?"),
        ("data.metadata", "info", ["problem", "solution"], "Name the right one in data.metadata."),
    ],
)
def test_a_missing_column_is_answered_with_one_that_holds_the_same(
    setting: str, column: str, available: list[str], advice: str
) -> None:
    shown = ", ".join(map(repr, available))
    assert str(missing_column("a.jsonl:1", column, available, setting)) == (
        f"a.jsonl:1 must have the column {column!r} that {setting} names, got {shown}. {advice}"
    )


def test_a_data_set_of_the_hub_that_cannot_be_had_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    for error, told in (
        (
            ConnectionError("Couldn't reach 'a/b' on the Hub"),
            "that is reached from here, got 'hub:a/b/train' (Couldn't reach",
        ),
        (
            ValueError("Unknown split"),
            "of the Hugging Face Hub as in 'hub:name/split' or 'hub:name@subset/split', got 'hub:a/b",
        ),
    ):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(datasets, "load_dataset", fails)
        with pytest.raises(ConfigError, match=re.escape(f"data.path must name a data set {told}")):
            open_source(DataConfig(path="hub:a/b/train"))
    with pytest.raises(
        ConfigError, match=r"Check the path, or write 'hub:a/b/train' for a data set of the Hugging Face Hub"
    ):
        open_source(DataConfig(path="a/b"))


def test_a_function_gives_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        "def listed():\n    return [{'prompt': 'a', 'label': 1}]\n"
        "def streamed():\n    yield {'prompt': 'b', 'label': (1, 2)}\n"
        "def wrong():\n    return 'text'\n"
        "def mixed():\n    return [{'prompt': 'a', 'label': 1}, 'b']\n"
    )
    assert open_dataset(DataConfig(rows=f"{tmp_path}/rows.py:listed")).row(0) == Row("listed row 0", "a", 1, {})
    assert open_dataset(DataConfig(rows=f"{tmp_path}/rows.py:streamed")).row(0).prompt == "b"
    with pytest.raises(ConfigError, match=r"data.rows must return rows, got str"):
        open_dataset(DataConfig(rows=f"{tmp_path}/rows.py:wrong"))
    with pytest.raises(RowError, match="mixed row 1: row must be a dict, got str"):
        open_dataset(DataConfig(rows=f"{tmp_path}/rows.py:mixed")).row(1)


def test_the_hub_is_asked_for_name_subset_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    library, asked = pytest.importorskip("datasets"), list[tuple[Any, ...]]()

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        asked.append((*arguments, options))
        return library.Dataset.from_list(ROWS)

    monkeypatch.setattr(library, "load_dataset", load_dataset)
    assert len(open_dataset(config("hub:openai/gsm8k@main/train"))) == 40
    assert len(open_dataset(config("hub:squad/validation"))) == 40
    assert asked == [("openai/gsm8k", "main", {"split": "train"}), ("squad", None, {"split": "validation"})]
    with pytest.raises(ConfigError, match="must look like 'hub:name/split'"):
        open_dataset(config("hub:squad"))


@pytest.mark.parametrize(
    ("library", "path"), [("datasets", "hub:squad/validation"), ("pyarrow", "a.parquet")], ids=["hub", "parquet"]
)
def test_a_missing_library_prints_its_install_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, path: str
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r"Install it: pip install 'rondo-rl\[data\]'"):
        open_dataset(config(path))


def test_a_missing_column_names_the_row_and_the_nearest_column(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(RowError) as raised:
        open_dataset(config(path, prompt="questoin"))
    assert str(raised.value) == (
        "a.jsonl:1 must have the column 'questoin' that data.prompt names, "
        "got 'question', 'answer', 'info'. Did you mean 'question'?"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "data.path must name files that exist"), ("", "data must have rows"), ("\n\n", "data must have rows")],
)
def test_a_missing_or_empty_data_set_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_dataset(config(tmp_path / "a.jsonl"))


def test_files_of_two_kinds_are_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"one kind at a time, got \.jsonl and \.parquet"):
        open_dataset(config(tmp_path))


def test_metadata_may_be_null_and_nothing_else_but_an_object(tmp_path: Path) -> None:
    others: dict[str, Any] = {"str": "x", "int": 0, "bool": False, "list": []}
    rows = [{"question": "a", "info": value} for value in (None, *others.values())]
    data = open_dataset(config(write_jsonl(tmp_path / "a.jsonl", rows), label=None, metadata="info"))
    assert data.row(0).metadata == {}
    for at, kind in enumerate(others, 1):
        with pytest.raises(RowError, match=f"'info' must be an object or null, got {kind}"):
            data.row(at)


def test_the_split_is_exact_disjoint_and_seeded(tmp_path: Path) -> None:
    data = open_dataset(config(write_jsonl(tmp_path / "a.jsonl", ROWS)))
    kept, held_out = data.split(7, seed=1)
    assert (len(kept), len(held_out)) == (33, 7)
    everything = prompts(kept) + prompts(held_out)
    assert sorted(everything) == sorted(prompts(data)) and len(set(everything)) == 40
    assert [prompt for prompt in prompts(data) if prompt in prompts(kept)] == prompts(kept)
    assert prompts(data.split(7, seed=1)[1]) == prompts(held_out)
    assert prompts(data.split(7, seed=2)[1]) != prompts(held_out)


def test_without_leaves_out_exactly_what_it_was_told() -> None:
    for left_out in ([], [0], [4], [0, 1, 2], [2, 3], [0, 2, 4], [0, 1, 2, 3, 4]):
        kept = Without(range(10, 15), left_out)
        assert list(kept) == [10 + i for i in range(5) if i not in left_out]
        assert kept[:2] == list(kept)[:2]


def test_evaluation_takes_what_training_never_sees(tmp_path: Path) -> None:
    settings = config(write_jsonl(tmp_path / "a.jsonl", ROWS), held_out=10, limit=30)
    train, sets = open_splits(job(settings, EvalConfig(num_prompts=6)))
    (held_out,) = sets.values()
    assert (len(train), len(held_out)) == (20, 6)
    assert not set(prompts(train)) & set(prompts(held_out))
    order = train_order(job(settings), train)
    assert sorted(order.locate(position).row for position in range(20)) == list(range(20))


def test_evaluation_takes_rows_of_its_own_where_it_has_them(tmp_path: Path) -> None:
    train = config(write_jsonl(tmp_path / "a.jsonl", ROWS))
    own = config(write_jsonl(tmp_path / "test.jsonl", ROWS))
    rows, sets = open_splits(job(train, EvalConfig(num_prompts=10, data=own)))
    evaluation = sets["held_out"]
    assert len(rows) == 40 and len(evaluation) == 10
    assert evaluation.row(0).name.startswith("test.jsonl")
    assert prompts(evaluation) != [row["question"] for row in ROWS[:10]]
    unshuffled = EvalSet(num_prompts=10, data=own.model_copy(update={"shuffle": False}))
    sets = open_splits(job(train, EvalConfig(sets={"first": unshuffled, "some": EvalSet(num_prompts=3, data=own)})))[1]
    assert list(sets) == ["first", "some"] and len(sets["some"]) == 3
    assert prompts(sets["first"]) == [row["question"] for row in ROWS[:10]]


def test_an_evaluation_takes_at_most_its_number_of_prompts_and_all_of_a_smaller_set(tmp_path: Path) -> None:
    own = config(write_jsonl(tmp_path / "test.jsonl", ROWS[:5]))
    train = config(write_jsonl(tmp_path / "a.jsonl", ROWS), held_out=3)
    sets = {"held_out": EvalSet(), "own": EvalSet(data=own), "first": EvalSet(data=own, num_prompts=2)}
    _, found = open_splits(job(train, EvalConfig(sets=sets)))
    assert {name: len(rows) for name, rows in found.items()} == {"held_out": 3, "own": 5, "first": 2}
    assert sorted(prompts(found["own"])) == [row["question"] for row in ROWS[:5]]


def test_holding_everything_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.held_out must be less than the data's rows, 40, got 40"):
        open_splits(job(config(write_jsonl(tmp_path / "a.jsonl", ROWS), held_out=40)))


def test_light_modules_import_no_torch() -> None:
    program = (
        "import sys, rondo.roles.config, rondo.roles.data.datasets, rondo.roles.data.prompts, rondo.roles.algorithms.advantages, "
        "rondo.roles.rewards.pool, rondo.comm.bus.config; "
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


PNG = b"\x89PNG"


def test_rows_of_every_source_carry_the_media_that_columns_hold(tmp_path: Path) -> None:
    media = {"media_columns": {"image": "picture", "audio": "speech"}, "apply_chat_template": True, "label": None}
    rows = [
        {"question": "What is <image>?", "picture": "1.png", "speech": None},
        {"question": "x", "picture": [], "speech": "a"},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = open_dataset(config(path, **media))
    first = data.row(0)
    assert first.media == (MediaRef("image", "1.png"),)
    assert isinstance(first.prompt, list) and first.prompt[0]["content"][1] == {"type": "image"}
    assert data.row(1).media == (MediaRef("audio", "a"),)
    write_jsonl(path, [rows[0], {"question": "What?", "picture": "1.png"}])
    with pytest.raises(RowError) as raised:
        open_dataset(config(path, **media)).row(1)
    assert str(raised.value) == (
        "a.jsonl:2 must have the column 'speech' that data.media_columns names, got 'question', 'picture'. "
        "Name the right one in data.media_columns. A row without media holds null there."
    )


def test_rows_go_by_their_kinds_where_steps_are_balanced_and_each_kind_needs_a_share(tmp_path: Path) -> None:
    media = {"media_columns": {"image": "picture", "audio": "speech"}, "apply_chat_template": True, "label": None}
    names = {"i": ("1.png", None), "a": (None, "1.wav"), "m": ("1.png", "1.wav"), "t": (None, None)}
    rows = [{"question": "?", "picture": names[kind][0], "speech": names[kind][1]} for kind in "iiiiaamt"]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    natural = config(path, **media, balance="natural", shuffle=False)
    data = open_dataset(natural)
    order = train_order(job(natural), data)
    assert ["iiiiaamt"[order.locate(at).row] for at in range(8)] == list("iaimtiai")
    shares = {"image": 1.0, "audio": 1.0, "text": 1.0}
    with pytest.raises(ConfigError, match=r"data\.balance must have a share for each kind of rows, got none for mixed"):
        train_order(job(config(path, **media, balance=shares)), data)


def test_the_bytes_of_media_in_large_parquet_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("rondo.roles.data.sources._HELD_BYTES", 1)
    size = 1 << 18
    rows = [
        {"question": str(i), "image": {"bytes": bytes([i]) * size, "path": f"{i}.png"}, "name": f"{i}.wav"}
        for i in range(48)
    ]
    for name, part in (("a", rows[:31]), ("b", rows[31:])):
        parquet.write_table(pyarrow.Table.from_pylist(part), tmp_path / f"{name}.parquet", row_group_size=10)
    pyarrow.default_memory_pool().release_unused()
    before = pyarrow.total_allocated_bytes()
    settings = {"label": None, "media_columns": {"image": "image", "audio": "name"}, "apply_chat_template": True}
    data = open_dataset(config(tmp_path, **settings))
    for i in [0, 3, 9, 10, 30, 31, 37, 38, 47, 2]:
        row = data.row(i)
        assert row.media == (MediaRef("image", bytes([i]) * size), MediaRef("audio", f"{i}.wav"))
        assert isinstance(row.prompt, list) and row.prompt[0]["content"][-1] == {"type": "text", "text": str(i)}
    assert pyarrow.total_allocated_bytes() - before < size


def test_rows_of_the_hub_keep_their_media_undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    library, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    columns = {
        "question": ["a", "b"],
        "pictures": [[{"bytes": PNG, "path": None}], []],
        "sound": [None, {"bytes": b"x", "path": "s"}],
    }
    features = library.Features(
        {"question": library.Value("string"), "pictures": library.List(library.Image()), "sound": library.Audio()}
    )
    table = pyarrow.Table.from_pydict(columns, schema=features.arrow_schema)  # as it comes from a file: encoded already
    rows = library.Dataset(library.table.InMemoryTable(table), info=library.DatasetInfo(features=features))
    monkeypatch.setattr(library, "load_dataset", lambda *_, **__: rows)
    media = {"image": "pictures", "audio": "sound"}
    data = open_dataset(config("hub:some/thing/train", label=None, media_columns=media, apply_chat_template=True))
    assert (data.row(0).media, data.row(1).media) == ((MediaRef("image", PNG),), (MediaRef("audio", b"x"),))
    assert len(data) == 2 and data.row(1).name == "hub:some/thing/train row 1"


def test_demonstrations_of_training_rows_bring_their_media(tmp_path: Path) -> None:
    rows = [{"question": f"{i}", "answer": str(i), "image": f"{i}.png"} for i in range(8)]
    data = config(write_jsonl(tmp_path / "a.jsonl", rows), media_columns={"image": "image"}, apply_chat_template=True)
    sft = SftConfig(demonstrate=f"{__file__}:shout", steps=2, batch_size=6)
    found, _ = demonstrations(job(data).model_copy(update={"sft": sft}))
    assert len(found) == 12
    for i in range(12):
        row = found.row(i)
        assert row.media == (MediaRef("image", f"{row.label[:-1]}.png"),)


def test_demonstrations_of_a_mixture_are_taken_in_an_order_without_weights(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"question": f"{i}", "answer": str(i)} for i in range(8)])
    sources = {name: SourceConfig(path=str(path), weight=1) for name in ("one", "two")}
    data = DataConfig(prompt="question", label="answer", sources=sources)
    whole = job(data).model_copy(update={"sft": SftConfig(demonstrate=shout, steps=2, batch_size=6)})
    found, _ = demonstrations(whole)
    order = order_of(whole.demonstrated(), found, 0, None)
    assert sorted(order.locate(place).row for place in range(12)) == list(range(len(found)))


def shout(prompt: Any, label: str, draw: Any) -> str:
    return f"{label}!"


def two_of_each(rows):
    return [{**row, "copy": copy} for row in rows for copy in range(2)]


def echo(prompt, label, draw):
    return f"{prompt}{label}{draw.randint(0, 9)}"


def test_a_transform_turns_the_rows_of_a_source_into_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b", "label": "2"}\n')
    data = open_dataset(DataConfig(path=str(path), transform=two_of_each))
    assert [data.row(i).prompt for i in range(len(data))] == ["a", "a", "b", "b"]
    assert data.row(2).name == "two_of_each row 2"


def test_a_row_that_cannot_be_read_costs_a_transform_that_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b", "la\n{"prompt": "c", "label": "2"}\n')
    data = open_dataset(DataConfig(path=str(path), transform=two_of_each, max_bad_rows=0.4))
    assert prompts(data) == ["a", "a", "c", "c"]
    (left_out,) = data.split(1, 0)[0].left_out
    assert left_out.startswith("rows.jsonl:2: row must be JSON, got ")
    with pytest.raises(
        Fatal,
        match=r"^sft.data.path must have at most 1 % unusable rows, got 33.3 % of 3 rows: 1 as in .rows.jsonl:2: row must be",
    ):
        open_dataset(DataConfig(path=str(path), transform=two_of_each), "sft.data")


def test_chats_in_parquet_are_those_that_were_written_though_all_messages_have_the_same_fields(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def first(rows: list[dict[str, Any]], **options: Any) -> Row:
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
        return open_dataset(DataConfig(path=str(tmp_path / "a.parquet"), apply_chat_template=True, **options)).row(0)

    truth = {"ground_truth": "2", "style": "rule"}
    dapo = {
        "data_source": "math",
        "prompt": [{"content": "1+1", "role": "user"}],
        "reward_model": truth,
        "extra_info": {"index": "a"},
    }
    row = first([dapo], label="reward_model", metadata="extra_info")
    assert (row.prompt, row.label, row.metadata) == ([{"content": "1+1", "role": "user"}], truth, {"index": "a"})
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [{"role": "user", "content": [{"type": "text", "text": "1?"}]}, {"role": "assistant", "tool_calls": [call]}]
    tools = json.dumps([{"type": "function", "function": {"name": "add"}}])
    row = first([{"messages": chat, "tools": tools}], prompt="messages", tools="tools", label=None)
    assert row.prompt[0]["content"] == [{"type": "text", "text": "1?"}] and row.tools == json.loads(tools)
    assert row.prompt[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}  # type: ignore[index]


def test_a_data_set_names_its_settings_as_the_job_does(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*ROWS, {"question": 7, "answer": ""}])
    with pytest.raises(Fatal, match=r"^sft.data.path must name files that exist, got '/nowhere/my.data.jsonl'"):
        open_dataset(config("/nowhere/my.data.jsonl"), "sft.data")
    with pytest.raises(RowError, match=r"a.jsonl:1 must have the column 'anser' that evaluation.data.label names"):
        open_dataset(config(path, label="anser"), "evaluation.data")
    with pytest.raises(RowError, match=r"a.jsonl:41: .* or name another column in sft.data.prompt"):
        open_dataset(config(path), "sft.data").first(41).row(40)


def refuse_some(prompt, label, draw):
    return prompt + {"0": "!", "2": "?"}[label]


def test_a_training_row_that_has_no_answer_costs_that_demonstration(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "0"}, {"question": 7, "answer": "0"}, {"question": "c", "answer": "1"}]
    data = config(write_jsonl(tmp_path / "a.jsonl", [*rows, {"question": "d", "answer": "2"}]))
    sft = SftConfig(demonstrate=refuse_some, steps=1, batch_size=4)
    found, _ = demonstrations(job(data).model_copy(update={"sft": sft}))
    seen = []
    for index in range(len(found)):
        try:
            seen.append(str(found.row(index).label))
        except RowError as error:
            seen.append(str(error).partition(",")[0])
    assert sorted(seen) == [
        "a!", "a.jsonl:2: 'question' must be text or a list of chat messages",
        "a.jsonl:3: sft.demonstrate must answer every row", "d?",
    ]  # fmt: skip


def fingerprints(job: JobConfig) -> dict[str, dict[str, Any]]:
    """As a run directory keeps them."""
    found = Fingerprints()
    open_splits(job, found)
    return {name: asdict(each) for name, each in found.found.items()}


def test_the_same_rows_have_the_same_fingerprint_and_other_rows_or_another_order_are_refused(tmp_path: Path) -> None:
    task = job(config(write_jsonl(tmp_path / "a.jsonl", ROWS), held_out=8))
    known = fingerprints(task)
    assert known.keys() == {"data"} and known["data"]["num_rows"] == 40 and fingerprints(task) == known
    open_splits(task, Fingerprints(known))
    others = [ROWS[::-1], ROWS[:-1], [*ROWS[:20], {**ROWS[20], "answer": "4 "}, *ROWS[21:]]]
    for other in others:
        write_jsonl(tmp_path / "a.jsonl", other)
        with pytest.raises(DataChanged) as caught:
            open_splits(task, Fingerprints(known))
        was = f"40 rows with digest {known['data']['digest'][:8]}"
        assert str(caught.value).startswith(
            f"data must have the rows that the run began with, {was}, got {len(other)} rows "
        )


def test_rows_that_are_added_behind_those_of_a_run_are_not_the_runs(tmp_path: Path) -> None:
    task = job(config(write_jsonl(tmp_path / "a.jsonl", ROWS), held_out=8))
    before, known = open_splits(task)[0], fingerprints(task)
    write_jsonl(tmp_path / "a.jsonl", [*ROWS, *ROWS])
    assert prompts(open_splits(task, Fingerprints(known))[0]) == prompts(before)


def test_every_source_has_a_fingerprint_that_another_process_finds_too(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "rows.py").write_text(
        "def ordered():\n    return [{'question': str(i), 'answer': {'a', 'b', i}, 'n': 1 << 70} for i in range(30)]\n\n"
        "def unordered():\n    return [{'question': q, 'answer': q} for q in set('abcdefghijklmnop')]\n"
    )
    sources = {
        "jsonl": config(write_jsonl(tmp_path / "a.jsonl", ROWS)), "parquet": config(tmp_path / "a.parquet"),
        "ordered": DataConfig(rows=f"{tmp_path}/rows.py:ordered", prompt="question", label="answer"),
        "unordered": DataConfig(rows=f"{tmp_path}/rows.py:unordered", prompt="question", label="answer"),
    }  # fmt: skip
    code = (
        "import json, sys\nfrom rondo.roles.config import DataConfig\nfrom rondo.roles.data.datasets import open_dataset\n"
        "for text in sys.argv[1:]:\n    print(open_dataset(DataConfig(**json.loads(text))).fingerprint().digest)\n"
    )
    command = [sys.executable, "-c", code, *(each.model_dump_json() for each in sources.values())]
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found.append(dict(zip(sources, done.stdout.split(), strict=True)))
    same = {name for name in sources if found[0][name] == found[1][name]}
    assert same == {"jsonl", "parquet", "ordered"}


def test_rows_of_a_file_that_is_replaced_or_removed_are_those_it_had(tmp_path: Path) -> None:
    data = open_dataset(config(write_jsonl(tmp_path / "a.jsonl", ROWS)))
    write_jsonl(tmp_path / "b.jsonl", ROWS[::-1]).rename(tmp_path / "a.jsonl")
    assert data.row(3).prompt == "3 + 3?"
    (tmp_path / "a.jsonl").unlink()
    assert prompts(data) == [row["question"] for row in ROWS]


def test_a_file_that_is_written_to_gives_the_rows_it_had_or_an_error_of_each_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    data = open_dataset(config(path))
    with path.open("a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    assert prompts(data) == [row["question"] for row in ROWS]  # its rows are where they were
    changed = [{**row, "answer": row["answer"][::-1]} for row in ROWS]
    text = "".join(json.dumps(row) + "\n" for row in changed)
    with path.open("r+") as file:
        file.write(text)
    os.utime(path, ns=(1, 1))  # a clock too coarse to show that it was written to again would hide it
    with pytest.raises(RowError) as caught:
        data.row(3)
    assert str(caught.value) == (
        f"a.jsonl:4: row must be read as when {path} was opened, got another text. "
        "Restore the file; a run reads its data until it ends"
    )


def test_more_files_than_stay_open_are_read_by_name_and_missed_when_they_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rondo.roles.data.opening.MOST_OPEN", 1)
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"{name}.jsonl", ROWS)
    data = open_dataset(config(tmp_path))
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").unlink()
    assert data.row(3).prompt == "3 + 3?"
    with pytest.raises(RowError, match=r"b.jsonl:1: row must be read as when .*b.jsonl was opened, got No such file"):
        data.row(40)


class Lazy(list[dict[str, Any]]):
    """Rows that are made as they are read, one of which cannot be."""

    def __getitem__(self, index: Any) -> Any:
        return {"prompt": str(1 // (index - 2)), "label": ""}


def lazy() -> Lazy:
    return Lazy([{}] * 5)


def test_whatever_a_row_raises_as_it_is_read_is_an_error_of_that_row() -> None:
    data = open_dataset(DataConfig(rows=lazy))
    with pytest.raises(RowError) as caught:
        data.row(2)
    assert str(caught.value).startswith("lazy row 2: row must be read without errors, got ZeroDivisionError: ")
    assert data.row(3).prompt == "1"


def test_a_first_row_that_cannot_be_used_costs_that_row(tmp_path: Path) -> None:
    data = open_dataset(config(write_jsonl(tmp_path / "a.jsonl", [{"question": 1, "answer": ""}, *ROWS])))
    assert data.row(1).prompt == "0 + 0?"
