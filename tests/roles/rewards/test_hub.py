"""The reward hub: its checkers say what their sources say, and none is held up by an answer."""

from __future__ import annotations

import re
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.rewards import as_published
from benchmarks.rewards_cases import DIFFERS, PUBLISHED, Case
from benchmarks.rewards_hostile import hostile
from rondo.roles.config.data import RewardConfig
from rondo.roles.rewards import hub
from rondo.roles.rewards.hub import symbolic
from rondo.roles.rewards.scores import RewardError
from rondo.roles.rewards.worker import open_function
from rondo.runtime.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs" / "rewards.md"


def scored(name: str, response: str, label: Any, metadata: dict[str, Any] | None = None, **args: Any) -> float:
    value = getattr(hub, name)(response, label, prompt="", metadata=metadata or {}, **args)
    return float(value["score"] if isinstance(value, dict) else value)


def differs(name: str, case: Case) -> bool:
    try:
        score = scored(name, case.response, case.label, case.metadata, **as_published(name), **case.args)
    except RewardError:  # a label that no answer can equal
        score = 0.0
    return score != pytest.approx(case.theirs)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage of all that ran before in this process may be collected within a comparison."""
    monkeypatch.setattr(symbolic, "_PROCESSOR_S", 60.0)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_checker_says_what_its_source_says_but_where_the_table_says_why_not(name: str) -> None:
    assert [case.response for case in PUBLISHED[name] if differs(name, case)] == list(DIFFERS.get(name, {}))


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    ("name", "response", "label", "args", "score"),
    [
        ("exact", " 72\n", "72", {}, 1),
        ("exact", "72", 72, {}, 1),
        ("exact", "it is 72", "72", {}, 0),
        ("exact", "yes", ["no", "yes"], {}, 1),
        ("exact", "<answer>7</answer> <answer> 8 </answer>", "8", {"inside": "answer"}, 1),
        ("exact", "8", "8", {"inside": "answer"}, 0),
        ("boxed", "\\boxed{1}, no: \\fbox{ \\frac{1}{2} }", "\\frac{1}{2}", {}, 1),
        ("boxed", "\\boxed{72", "72", {}, 0),
        ("f1", "So <answer>the cat</answer>", ["dog", "cat"], {"inside": "answer"}, 1),
        ("f1", "cat", "cat", {"inside": "answer"}, 0),
        ("gsm8k", "#### 72", "6 * 12 = <<6*12=72>>72\n#### 72", {}, 1),
        ("math", "\\boxed{0.5}", ["7", "\\frac{1}{2}"], {}, 1),
        ("tags", "<think>x</think>\n<answer>y</answer>\n", None, {}, 1),
        ("tags", "<think>x</think><answer></answer>", None, {}, 0),
        ("tags", "<think>x</think>y<answer>y</answer>", None, {}, 0),
        ("tags", "<think><think>x</think><answer>y</answer>", None, {}, 0),
        ("tags", "<think>x</think><answer>y</answer><answer>z</answer>", None, {}, 0),
        ("tags", "<a>x</a>", None, {"names": ["a"]}, 1),
        ("format", "yes\nno", None, {"pattern": "y.*o"}, 1),
        ("format", "yes no?", None, {"pattern": "y.*o"}, 0),
    ],
)
def test_what_text_and_form_are_worth(name: str, response: str, label: Any, args: dict[str, Any], score: float) -> None:
    assert scored(name, response, label, **args) == score


def test_chance_is_the_same_for_the_same_row_and_response_and_as_often_as_it_is_said() -> None:
    drawn = [scored("random", str(n), "72", chance=0.3) for n in range(2000)]
    assert drawn == [scored("random", str(n), "72", chance=0.3) for n in range(2000)]
    assert 0.27 < sum(drawn) / 2000 < 0.33


LARGE = (
    "9^{9^{9^9}}", "((9^{999})^{999})^{999}", "2^{99999*99999}", "(10^9)!", "9!!!", "99999999!", "\\binom{99999999}{4999999}",
    "{" * 5000 + "7" + "}" * 5000, "7" * 100_000, "\\frac" * 20_000, "\x00\x1b[31m72", "\ud800", "10^{99999999}",
)  # fmt: skip


_FALLS_AGAIN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Where the limit falls into a destructor or a callback of the garbage collector, Python says so and goes on."""


@_FALLS_AGAIN
@pytest.mark.parametrize("form", ["\\boxed{{{}}}", "It is ${}$", "{}"])
def test_what_is_too_large_to_compute_is_not_equal_at_once(form: str) -> None:
    begun = time.thread_time()
    assert [answer[:20] for answer in LARGE if scored("math", form.format(answer), "72")] == []
    assert time.thread_time() - begun < 60
    assert scored("math", "\\boxed{9^{9^{9^9}}}", "9^{9^{9^9}}") == 1  # the same text


@_FALLS_AGAIN
@pytest.mark.usefixtures("patience")
def test_what_takes_too_long_is_not_equal_and_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "(x+y+z+1)^{9}(x-y+582)^{88}"
    begun = time.thread_time()
    with monkeypatch.context() as patch:
        patch.setattr(symbolic, "_PROCESSOR_S", 0.2)
        assert scored("math", f"\\boxed{{{slow}}}", "72") == 0
    assert time.thread_time() - begun < 30  # without a limit it is a minute
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0
    assert scored("math", "\\boxed{1/2}", "0.5") == 1


@pytest.mark.parametrize(
    "name", sorted({*PUBLISHED, "exact", "boxed", "tags"} - {"math", "deepscaler", "geo3k", "openr1mm"})
)
def test_no_answer_raises_or_holds_a_checker_up(name: str) -> None:
    begun = time.thread_time()
    labels = {"gsm8k": "72"}
    scores = {scored(name, response, labels.get(name, label)) for _, response, label in hostile(220)}
    assert min(scores) >= -1 and max(scores) <= 1 and time.thread_time() - begun < 60


def test_a_config_names_a_reward_and_an_unknown_name_gets_the_nearest() -> None:
    assert RewardConfig(function="math").function == "rondo.roles.rewards.hub:math"
    assert RewardConfig(function=hub.math).function == "rondo.roles.rewards.hub.symbolic:math"
    with pytest.raises(ValueError, match=r"a reward with a name, got 'maths'\. Did you mean 'math'\?"):
        RewardConfig(function="maths")
    with pytest.raises(ValueError, match="Known: boxed, code, dapo, deepscaler"):
        RewardConfig(function={"right": "something", "form": "tags"})
    needed = {"remote": {"url": "http://127.0.0.1:1"}, "format": {"pattern": "7"}}
    for name in set(hub.__all__) - ({"reasoning_gym"} if find_spec("reasoning_gym") is None else set()):
        open_function(RewardConfig(function=name).function, args=needed.get(name, {}))


def test_without_its_package_a_checker_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.delitem(sys.modules, symbolic.__name__)
    with pytest.raises(ConfigError, match=r"math-verify must be installed .* Run: pip install 'rondo-rl\[rewards\]'"):
        open_function("rondo.roles.rewards.hub:math")


def test_the_page_has_every_reward_and_its_settings_are_taken() -> None:
    text = DOCS.read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(hub.__all__)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, str(DOCS), "exec"), {"__name__": "__main__"})
