"""What is learnt of a chat is what its template writes for a turn of the assistant, in every kind of job, up to its end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rondo.models.chat_template import turn_ends
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.config import DataConfig, DpoConfig, RewardModelConfig
from rondo.roles.data.datasets import Row, RowError, open_dataset
from rondo.roles.data.prompts import render_prompt
from rondo.roles.data.turns import encode_answer, encode_turns
from rondo.roles.training.preference import pair_encoder
from tests.roles.data import templates
from tests.roles.data.templates import tokenizer_of

CHAT = DataConfig(path="unused", label=None, apply_chat_template=True)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | fields


CALL = said("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}])
WRITTEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
PLAIN, TWICE = [user("q"), said("4")], [user("q"), said("4"), user("r"), said("5")]
CALLS = [user("q"), CALL, {"role": "tool", "content": "3"}, said("4")]
REASONED = [user("q"), said("4", reasoning_content="hm")]
REASONED_CALLS = [
    user("q"), CALL | {"reasoning_content": "one"}, {"role": "tool", "content": "3"}, said("4", reasoning_content="two")
]  # fmt: skip
THOUGHT = [user("q"), said("<think>\nhm\n</think>\n\n4")]
REWRITES = "for message 4 the chat template must write what comes before it as without it, got another text"
NO_CALLS = "got one that leaves out the calls of message 2, of role 'assistant'"
NO_REASONING = "got one that leaves out the reasoning of message 2, of role 'assistant'"

LEARNT: list[tuple[str, list[dict[str, Any]], list[str] | str]] = [
    ("QWEN25", PLAIN, ["4<|im_end|>"]),
    ("QWEN25", TWICE, ["4<|im_end|>", "5<|im_end|>"]),
    ("QWEN25", [user("q"), CALL], [WRITTEN]),
    ("QWEN25", CALLS, [WRITTEN, "4<|im_end|>"]),
    ("QWEN25", THOUGHT, ["<think>\nhm\n</think>\n\n4<|im_end|>"]),
    ("QWEN25", REASONED, NO_REASONING),
    ("QWEN3", PLAIN, ["<think>\n\n</think>\n\n4<|im_end|>"]),
    ("QWEN3", [user("q"), CALL], ["<think>\n\n</think>\n\n" + WRITTEN]),
    ("QWEN3", REASONED, ["<think>\nhm\n</think>\n\n4<|im_end|>"]),
    ("QWEN3", THOUGHT, ["<think>\nhm\n</think>\n\n4<|im_end|>"]),
    ("QWEN3", REASONED_CALLS, ["<think>\none\n</think>\n\n" + WRITTEN, "<think>\ntwo\n</think>\n\n4<|im_end|>"]),
    (
        "QWEN3",
        [user("q"), THOUGHT[1] | {"reasoning_content": "hm"}],
        "for message 2 the chat template must be given one thought",
    ),
    ("QWEN3_THINKING", PLAIN, ["\n</think>\n\n4<|im_end|>"]),
    ("QWEN3_THINKING", [user("q"), CALL], ["\n</think>\n\n" + WRITTEN]),
    ("QWEN3_THINKING", REASONED, ["hm\n</think>\n\n4<|im_end|>"]),
    ("QWEN3_THINKING", THOUGHT, ["hm\n</think>\n\n4<|im_end|>"]),
    ("QWEN3_THINKING", REASONED_CALLS, ["one\n</think>\n\n" + WRITTEN, "two\n</think>\n\n4<|im_end|>"]),
    ("OPENED", THOUGHT, ["hm\n</think>\n\n4<|im_end|>"]),
    ("LLAMA3", TWICE, ["4<|eot_id|>", "5<|eot_id|>"]),
    ("LLAMA3", CALLS, ['{"name": "add", "parameters": {"a": 1}}<|eot_id|>', "4<|eot_id|>"]),
    ("LLAMA3", THOUGHT, ["<think>\nhm\n</think>\n\n4<|eot_id|>"]),
    ("LLAMA3", REASONED, NO_REASONING),
    ("LLAMA3", [user("q"), CALL | {"content": "Sure."}], "leaves out the content of message 2, of role 'assistant'"),
    ("MISTRAL", TWICE, [" 4</s>", " 5</s>"]),
    ("MISTRAL", [user("q"), CALL], NO_CALLS),
    ("MISTRAL", REASONED, NO_REASONING),
    ("MISTRAL", [{"role": "system", "content": "be"}, *PLAIN], "leaves out message 1, of role 'system'"),
    ("MISTRAL", [user("q"), {"role": "critic", "content": "no"}, said("4")], "leaves out message 2, of role 'critic'"),
    ("GEMMA", TWICE, ["4<end_of_turn>", "5<end_of_turn>"]),
    ("GEMMA", [user("q"), CALL], NO_CALLS),
    (
        "GEMMA",
        [{"role": "system", "content": "be"}, *PLAIN],
        "prompt must suit the chat template, got TemplateError: no",
    ),
    ("MARKED", TWICE, ["4<|im_end|>", "5<|im_end|>"]),
    ("MARKED", REASONED, NO_REASONING),
    ("R1", TWICE, ["4<|endoftext|>", "5<|endoftext|>"]),
    ("R1", THOUGHT, ["hm\n</think>\n\n4<|endoftext|>"]),
    ("R1", [user("q"), said("hm\n</think>\n\n4")], ["hm\n</think>\n\n4<|endoftext|>"]),
    ("R1", REASONED, NO_REASONING),
    ("R1", [user("q"), CALL], NO_CALLS),
    (
        "DROPPED",
        [user("q"), CALL | {"content": "<think>hm</think>"}],
        "for message 2 the chat template must write the thought in front of its calls",
    ),
    ("PHI", TWICE, ["4<|end|>", "5<|end|>"]),
    ("ENDLESS", PLAIN, ["4<|endoftext|>"]),
]


def runs(tokenizer: Any, tokens: np.ndarray, mask: np.ndarray) -> list[str]:
    """The text of each stretch of tokens that is learnt."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(tokens[first:end]) for first, end in edges.reshape(-1, 2)]


