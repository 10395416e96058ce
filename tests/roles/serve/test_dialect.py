"""The server's side of SGLang's contract, asked by the client that rondo uses for SGLang itself."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rondo.models.logprobs import score_tokens
from rondo.roles.engines.embedded.qwen3_forward import Qwen3Forward
from rondo.roles.engines.engine import Request, SamplingParams
from rondo.roles.engines.scoring_servers import ScoringServers
from rondo.roles.engines.sglang.client import ServerError
from tests.models.builders import full_tensors
from tests.roles.engines.engines import qwen3
from tests.roles.serve.serving import TOKEN, Served, ids, prompt_ids, reached, serving, tokenizer, until

LONG = "x" * 200


def real(seed: int = 0, num_slots: int = 4) -> Qwen3Forward:
    return Qwen3Forward(model_of(seed), num_slots=num_slots, max_length=128)


def model_of(seed: int) -> Any:
    return qwen3(seed, vocab_size=len(tokenizer()))


def asking(num_new: int = 8, **more: Any) -> dict[str, Any]:
    return {"input_ids": prompt_ids(), "sampling_params": {"max_new_tokens": num_new}, "return_logprob": True} | more


async def refused(served: Served, body: object, path: str = "/generate") -> tuple[int, str]:
    with pytest.raises(ServerError) as caught:
        await served.post(path, body)
    return caught.value.status, caught.value.words


async def test_generate_gives_the_tokens_log_probs_and_versions_that_the_engine_gives() -> None:
    async with serving(forward=real(), max_length=128) as served:
        params = SamplingParams(12, temperature=0.7, top_p=0.9, top_k=20)
        own = await served.engine.generate(Request("own", np.array(prompt_ids(), np.int32), params, seed=77))
        sampling = {"max_new_tokens": 12, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "sampling_seed": 77}
        told = await served.post("/generate", asking(rid="r1", sampling_params=sampling | {"ignore_eos": True}))
    meta = told["meta_info"]
    assert told["output_ids"] == own.tokens.tolist()
    assert [each[:2] for each in meta["output_token_logprobs"]] == [
        [pytest.approx(value), token] for value, token in zip(own.log_probs.tolist(), own.tokens.tolist(), strict=True)
    ]
    assert told["text"] == tokenizer().decode(own.tokens.tolist(), skip_special_tokens=True)
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r1", 5, 12)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 12}] and meta["weight_version"] == "0"


async def test_the_likeliest_tokens_are_told_with_the_log_probs_of_a_plain_forward() -> None:
    async with serving(forward=real(), max_length=128) as served:
        told = await served.post("/generate", asking(6, top_logprobs_num=3))
        streamed = await events(served, asking(6, top_logprobs_num=3, stream=True))
    with torch.no_grad():
        logits = model_of(0)(torch.tensor([prompt_ids() + told["output_ids"]])).logits[0, 4:-1].float()
    values, tokens = logits.log_softmax(-1).topk(3)
    found = told["meta_info"]["output_top_logprobs"]
    assert [[each[1] for each in row] for row in found] == tokens.tolist()
    assert np.allclose([[each[0] for each in row] for row in found], values.numpy(), atol=1e-4)
    assert all(len(part["meta_info"]["output_top_logprobs"]) == len(part["output_ids"]) for part in streamed)


async def test_batches_samples_and_texts_are_answered_in_order() -> None:
    async with serving(lambda prompt: prompt[-1] * 3) as served:
        batch = [ids("a"), ids("b"), ids("c")]
        params = [{"max_new_tokens": 1}, {"max_new_tokens": 2, "n": 2}, {"max_new_tokens": 8}]
        told = await served.post("/generate", {"input_ids": batch, "sampling_params": params, "rid": ["1", "2", "3"]})
        text = await served.post("/generate", {"text": "z"})
    assert [(each["meta_info"]["id"], each["text"]) for each in told] == [
        ("1", "a"), ("2", "bb"), ("2", "bb"), ("3", "ccc"),
    ]  # fmt: skip
    assert text["text"] == "zzz"
    assert text["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokenizer().eos_token_id}
    assert text["output_ids"][-1] == tokenizer().eos_token_id


async def events(served: Served, body: dict[str, Any], path: str = "/generate") -> list[Any]:
    """A whole stream, its end checked."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        async with session.post(served.url + path, json=body) as answer:
            assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in (await answer.text()).split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_stream_grows_to_what_is_answered_without_one() -> None:
    async with serving(forward=real(), max_length=128) as served:
        body = asking(40, sampling_params={"max_new_tokens": 40, "sampling_seed": 3})
        whole, parts = await served.post("/generate", body), await events(served, body | {"stream": True})
    assert len(parts) > 2
    for part in parts:
        count = len(part["output_ids"])
        assert part["output_ids"] == whole["output_ids"][:count] and whole["text"].startswith(part["text"])
        logged = part["meta_info"]["output_token_logprobs"]
        assert logged == whole["meta_info"]["output_token_logprobs"][:count]
        assert (part["meta_info"]["finish_reason"] is None) == (part is not parts[-1])
    assert parts[-1]["output_ids"] == whole["output_ids"] and parts[-1]["text"] == whole["text"]


