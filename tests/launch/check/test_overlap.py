"""Overlap: prompts of evaluation sets that are trained on are told, and what prompts merely have in common is not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rondo.launch.check import child, overlap
from rondo.launch.check.findings import Report
from rondo.launch.check.overlap import overlaps
from rondo.launch.config import load
from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import Dataset, open_dataset
from tests.launch import configs


def data(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Dataset:
    path.write_text("".join(json.dumps({"label": ""} | row) + "\n" for row in rows))
    return open_dataset(DataConfig(path=str(path), **settings))


def prompts(path: Path, texts: list[str]) -> Dataset:
    return data(path, [{"prompt": text} for text in texts])


def story(seed: int, num_words: int = 20) -> str:
    return " ".join(random.Random(seed).choices([f"word{number}" for number in range(500)], k=num_words))


def test_near_is_what_comparing_every_prompt_with_every_row_finds(tmp_path: Path) -> None:
    draw = random.Random(1)
    train = ["Think of it step by step: " + story(seed, draw.randrange(3, 40)) for seed in range(400)]
    asked = []
    for text in draw.choices(train, k=300):
        words = text.split()
        for _ in range(draw.randrange(4)):
            words[draw.randrange(6, len(words))] = f"other{draw.randrange(9)}"
        asked.append(" ".join(words))
    found = overlaps(prompts(tmp_path / "train.jsonl", train), {"e": prompts(tmp_path / "asked.jsonl", asked)})["e"]

    def shingles(text: str) -> set[tuple[str, ...]]:
        words = text.replace(":", "").lower().split()
        return {each for at in range(len(words) - 4) if not set(each := tuple(words[at : at + 5])) <= template}

    template = {"think", "of", "it", "step", "by"}
    known = list(map(shingles, train))
    exact = [at for at, text in enumerate(asked, 1) if text in train]
    near = [
        at
        for at, mine in enumerate(map(shingles, asked), 1)
        if at not in exact and len(mine) >= 3 and any(len(mine & each) >= 0.8 * len(mine | each) for each in known)
    ]
    assert len(exact) > 50 and len(near) > 10
    assert [name for name, _ in found.exact] == [f"asked.jsonl:{at}" for at in exact]
    assert [name for name, _ in found.near] == [f"asked.jsonl:{at}" for at in near]
    assert (found.num_prompts, found.num_rows) == (300, 400)


def test_case_spaces_and_punctuation_are_the_same_prompt_and_numbers_and_signs_another(tmp_path: Path) -> None:
    told = "A farmer has 12 cows and buys 30 + 7 more, of which he sells a third. How many are left?"
    train = prompts(tmp_path / "train.jsonl", [told, *map(story, range(9))])
    for other, exact, near in (
        (told.upper().replace(" ", "  ").replace("?", " !"), 1, 0),
        (told.replace("left", "there"), 0, 1),
        (told.replace("12", "13").replace("30 + 7", "30 - 7").replace("third", "half"), 0, 0),
    ):
        found = overlaps(train, {"e": prompts(tmp_path / "asked.jsonl", [other])})["e"]
        assert (len(found.exact), len(found.near)) == (exact, near), other
    signs = prompts(tmp_path / "signs.jsonl", ["小明有十二个苹果，吃了三个，又买了五个，还剩几个？"])
    alike = prompts(tmp_path / "alike.jsonl", ["小明有十二个苹果 吃了三个 又买了五个 还剩几个呢？"])
    assert len(overlaps(signs, {"e": alike})["e"].near) == 1


def test_what_many_prompts_have_in_common_makes_none_of_them_the_same(tmp_path: Path) -> None:
    frame = "Look at the problem with care, think step by step and write the result of {} in a box at the very end."
    train = prompts(tmp_path / "train.jsonl", [frame.format(f"{a} times {a + 5}") for a in range(60)])
    asked = prompts(tmp_path / "asked.jsonl", [frame.format("7 times 12"), frame.format("77 times 12")])
    found = overlaps(train, {"e": asked})["e"]
    assert found.exact == [("asked.jsonl:1", "train.jsonl:8")] and found.near == []
    # Words that all rows have alone say nothing: the label does.
    games = data(tmp_path / "games.jsonl", [{"prompt": "Play on", "label": str(at)} for at in range(9)])
    asked = data(tmp_path / "asked.jsonl", [{"prompt": "Play on!", "label": label} for label in ("3", "10")])
    assert overlaps(games, {"e": asked})["e"].exact == [("asked.jsonl:1", "games.jsonl:4")]


def test_the_same_text_about_other_media_is_another_prompt(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"media_columns": {"image": "image"}, "apply_chat_template": True}
    rows = [
        {"prompt": "<image> How many people in the picture wear a hat of any kind?", "image": name} for name in "ab"
    ]
    rows.append(
        {"prompt": [{"role": "user", "content": "Which of the people in the picture is the tallest?"}], "image": "a"}
    )
    train = data(tmp_path / "train.jsonl", rows, **settings)
    asked = data(tmp_path / "asked.jsonl", [{**rows[0], "image": "c"}, rows[1], {**rows[2], "image": "b"}], **settings)
    assert overlaps(train, {"e": asked})["e"].exact == [("asked.jsonl:2", "train.jsonl:2")]


def test_of_columns_with_bytes_only_those_of_the_same_text_are_read(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names, media = [story(at) for at in range(5)], [b"\x89PNG%d" % at for at in range(5)]
    for name, pictures in (("train", media), ("asked", [*media[:2], *[b"other"] * 3])):
        table = pyarrow.table(
            {"prompt": names, "label": [""] * 5, "image": [{"bytes": each, "path": None} for each in pictures]}
        )
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    settings: dict[str, Any] = {"media_columns": {"image": "image"}, "apply_chat_template": True}
    train, asked = (
        open_dataset(DataConfig(path=str(tmp_path / f"{name}.parquet"), **settings)) for name in ("train", "asked")
    )
    assert isinstance(train.prompt(0), str)
    assert [name for name, _ in overlaps(train, {"e": asked})["e"].exact] == [
        "asked.parquet row 0",
        "asked.parquet row 1",
    ]


def test_more_rows_than_the_search_may_take_are_sampled_and_rows_that_cannot_be_read_are_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": story(at)} for at in range(50)]
    train, asked = data(tmp_path / "train.jsonl", [*rows, {"prompt": None}]), data(tmp_path / "asked.jsonl", rows)
    assert (found := overlaps(train, {"e": asked})["e"]).num_rows == 50 and len(found.exact) == 50
    monkeypatch.setattr(overlap, "_MOST_ROWS", 11)
    assert (found := overlaps(train, {"e": asked})["e"]).num_rows == 10 and len(found.exact) == 10
    assert overlaps(train, {"e": asked}, most_s=0.0)["e"] == overlap.Overlap(0, 0, [], [])


def test_a_check_tells_prompts_of_evaluation_sets_that_are_trained_on(tmp_path: Path) -> None:
    told = [{"prompt": f"{story(at)} {at}+1=", "label": ""} for at in range(40)]
    other = [{"prompt": f"{story(at + 50)} {at}+1=", "label": ""} for at in range(7)]
    nearly = [{**each, "prompt": each["prompt"].replace("=", "?=").replace("+1", "+2")} for each in told[4:5]]
    for name, rows in (("train", told), ("known", [*other, *told[:2], *nearly]), ("new", other)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {
        name: {"data": {"path": str(tmp_path / f"{name}.jsonl"), "shuffle": False}, "num_prompts": 7}
        for name in ("known", "new")
    }
    sets["known"]["num_prompts"] = 10
    given = ["data.rows=null", f"data.path={tmp_path}/train.jsonl", "data.held_out=0", f"evaluation={{'sets': {sets}}}"]
    report = Report()
    child.look_at_data(load(configs.write(tmp_path), given), report, [], [], compares=True)
    told_of = [(each.level, each.text) for each in report.findings if "of evaluation.sets" in each.text]
    assert told_of == [
        ("note", "3 of 10 prompts of evaluation.sets.known are trained on, 2 word for word and 1 nearly, as those of data: "
         "known.jsonl:8 is train.jsonl:1 and known.jsonl:10 is nearly train.jsonl:5. Leave them out of one of the two, or read "
         "these rewards as those of prompts that the policy has seen"),
        ("ok", "none of 7 prompts of evaluation.sets.new is among those of data"),
    ]  # fmt: skip
