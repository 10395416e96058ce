"""Weights on their way into a real server: by every path, beside requests, damaged, and into a server that is killed."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rondo.models.load import load_model
from rondo.roles.config import SGLangConfig
from rondo.roles.engines.sglang import weights_buckets
from rondo.roles.engines.sglang.client import ServerError, SGLangClient
from rondo.roles.engines.sglang.server import SGLangServer
from rondo.roles.engines.sglang.shared_memory import FOLDER
from rondo.roles.engines.sglang.weights import ServerWeights
from rondo.roles.engines.sglang.weights_buckets import Bucket, pack
from rondo.runtime.errors import PeerGone
from rondo.runtime.processes.process import kill_session
from tests.roles.engines.engines import full_log_probs, request
from tests.sglang.servers import GRACE_S, START_S, Served, launch, moe, python

WAYS = ["disk", "tensor", "distributed"]
CALL_S = 300.0
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For a server's own files: short, since the path of torch's socket in it has 108 bytes at most."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture(scope="module")
def first(served: Served) -> Tensors:
    """The weights that the server was started with."""
    return load_file(served.model / "model.safetensors")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    return load_file(moe(tmp_path_factory.mktemp("other") / "model", seed=5) / "model.safetensors")


@asynccontextmanager
async def opened(
    client: SGLangClient, model: Path, folder: Path, way: Any, pause: Any = "retract", bucket_bytes: int = 1 << 16
) -> AsyncIterator[ServerWeights]:
    config = SGLangConfig(python=python(), weights=way, pause=pause, bucket_bytes=bucket_bytes)
    path = ServerWeights(config, client, folder=folder / "weights", model_path=str(model))
    await path.open()
    try:
        yield path
    finally:
        await path.close()


async def log_probs(client: SGLangClient, **more: Any) -> list[float]:
    """Of a prompt's own tokens."""
    body = {
        "input_ids": list(range(40, 72)), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True, "logprob_start_len": 0, **more,
    }  # fmt: skip
    answer = await client.post("/generate", body, deadline_s=CALL_S)
    return [value for value, _, _ in answer["meta_info"]["input_token_logprobs"][1:]]


async def sample(client: SGLangClient, start: int, num_tokens: int) -> dict[str, Any]:
    body = {
        "input_ids": [start] * 8, "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True},
        "return_logprob": True,
    }  # fmt: skip
    answer: dict[str, Any] = await client.post("/generate", body, deadline_s=CALL_S)
    return answer["meta_info"]


async def running(client: SGLangClient, num_requests: int, what: str = "num_running_reqs") -> None:
    """Returns when so many requests have made tokens."""
    async with asyncio.timeout(CALL_S):
        while True:
            loads = (await client.get("/v1/loads", deadline_s=CALL_S))["loads"]
            if sum(load[what] for load in loads) >= num_requests:
                return


async def waiting_there(client: SGLangClient, num_requests: int) -> None:
    """Returns when so many requests wait for room."""
    await running(client, num_requests, "num_waiting_reqs")


def leftovers() -> list[str]:
    return [path.name for path in FOLDER.glob(f"rondo_weights_{os.getpid()}_*")]


@pytest.mark.parametrize("way", WAYS)
async def test_log_probs_become_those_of_other_weights_and_exactly_the_first_ones_again(
    served: Served, first: Tensors, other: Tensors, tmp_path: Path, way: str
) -> None:
    async with served.client() as client, opened(client, served.model, tmp_path, way) as path:
        await path.update(1, first)
        before = await log_probs(client)
        await path.update(2, other)
        between = await log_probs(client)
        assert path.proof is not None and not path.proof.unknown
        assert path.proof.num_equal == path.proof.num_tensors > 15
        await path.update(3, first)
        assert await log_probs(client) == before
        assert (await client.get("/model_info", deadline_s=CALL_S))["weight_version"] == "3"
    assert max(abs(a - b) for a, b in zip(before, between, strict=True)) > 0.1
    assert not leftovers()