def learnt(
    tokenizer: Any, messages: list[dict[str, Any]], turns: str, config: DataConfig = CHAT
) -> tuple[str, list[str]]:
    """The prompt, and each stretch behind it that is learnt."""
    made = encode_turns(tokenizer, Row("a.jsonl:1", messages, None, {}), config, turns)
    prompt = made.prompt(render_prompt(tokenizer, made.row, config, 9999))
    return tokenizer.decode(prompt), runs(tokenizer, made.tokens, made.mask)


@pytest.mark.parametrize(("name", "messages", "expected"), LEARNT)
def test_what_is_learnt_is_what_the_template_writes_and_the_same_in_every_job(
    name: str, messages: list[dict[str, Any]], expected: list[str] | str
) -> None:
    tokenizer = tokenizer_of(getattr(templates, name))
    weighed = [message | {"weight": 1} if message["role"] == "assistant" else message for message in messages]
    if isinstance(expected, str):
        for turns in ("last", "all", "marked"):
            with pytest.raises(RowError, match=r"^a.jsonl:1: ") as raised:
                learnt(tokenizer, messages, turns)
            assert expected in str(raised.value)
        return
    prompt, last = learnt(tokenizer, messages, "last")
    assert last == expected[-1:]
    assert learnt(tokenizer, messages, "all")[1] == learnt(tokenizer, weighed, "marked")[1] == expected
    other = said("other", **({"reasoning_content": "so"} if "reasoning_content" in messages[-1] else {}))
    row = Row("a.jsonl:1", messages, None, {}, rejected=[*messages[:-1], other])
    for own in (DpoConfig(rows="a:b", steps=1, batch_size=1), RewardModelConfig(rows="a:b", steps=1, batch_size=1)):
        pair = pair_encoder(tokenizer, own, CHAT.model_copy(update={"rejected": "rejected"}))(row)
        begun = tokenizer.decode(pair.chosen.tokens[: -pair.chosen.response])
        answer = tokenizer.decode(pair.chosen.tokens[-pair.chosen.response :])
        assert begun + answer == prompt + last[0] and answer.endswith(last[0])
        assert tokenizer.decode(pair.rejected.tokens).startswith(begun)


