"""What the check says of a judge: whether it takes the questions, what it holds, and what one at a URL answers."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rondo.launch.check.child import scorer
from rondo.launch.check.estimate import held_by
from rondo.launch.check.findings import Report
from rondo.launch.check.genrm import look_at_judge, try_judge, try_scorer
from rondo.launch.config import RunConfig, load, override
from rondo.models.tiny import qwen3
from rondo.roles.data.datasets import Row
from tests.launch import configs
from tests.roles.rewards.judge import judging

ROWS = [Row("rows:0", "1+1", "2", {})]


def config_of(folder: Path, *sets: str, groups: str = "fully_async()", **judge: Any) -> RunConfig:
    told = {"prompt": "{prompt}{response}", "max_prompt_tokens": 48, "max_new_tokens": 16} | judge
    return load(configs.write(folder, ("role_groups=fully_async()", f"role_groups={groups}, genrm={told!r}")), sets)


def own(folder: Path, judge: Path, *sets: str, **settings: Any) -> RunConfig:
    model = {"path": str(judge)}
    return config_of(folder, *sets, groups="fully_async(genrm_replicas=1)", model=model, **settings)


def said(config: RunConfig) -> list[tuple[str, str]]:
    report = Report()
    for name, judge in config.judges.items():
        if judge.model is not None:
            report.look(functools.partial(look_at_judge, config, name, Path("unused"), report), f"{name}.model")
        tries = try_judge if name == "genrm" else try_scorer
        report.look(functools.partial(tries, config, report, ROWS), name)
    return [(finding.level, finding.text) for finding in report.findings]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    qwen3.build(folder, hidden_size=32, num_layers=1, max_positions=64)
    return folder


def test_a_judge_of_the_runs_own_is_counted(judge: Path, tmp_path: Path) -> None:
    config, report = own(tmp_path, judge, "genrm.num_slots=4"), Report()
    look_at_judge(config, "genrm", tmp_path, report)
    group = config.group_of("genrm")
    assert group is not None and report.facts.shape is None and report.facts.judge_paths == {"genrm": str(judge)}
    held = held_by(config, None, report.facts.traced, group)  # type: ignore[arg-type]
    assert held is not None
    [sizes] = held
    assert sizes.parts["weights of the judge"] == 4 * report.facts.judge_parameters
    assert sizes.parts["key-value cache of the judge"] % (4 * 64) == 0  # slots x tokens


def test_a_reward_model_is_traced_with_the_longest_answers_and_takes_those_of_the_run(
    judge: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1).save_pretrained(tmp_path / "rm")
    AutoTokenizer.from_pretrained(judge).save_pretrained(tmp_path / "rm")
    config, report = scored(tmp_path), Report()
    look_at_judge(config, "scorer", tmp_path, report)
    assert report.facts.traced == {} and [each.level for each in report.findings] == ["ok"]
    found = scorer(config, report).of("scorer")
    shard = scorer(config, report).of("scorer", 2)
    buffers = found.parts["parameters"] - 4 * report.facts.judge_parameters
    assert 0 <= buffers < 64
    assert shard.parts["parameters"] <= found.parts["parameters"] / 2 + 4 * 64
    short = scored(tmp_path, "scorer.max_prompt_tokens=10")
    [text] = [text for level, text in said(short) if level == "error"]
    assert re.search(r"must hold rows:0 with the longest response, \d \+ 8, got 10", text), text
    assert [level for level, _ in said(override(short, ["scorer.too_long=cut"]))] == ["ok"]


def scored(folder: Path, *sets: str) -> RunConfig:
    told = {"model": {"path": str(folder / "rm")}, "max_prompt_tokens": 48}
    change = ("role_groups=fully_async()", f"role_groups=fully_async(scorer_replicas=1), scorer={told!r}")
    return load(configs.write(folder, change), sets)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_new_tokens": 32}, "must be at most the positions of the judge, 64, got 48 + 32 = 80"),
        ({"max_prompt_tokens": 16}, "genrm.max_prompt_tokens must hold the question of rows:0 with 1 of the longest"),
        (
            {"prompt": None, "template": f"{__name__}:with_picture"},
            "must ask with text alone .* got image_url for rows:0",
        ),
        ({"prompt": "{metadata[gone]}{response}"}, "genrm must make a question of rows:0, got KeyError"),
    ],
)
def test_questions_that_a_judge_cannot_take_are_refused(
    judge: Path, tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    [text] = [text for level, text in said(own(tmp_path, judge, **settings)) if level == "error"]
    assert re.search(words.replace("+", r"\+"), text)


def with_picture(response: Any, label: Any, *, prompt: Any, metadata: Any) -> Any:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://picture"}}]}]


def test_a_judge_at_a_url_is_asked(tmp_path: Path) -> None:
    says = iter(("no", "well"))
    with judging(lambda _: next(says)) as (url, asked):
        config = config_of(tmp_path, "genrm.deadline_s=0.05", urls=(url,))
        judge = config.genrm
        assert judge is not None
        patient = config.model_copy(update={"genrm": judge.model_copy(update={"deadline_s": 60.0})})
        [(level, text)] = said(patient)
        assert level == "ok" and text.endswith("and gives an empty response 0") and len(asked) == 1
        [(level, text)] = said(patient)
        assert level == "note" and "it says no verdict: " in text
    [(level, text)] = said(config)
    assert level == "error" and "a judge must answer within 0.05 s" in text