async def test_both_ranks_of_a_tensor_parallel_server_get_and_prove_weights_by_every_path(
    served: Served, first: Tensors, other: Tensors, tmp_path: Path, folder: Path
) -> None:
    server = SGLangServer(
        launch(served.model, tensor_parallel=2), log=tmp_path / "log", folder=folder, name="two", grace_s=GRACE_S
    )
    client = await server.start(START_S)
    try:
        before = await log_probs(client)
        for way in WAYS:
            async with opened(client, served.model, tmp_path / way, way) as path:
                await path.update(1, first)
                assert await log_probs(client) == before
                await path.update(2, other)
                between = await log_probs(client)
                assert path.proof is not None and not path.proof.unknown
                assert path.proof.num_equal == path.proof.num_tensors > 2 * 15
                await path.update(3, first)
                assert await log_probs(client) == before
            assert max(abs(a - b) for a, b in zip(before, between, strict=True)) > 0.1
    finally:
        await client.__aexit__()
        await server.close()
    assert not leftovers()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pause", ["in_place", "retract", "abort"])
async def test_requests_in_flight_see_what_their_pause_promises(
    served: Served, first: Tensors, other: Tensors, tmp_path: Path, way: str, pause: str
) -> None:
    async with served.client() as client, opened(client, served.model, tmp_path, way, pause) as path:
        await path.update(1, first)
        asking = [asyncio.create_task(sample(client, start, 300)) for start in (50, 90)]
        await running(client, 2)
        await path.update(2, other)
        late = await sample(client, 120, 4)
        told = await asyncio.gather(*asking)
        await path.update(3, first)
    assert late["weight_versions"] == [{"version": "2", "start": 0, "end": 4}]
    for meta in told:
        spans = meta["weight_versions"]
        if pause == "abort":
            assert meta["finish_reason"]["type"] == "abort" and meta["completion_tokens"] < 300
            assert [span["version"] for span in spans] in ([], ["1"])
            continue
        assert meta["finish_reason"]["type"] == "length" and meta["completion_tokens"] == 300
        assert [span["version"] for span in spans] == ["1", "2"] and spans[-1]["end"] == 300
        assert meta["num_retractions"] == (1 if pause == "retract" else 0)


async def test_in_place_a_new_request_meets_the_old_cache_unless_its_key_is_the_version(
    served: Served, first: Tensors, other: Tensors, tmp_path: Path
) -> None:
    """Why the engine names the version so when it pauses in place."""

    async def prompt(**more: Any) -> tuple[int, list[Any]]:
        body = {"input_ids": list(range(40, 72)), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, **more}
        meta = (await client.post("/generate", body | {"return_logprob": True}, deadline_s=CALL_S))["meta_info"]
        return meta["cached_tokens"], meta["output_token_logprobs"][0][:2]

    async with served.client() as client, opened(client, served.model, tmp_path, "tensor", "in_place") as path:
        await path.update(1, first)
        await prompt()
        await path.update(2, other)
        stale, wrong = await prompt()
        fresh, right = await prompt(extra_key="2")
        await client.post("/flush_cache", deadline_s=CALL_S)
        assert (await prompt())[1] == right != wrong
        assert stale > 0 and fresh == 0
        await path.update(3, first)
        await client.post("/flush_cache", deadline_s=CALL_S)


async def test_an_engine_that_pauses_in_place_samples_a_prompt_that_comes_again_under_the_new_weights_alone(
    served: Served, first: Tensors, other: Tensors, tmp_path: Path
) -> None:
    trainer = load_model(str(served.model)).eval()
    asked = request("r", 40, 8, temperature=0.0)
    async with served.engine(tmp_path, pause="in_place", weights="tensor") as engine:
        await engine.update_weights(1, other)
        await engine.generate(asked)
        await engine.update_weights(2, first)
        got = await engine.generate(asked)
        again = await engine.generate(asked)
        assert engine.stats().shared_prompt_tokens > 0  # within a version they are shared
    for each in (got, again):
        np.testing.assert_allclose(each.log_probs, full_log_probs(trainer, asked, each.tokens), atol=2e-5)


async def test_what_waits_at_the_server_through_an_update_in_place_counts_as_begun_under_the_old_weights(
    served: Served, first: Tensors, other: Tensors, tmp_path: Path
) -> None:
    """It goes on from the prefix that the old weights computed, and the server tells all of its tokens as the new version's."""
    trainer = load_model(str(served.model)).eval()
    async with served.engine(tmp_path, pause="in_place", weights="tensor") as engine:
        await engine.update_weights(1, other)
        asked = request("prefix", 40, 8, temperature=0.0)
        await engine.generate(asked)
        ahead = [asyncio.create_task(engine.generate(request(f"ahead{n}", 8, 200))) for n in range(16)]
        await running(engine.client, 16)
        behind = asyncio.create_task(engine.generate(replace(asked, id="behind")))
        await waiting_there(engine.client, 1)
        await engine.update_weights(2, first)
        await asyncio.gather(*ahead)
        got = await behind
        assert got.policy_versions.tolist() == [1] + [2] * 7
        assert np.abs(got.log_probs - full_log_probs(trainer, asked, got.tokens)).max() > 1e-3


