from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rondo.models.load import load_model, load_tokenizer
from rondo.roles.engines.engine import Completion
from rondo.roles.engines.sglang.client import ServerError, SGLangClient
from rondo.runtime.errors import Closed, ConfigError, Refused
from rondo.runtime.waits import waiting
from tests.models.builders import full_tensors
from tests.roles.engines.engines import full_log_probs, request
from tests.sglang.servers import Served, moe

NEAR = 5e-5
"""Nats, in float32."""
STEP_S = 300.0


@pytest.fixture(scope="module")
def model(served: Served) -> Any:
    return load_model(str(served.model)).eval()


def routed(model: Any, tokens: np.ndarray) -> np.ndarray:
    """[T, layers, top_k] of transformers."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True).router_logits
    chosen = [torch.topk(torch.softmax(each.float(), -1), 2).indices for each in logits]
    return torch.stack(chosen, 1).numpy()


async def until(true: Callable[[], Awaitable[bool]], what: str) -> None:
    async with waiting(what, peer="sglang", deadline_s=STEP_S):
        while not await true():  # noqa: ASYNC110 - a server is asked, it tells nothing
            await asyncio.sleep(0.02)


async def generating(engine: Any) -> bool:
    load = await engine.load()
    return load.num_running > 0 and load.num_tokens > 12


async def test_greedy_tokens_are_those_of_transformers(served: Served, model: Any, tmp_path: Path) -> None:
    asked = [request(f"r{n}", n, 24, temperature=0.0) for n in (1, 3, 9, 40)]
    async with served.engine(tmp_path) as engine:
        done = await asyncio.gather(*map(engine.generate, asked))
    for each, got in zip(asked, done, strict=True):
        ids = torch.from_numpy(each.prompt.astype(np.int64))[None]
        want = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        np.testing.assert_array_equal(got.tokens, want[0, ids.shape[1] :].numpy())
        assert got.finish_reason == "length" and got.tokens.dtype == np.int32


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.7, "top_k": 5}, {"top_p": 0.5}],
    ids=lambda params: " ".join(f"{name} {value}" for name, value in params.items()) or "plain",
)
async def test_log_probs_are_the_trainers_after_the_temperature_and_before_top_k_and_top_p(
    served: Served, model: Any, tmp_path: Path, params: dict[str, float]
) -> None:
    asked = [request(f"r{n}", n, 32, **params) for n in (2, 7, 30)]
    async with served.engine(tmp_path) as engine:
        done = await asyncio.gather(*map(engine.generate, asked))
    gaps = [
        np.abs(full_log_probs(model, each, got.tokens) - got.log_probs).max()
        for each, got in zip(asked, done, strict=True)
    ]
    print(f"log-prob difference to transformers, mixture of experts, {params}: at most {max(gaps):.1e} nats")
    assert max(gaps) < NEAR


async def test_greedy_and_sampled_requests_in_one_batch_each_get_their_own_log_probs(
    served: Served, model: Any, tmp_path: Path
) -> None:
    asked = [request(f"r{n}", 5, 40, temperature=0.0 if n % 2 else 1.4) for n in range(6)]
    async with served.engine(tmp_path) as engine:
        done = await asyncio.gather(*map(engine.generate, asked))
    for each, got in zip(asked, done, strict=True):
        np.testing.assert_allclose(got.log_probs, full_log_probs(model, each, got.tokens), atol=NEAR)
    assert len({got.tokens.tobytes() for got in done[1::2]}) == 1


async def test_routed_experts_are_those_of_transformers_for_all_tokens_but_the_last(
    served: Served, model: Any, tmp_path: Path
) -> None:
    asked = request("r", 11, 9)
    async with served.engine(tmp_path) as engine:
        got = await engine.generate(asked)
    assert got.routed_experts is not None and got.routed_experts.dtype == np.uint8
    want = routed(model, np.concatenate([asked.prompt, got.tokens]))[:-1]
    assert got.routed_experts.shape == want.shape == (11 + 9 - 1, 2, 2)
    np.testing.assert_array_equal(np.sort(got.routed_experts, -1), np.sort(want, -1))


async def test_a_stop_token_is_the_last_token_of_a_sample_that_stops(served: Served, tmp_path: Path) -> None:
    async with served.engine(tmp_path) as engine:
        free = await engine.generate(request("free", 4, 30, temperature=0.0))
        stop = int(free.tokens[10])
        first = free.tokens.tolist().index(stop)
        got = await engine.generate(request("stopped", 4, 30, temperature=0.0, stop_token_ids=(stop,)))
    assert got.finish_reason == "stop"
    np.testing.assert_array_equal(got.tokens, free.tokens[: first + 1])


async def test_a_token_that_ends_sequences_for_the_server_alone_ends_none(served: Served, tmp_path: Path) -> None:
    """Its end of sequence is not among the request's; the sample goes on behind it, as one."""
    end = load_tokenizer(str(served.model)).eos_token_id
    own = 300 if served.capabilities.vocabulary is None else served.capabilities.vocabulary - 1
    asked = request("r", np.array([7, end, 7, end, 7], np.int32), 600, temperature=8.0, stop_token_ids=(own,))
    async with served.engine(tmp_path) as engine:
        for n in range(20):
            got = await engine.generate(replace(asked, id=f"r{n}"))
            if end in got.tokens[:-1]:
                break
        else:
            pytest.fail("the end of sequence must come up among thousands of nearly uniform draws")
    assert got.finish_reason == ("stop" if got.tokens[-1] == own else "length")
    assert got.tokens[-1] == own or len(got.tokens) == 600
    assert len(got.tokens) == len(got.log_probs) == len(got.policy_versions)