async def test_a_stop_string_ends_the_sample_at_its_token_and_the_engine_stops_there() -> None:
    async with serving(lambda prompt: "ab STOP" + LONG) as served:
        told = await served.post("/generate", asking(sampling_params={"max_new_tokens": 150, "stop": ["STOP"]}))
        kept = await served.post(
            "/generate", asking(sampling_params={"max_new_tokens": 150, "stop": "STOP", "no_stop_trim": True})
        )
        assert served.engine.stats().tokens_generated < 60
    assert told["text"] == "ab " and told["output_ids"] == ids("ab STOP")
    assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": "STOP"}
    assert len(told["meta_info"]["output_token_logprobs"]) == len(ids("ab STOP"))
    assert kept["text"] == "ab STOP"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input_ids and text must be sent one without the other, got neither"),
        ({"input_ids": [1], "text": "a"}, "input_ids and text must be sent one without the other, got both"),
        ({"input_ids": ["a"]}, "input_ids must be a list of token ids"),
        ({"input_ids": []}, "the prompt must have 1 to 1023 tokens, got 0"),
        ({"input_ids": [9999]}, "must be in [0, 266), got 9999"),
        ({"input_ids": [1] * 1000, "sampling_params": {"max_new_tokens": 100}}, "must fit into 1024 tokens, got 1000 + 100"),
        ({"input_ids": [1], "sampling_params": {"max_new_token": 1}}, "Did you mean 'max_new_tokens'?"),
        ({"input_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p must be 0"),
        ({"input_ids": [1], "sampling_params": {"json_schema": "{}"}}, "json_schema must not be set"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature must be 0 (greedy) or from 1e-06"),
        ({"input_ids": [1], "sampling_params": {"temperature": 1e-50}}, "temperature must be 0 (greedy) or from 1e-06"),
        ({"input_ids": [1], "sampling_params": {"top_p": 1e-46}}, "top_p must be from 1e-06 to 1, got 1e-46"),
        ({"input_ids": [1], "sampling_params": {"top_k": 2**63}}, "top_k must be -1 (all tokens) or from 1 to 2147483647"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": [2**63]}}, "stop_token_ids must be from 0 to 2147483647"),
        ({"input_ids": [1], "priority": 2**63}, "must be from -2147483647 to 2147483647, got 9223372036854775808"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n must be at least 1, got 0"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens must be at least 1, or 0 with"),
        ({"input_ids": [1], "image_data": ["a.png"]}, "image_data must be []"),
        ({"input_ids": [1], "return_hidden_states": True}, "return_hidden_states must be False"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "rid must be unique in a batch"),
    ],
)  # fmt: skip
async def test_what_would_change_the_answer_and_is_not_supported_is_refused_with_words(body: Any, words: str) -> None:
    async with serving() as served:
        status, told = await refused(served, body)
    assert status == 400 and words in told


async def scores(tokens: np.ndarray, response: int, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.tile(np.arange(top_k), (response, 1))
    return -0.5 * np.arange(response), ids, -1.0 - ids


async def test_a_prompts_own_tokens_are_scored_from_a_place_on_as_a_teacher_is_asked() -> None:
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    async with serving(scores=scores) as served:
        alone = await served.post("/generate", body | {"sampling_params": {"max_new_tokens": 0}})
        beside = await served.post("/generate", asking(2, **body))
        status, told = await refused(served, body | {"logprob_start_len": 2})
        async with ScoringServers([served.url], api="sglang", key=TOKEN) as servers:
            log_probs, compared = await servers.score(np.array([5, 6, 7, 8], np.int32), 2, 3)
    meta = alone["meta_info"]
    assert (alone["output_ids"], alone["text"], meta["completion_tokens"]) == ([], "", 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0} and meta["output_token_logprobs"] == []
    assert meta["input_token_logprobs"] == [[None, 6, None], [0.0, 7, None]]
    assert meta["input_top_logprobs"] == [None, [[-1, 0, None], [-2, 1, None]]]
    assert (
        len(beside["output_ids"]) == 2 and beside["meta_info"]["input_token_logprobs"] == meta["input_token_logprobs"]
    )
    assert status == 400 and "logprob_start_len must leave two of 3 tokens or more of a prompt, got 2" in told
    assert log_probs.tolist() == [0, -0.5] and compared is not None and compared[0].tolist() == [[0, 1, 2]] * 2
    async with serving() as served:
        assert (await refused(served, body))[0] == 501


async def test_what_the_engine_sampled_is_scored_with_its_own_log_probs() -> None:
    model = model_of(0)

    async def score(*asked: Any) -> Any:
        return await asyncio.to_thread(score_tokens, model, *asked)

    async with serving(forward=real(), max_length=128, scores=score) as served:
        told = await served.post("/generate", asking(6, top_logprobs_num=3))
        whole = {"input_ids": prompt_ids() + told["output_ids"], "sampling_params": {"max_new_tokens": 0}}
        again = await served.post("/generate", asking(**whole, logprob_start_len=4, top_logprobs_num=3))
    for mine, other in (
        ("input_token_logprobs", "output_token_logprobs"),
        ("input_top_logprobs", "output_top_logprobs"),
    ):
        scored, sampled = again["meta_info"][mine][1:], told["meta_info"][other]
        np.testing.assert_allclose(
            np.array(scored, object)[..., :2].astype(float), np.array(sampled, object)[..., :2].astype(float), atol=2e-5
        )


async def test_unknown_names_beside_the_sampling_are_ignored_and_neutral_values_are_taken() -> None:
    neutral = {"frequency_penalty": 0, "repetition_penalty": 1.0, "min_p": 0.0, "max_new_tokens": 2, "logit_bias": None}
    async with serving() as served:
        told = await served.post("/generate", asking(routing_key="k", something=1, sampling_params=neutral))
    assert told["text"] == "he"


async def test_an_abort_answers_with_what_there_is_and_only_the_one_that_was_named() -> None:
    async with serving(lambda prompt: LONG) as served:
        is_reached, go_on = served.speaker.hold(5)
        tasks = [asyncio.create_task(served.post("/generate", asking(100, rid=rid))) for rid in ("a", "b")]
        await reached(is_reached)
        assert await refused(served, {}, "/abort_request")
        await served.post("/abort_request", {"rid": "a"})
        await served.post("/abort_request", {"rid": "nobody"})
        go_on.set()
        first, second = await asyncio.gather(*tasks)
    meta = first["meta_info"]
    assert meta["finish_reason"]["type"] == "abort" and 0 < meta["completion_tokens"] < 10
    assert first["output_ids"] == ids("x") * meta["completion_tokens"] and len(meta["output_token_logprobs"]) == len(
        first["output_ids"]
    )
    assert second["meta_info"]["completion_tokens"] == 100


async def test_a_name_that_is_in_flight_is_refused_and_free_again_afterwards() -> None:
    async with serving(lambda prompt: LONG) as served:
        is_reached, go_on = served.speaker.hold(3)
        first = asyncio.create_task(served.post("/generate", asking(5, rid="a")))
        await reached(is_reached)
        assert (await refused(served, asking(5, rid="a")))[0] == 400
        go_on.set()
        await first
        assert (await served.post("/generate", asking(5, rid="a")))["meta_info"]["completion_tokens"] == 5


async def test_a_caller_that_leaves_takes_its_request_out_of_the_engine() -> None:
    for stream in (False, True):
        async with serving(lambda prompt: LONG) as served:
            is_reached, go_on = served.speaker.hold(5)
            task = asyncio.create_task(served.post("/generate", asking(150, stream=stream)))
            await reached(is_reached)
            task.cancel()
            await asyncio.wait([task])
            await until(lambda: not served.requests.num_asked)
            go_on.set()
            assert (await served.post("/generate", asking(5)))["meta_info"]["completion_tokens"] == 5
            stats = served.engine.stats()
            assert (stats.num_running, stats.num_cancelled, stats.num_completed) == (0, 1, 1)


async def test_of_many_samples_of_one_request_a_few_are_in_the_engine_and_an_abort_ends_them_all() -> None:
    async with serving(lambda prompt: LONG) as served:
        is_reached, go_on = served.speaker.hold(3)
        many = asyncio.create_task(served.post("/generate", asking(rid="many", sampling_params={"n": 64})))
        await reached(is_reached)
        stats = served.engine.stats()
        assert (stats.num_running + stats.num_waiting, served.requests.num_asked) == (4, 64)
        few = asyncio.create_task(served.post("/generate", asking(1, rid="few", sampling_params={"n": 3})))
        await until(lambda: len(served.engine.progress()) > 5)
        assert (len(served.engine.progress()), served.requests.num_asked) == (6, 67)  # its half of the slots at once
        await served.post("/abort_request", {"rid": "many"})
        go_on.set()
        told = await many
        assert len(await few) == 3
    assert [each["meta_info"]["finish_reason"]["type"] for each in told] == ["abort"] * 64


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_stops_the_sampling_and_afterwards_the_sample_is_the_one_of_no_pause(mode: str) -> None:
    body = asking(100, sampling_params={"max_new_tokens": 100, "sampling_seed": 9, "ignore_eos": True})
    async with serving(forward=real(), max_length=128) as served:
        whole = await served.post("/generate", body)
        parts: list[Any] = []
        task = asyncio.create_task(first_part(served, body | {"stream": True}, parts))
        await until(lambda: bool(parts))
        await served.post("/pause_generation", {"mode": mode})
        before = served.engine.stats().tokens_generated
        with pytest.raises(ServerError, match="must not be paused"):
            await served.get("/ready")
        late = asyncio.create_task(served.post("/generate", body))
        await served.get("/health")
        assert served.engine.stats().tokens_generated == before and not late.done()
        await served.post("/continue_generation", {})
        await task
        assert (await late)["output_ids"] == parts[-1]["output_ids"] == whole["output_ids"]
        assert (parts[-1]["meta_info"]["num_retractions"] > 0) == (mode == "retract" and before < 200)
        await served.get("/ready")


async def first_part(served: Served, body: dict[str, Any], parts: list[Any]) -> None:
    """Reads a stream into `parts` as it comes."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        async with session.post(f"{served.url}/generate", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    parts.append(json.loads(line.removeprefix(b"data: ")))


async def test_the_pause_of_mode_abort_ends_what_is_in_flight_and_keeps_the_rest_waiting() -> None:
    async with serving(lambda prompt: LONG) as served:
        is_reached, go_on = served.speaker.hold(5)
        first = asyncio.create_task(served.post("/generate", asking(100)))
        await reached(is_reached)
        pausing = asyncio.create_task(served.post("/pause_generation", {}))
        await until(lambda: served.requests.paused is not None)
        go_on.set()
        await pausing
        assert (await first)["meta_info"]["finish_reason"]["type"] == "abort"
        late = asking(5, rid="waits", top_logprobs_num=2)
        waiting = asyncio.create_task(served.post("/generate", late))
        await until(lambda: served.requests.num_asked > 0)
        assert (await refused(served, {}, "/flush_cache"))[0] == 400
        await served.post("/abort_request", {"rid": "waits"})
        assert (await waiting)["output_ids"] == []
        await served.post("/continue_generation")
        assert len((await served.post("/generate", asking(5)))["output_ids"]) == 5
        assert await served.post("/flush_cache") == "Cache flushed.\n"


async def test_weights_from_a_folder_change_the_version_and_the_tokens_between_two_steps(tmp_path: Path) -> None:
    other = dict(full_tensors(model_of(1)))
    save_file({name: tensor.clone().contiguous() for name, tensor in other.items()}, tmp_path / "model.safetensors")
    body = asking(100, sampling_params={"max_new_tokens": 100, "sampling_seed": 5, "ignore_eos": True})
    async with serving(forward=real(), max_length=128) as served:
        parts: list[Any] = []
        task = asyncio.create_task(first_part(served, body | {"stream": True}, parts))
        await until(lambda: bool(parts))
        await served.post("/pause_generation", {"mode": "in_place"})
        told = await served.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "7"})
        assert told["success"] is True
        assert (await served.get("/model_info"))["weight_version"] == "7"
        await served.post("/continue_generation", {})
        await task
        spans = parts[-1]["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["0", "7"] and spans[-1]["end"] == 100
        assert spans[0]["end"] == spans[1]["start"] > 0
        new = await served.post("/generate", body)
    async with serving(forward=real(1), max_length=128) as served:
        assert (await served.post("/generate", body))["output_ids"] == new["output_ids"]
        assert (await refused(served, {"model_path": str(tmp_path / "none")}, "/update_weights_from_disk"))[0] == 400
        path = {"model_path": str(tmp_path), "weight_version": "new"}
        assert "must be a number" in (await refused(served, path, "/update_weights_from_disk"))[1]


async def test_information_has_what_routers_and_clients_of_sglang_look_for() -> None:
    async with serving(num_slots=3, model_path="/models/m") as served:
        info, model = await served.get("/server_info"), await served.get("/get_model_info")
        loads = await served.get("/v1/loads")
        await served.get("/health_generate")
        models = await served.get("/v1/models")
    assert (info["max_running_requests"], info["max_total_num_tokens"], info["tp_size"]) == (3, 3 * 1024, 1)
    assert info["enable_deterministic_inference"] is True and info["version"].count(".") == 2
    assert (model["model_path"], model["served_model_name"], model["weight_version"]) == ("/models/m", "speaker", "0")
    assert (loads["loads"][0]["num_running_reqs"], loads["loads"][0]["num_waiting_reqs"]) == (0, 0)
    assert models["data"][0]["id"] == "speaker"


async def test_what_only_sglang_can_do_is_answered_with_501_and_words() -> None:
    async with serving() as served:
        for path in ("/update_weights_from_tensor", "/weights_checker", "/release_memory_occupation"):
            assert (await refused(served, {}, path))[0] == 501
        assert (await served.get("/server_info"))["enable_return_routed_experts"] is False
        assert (await refused(served, asking(return_routed_experts=True)))[0] == 501


async def test_routed_experts_are_told_where_the_engine_tells_them() -> None:
    def experts(slot: int, length: int) -> np.ndarray:
        return np.arange(length * 4, dtype=np.uint8).reshape(length, 2, 2)

    async with serving(experts=experts) as served:
        assert (await served.get("/server_info"))["enable_return_routed_experts"] is True
        asked = asking(return_routed_experts=True, routed_experts_start_len=2)
        told = await served.post("/generate", asked)
        meta = told["meta_info"]
    length = meta["prompt_tokens"] + meta["completion_tokens"] - 1
    found = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, 2, 2)
    assert np.array_equal(found, experts(0, length)[2:])


async def test_without_the_token_nobody_learns_more_than_whether_it_is_up() -> None:
    shown = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer é"})
    async with serving() as served, aiohttp.ClientSession() as session:
        for headers in shown:
            for path in ("/v1/models", "/model_info", "/rondo/trajectories", "/no/such/path"):
                async with session.get(served.url + path, headers=headers) as answer:
                    code = (await answer.json())["error"]["code"]
                    assert answer.status == code and code in (401, 429)  # who is wrong too often is told to wait
                    assert code == 401 or headers == shown[-1]
        async with session.get(f"{served.url}/health") as answer:
            assert (answer.status, await answer.read()) == (200, b"")


async def test_a_body_beyond_the_limit_is_refused_before_it_is_read_whole() -> None:
    async with serving(max_body_bytes=1000) as served:
        assert (await refused(served, {"text": "x" * 2000}))[0] == 413
        assert (await served.post("/generate", {"text": "x"}))["text"] == "hello"


async def test_an_endpoint_of_a_run_leaves_pauses_and_weights_to_the_run() -> None:
    async with serving(control=False) as served:
        for path in ("/pause_generation", "/continue_generation", "/flush_cache", "/update_weights_from_disk"):
            assert (await refused(served, {}, path))[0] == 403
        assert (await refused(served, {"abort_all": True}, "/abort_request"))[0] == 403
        await served.post("/abort_request", {"rid": "any"})


async def test_a_server_that_ends_answers_what_is_in_flight_and_takes_nothing_new() -> None:
    async with serving(lambda prompt: LONG) as served:
        is_reached, go_on = served.speaker.hold(5)
        first = asyncio.create_task(served.post("/generate", asking(20)))
        await reached(is_reached)
        draining = asyncio.create_task(served.requests.drain())
        await asyncio.sleep(0)
        assert (await refused(served, asking(20)))[0] == 503
        with pytest.raises(ServerError):
            await served.get("/ready")
        go_on.set()
        assert len((await first)["output_ids"]) == 20
        await draining
