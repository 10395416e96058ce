"""Servers that judge given tokens, in both dialects: real sockets, answers that are whole or are none, and servers that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rondo.roles.algorithms.teachers import NONE
from rondo.roles.engines import equal_servers
from rondo.roles.engines.scoring_servers import Api, ScoringServers
from rondo.runtime.errors import ConfigError, PeerGone, ProtocolError
from tests.schedules import later

TOKENS = np.array([5, 6, 7, 8], np.int32)
Answer = Callable[[dict[str, Any]], Any]


def log_prob(place: int, token: int) -> float:
    return -0.1 * place - 0.01 * token


def of_sglang(body: dict[str, Any]) -> Any:
    """As SGLang 0.5.15 answers: triples from `logprob_start_len` on, of which the first has no log-prob."""
    ids, start, top = body["input_ids"], body["logprob_start_len"], body["top_logprobs_num"]
    assert body["return_logprob"] and body["sampling_params"]["max_new_tokens"] == 0
    said = [[log_prob(at, ids[at]), ids[at], None] for at in range(start, len(ids))]
    tops = [[[log_prob(at, token), token, None] for token in range(top)] for at in range(start, len(ids))]
    said[0][0], tops[0] = None, None  # type: ignore[call-overload]
    return {"meta_info": {"input_token_logprobs": said, "input_top_logprobs": tops if top else None}}


def of_vllm(body: dict[str, Any]) -> Any:
    """As vLLM does: of each place the likeliest, and the token that is there behind them where it is none of these."""
    assert body["model"] == "judge" and body["max_tokens"] == 1
    places: list[Any] = [None]
    for at, token in enumerate(body["prompt"][1:], 1):
        ids = [*range(body["prompt_logprobs"]), token]
        places.append(
            {
                str(each): {"logprob": log_prob(at, each), "rank": rank + 1, "decoded_token": chr(65 + each)}
                for rank, each in reversed(list(enumerate(ids)))
            }
        )
    return {"choices": [{"prompt_logprobs": places}]}


@asynccontextmanager
async def served(*answers: Answer) -> AsyncIterator[tuple[list[str], list[list[Any]]]]:
    """A server for each of `answers`: its url, and what it was asked."""
    asked: list[list[Any]] = [[] for _ in answers]
    runners, urls = [], []
    for number, answer in enumerate(answers):

        async def on_post(request: web.Request, number: int = number, answer: Answer = answer) -> web.Response:
            asked[number].append(await request.json())
            found = answer(asked[number][-1])
            found = await found if hasattr(found, "__await__") else found
            return found if isinstance(found, web.Response) else web.json_response(found)

        app = web.Application()
        app.router.add_post("/generate", on_post)
        app.router.add_post("/v1/completions", on_post)
        app.router.add_get("/v1/models", models)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runners[-1].addresses[0][1]}")
    try:
        yield urls, asked
    finally:
        for runner in runners:
            await runner.cleanup()


served_models: list[Any] = [{"id": "judge"}]


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": served_models})


def refuse(status: int) -> Answer:
    return lambda _: web.json_response({"error": {"message": "no"}}, status=status)


@pytest.mark.parametrize(("api", "answer"), [("sglang", of_sglang), ("vllm", of_vllm)])
@pytest.mark.parametrize("top_k", [0, 3])
def test_a_server_tells_of_the_response_and_of_the_likeliest_at_its_places(
    api: Api, answer: Answer, top_k: int
) -> None:
    async def run() -> None:
        async with served(answer) as (urls, asked), ScoringServers(urls, api=api) as servers:
            log_probs, compared = await servers.score(TOKENS, 2, top_k)
            assert log_probs.dtype == np.float32
            assert log_probs.tolist() == pytest.approx([log_prob(2, 7), log_prob(3, 8)])
            assert (compared is None) == (top_k == 0)
            if compared is not None:
                assert compared[0].dtype == np.int32 and compared[0].tolist() == [[0, 1, 2], [0, 1, 2]]
                wanted = [[log_prob(at, token) for token in range(3)] for at in (2, 3)]
                np.testing.assert_allclose(compared[1], wanted, rtol=1e-6)
            assert len(asked[0]) == 1

    asyncio.run(run())


def test_a_server_that_is_full_or_answers_of_other_tokens_is_asked_again_and_the_others_meanwhile() -> None:
    others = iter([refuse(503)({}), of_sglang({**_body(), "input_ids": [5, 6, 9, 9]}), {"meta_info": {}}])

    def fails_first(body: dict[str, Any]) -> Any:
        return next(others, None) or of_sglang(body)

    async def run() -> None:
        async with served(fails_first) as (urls, asked), ScoringServers(urls, api="sglang") as servers:
            log_probs, _ = await servers.score(TOKENS, 2)
            assert log_probs.tolist() == pytest.approx([log_prob(2, 7), log_prob(3, 8)]) and len(asked[0]) == 4

    asyncio.run(run())


def test_a_call_that_fails_at_one_server_goes_to_the_next_one_however_soon_it_failed() -> None:
    async def run() -> None:
        async with (
            served(refuse(503), of_sglang) as (urls, asked),
            ScoringServers(urls, api="sglang", deadline_s=60.0) as servers,
        ):
            await servers.score(TOKENS, 2)
            assert [len(each) for each in asked] == [1, 1]

    asyncio.run(run())


async def failed_once(servers: ScoringServers) -> None:
    while not servers._servers.num_failed:  # noqa: ASYNC110 - a count
        await asyncio.sleep(0)


def _body() -> dict[str, Any]:
    return {
        "logprob_start_len": 1, "top_logprobs_num": 0, "return_logprob": True, "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip


def test_calls_are_spread_and_no_more_go_out_than_are_allowed() -> None:
    met, busy, most = asyncio.Barrier(4), 0, 0

    async def together(body: dict[str, Any]) -> Any:
        """Each four answers come once all four are asked for."""
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await met.wait()
        busy -= 1
        return of_sglang(body)

    async def run() -> None:
        async with (
            served(together, together) as (urls, asked),
            ScoringServers(urls, api="sglang", num_calls=4) as servers,
        ):
            await asyncio.gather(*(servers.score(TOKENS, 2) for _ in range(12)))
            assert [len(each) for each in asked] == [6, 6] and most == 4

    asyncio.run(run())


def test_what_a_server_refuses_fails_with_its_words_and_what_none_answers_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(equal_servers, "_PAUSE_S", 60.0)  # it is asked once

    async def run() -> None:
        async with served(refuse(400), refuse(503)) as (urls, asked):
            async with ScoringServers(urls[:1], api="sglang") as servers:
                with pytest.raises(ConfigError, match=r"must take what it is asked, got: .*HTTP 400: no"):
                    await servers.score(TOKENS, 2)
            async with ScoringServers(urls[1:], api="sglang", deadline_s=50.0) as servers:
                asking = asyncio.create_task(servers.score(TOKENS, 2))
                await failed_once(servers)
                later(50.0)
                with pytest.raises(PeerGone, match=r"within 50 s, got at last: .*HTTP 503: no"):
                    await asking
            assert [len(each) for each in asked] == [1, 1]

    asyncio.run(run())


def test_a_server_that_serves_no_model_yet_is_asked_again_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "served_models", [])

    async def run() -> None:
        async with served(of_vllm) as (urls, _), ScoringServers(urls, api="vllm", deadline_s=3600) as servers:
            with pytest.raises(ProtocolError, match=r"must answer /v1/models with a model that it serves, got"):
                await servers.texts(TOKENS)
            asking = asyncio.create_task(servers.score(TOKENS, 2))
            await failed_once(servers)
            later(3600)
            with pytest.raises(PeerGone, match=r"Name it in distillation\.teacher\.served_model"):
                await asking

    asyncio.run(run())


def test_the_words_of_every_servers_tokenizer_are_those_that_it_tells() -> None:
    async def run() -> None:
        async with served(of_vllm, of_vllm) as (urls, asked), ScoringServers(urls, api="vllm") as servers:
            assert await servers.texts(TOKENS) == {url: ["G", "H", "I"] for url in urls}
            assert [len(each) for each in asked] == [1, 1]

    asyncio.run(run())


@pytest.mark.parametrize(("api", "answer"), [("sglang", of_sglang), ("vllm", of_vllm)])
def test_a_token_without_a_chance_is_told_as_one_and_not_asked_for_again(api: Api, answer: Answer) -> None:
    """JSON has null for -inf: of the sampled token, which is among the likeliest here, and of another one."""

    def without(body: dict[str, Any]) -> Any:
        found = answer(body)
        if api == "vllm":
            place = found["choices"][0]["prompt_logprobs"][-1]
            place["8"]["logprob"] = place["1"]["logprob"] = None
        else:
            meta = found["meta_info"]
            meta["input_token_logprobs"][-1][0] = meta["input_top_logprobs"][-1][1][0] = None
        return found

    async def run() -> None:
        async with served(without) as (urls, asked), ScoringServers(urls, api=api, deadline_s=300.0) as servers:
            log_probs, compared = await servers.score(TOKENS, 2, 3)
            assert log_probs.tolist() == pytest.approx([log_prob(2, 7), -np.inf]) and compared is not None
            assert compared[0].tolist() == [[0, 1, 2], [0, NONE, 2]] and np.isfinite(compared[1]).all()
            assert len(asked[0]) == 1

    asyncio.run(run())
