"""OpenAI's endpoints, driven by OpenAI's own client."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.engines.engine import Completion, Prefix, Request
from tests.roles.data import templates
from tests.roles.data.templates import tokenizer_of
from tests.roles.serve.serving import MODEL, ids, reached, serving, tokenizer, until
from tests.roles.serve.test_dialect import events, real

USER: Any = [{"role": "user", "content": "hi"}]
ADD: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


async def test_a_chat_is_answered_through_the_chat_template() -> None:
    heard: list[str] = []

    def says(prompt: str) -> str:
        heard.append(prompt)
        return "hello 漢"

    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
    ]
    async with serving(says) as served:
        done = await served.openai.chat.completions.create(model=MODEL, messages=messages, user="me", store=False)
    assert heard[0] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    [choice] = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello 漢", "stop")
    assert done.usage is not None and done.usage.prompt_tokens == len(ids(heard[0]))
    assert done.usage.completion_tokens == len(ids("hello 漢")) + 1
    assert (done.object, done.model) == ("chat.completion", MODEL)


async def test_a_stream_tells_the_same_as_the_whole_and_ends_with_the_usage() -> None:
    async with serving(lambda prompt: f"<think>\nhm\n</think>\n\nLook: {CALL}\n{CALL}") as served:
        asked: Any = {"model": MODEL, "messages": USER, "tools": ADD, "seed": 1}
        whole = (await served.openai.chat.completions.create(**asked)).choices[0]
        chunks = [
            chunk
            async for chunk in await served.openai.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}
            )
        ]
    *parts, last = chunks
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens > 40
    deltas = [chunk.choices[0].delta for chunk in parts]
    assert deltas[0].role == "assistant" and all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content == "Look:"
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == whole.message.model_extra["reasoning_content"] == "hm"
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1] and whole.message.tool_calls is not None
    for streamed, told in zip(calls, whole.message.tool_calls, strict=True):
        assert streamed.function is not None and streamed.id and told.id
        assert streamed.function.name == told.function.name == "add"
        assert json.loads(streamed.function.arguments or "") == json.loads(told.function.arguments) == {"a": 1}
    assert parts[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"
    assert all(chunk.choices[0].finish_reason is None for chunk in parts[:-1])
    assert len(parts) > 3


async def test_tools_reach_the_template_and_without_them_a_call_is_text() -> None:
    heard: list[str] = []

    def says(prompt: str) -> str:
        heard.append(prompt)
        return CALL

    async with serving(says) as served:
        create = served.openai.chat.completions.create
        with_tools = (await create(model=MODEL, messages=USER, tools=ADD)).choices[0]
        heard_with = heard[-1]
        without = (await create(model=MODEL, messages=USER)).choices[0]
        off = (await create(model=MODEL, messages=USER, tools=ADD, tool_choice="none")).choices[0]
    assert heard_with.startswith("<tools>add </tools>") and not heard[-1].startswith("<tools>")
    assert with_tools.message.content is None and with_tools.finish_reason == "tool_calls"
    for plain in (without, off):
        assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == (CALL, None, "stop")


async def test_calls_are_read_as_the_chat_template_writes_them_in_a_stream_too() -> None:
    own = copy.deepcopy(tokenizer())
    hermes = own.chat_template
    own.chat_template = hermes.replace("<tool_call>", "<tool_call>{# as <function= #}")
    properties = {"a": {"type": "integer"}}
    add: Any = [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": properties}}}
    ]
    spoken = "Look: <tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    async with serving(lambda prompt: spoken, own=own) as served:
        asked: Any = {"model": MODEL, "messages": USER, "tools": add}
        whole = (await served.openai.chat.completions.create(**asked)).choices[0]
        chunks = [chunk async for chunk in await served.openai.chat.completions.create(stream=True, **asked)]
    [told] = whole.message.tool_calls or []
    [streamed] = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert told.function.name == "add" and streamed.function is not None and streamed.function.name == "add"
    assert json.loads(told.function.arguments) == json.loads(streamed.function.arguments or "") == {"a": 1}
    assert whole.message.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Look:"
    assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_of_agents_that_wait_the_urgent_go_first() -> None:
    heard: list[str] = []

    def says(prompt: str) -> str:
        if prompt not in heard:
            heard.append(prompt)
        return "yes"

    async with serving(says, num_slots=1) as served:
        stands, go_on = served.speaker.hold(1)
        create = served.openai.completions.create
        asking = [asyncio.create_task(create(model=MODEL, prompt="running"))]
        await reached(stands)
        for prompt, priority in (("late", 0), ("later", 0), ("urgent", 5)):
            asking.append(asyncio.create_task(create(model=MODEL, prompt=prompt, extra_body={"priority": priority})))
            await until(lambda: served.requests.num_asked == len(asking))
        go_on.set()
        await asyncio.gather(*asking)
    assert heard == ["running", "urgent", "late", "later"]


async def test_the_result_of_a_tool_goes_back_to_the_model_as_the_template_shows_it() -> None:
    heard: list[str] = []

    def says(prompt: str) -> str:
        heard.append(prompt)
        return "3"

    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 36893488147419103233}'}}
    messages: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    async with serving(says) as served:
        await served.openai.chat.completions.create(model=MODEL, messages=messages)
    written = CALL.replace("1", "36893488147419103233")
    assert f"<|im_start|>assistant\n{written}<|im_end|>\n<|im_start|>tool\n3<|im_end|>" in heard[-1]


async def test_stop_strings_several_samples_and_lengths() -> None:
    async with serving(lambda prompt: "one END two") as served:
        create = served.openai.chat.completions.create
        stopped = await create(model=MODEL, messages=USER, stop="END", n=3)
        token = await create(model=MODEL, messages=USER, stop=["<|im_end|>"])
        short = await create(model=MODEL, messages=USER, max_completion_tokens=3, max_tokens=9)
    assert [(c.index, c.message.content, c.finish_reason) for c in stopped.choices] == [
        (index, "one ", "stop") for index in range(3)
    ]
    assert stopped.usage is not None and stopped.usage.completion_tokens == 3 * len(ids("one END"))
    assert token.choices[0].message.content == "one END two"
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("one", "length")


async def test_a_seed_decides_the_answer_and_each_sample_has_its_own() -> None:
    asked: Any = {"model": MODEL, "messages": USER, "max_tokens": 12, "extra_body": {"return_token_ids": True}}
    async with serving(forward=real(), max_length=128) as served:
        create = served.openai.chat.completions.create
        first, again = await create(**asked, seed=4, n=2), await create(**asked, seed=4, n=2)
        single, free = await create(**asked, seed=4), [await create(**asked) for _ in range(2)]
    tokens = [[choice.model_extra["token_ids"] for choice in done.choices] for done in (first, again)]
    assert tokens[0] == tokens[1] and tokens[0][0] != tokens[0][1]
    assert single.choices[0].model_extra["token_ids"] == tokens[0][0]
    assert free[0].choices[0].model_extra["token_ids"] != free[1].choices[0].model_extra["token_ids"]
    assert first.model_extra["prompt_token_ids"] == ids("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_log_probs_are_told_token_by_token_in_a_stream_too() -> None:
    asked: Any = {"model": MODEL, "messages": USER, "max_tokens": 20, "seed": 2, "logprobs": True, "top_logprobs": 2}
    asked |= {"extra_body": {"return_token_ids": True}}
    async with serving(forward=real(), max_length=128) as served:
        whole = (await served.openai.chat.completions.create(**asked)).choices[0]
        chunks = [chunk async for chunk in await served.openai.chat.completions.create(**asked, stream=True)]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    streamed = [
        each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content or []
    ]
    assert [each.logprob for each in streamed] == [each.logprob for each in whole.logprobs.content]
    tokens = [token for chunk in chunks for token in (chunk.choices[0].model_extra or {}).get("token_ids", [])]
    assert tokens == whole.model_extra["token_ids"] and len(tokens) == len(streamed)
    assert all(len(each.top_logprobs) == 2 for each in streamed)
    assert all(each.logprob <= each.top_logprobs[0].logprob + 1e-6 for each in whole.logprobs.content)


async def test_completions_take_text_tokens_and_lists_of_either() -> None:
    async with serving(lambda prompt: prompt[-1] * 3) as served:
        create = served.openai.completions.create
        text = await create(model=MODEL, prompt="a", max_tokens=2, logprobs=0)
        several = await create(model=MODEL, prompt=["a", "b"], n=2)
        tokens = await create(model=MODEL, prompt=ids("z"))
        lists = await create(model=MODEL, prompt=[ids("y"), ids("z")])
        streamed = [chunk async for chunk in await create(model=MODEL, prompt="q", stream=True)]
    assert text.choices[0].text == "aa" and text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.tokens == ["a", "a"] and text.choices[0].logprobs.text_offset == [0, 1]
    assert [(c.index, c.text) for c in several.choices] == [(0, "aaa"), (1, "aaa"), (2, "bbb"), (3, "bbb")]
    assert several.usage is not None and several.usage.prompt_tokens == 2
    assert tokens.choices[0].text == "zzz" and [c.text for c in lists.choices] == ["yyy", "zzz"]
    assert "".join(chunk.choices[0].text for chunk in streamed) == "qqq"


async def test_models_are_listed_and_others_are_not_found() -> None:
    async with serving() as served:
        assert [model.id async for model in served.openai.models.list()] == [MODEL]
        assert (await served.openai.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError, match="model must be 'speaker'"):
            await served.openai.chat.completions.create(model="gpt-4", messages=USER)
        await served.openai.chat.completions.create(model="default", messages=USER)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty must be 0"),
        ({"response_format": {"type": "json_object"}}, "response_format must be"),
        ({"tools": ADD, "tool_choice": "required"}, "tool_choice must be 'auto' or 'none'"),
        ({"tools": ADD, "parallel_tool_calls": False}, "parallel_tool_calls must be True"),
        ({"logit_bias": {"5": 1}}, "logit_bias must be {}"),
        ({"top_logprobs": 3}, "top_logprobs must be 0 to 20, and come with logprobs"),
        ({"extra_body": {"temprature": 1}}, "Did you mean 'temperature'?"),
        ({"messages": []}, "messages must be a list of 1 to 8192 messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "must be an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "parts of text"),
        ({"max_tokens": 5000}, "must fit into 1024 tokens"),
        ({"reasoning_effort": "high"}, "chat_template_kwargs"),
    ],
)  # fmt: skip
async def test_what_would_change_the_answer_and_is_not_supported_is_refused(more: dict[str, Any], words: str) -> None:
    asked: Any = {"model": MODEL, "messages": USER} | more
    async with serving() as served:
        with pytest.raises(openai.BadRequestError) as caught:
            await served.openai.chat.completions.create(**asked)
    assert words in str(caught.value)


async def test_neutral_values_of_what_is_not_supported_are_taken() -> None:
    neutral: Any = {
        "presence_penalty": 0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
    }
    async with serving() as served:
        done = await served.openai.chat.completions.create(model=MODEL, messages=USER, **neutral)
    assert done.choices[0].message.content == "hello"


async def test_arguments_of_the_template_come_with_the_request_and_may_begin_the_reasoning() -> None:
    own = build_tokenizer()
    own.chat_template = "{{ messages[0].content }}<|im_start|>assistant\n{% if thinking %}<think>\n{% endif %}"
    async with serving(lambda prompt: "so </think> yes", own=own) as served:
        create = served.openai.chat.completions.create
        more: Any = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
        thinking = (await create(model=MODEL, messages=USER, **more)).choices[0].message
        plain = (await create(model=MODEL, messages=USER)).choices[0].message
    assert (thinking.content, thinking.model_extra["reasoning_content"]) == ("yes", "so")
    assert plain.content == "so </think> yes"


async def test_a_failure_of_the_engine_is_an_answer_and_in_the_midst_of_a_stream_an_event_of_it() -> None:
    async with serving(lambda prompt: "x" * 50) as served:
        served.speaker.fails_at = 5
        asked: Any = {"model": MODEL, "messages": USER}
        found = await events(served, asked | {"stream": True}, "/v1/chat/completions")
        served.speaker.fails_at = served.speaker.num_calls + 3
        with pytest.raises(openai.InternalServerError, match="the device is gone"):
            await served.openai.chat.completions.create(**asked)
        await served.openai.chat.completions.create(**asked)
    assert found[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "the device is gone" in found[-1]["error"]["message"]


async def test_an_engine_that_tells_no_progress_is_served_too_its_stream_in_one_part() -> None:
    async with serving(lambda prompt: "one END two") as served:
        generate = served.engine.generate

        async def quiet(request: Request) -> Completion:
            return await generate(replace(request, progress=None))

        served.engine.generate = quiet  # type: ignore[method-assign]
        asked: Any = {"model": MODEL, "messages": USER, "stop": ["END"]}
        whole = await served.openai.chat.completions.create(**asked)
        chunks = [chunk async for chunk in await served.openai.chat.completions.create(**asked, stream=True)]
    assert whole.choices[0].message.content == "one " and whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and whole.usage.completion_tokens == len(ids("one END"))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["one ", None]


@pytest.mark.parametrize(
    ("told", "silent"),
    [(["xy", "q"], False), (["xy"], True), (["abc", "a"], False)],
    ids=["anew", "at the end", "the same"],
)
async def test_a_stream_goes_on_where_it_was_or_ends_with_an_error_where_its_engine_says_otherwise(
    told: list[str], silent: bool
) -> None:
    """The engine tells these beginnings, and then what it makes, or, `silent`, gives that at the end alone."""
    async with serving(lambda prompt: "abcdef") as served:
        telling(served, told, silent=silent)
        found = await events(served, {"model": MODEL, "messages": USER, "stream": True}, "/v1/chat/completions")
    assert found[0]["choices"][0]["delta"]["content"] == told[0]
    if told[0] == "xy":
        assert "another beginning" in found[-1]["error"]["message"]
    else:
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in found) == "abcdef"


async def test_what_nobody_was_shown_is_read_anew_where_an_engine_begins_anew() -> None:
    async with serving(lambda prompt: "one END two") as served:
        told = ["xy", "one EN"]
        telling(served, told)
        asked: Any = {"model": MODEL, "messages": USER, "stop": ["END"]}
        whole = await served.openai.chat.completions.create(**asked)
        told[:] = ["xy"]
        once_more = await served.openai.chat.completions.create(**asked)
    assert whole.choices[0].message.content == once_more.choices[0].message.content == "one "


def telling(served: Any, told: list[str], *, silent: bool = False) -> None:
    """The engine tells these beginnings first; `silent`: and nothing more before its end."""
    generate = served.engine.generate

    async def again(request: Request) -> Completion:
        assert request.progress is not None
        for text in told:
            request.progress(prefix(text))
        return await generate(replace(request, progress=None) if silent else request)

    served.engine.generate = again


def prefix(text: str) -> Prefix:
    tokens = np.array(ids(text), np.int32)
    return Prefix(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32))


@pytest.mark.parametrize(
    ("template", "asked", "words"),
    [
        ("LLAMA3", {"messages": USER, "tools": ADD}, "the tool 'add'"),
        ("MISTRAL", {"messages": [*USER, {"role": "system", "content": "be"}]}, "message 2, of role 'system'"),
        (
            "GEMMA",
            {"messages": [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "the calls of message 2, of role 'assistant'",
        ),
    ],
)
async def test_what_the_template_does_not_show_is_refused_with_its_name(
    template: str, asked: dict[str, Any], words: str
) -> None:
    async with serving(own=tokenizer_of(getattr(templates, template))) as served:
        with pytest.raises(
            openai.BadRequestError, match="must suit the model's chat template, which leaves out"
        ) as refused:
            await served.openai.chat.completions.create(model=MODEL, **asked)
    assert words in str(refused.value)