async def test_a_cancelled_request_has_its_tokens_and_leaves_the_server(
    served: Served, model: Any, tmp_path: Path
) -> None:
    asked = request("r", 5, 900)
    async with served.engine(tmp_path) as engine:
        asking = asyncio.create_task(engine.generate(asked))
        await until(lambda: generating(engine), "a running request")
        engine.cancel("r")
        got = await asking
        assert got.finish_reason == "cancelled" and 0 < len(got.tokens) < 900
        np.testing.assert_allclose(got.log_probs, full_log_probs(model, asked, got.tokens), atol=NEAR)
        engine.cancel("r")
        engine.cancel("unknown")
        await until(lambda: idle(engine), "an idle server")
        assert engine.stats().num_cancelled == 1


async def idle(engine: Any) -> bool:
    load = await engine.load()
    return load.num_running == load.num_waiting == 0


async def test_a_request_cancelled_at_once_ends_too(served: Served, tmp_path: Path) -> None:
    async with served.engine(tmp_path) as engine:
        asking = asyncio.create_task(engine.generate(request("r", 5, 900)))
        await asyncio.sleep(0)
        engine.cancel("r")
        got = await asking
        assert got.finish_reason == "cancelled" and len(got.tokens) < 900


async def test_of_requests_that_wait_at_the_server_the_urgent_go_first(served: Served, tmp_path: Path) -> None:
    ended: list[str] = []

    async def ask(engine: Any, name: str, num_new: int, priority: int) -> None:
        await engine.generate(replace(request(name, 5, num_new), priority=priority))
        ended.append(name)

    most = served.capabilities.max_running
    async with served.engine(tmp_path) as engine, asyncio.TaskGroup() as tasks:
        for number in range(5 * most // 2):
            tasks.create_task(ask(engine, f"plain {number}", 200, 0))
        await until(lambda: queued(engine, most), "a queue at the server")
        tasks.create_task(ask(engine, "urgent", 4, 5))
    # It begins when the first wave ends, and not behind all others, in the third.
    assert ended.index("urgent") < 3 * most // 2


async def queued(engine: Any, num: int) -> bool:
    return bool((await engine.load()).num_waiting >= num)


async def test_a_caller_that_leaves_takes_its_request_with_it(served: Served, tmp_path: Path) -> None:
    async with served.engine(tmp_path) as engine:
        asking = asyncio.create_task(engine.generate(request("r", 5, 900)))
        await until(lambda: generating(engine), "a running request")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: idle(engine), "an idle server")
        assert (await engine.generate(request("r", 5, 3))).finish_reason == "length"