@pytest.mark.parametrize("way", ["tensor", "distributed"])
async def test_a_bit_flipped_in_a_bucket_is_seen_by_the_server_and_sent_again(
    served: Served, first: Tensors, other: Tensors, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flipped: list[str] = []

    def damaging(bucket: Bucket, tensors: Any, into: torch.Tensor) -> torch.Tensor:
        packed = pack(bucket, tensors, into)
        if not flipped:
            packed[bucket.num_bytes // 2] ^= 1
            flipped.append(bucket.places[0].name)
        return packed

    async with served.client() as client, opened(client, served.model, tmp_path, way) as path:
        await path.update(1, first)
        before = await log_probs(client)
        await path.update(2, other)
        monkeypatch.setattr(weights_buckets, "pack", damaging)
        await path.update(3, first)
        assert flipped and (stats := path.stats()) is not None and stats.num_sendings == 2
        assert await log_probs(client) == before


async def test_a_bucket_that_the_server_does_not_take_ends_the_group_and_the_next_update_forms_another(
    served: Served, first: Tensors, tmp_path: Path
) -> None:
    async with (
        served.client() as client,
        opened(client, served.model, tmp_path, "distributed", "retract", 4 << 20) as path,
    ):
        await path.update(1, first)
        path._sessions = False  # an update outside of a session is refused before the broadcast
        with pytest.raises(ServerError, match="must run between"):
            await path.update(2, first)
        assert path.proof is None
        assert (await client.get("/model_info", deadline_s=CALL_S))["weight_version"] == "unproved-2"
        for thread in threading.enumerate():  # gloo cannot be interrupted, but its peer has left
            if thread.name.startswith("broadcast"):
                await asyncio.to_thread(thread.join, CALL_S)
                assert not thread.is_alive()
        path._sessions = True
        await path.update(3, first)
        assert path.proof is not None and path.proof.version == 3


async def test_memory_that_was_released_comes_back_with_the_next_weights(
    served: Served, first: Tensors, other: Tensors, tmp_path: Path
) -> None:
    async with served.client() as client, opened(client, served.model, tmp_path, "tensor") as path:
        await path.update(1, first)
        before = await log_probs(client)
        await path.release()
        asking = asyncio.create_task(sample(client, 60, 5))
        await path.update(2, other)
        assert (await asking)["weight_versions"] == [{"version": "2", "start": 0, "end": 5}]
        assert path.proof is not None and path.proof.version == 2
        await path.release()
        await path.update(3, first)
        assert await log_probs(client) == before


class Killing(SGLangClient):
    """Kills its server in the middle of the update calls' second one."""

    server: SGLangServer
    num_calls = 0

    async def post(self, path: str, body: object | None = None, **how: Any) -> Any:
        calling = asyncio.create_task(super().post(path, body, **how))
        if path.startswith("/update_weights_from"):
            self.num_calls += 1
            if self.num_calls == 2:
                assert self.server.pid is not None
                kill_session(self.server.pid)
        return await calling


async def test_a_server_killed_during_an_update_ends_it_and_the_next_server_gets_weights_the_same_way(
    tmp_path: Path,
    folder: Path,
) -> None:
    model = moe(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    server = SGLangServer(launch(model), log=tmp_path / "server.log", folder=folder, name="killed", grace_s=GRACE_S)
    for way in ("distributed", "tensor"):
        started = await server.start(START_S)
        try:
            async with opened(started, model, tmp_path, way, bucket_bytes=1 << 20) as path:
                await path.update(1, tensors)
                assert path.proof is not None
            async with Killing(started.url, api_key=server.key) as client:
                client.server = server
                config = SGLangConfig(python=python(), weights=way, pause="retract", bucket_bytes=1 << 16)  # type: ignore[arg-type]
                path = ServerWeights(config, client, folder=tmp_path / "weights", model_path=str(model))
                await path.open()
                async with asyncio.timeout(CALL_S):
                    with pytest.raises(PeerGone) as failed:
                        await path.update(2, tensors)
                assert path.proof is None and any("continue_generation" in note for note in failed.value.__notes__)
                await path.close()
            await server.gone()
        finally:
            await started.__aexit__()
            await server.close()
    assert not leftovers()
