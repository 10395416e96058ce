"""Mixtures: each source in its share, with passes and settings of its own; the order is a function of the position."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from rondo.roles.config import DataConfig, JobConfig, ModelConfig, RewardConfig, RolloutConfig, SourceConfig
from rondo.roles.data.cursor import Cursor, Mixture, Order
from rondo.roles.data.datasets import open_dataset, open_splits, train_order
from rondo.roles.data.fingerprints import DataChanged, Fingerprints
from rondo.roles.streams import SOURCE, base_columns
from rondo.roles.training.step_totals import StepTotals
from rondo.runtime.errors import Fatal


def files(folder: Path, **sizes: int) -> dict[str, SourceConfig]:
    """A source of so many rows by each name."""
    for name, size in sizes.items():
        rows = [{"prompt": f"{name} {i}", "label": i} for i in range(size)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: SourceConfig(path=str(folder / f"{name}.jsonl")) for name in sizes}


def weighed(sources: dict[str, SourceConfig], **weights: float) -> dict[str, SourceConfig]:
    return {name: each.model_copy(update={"weight": weights[name]}) for name, each in sources.items()}


def job(data: DataConfig, **options: Any) -> JobConfig:
    return JobConfig(**{
        "name": "mixed", "seed": 3, "num_steps": 9, "model": ModelConfig(path="unused"), "data": data,
        "reward": RewardConfig(function="m:f"),
        "rollout": RolloutConfig(prompts_per_step=4, samples_per_prompt=2, max_prompt_tokens=8, max_new_tokens=8),
    } | options)  # fmt: skip


def taken(config: JobConfig, start: int, end: int) -> list[str]:
    """The prompts at these positions, as a process that has just opened the data takes them."""
    rows, _ = open_splits(config)
    cursor = Cursor(train_order(config, rows), start)
    return [rows.row(place.row).prompt for place in itertools.islice(cursor, end - start)]


def test_every_stretch_of_sources_without_weights_holds_their_kinds_of_rows_in_their_shares(tmp_path: Path) -> None:
    sources = files(tmp_path, said=30, seen=10)
    pictures = [{"prompt": f"seen {i}", "label": i, "image": f"{i}.png"} for i in range(10)]
    (tmp_path / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pictures))
    sources["seen"] = sources["seen"].model_copy(update={"media_columns": {"image": "image"}})
    config = job(DataConfig(sources=sources, balance={"text": 3, "image": 1}, apply_chat_template=True), media={})
    rows, _ = open_splits(config)
    places = [train_order(config, rows).locate(position) for position in range(40)]
    for at in range(0, 40, 4):
        assert Counter(rows.row(place.row).source for place in places[at : at + 4]) == {"said": 3, "seen": 1}


def test_every_stretch_holds_each_source_in_its_share_and_each_goes_through_passes_of_its_own(tmp_path: Path) -> None:
    sources = weighed(files(tmp_path, big=40, small=3), big=3, small=1)
    prompts = taken(job(DataConfig(sources=sources)), 0, 400)
    for at in range(0, 400, 8):
        assert Counter(prompt.split()[0] for prompt in prompts[at : at + 8]) == {"big": 6, "small": 2}
    small = [prompt for prompt in prompts if prompt.startswith("small")]
    passes = [small[at : at + 3] for at in range(0, 99, 3)]
    assert all(len(set(each)) == 3 for each in passes) and len({tuple(each) for each in passes}) > 3
    big = [prompt for prompt in prompts if prompt.startswith("big")]
    assert [len(set(big[at : at + 40])) for at in range(0, 280, 40)] == [40] * 7


@pytest.mark.parametrize("stop", [0, 1, 57, 10_001])
def test_a_resumed_run_takes_the_rows_that_the_uninterrupted_one_would(tmp_path: Path, stop: int) -> None:
    config = job(DataConfig(sources=weighed(files(tmp_path, a=11, b=5, c=2), a=0.6, b=0.3, c=0.1), held_out=4))
    whole = taken(config, 0, stop + 60)
    resumed = JobConfig.from_resolved(json.loads(config.model_dump_json()))  # as the next process reads it
    assert taken(resumed, stop, stop + 60) == whole[stop:]


def test_shares_are_whole_rows_of_a_stretch_and_a_light_source_is_there() -> None:
    mixture = Mixture({"a": range(7), "b": range(7, 9), "c": range(9, 10)}, {"a": 1.0, "b": 1.0, "c": 2e-4})
    found = Counter(mixture.at(position)[0] for position in range(10_000))
    assert sum(found.values()) == 10_000 and found["c"] == 1 and abs(found["a"] - found["b"]) <= 1
    order = Order(10, seed=1, mixture=mixture)
    assert {order.locate(position).row for position in range(20_000)} == set(range(10))


def test_without_weights_every_row_of_all_sources_comes_once_in_a_pass(tmp_path: Path) -> None:
    config = job(DataConfig(sources=files(tmp_path, a=6, b=4), num_passes=2))
    prompts = taken(config, 0, 20)
    assert len(set(prompts[:10])) == len(set(prompts[10:])) == 10 and prompts[:10] != prompts[10:]


def test_rows_have_the_settings_of_their_source(tmp_path: Path) -> None:
    sources = {
        "maths": SourceConfig(rows=f"{__file__}:maths", prompt="q", label="a", system="Count.", reward="exact"),
        "words": SourceConfig(path=files(tmp_path, words=2)["words"].path, max_new_tokens=4),
    }
    reward = RewardConfig(function={"exact": "exact", "*": "f1"}, by="kind")
    config = job(DataConfig(sources=sources, apply_chat_template=True, shuffle=False), reward=reward)
    rows, _ = open_splits(config)
    maths, words = rows.row(0), rows.row(1)
    assert (maths.source, maths.label, maths.metadata) == ("maths", "2", {"kind": "exact"})
    assert maths.prompt == [{"role": "system", "content": "Count."}, {"role": "user", "content": "1+1"}]
    assert (words.source, words.prompt, words.label, words.metadata) == ("words", "words 0", 0, {})
    assert SOURCE in base_columns(config)


def maths() -> list[dict[str, str]]:
    return [{"q": "1+1", "a": "2"}]


@pytest.mark.parametrize(
    ("cut", "numbers"), [("[2:5]", [2, 3, 4]), ("[-2:]", [8, 9]), ("[:1]", [0]), ("[8:99]", [8, 9])]
)
def test_a_path_may_name_some_of_its_rows(tmp_path: Path, cut: str, numbers: list[int]) -> None:
    path = files(tmp_path, a=10)["a"].path
    rows = open_dataset(DataConfig(path=f"{path}@{cut}"))
    assert [rows.row(at).label for at in range(len(rows))] == numbers
    assert rows.row(0).name == f"a.jsonl:{numbers[0] + 1}"


@pytest.mark.parametrize(
    ("cut", "message"), [("[5:5]", "data must have rows, got none"), ("[1:2:3]", "must end with rows as in")]
)
def test_rows_that_a_path_does_not_have_are_refused(tmp_path: Path, cut: str, message: str) -> None:
    with pytest.raises(Fatal, match=message):
        open_dataset(DataConfig(path=f"{files(tmp_path, a=10)['a'].path}@{cut}"))


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ((1, 0), {}, "greater than 0"),
        ((1, float("nan")), {}, "finite number"),
        ((1, None), {}, "must all have a weight, or none, got none of b"),
        ((1, 1e-6), {}, "weight must be at least 1/10000 of all weights"),
        ((1, 1), {"num_passes": 1}, "num_passes must be None with weights"),
        ((1, 1), {"balance": "natural"}, "balance must be None with weights"),
        ((1, 1), {"path": "x.jsonl"}, "path must be None with data.sources"),
    ],
)
def test_weights_and_settings_that_make_no_order_are_refused(
    weights: tuple[Any, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(sources={n: {"path": "x.jsonl", "weight": w} for n, w in zip("ab", weights, strict=True)}, **options)


def test_a_source_is_refused_by_its_name_before_anything_starts(tmp_path: Path) -> None:
    good = files(tmp_path, a=4, b=1)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(Fatal, match=r"data\.sources\.none must have rows, got none in .*empty\.jsonl"):
        open_splits(job(DataConfig(sources=good | {"none": SourceConfig(path=str(tmp_path / "empty.jsonl"))})))
    with pytest.raises(ValueError, match=r"must have the column 'question' that data\.sources\.b\.prompt names"):
        open_splits(job(DataConfig(sources=good | {"b": good["b"].model_copy(update={"prompt": "question"})})))
    config = job(DataConfig(sources=weighed(good, a=1, b=1), held_out=4))
    rows, _ = open_splits(config)
    with pytest.raises(Fatal, match=r"must have rows to train on behind data\.held_out 4, got none"):
        train_order(config, rows)
    with pytest.raises(ValidationError, match=r"data\.sources\.a\.reward must be one of several, got 'math'"):
        job(DataConfig(sources={"a": SourceConfig(path="a.jsonl", reward="math")}))
    with pytest.raises(ValidationError, match=r"data\.sources\.a\.max_new_tokens must be at most"):
        job(DataConfig(sources={"a": SourceConfig(path="a.jsonl", max_new_tokens=9)}))


def test_other_rows_of_a_source_are_told_by_its_name_and_added_ones_are_not_the_runs(tmp_path: Path) -> None:
    config = job(DataConfig(sources=files(tmp_path, a=5, b=5)))
    known = Fingerprints()
    open_splits(config, known)
    saved = {name: {"num_rows": each.num_rows, "digest": each.digest} for name, each in known.found.items()}
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"prompt": "a 5", "label": 5}\n')
    assert len(open_splits(config, Fingerprints(saved))[0]) == 10
    (tmp_path / "b.jsonl").write_text((tmp_path / "b.jsonl").read_text().replace("b 3", "changed"))
    with pytest.raises(DataChanged, match=r"data\.sources\.b must have the rows that the run began with"):
        open_splits(config, Fingerprints(saved))


def test_reward_and_length_are_told_of_each_source() -> None:
    def row(source: int, reward: float, response: int) -> Any:
        arrays = {"tokens": np.zeros(9, np.int32), SOURCE: np.array([source], np.uint8)}
        return SimpleNamespace(
            media=None,
            columns=("tokens",),
            array=arrays.__getitem__,
            reward=reward,
            response=response,
            finish="stop",
            part=0,
        )

    totals = StepTotals(0, ["maths", "words", "none"])
    totals.add([row(0, 1.0, 2), row(0, 0.0, 4), row(1, 0.5, 3)], [])
    found = totals.of(totals.sums())
    assert (found["reward_mean_maths"], found["num_samples_maths"], found["response_tokens_maths"]) == (0.5, 2, 3.0)
    assert found["reward_mean_words"] == 0.5 and not [name for name in found if name.endswith(("_none", "_text"))]
