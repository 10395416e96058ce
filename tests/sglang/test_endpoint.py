"""The server for agents over a real SGLang server: OpenAI's client, trajectories and SGLang's dialect once more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import orjson

from rondo.models.load import load_tokenizer
from rondo.roles.engines.engine import Prefix, Request, SamplingParams
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.serve.app import listening
from rondo.roles.serve.prompt_work import prompt_work
from rondo.roles.serve.service import Service
from tests.sglang.servers import Served

TOKEN = "a-token-of-a-test"
ASK_S = 300.0


async def test_an_agent_on_sglang_gets_its_tokens_and_leaves_an_exact_trajectory(
    served: Served, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(served.model))
    async with served.engine(tmp_path) as engine:
        async with (
            prompt_work(str(served.model)) as work,
            listening(
                Service(engine, tokenizer, work, "m", max_length=256, control=False, seeds=False),
                [TOKEN],
                "127.0.0.1",
                0,
            ) as url,
            SGLangClient(url, api_key=TOKEN) as client,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as agent,
        ):
            asked: Any = {"model": "m", "temperature": 0.0, "max_tokens": 12, "extra_headers": {"X-Rondo-Session": "s"}}
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            first = await agent.chat.completions.create(messages=messages, **asked)
            messages += [{"role": "assistant", "content": first.choices[0].message.content}, messages[0]]
            chunks = [
                chunk async for chunk in await agent.chat.completions.create(messages=messages, stream=True, **asked)
            ]
            told = await client.get("/rondo/trajectories/s", deadline_s=ASK_S)
            routed = await client.post(
                "/generate",
                {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, "return_routed_experts": True},
                deadline_s=ASK_S,
            )
            ends = (tokenizer.eos_token_id,)
            for call in told["calls"]:
                prompt = np.array(call["prompt_token_ids"], np.int32)
                own = await engine.generate(
                    Request(call["id"], prompt, SamplingParams(12, 0.0, stop_token_ids=ends), 0)
                )
                assert call["token_ids"] == own.tokens.tolist()
                assert np.allclose(call["log_probs"], own.log_probs, atol=1e-4)
                assert call["policy_versions"] == own.policy_versions.tolist()
            leaving = asyncio.create_task(
                agent.chat.completions.create(messages=messages, **asked | {"max_tokens": 150})
            )
            async with asyncio.timeout(ASK_S):
                while not engine.stats().num_running:  # noqa: ASYNC110 - an engine is asked, it tells nothing
                    await asyncio.sleep(0)
            leaving.cancel()
            async with asyncio.timeout(ASK_S):
                while engine.stats().num_running:  # noqa: ASYNC110
                    await asyncio.sleep(0)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length") and len(told["calls"]) == 2
    assert first.usage is not None and first.usage.completion_tokens == len(told["calls"][0]["token_ids"])
    assert routed["meta_info"]["routed_experts"]


async def test_an_answer_is_streamed_as_it_grows_and_is_that_of_one_part_cut_at_a_stop_string(
    served: Served, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(str(served.model))
    async with served.engine(tmp_path) as engine:
        async with (
            prompt_work(str(served.model)) as work,
            listening(
                Service(engine, tokenizer, work, "m", max_length=256, control=False, seeds=False),
                [TOKEN],
                "127.0.0.1",
                0,
            ) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0) as agent,
        ):
            asked: Any = {"model": "m", "prompt": [5, 6, 7], "temperature": 0.0, "max_tokens": 100}
            whole = (await agent.completions.create(**asked)).choices[0].text
            chunks = [chunk async for chunk in await agent.completions.create(stream=True, **asked)]
            texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
            assert sum(text != "" for text in texts) > 1 and "".join(texts) == whole
            stop = whole[len(whole) // 3 :][:3]
            cut = await agent.completions.create(stop=[stop], **asked)
            assert cut.choices[0].text == whole[: whole.index(stop)] and cut.choices[0].finish_reason == "stop"
            prompt = np.array([5, 6, 7], np.int32)
            told: list[Prefix] = []
            plain = Request("plain", prompt, SamplingParams(100, 0.0, num_top=2), 0)
            one = await engine.generate(plain)
            grown = await engine.generate(replace(plain, id="grown", progress=told.append))
    assert grown.tokens.tolist() == one.tokens.tolist() and np.allclose(grown.log_probs, one.log_probs, atol=1e-4)
    assert grown.policy_versions.tolist() == one.policy_versions.tolist() and len(told) > 1
    for so_far in told:
        num = len(so_far.tokens)
        assert so_far.tokens.tolist() == grown.tokens[:num].tolist()
        assert np.array_equal(so_far.log_probs, grown.log_probs[:num])
        assert so_far.policy_versions.tolist() == grown.policy_versions[:num].tolist()
        assert so_far.top is not None and so_far.top.tokens.shape == (num, 2)


class Counting(SGLangClient):
    """Counts what the parts of an answer bring."""

    num_bytes = num_parts = num_told = 0

    async def stream(self, path: str, body: Any, on_events: Callable[[list[bytes]], None], **how: Any) -> None:
        def come(events: list[bytes]) -> None:
            self.num_parts += len(events)
            self.num_bytes += sum(map(len, events))
            self.num_told += sum(len(orjson.loads(each)["meta_info"]["output_token_logprobs"]) for each in events)
            on_events(events)

        await super().stream(path, body, come, **how)


async def test_a_stream_brings_each_token_once(served: Served, tmp_path: Path) -> None:
    async with served.engine(tmp_path) as engine, Counting(served.url, api_key=served.key) as client:
        engine.client = client
        asked = Request("r", np.array([5, 6, 7], np.int32), SamplingParams(800), 0, progress=lambda so_far: None)
        assert len((await engine.generate(asked)).tokens) == client.num_told == 800
        print(f"a stream of 800 tokens: {client.num_parts} parts, {client.num_bytes} bytes")
        assert client.num_parts > 1
