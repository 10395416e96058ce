from __future__ import annotations

import random
from typing import Any

import pytest

from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.serve.calls import call_reader
from rondo.roles.serve.output import OutputReader, Part
from rondo.roles.serve.stop_strings import StopSearch
from rondo.roles.serve.text import TextReader, text_of
from tests.roles.serve.serving import ids, tokenizer
from tests.roles.serve.tokenizers_of import KINDS, of_kind


def read(
    tokens: list[int], pieces: random.Random | None, own: Any = None, **settings: Any
) -> tuple[str, int | None, str | None]:
    """(text, tokens kept, stop string) after the sample came in pieces, or at once."""
    reader = TextReader(own or tokenizer(), **settings)
    at = 0
    while pieces is not None and at < len(tokens):
        at = min(len(tokens), at + pieces.randint(1, 9))
        before = reader.text
        kept = reader.feed(tokens[:at])
        if kept is not None:
            return reader.text, kept, reader.matched
        assert reader.text.startswith(before)
    kept = reader.finish(tokens)
    return reader.text, kept, reader.matched


@pytest.mark.parametrize("kind", KINDS)
def test_text_of_every_kind_of_tokenizer_is_what_it_makes_of_all_tokens_however_they_come(kind: str) -> None:
    own, draw = of_kind(kind), random.Random(kind)
    loose = set(own.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])) - {own.unk_token_id}
    others = [token for token in range(len(own)) if token not in loose]  # bytes that make no character: below
    for _ in range(20):
        tokens = ids("hi 😀ok 漢", own) + [draw.choice(others) for _ in range(40)] + ids("😀, no end.", own)
        for skip in (True, False):
            whole = own.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert read(tokens, draw, own, skip_special_tokens=skip)[0] == whole
            assert read(tokens, None, own, skip_special_tokens=skip)[0] == whole


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "byte fallback, spaces kept"])
def test_a_character_of_several_tokens_is_told_whole_and_stops_as_any_other(kind: str) -> None:
    own = of_kind(kind)
    tokens = ids("hi 😀", own)
    reader = TextReader(own)
    texts = []
    for end in range(1, len(tokens) + 1):
        assert reader.feed(tokens[:end]) is None
        texts.append(reader.text)
    assert texts[-5:] == ["hi ", "hi ", "hi ", "hi ", "hi 😀"]
    # Two in a row are bytes in a row, of which those that came first stay what they are.
    assert read(ids("😀🙂", own)[:-1], random.Random(0), own)[0].lstrip() == "😀" + (
        "\ufffd" if kind == "byte level" else "\ufffd" * 3
    )
    stopped = ids("hi 😀🙂 ok", own)
    kept = len(ids("hi 😀🙂", own))
    assert read(stopped, random.Random(1), own, stops=("🙂",)) == read(stopped, None, own, stops=("🙂",))
    assert read(stopped, None, own, stops=("🙂",)) == ("hi 😀", kept, "🙂")
    assert read(ids("hi 🙂 漢", own)[:-1], None, own, stops=("漢",))[1] is None


def test_text_behind_a_prompt_keeps_the_space_that_it_begins_with() -> None:
    own = of_kind("byte fallback")
    tokens = ids("no ok", own)
    assert text_of(own, tokens) == "no ok"
    assert text_of(own, tokens, after=ids("hi", own)[-1]) == " no ok"


@pytest.mark.parametrize("seed", range(8))
def test_text_that_comes_in_pieces_is_the_text_of_all_tokens_also_where_bytes_make_no_character(seed: int) -> None:
    draw = random.Random(seed)
    words = "".join(draw.choice("aé漢🙂 ") for _ in range(60))
    tokens = ids(words) + [draw.randrange(256) for _ in range(300)] + ids(words)
    whole = tokenizer().decode(tokens)
    assert read(tokens, draw)[0] == read(tokens, None)[0] == whole


def test_a_character_is_told_once_its_last_byte_is_there() -> None:
    reader = TextReader(tokenizer())
    tokens = ids("a漢")
    texts = []
    for end in range(1, len(tokens) + 1):
        reader.feed(tokens[:end])
        texts.append(reader.text)
    assert texts == ["a", "a", "a", "a漢"]