@pytest.mark.parametrize(
    ("name", "messages", "wrong"),
    [
        ("QWEN3", TWICE, REWRITES),
        ("QWEN3_THINKING", [*REASONED, user("r"), said("5", reasoning_content="ah")], REWRITES),
        ("QWEN3", CALLS, REWRITES),
        ("R1", [*THOUGHT, user("r"), said("5")], REWRITES),
        (
            "ENDLESS",
            TWICE,
            "for message 2 the chat template must write a control token that ends it, got none",
        ),
        (
            "APART",
            PLAIN,
            "for message 2 the chat template must write it behind the generation prompt, got another text",
        ),
    ],
)
def test_a_template_that_changes_what_came_before_a_turn_is_refused_by_name(
    name: str, messages: list[dict[str, Any]], wrong: str
) -> None:
    with pytest.raises(RowError) as raised:
        learnt(tokenizer_of(getattr(templates, name)), messages, "all")
    assert str(raised.value).startswith(f"a.jsonl:1: {wrong}")


def test_the_prompt_is_what_an_engine_is_given_but_for_a_thought_that_the_template_opens_for_others() -> None:
    asked = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert learnt(tokenizer_of(templates.QWEN25), PLAIN, "last")[0] == asked
    thinking = tokenizer_of(templates.QWEN3_THINKING)
    assert learnt(thinking, PLAIN, "last")[0] == learnt(thinking, REASONED, "all")[0] == asked + "<think>\n"
    r1 = tokenizer_of(templates.R1)
    assert learnt(r1, PLAIN, "last")[0] == "<|User|>q<|Assistant|>"
    assert learnt(r1, THOUGHT, "last")[0] == "<|User|>q<|Assistant|><think>\n"
    closed = CHAT.model_copy(update={"chat_template_args": {"enable_thinking": False}})
    qwen3 = tokenizer_of(templates.QWEN3)
    assert learnt(qwen3, PLAIN, "last", closed) == (asked + "<think>\n\n</think>\n\n", ["4<|im_end|>"])
    assert learnt(qwen3, REASONED, "last", closed) == (asked, ["<think>\nhm\n</think>\n\n4<|im_end|>"])


def test_the_sides_of_a_pair_have_one_prompt_also_where_only_one_has_a_thought() -> None:
    tokenizer, own = tokenizer_of(templates.R1), DpoConfig(rows="a:b", steps=1, batch_size=1)
    source = DataConfig(path="unused", label="chosen", rejected="rejected", apply_chat_template=True)
    for chosen, rejected in ((THOUGHT[1:], "4"), ("<think>\nhm\n</think>\n\n4", PLAIN)):
        pair = pair_encoder(tokenizer, own, source)(Row("a", "q", chosen, {}, rejected=rejected))
        sides = (pair.chosen, pair.rejected)
        assert [tokenizer.decode(side.tokens[: -side.response]) for side in sides] == ["<|User|>q<|Assistant|>"] * 2
        assert [tokenizer.decode(side.tokens[-side.response :]) for side in sides] == [
            "<think>\nhm\n</think>\n\n4<|endoftext|>", "4<|endoftext|>"
        ]  # fmt: skip


def test_all_tokens_are_those_that_an_engine_and_the_template_make_and_what_follows_an_end_is_context() -> None:
    tokenizer, config = tokenizer_of(templates.QWEN25), CHAT.model_copy(update={"system": "be"})
    made = encode_turns(tokenizer, Row("a", TWICE, None, {}), config, "all")
    whole = tokenizer.apply_chat_template([{"role": "system", "content": "be"}, *TWICE], tokenize=False)
    tokens = [*render_prompt(tokenizer, made.row, config, 999).tolist(), *made.tokens.tolist()]
    assert tokens == tokenizer(whole, add_special_tokens=False)["input_ids"][:-1]  # without the last line's end
    assert runs(tokenizer, made.tokens, 1 - made.mask) == ["\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"]


def test_marked_turns_are_learnt_unless_their_weight_is_0() -> None:
    def chat(*weights: int | None) -> list[dict[str, Any]]:
        turns = [said(f"{n}{n}", **({} if weight is None else {"weight": weight})) for n, weight in enumerate(weights)]
        return [message for n, turn in enumerate(turns) for message in (user(f"s{n}"), turn)]

    tokenizer = tokenizer_of(templates.QWEN25)
    assert learnt(tokenizer, chat(0, 1, None), "marked")[1] == ["11<|im_end|>", "22<|im_end|>"]
    assert "s1" in learnt(tokenizer, chat(0, 1, None), "marked")[0]
    assert learnt(tokenizer, chat(1, 0, 1), "marked")[1] == ["00<|im_end|>", "22<|im_end|>"]
    assert learnt(tokenizer, chat(0, None), "all")[1] == ["00<|im_end|>", "11<|im_end|>"]
    # What is not learnt may be written in another way once it is past.
    assert learnt(tokenizer_of(templates.QWEN3), chat(0, 1), "marked")[1] == ["<think>\n\n</think>\n\n11<|im_end|>"]


