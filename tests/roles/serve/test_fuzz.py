"""Whatever agents ask: odd bodies, headers, methods and routes. No 5xx, no traceback, and the next one is answered."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.roles.serve.serving import LIMIT_S, MODEL, TOKEN, serving, until
from tests.strength import strength

PATIENCE = aiohttp.ClientTimeout(LIMIT_S)
text = st.text(max_size=12)
json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 70)
    | st.integers(-(2**31), 2**31 - 1)
    | st.floats(-10, 10, width=16)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
small = st.integers(-3, 8)
huge = st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64 - 1, -(2**63)])
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer", "other"]) | json
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": ROLES,
            "content": text | json | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": text})),
            "tool_calls": st.lists(
                st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": text, "arguments": json})})
            ),
            "reasoning_content": text | json,
            "name": json,
            "refusal": json,
            "odd": json,
        },
    )
    | json,
    max_size=3,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just(MODEL) | json,
    "max_tokens": small | json,
    "max_completion_tokens": small | json,
    "temperature": st.sampled_from([0, 1, 0.5, -1, 3, 1e-50, 1e308]) | text,
    "top_p": st.sampled_from([0, 1, 0.5, -1, 2, 1e-46]) | text,
    "top_k": st.integers(-3, 50) | huge | text,
    "stop_token_ids": st.lists(small | huge, max_size=3),
    "n": small | json,
    "stop": text | st.lists(text, max_size=5) | json,
    "seed": json,
    "stream": st.booleans() | json,
    "stream_options": json,
    "logprobs": st.booleans() | small | json,
    "top_logprobs": small | json,
    "tools": json,
    "tool_choice": json,
    "response_format": json,
    "user": json,
    "echo": json,
    "suffix": json,
    "best_of": json,
    "logit_bias": json,
    "presence_penalty": json,
    "frequency_penalty": json,
    "priority": json,
    "metadata": json,
    "return_token_ids": json,
    "odd": json,
    "chat_template_kwargs": st.dictionaries(
        st.sampled_from(
            ["chat_template", "tokenize", "tools", "messages", "add_generation_prompt", "documents", "odd"]
        ),
        json | st.just("{% for i in range(9) %}{{ i }}{% endfor %}"),
        max_size=2,
    )
    | json,
}
NATIVE = {
    "text": text | st.lists(text, max_size=2) | st.just("long " * 9000) | json,
    "input_ids": st.lists(st.integers(-2, 2000) | huge, max_size=5) | json,
    "rid": st.just("mine") | json,
    "priority": small | huge,
    "sampling_params": st.fixed_dictionaries(
        {},
        optional={
            "max_new_tokens": small | json,
            "n": small | json,
            "stop": json,
            "min_p": json,
            "ignore_eos": json,
            "odd": json,
            "temperature": FIELDS["temperature"],
            "top_k": FIELDS["top_k"],
            "skip_special_tokens": json,
            "stop_token_ids": small | huge,
        },
    )
    | json,
    "stream": st.booleans() | json,
    "return_logprob": json,
    "logprob_start_len": json,
    "top_logprobs_num": json,
    "odd": json,
}


def bodies(
    required: dict[str, st.SearchStrategy[Any]], optional: dict[str, st.SearchStrategy[Any]]
) -> st.SearchStrategy[bytes]:
    """Of a request that is right but for one to three fields; any JSON; or no JSON at all."""
    some = st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({**required, **{name: optional[name] for name in names}})
    )
    return st.builds(orjson.dumps, some | json) | st.binary(max_size=40)


ROUTES = st.sampled_from(
    [
        "/v1/models",
        "/v1/models/x",
        "/health",
        "/ping",
        "/ready",
        "/model_info",
        "/server_info",
        "/v1/loads",
        "/flush_cache",
        "/abort_request",
        "/rondo/trajectories",
        "/rondo/trajectories/x",
        "/pause_generation",
        "/update_weights_from_disk",
        "/none",
        "/%00",
    ]
)
HEADERS = st.dictionaries(
    st.sampled_from(["X-Rondo-Session", "Content-Type", "Accept", "Content-Encoding", "Expect", "X-Odd"]),
    st.sampled_from(["", "s", "x" * 3000, "application/json", "gzip", "\u00fc", "100-continue", "a/b", "*"]),
    max_size=2,
)
KNOWN_MESSAGES = st.just([{"role": "user", "content": "hi"}]) | MESSAGES
ASKED = (
    st.tuples(
        st.just("POST"),
        st.just("/v1/chat/completions"),
        bodies({"messages": KNOWN_MESSAGES, "max_tokens": small}, FIELDS),
        HEADERS,
    )
    | st.tuples(
        st.just("POST"),
        st.just("/v1/completions"),
        bodies({"prompt": text | st.lists(small | huge, max_size=3) | json, "max_tokens": small}, FIELDS),
        HEADERS,
    )
    | st.tuples(st.just("POST"), st.just("/generate"), bodies({}, NATIVE), HEADERS)
    | st.tuples(
        st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"]),
        ROUTES,
        st.builds(orjson.dumps, json),
        HEADERS,
    )
)


async def storm(requests: list[tuple[str, str, bytes, dict[str, str]]]) -> None:
    raised: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with serving(control=False, num_slots=2, max_length=256) as served, aiohttp.ClientSession() as session:
        for method, path, body, headers in requests:
            headers = {**headers, "Authorization": f"Bearer {TOKEN}"}
            with suppress(aiohttp.ClientConnectionError):  # what is no HTTP is hung up on
                async with session.request(
                    method, served.url + path, data=body, headers=headers, timeout=PATIENCE
                ) as response:
                    told = await response.read()
                    assert response.status < 500 or response.status == 501, (method, path, body, headers, told)
                    assert b"Traceback" not in told
        for name in (await served.get("/rondo/trajectories"))["sessions"]:
            told = await served.get(f"/rondo/trajectories/{name}")
            assert sum(len(row["calls"]) for row in told["rows"]) == len(told["calls"])
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
        done = await served.post("/v1/chat/completions", asked)
        assert done["choices"][0]["message"]["content"] == "hello"
        stats = served.engine.stats
        await until(lambda: stats().num_running + stats().num_waiting == 0)
    assert raised == []


def test_agents_are_answered_after_whatever_was_asked(caplog: pytest.LogCaptureFixture) -> None:
    @settings(max_examples=strength(quick=4, full=200))
    @given(st.lists(ASKED, min_size=4, max_size=24))
    def one(requests: list[tuple[str, str, bytes, dict[str, str]]]) -> None:
        asyncio.run(storm(requests))

    with caplog.at_level(logging.WARNING):
        one()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
