"""What a judge is asked and what its answers say: every form of both, and answers that say nothing."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from rondo.roles.rewards.scores import RewardError
from rondo.roles.rewards.verdicts import ASK, READ, open_verdicts
from rondo.runtime.errors import ConfigError

YES_NO = {"yes": 1.0, "no": 0.0}
HERE = __name__
CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text", "text": "1+1"}]}]


def asked(responses: list[str], prompt: Any = "1+1", **settings: Any) -> list[dict[str, Any]]:
    opened = open_verdicts(**{"choices": YES_NO} | settings)
    found: list[dict[str, Any]] = orjson.loads(opened.call([ASK, responses, "2", prompt, {"level": 3}, {}, []]).text)
    return found


def read(text: str, number: int = 1, **settings: Any) -> list[Any]:
    found: list[Any] = orjson.loads(open_verdicts(prompt="", **settings).call([READ, text, number]).text)
    return [score for score, details in found if not details] or found


def of_lengths(response: Any, label: Any, *, prompt: Any, metadata: Any) -> Any:
    return [{"role": "user", "content": f"{label} {len(response)} {prompt} {metadata['level']}"}]


async def waits(response: Any, label: Any, *, prompt: Any, metadata: Any) -> str:
    return ""


def of_nothing() -> None: ...


def digits(text: str) -> list[float]:
    return list(map(float, text))


def parts(text: str) -> Any:
    return None if text == "hm" else {"kind": 1.0, "right": 0.5, "why": text}


def test_a_question_is_a_format_or_what_a_function_makes() -> None:
    one = asked(["2 {x}"], system="Judge.", template=f"{HERE}:of_lengths")
    assert one == [{"role": "system", "content": "Judge."}, {"role": "user", "content": "2 5 1+1 3"}]


@pytest.mark.parametrize(
    ("per", "responses", "form", "said"),
    [
        ("response", ["2 {x}"], "{prompt}|{label}|{response}|{metadata[level]}|{{}}", "1+1|2|2 {x}|3|{}"),
        ("pair", ["a", "b"], "{first}<{second}", "a<b"),
        ("group", ["a", "b"], "{responses}", "[1]\na\n\n[2]\nb"),
    ],
)
def test_a_format_has_places(per: str, responses: list[str], form: str, said: str) -> None:
    opened = open_verdicts(per=per, prompt=form, tag="score")
    [message] = orjson.loads(opened.call([ASK, responses, "2", "1+1", {"level": 3}, {"transcript": "all"}, []]).text)
    assert message == {"role": "user", "content": said}


def test_a_prompt_of_messages_is_shown_as_text() -> None:
    for prompt, said in ((CHAT, "system: Add.\nuser: 1+1"), (CHAT[1:], "1+1")):
        [message] = orjson.loads(
            open_verdicts(prompt="{prompt}", choices=YES_NO).call([ASK, [""], "", prompt, {}, {}, []]).text
        )
        assert message["content"] == said


@pytest.mark.parametrize(
    ("settings", "text", "number", "scores"),
    [
        ({"choices": YES_NO}, "No, or rather: YES.", 1, [1.0]),
        ({"choices": YES_NO}, "<think>yes</think> no", 1, [0.0]),
        ({"choices": {"A": 1.0, "A-": 0.5}}, "an A-", 1, [0.5]),
        ({"choices": {"A": 1.0, "B": 0.0}}, "B is better, as it has a proof.", 1, [0.0]),
        ({"tag": "score"}, "<score>3</score> no: <score> 7.5 </score>", 1, [7.5]),
        ({"tag": "score", "bounds": (0, 10)}, "<score>10</score>", 1, [10.0]),
        ({"tag": "score", "per": "group"}, "<score>1, 2,-3</score>", 3, [1.0, 2.0, -3.0]),
        ({"tag": "score", "per": "group"}, "<score>1</score> <score>2</score>", 2, [1.0, 2.0]),
        ({"parse": "builtins:len"}, "abc", 1, [3.0]),
        ({"parse": f"{HERE}:digits", "per": "group"}, "21", 2, [2.0, 1.0]),
    ],
)
def test_an_answer_is_read(settings: dict[str, Any], text: str, number: int, scores: list[float]) -> None:
    assert read(text, number, **settings) == scores


def test_a_dict_of_components_is_summed_and_kept() -> None:
    [[score, details]] = read("so", parse=f"{HERE}:parts", components={"kind": 2.0, "right": 1.0})
    assert score == 2.5 and details == {"kind": 1.0, "right": 0.5, "why": "so"}


@pytest.mark.parametrize(
    ("settings", "text", "number", "why"),
    [
        ({"choices": YES_NO}, "maybe yesterday", 1, "must say a verdict, got 'maybe yesterday'"),
        ({"choices": YES_NO}, "yes</think>", 1, "must say a verdict"),
        ({"choices": YES_NO}, "<think>yes, it", 1, "must say a verdict"),
        ({"tag": "score"}, "<think>no <score>1</score>? Or", 1, "must say a verdict"),
        ({"tag": "score"}, "score 7", 1, "must say a verdict"),
        ({"tag": "score"}, "<score>7/10</score>", 1, "must say a verdict"),
        ({"tag": "score", "bounds": (0, 10)}, "<score>11</score>", 1, "must say a verdict"),
        ({"tag": "score", "per": "group"}, "<score>1 2</score>", 3, "must say a verdict"),
        ({"parse": f"{HERE}:parts"}, "hm", 1, "must say a verdict"),
        ({"parse": "builtins:sorted", "per": "group"}, "123", 2, "must score each of 2 responses, got 3"),
        ({"parse": "builtins:len", "per": "group"}, "123", 2, "must return a list of one score a response"),
    ],
)
def test_an_answer_without_a_verdict_says_what_was_missing(
    settings: dict[str, Any], text: str, number: int, why: str
) -> None:
    with pytest.raises(RewardError, match=why):
        read(text, number, **settings)


def test_functions_that_cannot_be_called_so_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"genrm\.template must take \(response, label"):
        open_verdicts(template=f"{HERE}:of_nothing", choices=YES_NO)
    with pytest.raises(ConfigError, match=r"genrm\.template must be a plain function"):
        open_verdicts(template=f"{HERE}:waits", choices=YES_NO)
    with pytest.raises(RewardError, match="must return text or chat messages, got 3"):
        asked(["abc"], template=f"{HERE}:three")
    with pytest.raises(RewardError, match="must return what JSON can say"):
        asked(["abc"], template=f"{HERE}:picture")


def picture(response: Any, label: Any, *, prompt: Any, metadata: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": b"png"}}]}]


def three(response: Any, label: Any, *, prompt: Any, metadata: Any) -> int:
    return len(response)