@pytest.mark.parametrize(
    ("prompt", "turns", "wrong"),
    [
        ([user("q"), said("4", weight=0)], "marked", "a chat must have a turn of the assistant to learn, got none"),
        ("text", "all", "a chat must have a turn of the assistant to learn, got none"),
        ([user("q"), said(""), user("r"), said("5")], "all", "answer must be text, got '' in message 2"),
        ([user("q"), said("")], "last", "answer must be text, got ''"),
        ([user("q"), said("\n")], "last", "answer must be text, got '\\n'"),
        ([user("q")], "last", "answer must be text, got None"),
        ([said("4")], "last", "answer must be text, got '4'"),
        (
            [*PLAIN, {"role": "user", "content": [{"type": "image"}]}, said("5")],
            "all",
            "media must come before the first turn that is learnt",
        ),
    ],
)
def test_a_chat_without_a_turn_to_learn_is_refused(prompt: Any, turns: str, wrong: str) -> None:
    with pytest.raises(RowError) as raised:
        encode_turns(build_tokenizer(), Row("a.jsonl:1", prompt, None, {}), CHAT, turns)
    assert str(raised.value).startswith(f"a.jsonl:1: {wrong}")


def test_an_answer_to_plain_text_ends_with_the_end_of_sequence() -> None:
    tokenizer, config = build_tokenizer(), DataConfig(path="unused")
    made = encode_turns(tokenizer, Row("a", "s31>", "13", {}), config, "last")
    assert made.tokens.dtype == np.int32 and made.mask.tolist() == [1, 1, 1]
    assert tokenizer.decode(made.tokens) == "13" + tokenizer.eos_token
    for label in (None, "", 13, [CALL]):
        with pytest.raises(RowError, match=r"^a: answer must be text"):
            encode_turns(tokenizer, Row("a", "s31>", label, {}), config, "last")
    assert tokenizer.decode(
        encode_answer(tokenizer, Row("a", "s31>", None, {}), "", config, may_be_empty=True).tokens
    ) == (tokenizer.eos_token)


def test_a_beginning_of_the_assistants_is_continued_by_the_answer() -> None:
    config = CHAT.model_copy(update={"label": "label", "chat_template_args": {"continue_final_message": True}})
    made = encode_turns(tokenizer_of(templates.QWEN25), Row("a", [user("q"), said("Well,")], " 4", {}), config, "last")
    assert tokenizer_of(templates.QWEN25).decode(made.tokens) == " 4<|im_end|>"
    assert made.row.prompt == [user("q"), said("Well,")]


def test_a_tokenizer_that_begins_texts_with_a_space_sets_none_into_the_middle_of_a_chat() -> None:
    words = ["<s>", "</s>", "[INST]", "[/INST]", "<0x0A>", "▁", "▁4", "4", "▁q", "q", "▁5", "▁a", "a"]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words[:4]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", bos_token="<s>")
    tokenizer.chat_template = templates.MISTRAL.replace("%} {{ m.content", "%}{{ m.content")
    made = encode_turns(tokenizer, Row("a", TWICE[:2], None, {}), CHAT, "last")
    assert tokenizer.convert_ids_to_tokens(made.tokens) == ["4", "</s>"]
    tokenizer.chat_template = templates.MISTRAL
    made = encode_turns(tokenizer, Row("a", TWICE, None, {}), CHAT, "last")
    assert tokenizer.convert_ids_to_tokens(made.tokens) == ["▁5", "</s>"]


