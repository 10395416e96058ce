"""Trajectories: what agents' calls leave behind is what was sampled, to the token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rondo.models.tiny.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, END_OF_TURN
from rondo.roles.rollout.engine import Completion, Request
from rondo.roles.rollout.serve.errors import TurnedDown
from rondo.roles.rollout.serve.trajectory import Call, Prompt, Trajectories, rows_of
from rondo.roles.rollout.sglang.client import ServerError
from tests.roles.rollout.serve.serving import MODEL, Served, ids, serving, tokenizer
from tests.roles.rollout.serve.test_openai import ADD, CALL

SESSION = {"X-Rondo-Session": "task-7"}


def merging() -> Any:
    """A tokenizer that writes "ab" as one token, though a model may sample "a" and "b"."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    vocabulary = {symbol: index for index, symbol in enumerate([*sorted(ByteLevel.alphabet()), "ab"])}
    made = Qwen2Tokenizer(
        vocab=vocabulary, merges=[("a", "b")], eos_token=END_OF_TURN, pad_token=END_OF_TEXT, unk_token=None,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.chat_template = CHAT_TEMPLATE
    return made


async def say(served: Served, messages: list[Any], **more: Any) -> Any:
    """One call of the session; the raw answer, with its headers."""
    return await served.openai.chat.completions.with_raw_response.create(
        model=MODEL, messages=messages, extra_headers=SESSION, **more
    )


async def test_a_second_turn_begins_with_the_tokens_that_were_sampled_and_not_with_those_of_their_text() -> None:
    own = merging()
    apart = [*ids("a", own), *ids("b", own)]
    assert len(ids("ab", own)) == 1 and len(apart) == 2
    prompts: list[Request] = []
    async with serving(lambda prompt: apart, own=own) as served:
        generate = served.engine.generate

        async def listen(request: Request) -> Completion:
            prompts.append(request)
            return await generate(request)

        served.engine.generate = listen  # type: ignore[method-assign]
        messages: list[Any] = [{"role": "user", "content": "ab?"}]
        first = await say(served, messages)
        messages += [first.parse().choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "ab!"}]
        second = await say(served, messages)
        told = await served.get("/rondo/trajectories/task-7")
    one, two = told["calls"]
    end = own.eos_token_id
    assert one["token_ids"] == two["token_ids"] == [*apart, end]
    tail = ids("\n<|im_start|>user\nab!<|im_end|>\n<|im_start|>assistant\n", own)
    assert two["prompt_token_ids"] == one["prompt_token_ids"] + one["token_ids"] + tail
    assert (two["reused_tokens"], two["parted"]) == (len(one["prompt_token_ids"]) + 3, None)
    assert [request.prompt.tolist() for request in prompts] == [one["prompt_token_ids"], two["prompt_token_ids"]]
    assert first.headers["X-Rondo-Reused-Tokens"] == "0"
    assert second.headers["X-Rondo-Reused-Tokens"] == str(two["reused_tokens"])
    # What a trainer would get: one row, with the sampled tokens, and only these, under the mask.
    [row] = told["rows"]
    assert row["tokens"] == two["prompt_token_ids"] + two["token_ids"]
    sampled = [token for token, mask in zip(row["tokens"], row["loss_mask"], strict=True) if mask]
    assert sampled == one["token_ids"] + two["token_ids"]
    kept = [value for value, mask in zip(row["log_probs"], row["loss_mask"], strict=True) if mask]
    assert kept == one["log_probs"] + two["log_probs"]
    assert {v for v, mask in zip(row["policy_versions"], row["loss_mask"], strict=True) if mask} == {0}


async def test_a_conversation_that_was_rewritten_says_where_it_parts_and_is_tokenised_whole() -> None:
    async with serving(lambda prompt: "sure") as served:
        messages: list[Any] = [{"role": "user", "content": "one"}]
        await say(served, messages)
        messages += [{"role": "assistant", "content": "sure thing"}, {"role": "user", "content": "two"}]
        answer = await say(served, messages)
        told = await served.get("/rondo/trajectories/task-7")
    second = told["calls"][1]
    # The prompt of the first call still agrees; the reply, which the agent changed, does not.
    assert second["reused_tokens"] == len(told["calls"][0]["prompt_token_ids"])
    assert "'<|im_end|>' was recorded, ' thing<|im_end|>" in second["parted"]
    assert answer.headers["X-Rondo-Parted"] == second["parted"].encode("ascii", "backslashreplace").decode()
    assert second["prompt_token_ids"] == ids(second["prompt_text"])
    assert len(told["rows"]) == 2


async def test_reasoning_that_the_client_drops_and_calls_of_tools_come_back_as_they_were_sampled() -> None:
    thought = f"<think>\nI add.\n</think>\n\nLet me see.\n{CALL}"
    async with serving(lambda prompt: "It is 2." if "<|im_start|>tool" in prompt else thought) as served:
        messages: list[Any] = [{"role": "user", "content": "1+1?"}]
        reply = (await say(served, messages, tools=ADD)).parse().choices[0].message
        assert reply.tool_calls and reply.content == "Let me see."
        back = {"role": "assistant", "content": reply.content, "tool_calls": [reply.tool_calls[0].model_dump()]}
        result = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "2"}
        done = (await say(served, [*messages, back, result], tools=ADD)).parse().choices[0].message
        told = await served.get("/rondo/trajectories/task-7")
    assert done.content == "It is 2."
    first, second = told["calls"]
    assert second["parted"] is None
    assert second["prompt_token_ids"][: second["reused_tokens"]] == first["prompt_token_ids"] + first["token_ids"]
    assert first["text"] == thought + "<|im_end|>" and len(told["rows"]) == 1