@pytest.mark.parametrize("seed", range(4))
def test_a_stop_string_keeps_the_tokens_up_to_the_one_that_completes_it(seed: int) -> None:
    tokens = ids("one two END three END")
    expected = ("one two ", len("one two END"), "END")
    stops = ("STOP", "END")
    assert read(tokens, random.Random(seed), stops=stops) == read(tokens, None, stops=stops) == expected
    assert read(tokens, None, stops=stops, keep_stop=True)[0] == "one two END"


def test_what_may_become_a_stop_string_is_not_shown_before_it_is_decided() -> None:
    reader = TextReader(tokenizer(), stops=("</end>",))
    reader.feed(ids("yes </e"))
    assert (reader.text, reader.shown) == ("yes </e", "yes ")
    reader.feed(ids("yes </exit>"))
    assert reader.shown == reader.text == "yes </exit>"


@pytest.mark.parametrize("seed", range(20))
def test_what_is_found_and_kept_back_is_what_a_plain_search_finds(seed: int) -> None:
    draw = random.Random(seed)
    stops = tuple("".join(draw.choice("ab") for _ in range(draw.randint(1, 6))) for _ in range(draw.randint(1, 5)))
    text, search = "".join(draw.choice("abc") for _ in range(40)), StopSearch(stops)
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        assert search.feed(text[end - 1]) == (1 if done else None)
        if done:
            assert search.matched == max(done, key=len)
            return
        begun = [size for stop in stops for size in range(len(stop)) if text[:end].endswith(stop[:size])]
        assert search.depth == max(begun)


def test_of_two_stop_strings_the_one_that_is_complete_first_ends_the_sample() -> None:
    assert read(ids("abcdef"), None, stops=("abcdef", "cd")) == ("ab", 4, "cd")


def test_special_tokens_are_no_part_of_the_text_unless_asked_for() -> None:
    tokens = [*ids("a"), build_tokenizer().eos_token_id]
    assert read(tokens, None)[0] == "a"
    assert read(tokens, None, skip_special_tokens=False)[0] == "a<|im_end|>"


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain  text\n", [Part("content", "plain  text\n")]),
        ("<think>\nhm\n</think>\n\nyes", [Part("reasoning", "hm"), Part("content", "yes")]),
        ("<think>no end", [Part("reasoning", "no end")]),
        ("<thin air", [Part("content", "<thin air")]),
        (f"First.\n{CALL}", [Part("content", "First."), Part("call", '{"a":1}', "add")]),
        (f"{CALL}\n{CALL}", [Part("call", '{"a":1}', "add"), Part("call", '{"a":1}', "add")]),
        ("<tool_call>not json</tool_call> so", [Part("content", "<tool_call>not json</tool_call> so")]),
        ("a <tool_call>{", [Part("content", "a <tool_call>{")]),
        (
            f"<think>x</think>{CALL} end",
            [Part("reasoning", "x"), Part("call", '{"a":1}', "add"), Part("content", "end")],
        ),
        ('<tool_call>{"name": ""}</tool_call>', [Part("content", '<tool_call>{"name": ""}</tool_call>')]),
    ],
)
def test_output_is_read_as_reasoning_content_and_calls_however_it_is_cut(text: str, expected: list[Part]) -> None:
    for size in (1, 2, 3, 7, len(text)):
        reader = OutputReader(calls=call_reader("", []), reasoning=False)
        parts: list[Part] = []
        for at in range(0, len(text), size):
            parts += reader.feed(text[at : at + size])
        parts += reader.finish()
        joined: list[Part] = []
        for part in parts:
            if joined and part.kind != "call" and joined[-1].kind == part.kind:
                joined[-1] = Part(part.kind, joined[-1].text + part.text)
            else:
                joined.append(part)
        assert joined == expected


def test_a_prompt_that_ends_inside_of_reasoning_makes_the_output_begin_there() -> None:
    reader = OutputReader(calls=None, reasoning=True)
    assert reader.feed("so </think> yes") == [Part("reasoning", "so"), Part("content", "yes")]


def test_without_tools_a_call_is_content() -> None:
    reader = OutputReader(calls=None, reasoning=False)
    assert reader.feed(CALL + " ") + reader.finish() == [Part("content", CALL + " ")]
