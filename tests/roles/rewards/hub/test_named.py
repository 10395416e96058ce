"""A thought is no answer, whichever named reward judges."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.roles.rewards import hub
from rondo.roles.rewards.hub.named import ends_in_thought, without_thoughts
from rondo.roles.rewards.worker import open_function

pytestmark = pytest.mark.usefixtures("language_data")
RIGHT: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "exact": ("72", "72", {}),
    "boxed": ("\\boxed{72}", "72", {}),
    "gsm8k": ("#### 72", "72", {}),
    "multiple_choice": ("<answer>C</answer>", "C", {}),
    "gpqa": ("Answer: C", "C", {}),
    "f1": ("72", "72", {}),
    "dapo": ("Answer: 72", "72", {}),
    "math": ("\\boxed{72}", "72", {}),
    "deepscaler": ("\\boxed{72}", "72", {}),
    "geo3k": ("\\boxed{72}", "72", {}),
    "openr1mm": ("<answer>72</answer>", "72", {}),
    "code": ("```python\nprint(72)\n```", {"inputs": [""], "outputs": ["72"]}, {}),
    "ifeval": ("72", None, {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}),
    "ifbench": ("72", None, {"instruction_id_list": ["format:no_whitespace"], "kwargs": [{}]}),
}
WHOLE = {"tags", "format", "random", "remote"}
"""These judge the form of the whole response, or hand it on."""
FORMS = {
    "<think>{}": False,
    "<think>{}</think>": False,
    "<think>{}</think>\n": False,
    "<THINK>\n{}\n": False,
    "<thinking>{}</thinking>": False,
    "[THINK]{}[/THINK]": False,
    "{}</think>": False,
    "<think>a</think> b <think>{}": False,
    "<think>a</think> b <think>{}</think>": False,
    "{} <think>No, that is wrong.</think>": False,
    "{} <think>No, that is": False,
    "<think>a</think>{}": True,
    "a</think>{}": True,
    "<think>a</think> b <think>c</think>\n{}": True,
}


def scored(name: str, response: str, prompt: Any = "6 * 12", **args: Any) -> float:
    _, label, metadata = RIGHT[name]
    value = getattr(hub, name)(response, label, prompt=prompt, metadata=metadata, **args)
    return float(value["accuracy" if name in ("dapo", "geo3k") else "score"] if isinstance(value, dict) else value)


def test_every_named_reward_but_those_of_form_cuts_thoughts_off() -> None:
    # reasoning_gym's package may be missing here
    assert set(RIGHT) | WHOLE | {"reasoning_gym"} == set(hub.__all__)


@pytest.mark.parametrize("name", sorted(set(RIGHT) - {"code"}))
def test_an_answer_counts_behind_the_last_thought_alone(name: str) -> None:
    answer = RIGHT[name][0]
    forms = {form: right for form, right in FORMS.items() if name != "openr1mm" or form.count("<think>") < 2}
    assert {form: bool(scored(name, form.replace("{}", answer))) for form in forms} == forms


@pytest.mark.parametrize("name", sorted(set(RIGHT) - {"code"}))
def test_where_the_prompt_has_opened_a_thought_the_response_begins_in_it(name: str) -> None:
    answer = RIGHT[name][0]
    chat = [{"role": "user", "content": "6 * 12"}, {"role": "assistant", "content": [{"text": "<think>\n"}]}]
    for prompt, flag in (("6 * 12 <think>\n", None), (chat, None), ("6 * 12", True)):
        assert scored(name, f"I say {answer}", prompt, in_thought=flag) == 0
        assert scored(name, f"so</think>{answer}", prompt, in_thought=flag) > 0
    if name != "deepscaler":  # which wants a thought
        assert scored(name, answer, "Reason inside <think>", in_thought=False) > 0


def test_code_in_a_thought_is_not_run() -> None:
    answer = RIGHT["code"][0]
    for response, args in ((f"<think>{answer}", {}), (f"{answer}</think>", {}), (answer, {"in_thought": True})):
        value = hub.code(response, RIGHT["code"][1], prompt="", metadata={}, **args)
        assert (value["score"], value["why"]) == (0, "no code")


def test_an_item_says_whether_its_prompt_opened_a_thought() -> None:
    opened = open_function("rondo.roles.rewards.hub:gsm8k")
    assert [opened.call(["#### 72", "72", "", {}, {"in_thought": at}, []]) for at in (None, False, True)] == [1, 1, 0]


def test_thoughts_are_cut_off_in_linear_time() -> None:
    assert without_thoughts("<think>" * 100_000) == ""
    assert without_thoughts("<think>x</think>" * 100_000 + "72") == "72"
    assert not ends_in_thought("<think>" + " " * 100_000 + "x")


def test_a_gym_answer_in_a_thought_is_none() -> None:
    pytest.importorskip("reasoning_gym")
    row = {"reasoning_gym": {"name": "basic_arithmetic", "args": {"seed": 1, "size": 1}, "index": 0}}
    assert hub.reasoning_gym("<think><answer>7</answer>", "7", prompt="", metadata=row) < 1
