"""tags, format, ifeval and ifbench: written responses with the verdict of a careful person."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rewards_instructions import IFBENCH, IFEVAL
from rondo.roles.rewards.hub import ifbench, ifeval
from tests.roles.rewards.hub.judging import Table, misjudged, size

pytestmark = pytest.mark.usefixtures("language_data")
TAGS: Table = {
    None: (
        (
            "<think>x</think><answer>y</answer>", "<think>x</think>\n<answer>y</answer>",
            "\n<think>x</think>\n\n<answer>y</answer>\n",
            "<think>\nx\n</think>\n<answer>\n72\n</answer>", "<think>a < b</think><answer>b > a</answer>",
            "<think>0</think><answer>0</answer>",
            "<think>x <b>y</b></think><answer>z</answer>", "<think>I think.</think> <answer>I answer.</answer>",
            "<think>é</think><answer>é</answer>",
            "<think>\\boxed{1}</think><answer>\\boxed{2}</answer>", "<think>x</think>\t<answer>y</answer>",
            "<think>```x```</think><answer>y</answer>",
        ),
        (
            "", "72", "<answer>y</answer>", "<think>x</think>", "<think>x</think>y", "x<think>x</think><answer>y</answer>",
            "<think>x</think><answer>y</answer>z", "<think>x</think>y<answer>y</answer>", "<think></think><answer>y</answer>",
            "<think>x</think><answer></answer>", "<think> </think><answer>y</answer>", "<think>x</think><answer> </answer>",
            "<answer>y</answer><think>x</think>", "<think>x<answer>y</answer></think>", "<think>x<answer>y</answer>",
            "<think>x</think><answer>y",
            "<think>x</think>answer>y</answer>", "<think><think>x</think><answer>y</answer>",
            "<think>x</think></think><answer>y</answer>",
            "<think>x</think><answer>y</answer><answer>y</answer>", "<think>x</think><think>x</think><answer>y</answer>",
            "<think>x</think><answer><answer>y</answer>", "<think>x</think><answer>y</answer></answer>",
            "<THINK>x</THINK><ANSWER>y</ANSWER>",
            "<think >x</think><answer>y</answer>", "<thinking>x</thinking><answer>y</answer>",
            "<think>x<answer></think><answer>y</answer>",
            "x</think><answer>y</answer>", "<think>x</think><answer>y</think></answer>",
            "```<think>x</think><answer>y</answer>```",
        ),
    )
}  # fmt: skip
DIGITS: Table = {
    None: (
        (
            "Answer: 1", "Answer: 12", "x\nAnswer: 1", "x\n\ny\nAnswer: 0", " Answer: 7", "xAnswer: 7",
            "Answer: 1\nAnswer: 2", "Answer: 007",
            "é Answer: 1", "<think>x</think>Answer: 1", "<think>Answer: 1", "\nAnswer: 1", "Answer: x Answer: 3",
            "Answer: " + "9" * 50,
        ),
        (
            "", "1", "Answer:", "Answer: ", "Answer: x", "Answer: 1 ", "Answer: 1\n", "Answer: 1.", "answer: 1", "Answer:1",
            "Answer: -1", "Answer: 1x",
            "Answer: 1 or 2", "Answer: 1.5", "Answer 1", "ANSWER: 1", "Answer: one", "Answer: 1\nx", "Answer:  1",
            "Answer: $1$", "Answer: 1%",
            "Answer: 1,000", "Answers 1", "Answer: 1/2", "Answer: **1**", "1 Answer:",
        ),
    )
}  # fmt: skip
FOLLOWED: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ("punctuation:no_comma", {}, ("Yes it is.", "One; two.", "1.000"), ("Yes, it is.", "1,000", ",")),
    ("change_case:english_lowercase", {}, ("all of this is small.", "this has 7 words in small letters."),
        ("All of this is small.", "tHIS IS NOT.")),
    ("change_case:english_capital", {}, ("ALL OF THIS IS LARGE.",), ("All of this is large.", "ALMOST ALL OF THIS is.")),
    ("keywords:existence", {"keywords": ["cat", "dog"]}, ("A cat and a dog.", "Dog! Cat!"), ("A cat.", "A bird.",
        "A dog and a bird.")),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, ("A dog.", "A category.", "concatenate"), ("A cat.", "Cat!",
        "the CAT sat")),
    ("keywords:frequency", {"keyword": "cat", "frequency": 2, "relation": "at least"}, ("cat cat", "A cat, a Cat, a CAT."),
        ("cat", "dog dog")),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ("one two three", "one two three four"),
        ("one two", "one")),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ("one two", "one"), ("one two three",
        "a b c d e")),
    ("startend:quotation", {}, ('"All of it."', '"x"'), ("None of it.", 'He said "x".', '"x')),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, ("So. Any questions?", "ANY QUESTIONS?"),
        ("Any questions? No.", "So.")),
    ("detectable_format:json_format", {}, ('{"a": 1}', "[1, 2]", '```json\n{"a": 1}\n```'), ("{a: 1}", "a", '{"a": 1')),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ("* a\n* b", "- a\n- b"), ("* a", "* a\n* b\n* c", "a\nb")),
    ("detectable_format:title", {}, ("<<A title>>\nText", "<<x>>"), ("A title\nText", "<A title>", "<<>>")),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ("*a* and *b*", "**a** and *b*"), ("*a*",
        "a and b")),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ("[a] [b]", "[a] [b] [c]"), ("[a]", "none", "(a) (b)")),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ("Text.\nP.S. More.",), ("Text.", "Text. More.")),
    ("detectable_format:constrained_response", {}, ("My answer is yes.", "My answer is maybe."), ("Yes.", "It depends.")),
    ("combination:two_responses", {}, ("One.\n******\nTwo.",), ("One.", "One.\n***\nTwo.", "Same.\n******\nSame.")),
]  # fmt: skip


def test_tags_wants_each_tag_once_and_nothing_around_them() -> None:
    assert size(TAGS) >= 40
    assert misjudged("tags", TAGS) == []


def test_format_matches_the_whole_response() -> None:
    assert size(DIGITS) >= 40
    assert misjudged("format", DIGITS, pattern=r".*Answer: [0-9]+") == []


def test_instructions_are_followed_where_a_careful_person_says_so() -> None:
    judged, wrong = 0, []
    for name, kwargs, followed, broken in FOLLOWED:
        row = {"instruction_id_list": [name], "kwargs": [kwargs]}
        for response in (*followed, *broken):
            judged += 1
            score = ifeval(response, None, prompt="", metadata=row)["score"]
            behind = ifeval(f"<think>A thought, of CAT and [x].</think>\n{response}", None, prompt="", metadata=row)[
                "score"
            ]
            inside = ifeval(f"<think>{response}", None, prompt="", metadata=row)["score"]
            if (score, behind, inside) != (response in followed, response in followed, 0):
                wrong.append((name, response, score, behind, inside))
    assert wrong == [] and judged >= 40


@pytest.mark.parametrize(("function", "cases"), [(ifeval, IFEVAL), (ifbench, IFBENCH)])
def test_what_stands_in_a_thought_follows_no_instruction(function: Any, cases: Any) -> None:
    for case in cases:
        for thought in ("<think>{}", "<think>{}</think>", "{}</think>\n"):
            assert function(thought.replace("{}", case.response), None, prompt="", metadata=case.metadata)["score"] == 0