async def test_a_prefix_is_the_beginning_of_the_sample_and_is_continued_as_itself(
    served: Served, model: Any, tmp_path: Path
) -> None:
    asked = request("r", 6, 40, temperature=0.0)
    async with served.engine(tmp_path) as engine:
        whole = await engine.generate(asked)
        older = np.full(15, -7, np.int32)  # none that a test gives the server
        part = Completion("r", whole.tokens[:15], whole.log_probs[:15], older, "interrupted")
        got = await engine.generate(asked.resumed(part))
    np.testing.assert_array_equal(got.tokens, whole.tokens)
    np.testing.assert_allclose(got.log_probs, whole.log_probs, atol=NEAR)
    assert got.policy_versions[:15].tolist() == [-7] * 15 and -7 not in got.policy_versions[15:]
    assert got.routed_experts is not None
    want = routed(model, np.concatenate([asked.prompt, got.tokens]))[:-1]
    np.testing.assert_array_equal(np.sort(got.routed_experts, -1), np.sort(want, -1))


async def test_a_sample_ends_by_the_length_that_the_server_told_and_what_does_not_fit_is_refused_and_harms_nobody(
    served: Served, tmp_path: Path
) -> None:
    async with served.engine(tmp_path) as engine:
        lengths = engine.capabilities.lengths
        assert lengths is not None
        for num_prompt in (5, lengths.prompt):
            done = await engine.generate(request(f"long/{num_prompt}", num_prompt, 5000))
            assert (done.finish_reason, num_prompt + len(done.tokens)) == ("length", lengths.whole)
        with pytest.raises(ConfigError, match=f"must have {lengths.prompt} tokens at most"):
            await engine.generate(request("longer", lengths.prompt + 1, 1))
        # What was counted here is what the server itself goes by.
        for num_prompt, num_new in ((lengths.prompt + 1, 1), (5, lengths.whole - 5 + 1)):
            body = {"input_ids": [7] * num_prompt, "sampling_params": {"max_new_tokens": num_new, "ignore_eos": True}}
            if num_prompt > lengths.prompt:
                with pytest.raises(ServerError, match="400"):
                    await engine.client.post("/generate", body, deadline_s=STEP_S)
            else:
                told = await engine.client.post("/generate", body, deadline_s=STEP_S)
                assert told["meta_info"]["completion_tokens"] == num_new - 1
        with pytest.raises(ConfigError, match="the model's vocabulary"):
            await engine.generate(request("strange", np.array([5, 700_000], np.int32), 4))
        with pytest.raises(ConfigError, match="unique"):
            await asyncio.gather(*(engine.generate(request("twin", 5, 4)) for _ in range(2)))
        assert len((await engine.generate(request("r", 5, 4))).tokens) == 4
    with pytest.raises(Closed):
        await engine.generate(request("late", 5, 4))


async def test_a_wrong_key_is_refused(served: Served) -> None:
    async with SGLangClient(served.url, api_key="another") as client:
        with pytest.raises(ServerError, match="401"):
            await client.post("/generate", {"input_ids": [5]}, deadline_s=STEP_S)


def kept_in_shared_memory(processes: list[psutil.Process]) -> list[str]:
    """Their files there that have a name, and would stay there when these processes are killed."""
    lines = [line for each in processes for line in Path(f"/proc/{each.pid}/maps").read_text().splitlines()]
    return [line for line in lines if re.search("/dev/shm/(sgl|sem)", line) and not line.endswith("(deleted)")]


def test_a_server_shows_its_key_and_a_name_in_shared_memory_nowhere(served: Served) -> None:
    pid = served.server.pid
    assert pid is not None
    leader = psutil.Process(pid)
    family = [leader, *leader.children(recursive=True)]
    assert len(family) >= 3
    for process in family:
        assert served.key not in " ".join([*process.cmdline(), *process.environ().values()])
    assert kept_in_shared_memory(family) == []
    assert served.server.log.stat().st_mode & 0o077 == 0


async def test_capabilities_are_told_as_the_server_has_them(served: Served) -> None:
    found = served.capabilities
    assert found.version == "0.5.23" and found.architecture == "Qwen3MoeForCausalLM"
    assert found.version_spans and found.log_probs_after_temperature
    assert not found.seeds and found.priority == 1
    assert found.experts is not None and (found.experts.num_layers, found.experts.top_k, found.experts.num) == (2, 2, 8)
    assert (found.max_running, found.tensor_parallel) == (16, 1) and found.vocabulary == 266