async def test_an_answer_that_was_cut_is_gone_on_from() -> None:
    async with serving(lambda prompt: "abcdef") as served:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        await say(served, messages, max_tokens=3)
        messages += [{"role": "assistant", "content": "abc"}, {"role": "user", "content": "on"}]
        await say(served, messages)
        told = await served.get("/rondo/trajectories/task-7")
    assert told["calls"][1]["parted"] is None and len(told["rows"]) == 1
    assert told["calls"][0]["finish_reason"] == "length"


async def test_samples_of_one_call_are_rows_of_their_own_and_streams_are_recorded_too() -> None:
    async with serving(lambda prompt: "hello") as served:
        create = served.openai.chat.completions.create
        messages: Any = [{"role": "user", "content": "x"}]
        await create(model=MODEL, messages=messages, n=2, extra_headers=SESSION)
        async for _ in await create(model=MODEL, messages=messages, stream=True, extra_headers=SESSION):
            pass
        told = await served.get("/rondo/trajectories/task-7")
        assert (await served.get("/rondo/trajectories"))["sessions"] == ["task-7"]
    assert [(call["index"], call["token_ids"]) for call in told["calls"]] == [
        (index, [*ids("hello"), tokenizer().eos_token_id]) for index in (0, 1, 0)
    ]
    assert len(told["rows"]) == 3


async def test_texts_of_completions_go_on_from_each_other() -> None:
    async with serving(lambda prompt: "zz") as served:
        client = served.openai.with_options(default_headers=SESSION)
        await client.completions.create(model=MODEL, prompt="ab", max_tokens=2)
        await client.completions.create(model=MODEL, prompt="abzz and", max_tokens=2)
        told = await served.get("/rondo/trajectories/task-7")
    assert [call["reused_tokens"] for call in told["calls"]] == [0, 4]
    assert told["rows"][0]["loss_mask"] == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1]


async def test_a_session_is_forgotten_when_asked_and_unknown_ones_are_not_found() -> None:
    async with serving() as served:
        await say(served, [{"role": "user", "content": "x"}])
        path = "/rondo/trajectories/task-7"
        deleted = await served.openai.delete(f"{served.url}{path}", cast_to=object)
        assert deleted == {"session": "task-7", "forgotten": True}
        with pytest.raises(ServerError, match="session must have a recorded call, got 'task-7'"):
            await served.get(path)
        without = await served.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        assert without.choices and (await served.get("/rondo/trajectories"))["sessions"] == []


def call(prompt: str, sampled: str, name: str = "c") -> Call:
    tokens = np.array(ids(sampled), np.int32)
    size = len(tokens)
    return Call(
        name, 0, Prompt(np.array(ids(prompt), np.int32), prompt), tokens, np.full(size, -0.5, np.float32),
        np.full(size, 3, np.int32), "stop", sampled, 0.0,
    )  # fmt: skip


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_sessions_go_by_number_by_tokens_and_by_age_the_one_not_used_for_longest_first() -> None:
    clock = Clock()
    kept = Trajectories(max_sessions=2, max_tokens=20, max_age_s=10, clock=clock)
    for name in ("a", "b"):
        kept.record(name, call("xx", "yy"))
    kept.record("a", call("xx", "yy"))
    kept.record("c", call("xx", "yy"))
    assert kept.names() == ["a", "c"]  # b was used before a
    kept.record("c", call("x" * 8, "y" * 2))
    assert kept.names() == ["c"] and kept.stats().num_tokens == 14
    clock.now = 10.5
    assert kept.names() == [] and kept.stats().num_evicted == 3
    with pytest.raises(TurnedDown):
        kept.calls("c")


def test_a_prompt_begins_with_the_longest_recorded_text_that_it_has() -> None:
    kept = Trajectories()
    for each in (call("A", "b"), call("Ab C", "d"), call("Other", "x")):
        kept.record("s", each)

    def rest(text: str) -> np.ndarray:
        return np.array(ids(text), np.int32)

    found = kept.prompt("s", "Ab Cd E", rest)
    assert found.tokens.tolist() == ids("Ab Cd E") and found.reused_tokens == len(ids("Ab Cd"))
    assert found.parted is not None and "at character 0: 'Otherx' was recorded" in found.parted
    assert kept.prompt("s", "Otherx!", rest).parted is None
    assert kept.prompt("s", "new", rest).reused_tokens == 0
    assert kept.prompt("s", "Otherx", rest).tokens.tolist() == ids("Otherx")


def test_rows_hold_each_sampled_token_once_under_the_mask() -> None:
    rows = rows_of([call("A", "b", "1"), call("Ab C", "d", "2"), call("A", "e", "3"), call("Ab Cd", "f", "4")])
    assert [row.calls for row in rows] == [("1/0", "2/0", "4/0"), ("3/0",)]
    assert rows[0].tokens.tolist() == ids("Ab Cdf") and rows[0].loss_mask.tolist() == [0, 1, 0, 0, 1, 1]
    assert rows[0].policy_versions.tolist() == [-1, 3, -1, -1, 3, 3]
    assert rows[0].log_probs.tolist() == [0.0, -0.5, 0.0, 0.0, -0.5, -0.5]
