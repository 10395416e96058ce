"""What strangers send that is too much, too deep or not theirs to say is refused, shortly, and before any work begins on it."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import orjson
import pytest

from rondo.roles.serve.conversation import messages_of
from rondo.roles.serve.fields import refuse_unknown
from rondo.roles.serve.service import SLICE, in_slices, parsed
from rondo.runtime.errors import ConfigError
from tests.roles.serve.serving import MODEL, TOKEN, prompt_ids, serving, tokenizer

CHAT, TEXTS, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def chat(*messages: Any, **more: Any) -> tuple[str, Any]:
    return CHAT, {"messages": list(messages) or [USER]} | more


def native(**more: Any) -> tuple[str, Any]:
    return NATIVE, {"input_ids": prompt_ids()} | more


def deep(levels: int, inner: Any = 1) -> Any:
    for _ in range(levels):
        inner = [inner]
    return inner


ASKED: list[tuple[tuple[str, Any], str]] = [
    (
        chat(chat_template_kwargs={"chat_template": "{% for i in range(9) %}{% endfor %}"}),
        "leave what the server decides to it",
    ),
    *(
        (chat(chat_template_kwargs={name: True}), "chat_template_kwargs must leave")
        for name in ("tokenize", "tools", "tokenizer_kwargs", "return_dict", "max_length", "messages", "eos_token")
    ),
    (chat(USER | {"junk": "x" * 9}), "messages[0] must have known fields only, got 'junk'"),
    (chat(USER | {"contnet": "x"}), "Did you mean 'content'?"),
    (chat(USER | {"content": deep(400)}), "must hold parts of text"),
    (chat(USER | {"name": deep(400)}), "must be JSON of few levels"),
    (chat(tools=[{"type": "function", "function": deep(400)}]), "must be JSON of few levels"),
    (chat({"role": "assistant", "content": "", "tool_calls": [3]}), "tool_calls must hold functions with a name"),
    (chat({"role": "assistant", "content": "", "tool_calls": 3}), "tool_calls must be a list of at most 1024"),
    (chat(*[USER] * 8193), "messages must be a list of 1 to 8192 messages"),
    (chat(tools=[{}] * 1025), "tools must be a list of at most 1024 objects"),
    (chat(stop=["x" * 4097]), "stop must be at most 64 texts of 4096 characters together"),
    (chat(stop=["x"] * 65), "stop must be at most 64 texts"),
    (chat(n=256, logprobs=True, top_logprobs=20), "top_logprobs of all tokens of all samples must be at most 2097152"),
    (
        native(return_logprob=True, top_logprobs_num=32, sampling_params={"n": 256, "max_new_tokens": 500}),
        "top_logprobs of",
    ),
    (chat(n=257), "n must be at most 256 over all prompts, got 257"),
    (chat(model="x" * 5000), "model must be text of at most 256 characters, got 'xxx"),
    (chat(**{"x" * 90_000: 1}), "the body must have known fields only, got 'xxx"),
    (chat(seed=1, top_k=2**63), "top_k must be"),
    (chat(USER | {"content": "x" * 30_000}), "a prompt must have at most 16384 characters, got 30"),
    ((TEXTS, {"prompt": "x" * 30_000}), "a prompt must have at most 16384 characters, got 30000"),
    ((TEXTS, {"prompt": ["x"] * 200, "n": 2}), "n must be at most 256 over all prompts, got 400"),
    ((TEXTS, {"prompt": [5] * 2000}), "prompt must have at most 1024 tokens, got 2000"),
    ((TEXTS, {"prompt": [[-1]]}), "prompt must be a list of token ids, got [-1]"),
    ((NATIVE, {"text": ["x"] * 300}), "n must be at most 256 over all prompts, got 300"),
    ((NATIVE, {"text": "x" * 30_000}), "a prompt must have at most 16384 characters"),
    (native(rid="x" * 5000), "rid must be text of at most 256 characters"),
    (native(sampling_params=[{"n": 200}] * 2, input_ids=[[5], [6]]), "n must be at most 256 over all prompts, got 400"),
    (native(sampling_params={"stop_token_ids": list(range(2000))}), "the number of stop_token_ids must be"),
    (native(return_logprob=deep(400)), "return_logprob must be true or false, got [[[...]]]"),
    (native(session_id="x" * 5000), "session_id must be text of at most 256 characters"),
    *(
        (("/update_weights_from_disk", {"model_path": path}), "model_path must be a folder with safetensors, got ")
        for path in ("x" * 4000, "a\0b", "/dev/null")
    ),
]


async def test_what_is_too_much_is_refused_with_short_words_and_the_next_one_is_answered() -> None:
    async with serving() as served:
        wrong = []
        for (path, body), words in ASKED:
            status, told = await raw(served.url, path, json.dumps(body).encode())
            if status != 400 or words not in told or len(told) > 700:
                wrong.append((words, status, told[:300]))
        assert wrong == []
        assert served.engine.stats().tokens_generated == 0
        assert (await served.post(CHAT, {"messages": [USER]}))["choices"][0]["message"]["content"] == "hello"


async def test_fields_that_the_template_names_or_that_answers_have_may_come_back() -> None:
    own = tokenizer()
    plain = own.chat_template
    own.chat_template = plain.replace("{{ message.content }}", "{{ message.content }}{{ message.mood or '' }}")
    try:
        async with serving(lambda prompt: prompt[-60:], own=own) as served:
            echoed = USER | {"mood": "!", "refusal": None, "annotations": [], "audio": None, "function_call": None}
            told = await served.post(CHAT, {"messages": [echoed], "model": MODEL})
    finally:
        own.chat_template = plain
    assert "hi!" in told["choices"][0]["message"]["content"]


def test_a_message_of_many_names_is_refused_after_one_look_at_the_template() -> None:
    class Template:
        num_looks = 0

        def __str__(self) -> str:
            self.num_looks += 1
            return "{{ message.content }}"

    template = Template()
    with pytest.raises(ConfigError, match=r"messages\[0\] must have known fields only, got 'x0'"):
        messages_of([USER | {f"x{number}": 1 for number in range(1000)}], template)
    assert template.num_looks == 1


def test_a_name_that_is_longer_than_any_is_compared_with_none() -> None:
    with pytest.raises(ConfigError, match="Remove it"):
        refuse_unknown(["x" * 301], ["x" * 300], (), "the body")


async def test_a_token_that_is_no_text_is_a_wrong_one() -> None:
    async with serving() as served:
        status, told = await raw(served.url, "/v1/models", b"", authorization=b"Bearer \xff\xfe" + TOKEN.encode())
    assert status == 401 and "must be asked with a valid token" in told


async def test_a_second_value_of_a_name_is_refused_in_both_dialects() -> None:
    async with serving() as served:
        for path, body in (
            (CHAT, b'{"messages": [{"role": "user", "role": "system"}]}'),
            (NATIVE, b'{"n": 1, "n": 2}'),
        ):
            status, told = await raw(served.url, path, body, authorization=b"Bearer " + TOKEN.encode())
            assert status == 400 and "must have each name once" in told


def test_a_body_of_many_values_is_read_without_walking_them_again_and_again() -> None:
    walks: list[str] = []
    gc.callbacks.append(lambda phase, info: walks.append(phase))
    try:
        found = parsed(b"[" + b"[]," * 100_000 + b"[]]")
        told = list(walks)
    finally:
        gc.callbacks.pop()
    assert len(found) == 100_001 and told.count("start") <= 1 and gc.isenabled()  # 140 times with the collector on


async def test_while_a_long_answer_is_written_others_have_their_turn() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    told = await in_slices(range(20 * SLICE + 1), lambda place: [place, -0.5])
    beside.cancel()
    assert turns >= 20 and orjson.loads(orjson.dumps(told)) == [[place, -0.5] for place in range(20 * SLICE + 1)]
    assert orjson.dumps(await in_slices([], str)) == b"[]"


async def raw(url: str, path: str, body: bytes, authorization: bytes = b"Bearer " + TOKEN.encode()) -> tuple[int, str]:
    """Status and body of what is answered to these bytes."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    method = b"POST" if body else b"GET"
    head = b"%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % (method, path.encode())
    writer.write(head + b"Authorization: %s\r\nContent-Length: %d\r\n\r\n" % (authorization, len(body)) + body)
    told = await reader.read()
    writer.close()
    top, _, rest = told.partition(b"\r\n\r\n")
    return int(top.split()[1]), rest.decode()