def test_tools_that_a_template_does_not_show_are_refused_and_so_they_are_in_prompts() -> None:
    row = Row("a.jsonl:1", PLAIN, None, {}, tools=[ADD])
    assert encode_turns(tokenizer_of(templates.QWEN3), row, CHAT, "last").row.tools == [ADD]
    wrong = r"^a.jsonl:1: the chat template must write all of the chat, got one that leaves out the tool 'add'"
    with pytest.raises(RowError, match=wrong):
        encode_turns(tokenizer_of(templates.LLAMA3), row, CHAT, "last")
    with pytest.raises(RowError, match=wrong):
        render_prompt(tokenizer_of(templates.LLAMA3), replace(row, prompt=PLAIN[:1]), CHAT, 999)


def test_the_same_rows_as_json_lines_and_as_parquet_are_the_same_tokens(tmp_path: Path) -> None:
    def call(**arguments: Any) -> dict[str, Any]:
        return said("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": arguments}}])

    def tool(name: str, **properties: Any) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
        }

    tools = [tool("add", a={"type": "integer"}), tool("find", city={"type": "string", "enum": ["x", "y"]}), tool("now")]
    answers = {"chosen": [said("7", reasoning_content="hm")], "rejected": [said("8")]}
    rows: list[dict[str, Any]] = [
        {"messages": [user("q"), call(a=1, b={"c": [2]}), {"role": "tool", "name": "add", "content": "3"}, said("4")]},
        {
            "messages": [
                user("q"),
                call(city="x"),
                {"role": "tool", "content": "ok"},
                said("5", weight=0),
                user("r"),
                said("6"),
            ]
        },
        {"messages": [user("q"), said("7", weight=1)], "tools": tools[:2]},
        {"messages": [user("q"), call()], "tools": tools[2:]},
    ]
    rows = [{"tools": None} | row | answers for row in rows]
    assert '"city": null' in json.dumps(pyarrow.Table.from_pylist(rows).to_pylist())  # what this is about
    tokenizer, own = tokenizer_of(templates.QWEN25), DpoConfig(rows="a:b", steps=1, batch_size=1)
    options: dict[str, Any] = {"prompt": "messages", "tools": "tools", "apply_chat_template": True}
    sft = DataConfig(path="unused", label=None, **options)
    for one, other in in_both_formats(tmp_path, rows, sft):
        made = [encode_turns(tokenizer, row, sft, "marked") for row in (one, other)]
        prompts = [render_prompt(tokenizer, turns.row, sft, 9999) for turns in made]
        assert prompts[0].tolist() == prompts[1].tolist()
        assert made[0].tokens.tolist() == made[1].tokens.tolist() and made[0].mask.tolist() == made[1].mask.tolist()
        assert "null" not in tokenizer.decode([*prompts[0], *made[0].tokens])
    pairs = DataConfig(path="unused", label="chosen", rejected="rejected", **options)
    for both in in_both_formats(tmp_path, rows, pairs):
        encode = pair_encoder(tokenizer_of(templates.QWEN3), own, pairs)
        first, second = (encode(replace(row, prompt=row.prompt[:1])) for row in both)
        assert first.key == second.key
    parts = [{"type": "text", "text": "Look: "}, {"type": "image", "image": "7.png"}]
    seen = {
        "messages": [{"role": "user", "content": parts}, said("", content=[{"type": "text", "text": "8"}])],
        "tools": None,
    }
    for one, other in in_both_formats(tmp_path, [seen], sft):
        assert one == other and one.media


def in_both_formats(folder: Path, rows: list[dict[str, Any]], source: DataConfig) -> list[tuple[Row, Row]]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    paths = [str(folder / f"rows.{kind}") for kind in ("jsonl", "parquet")]
    lines, table = (open_dataset(source.model_copy(update={"path": path})) for path in paths)
    return [(lines.row(at), replace(table.row(at), name=lines.row(at).name)) for at in range(len(rows))]


def test_templates_end_turns_with_tokens_of_their_own() -> None:
    found = {name: turn_ends(tokenizer_of(getattr(templates, name))) for name in ("QWEN3", "LLAMA3", "PHI", "ENDLESS")}
    assert found == {"QWEN3": ("<|im_end|>",), "LLAMA3": ("<|eot_id|>",), "PHI": ("<|end|>",), "ENDLESS": ()}
    assert turn_ends(tokenizer_of(templates.HARMONY)) == ("<|return|>", "<|call|>")
    assert turn_ends(build_tokenizer(chat_template=False)) == ()
