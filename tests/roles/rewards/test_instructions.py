"""Instructions that a program can check: the published cases of IFEval and IFBench, and what a row must say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nltk
import pytest

from benchmarks.rewards_cases import Case
from benchmarks.rewards_instructions import IFBENCH, IFEVAL
from rondo.roles.rewards.hub import ifbench, ifeval, instructions
from rondo.roles.rewards.scores import RewardError
from rondo.runtime.errors import ConfigError

pytestmark = pytest.mark.usefixtures("language_data")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage of all that ran before in this process may be collected within a check."""
    monkeypatch.setattr(instructions, "_PROCESSOR_S", 60.0)


def scored(function: Any, case: Case, prompt: str = "", **args: Any) -> dict[str, Any]:
    return function(case.response, None, prompt=prompt, metadata=case.metadata, **args)


@pytest.mark.parametrize(("function", "cases"), [(ifeval, IFEVAL), (ifbench, IFBENCH)])
def test_each_instruction_is_followed_where_its_source_says_so(function: Any, cases: list[Case]) -> None:
    assert [case for case in cases if scored(function, case)["score"] != case.theirs] == []


def row(*names: str, kwargs: Any = None) -> dict[str, Any]:
    return {"instruction_id_list": list(names), "kwargs": [{}] * len(names) if kwargs is None else kwargs}


COMMA, LOWER, QUOTED = "punctuation:no_comma", "change_case:english_lowercase", "startend:quotation"


def test_every_instruction_counts_or_the_part_that_is_followed() -> None:
    case = Case("the response is english, in lower case", None, 0, row(COMMA, LOWER))
    assert scored(ifeval, case) == {"score": 0.0, "followed": {COMMA: False, LOWER: True}}
    assert scored(ifeval, case, every=False)["score"] == 0.5


def test_loosely_the_first_and_last_line_and_asterisks_may_be_left_out_and_a_thought_never_counts() -> None:
    case = Case('Sure, here it is:\n"no commas at all"\nBye', None, 0, row(QUOTED))
    assert (scored(ifeval, case)["score"], scored(ifeval, case, loose=True)["score"]) == (0, 1)
    assert scored(ifeval, Case("<think>well, a, b</think>yes", None, 0, row(COMMA)))["score"] == 1
    assert scored(ifeval, Case("<think>well", None, 0, row(COMMA)))["score"] == 0
    assert scored(ifeval, Case("  ", None, 0, row(COMMA)))["score"] == 0


def test_columns_of_other_rows_are_left_out_and_whole_numbers_of_a_table_are_whole() -> None:
    kwargs = [{"num_bullets": 1.0, "language": None, "keywords": None}]
    assert (
        scored(ifeval, Case("* one", None, 0, row("detectable_format:number_bullet_lists", kwargs=kwargs)))["score"]
        == 1
    )


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "must have instruction_id_list and as many kwargs in its metadata"),
        (row(COMMA, kwargs=[{}, {}]), "as many kwargs"),
        (row("no:such"), "must name instructions of its own, got 'no:such'"),
        (row("keywords:existence"), "kwargs of keywords:existence must have keywords, got"),
        (row("length_constraints:number_words", kwargs=[{"num_words": 7}]), "must have relation, got"),
    ],
)
def test_a_row_that_does_not_say_what_is_asked_fails_with_what_it_must_say(metadata: Any, says: str) -> None:
    with pytest.raises(RewardError, match=says):
        scored(ifeval, Case("yes", None, 0, metadata))


def test_a_checker_that_takes_too_long_or_raises_says_that_nothing_was_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Endless:
        def __init__(self, name: str) -> None:
            self.name = name

        def build_description(self) -> None: ...

        def get_instruction_args_keys(self) -> list[str]:
            return []

        def check_following(self, response: str) -> bool:
            while self.name == "endless":
                pass
            raise IndexError(response)

    monkeypatch.setattr(instructions, "_PROCESSOR_S", 0.05)
    monkeypatch.setattr(instructions, "_checkers", lambda _: {"endless": Endless, "raises": Endless})
    assert scored(ifeval, Case("yes", None, 0, row("endless", "raises")))["followed"] == {
        "endless": False,
        "raises": False,
    }


def test_without_its_package_or_its_data_it_says_what_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    instructions._checkers.cache_clear()
    with pytest.raises(
        ConfigError, match=r"nltk's punkt_tab must be there .* Run: python -m nltk\.downloader punkt_tab"
    ):
        scored(ifeval, Case("yes", None, 0, row(COMMA)))
    monkeypatch.setitem(sys.modules, "if_verifiable.common", None)
    monkeypatch.delitem(sys.modules, instructions.__name__)
    with pytest.raises(ConfigError, match=r"Run: pip install 'rondo-rl\[instructions\]'"):
        __import__(instructions.__name__)