async def test_ready_and_load_are_the_servers_own(served: Served, tmp_path: Path) -> None:
    async with served.engine(tmp_path) as engine:
        assert await engine.ready() and await idle(engine)
        await engine.client.post("/pause_generation", {"mode": "in_place"}, deadline_s=STEP_S)
        try:
            assert not await engine.ready()
        finally:
            await engine.client.post("/continue_generation", {}, deadline_s=STEP_S)
        assert await engine.ready()
    assert not await engine.ready()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same model with weights of another seed."""
    return load_model(str(moe(tmp_path_factory.mktemp("other") / "model", seed=1))).eval()


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors(model)}


@pytest.mark.parametrize("pause", ["in_place", "retract", "abort"])
async def test_each_token_tells_the_weights_it_was_sampled_under(
    served: Served, model: Any, other: Any, tmp_path: Path, pause: Any
) -> None:
    asked = request("r", 5, 400)
    async with served.engine(tmp_path, pause=pause) as engine:
        await engine.update_weights(7, tensors_of(model))
        asking = asyncio.create_task(engine.generate(asked))
        await until(lambda: generating(engine), "a running request")
        await engine.update_weights(8, tensors_of(other))
        got = await asking
        await engine.update_weights(9, tensors_of(model))
        assert engine.version == 9
    split = int((got.policy_versions == 7).sum())
    assert got.finish_reason == "length" and 0 < split < 400
    assert got.policy_versions.tolist() == [7] * split + [8] * (400 - split)
    before, after = (full_log_probs(each, asked, got.tokens) for each in (model, other))
    np.testing.assert_allclose(got.log_probs[:split], before[:split], atol=NEAR)
    if pause == "in_place":  # it goes on with the cache that the old weights filled
        assert np.abs(got.log_probs[split:] - after[split:]).max() > NEAR
    else:
        np.testing.assert_allclose(got.log_probs[split:], after[split:], atol=NEAR)


@pytest.mark.parametrize("pause", ["in_place", "retract", "abort"])
async def test_a_new_request_reads_no_prefix_that_older_weights_computed(
    served: Served, model: Any, other: Any, tmp_path: Path, pause: Any
) -> None:
    asked = request("r", 40, 20)
    async with served.engine(tmp_path, pause=pause) as engine:
        await engine.update_weights(11, tensors_of(model))
        first = await engine.generate(asked)
        again = await engine.generate(asked)
        shared = engine.stats().shared_prompt_tokens
        await engine.update_weights(12, tensors_of(other))
        got = await engine.generate(asked)
        await engine.update_weights(13, tensors_of(model))
    assert shared >= 39  # under one version they share it
    for each in (first, again):
        np.testing.assert_allclose(each.log_probs, full_log_probs(model, asked, each.tokens), atol=NEAR)
    np.testing.assert_allclose(got.log_probs, full_log_probs(other, asked, got.tokens), atol=NEAR)


async def test_a_request_that_wants_it_is_handed_back_at_new_weights(
    served: Served, model: Any, other: Any, tmp_path: Path
) -> None:
    asked = replace(request("r", 5, 400), on_new_weights="interrupt")
    async with served.engine(tmp_path, pause="abort") as engine:
        await engine.update_weights(1, tensors_of(model))
        asking = asyncio.create_task(engine.generate(asked))
        await until(lambda: generating(engine), "a running request")
        await engine.update_weights(2, tensors_of(other))
        got = await asking
        assert got.finish_reason == "interrupted" and set(got.policy_versions.tolist()) == {1}
        done = await engine.generate(asked.resumed(got))
        await engine.update_weights(3, tensors_of(model))
    assert done.finish_reason == "length" and len(done.tokens) == 400
    np.testing.assert_array_equal(done.tokens[: len(got.tokens)], got.tokens)
    assert done.policy_versions.tolist() == [1] * len(got.tokens) + [2] * (400 - len(got.tokens))


async def test_tokens_of_weights_that_somebody_else_gave_are_refused(
    served: Served, model: Any, tmp_path: Path
) -> None:
    async with served.engine(tmp_path) as engine:
        await engine.update_weights(4, tensors_of(model))
        body = {"new_version": "theirs", "abort_all_requests": False}
        await engine.client.post("/update_weight_version", body, deadline_s=STEP_S)
        with pytest.raises(Refused, match="'theirs'"):
            await engine.generate(request("r", 5, 4))
