"""rondo's own engine over SGLang servers, with this server in the place of one: nothing is lost on the way."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rondo.models.load import load_model
from rondo.models.tiny.qwen3 import build
from rondo.roles.config import SGLangConfig
from rondo.roles.engines.embedded.qwen3_forward import Qwen3Forward
from rondo.roles.engines.engine import Completion, Prefix, Request, SamplingParams
from rondo.roles.engines.sglang.capabilities import probe
from rondo.roles.engines.sglang.one_server import SGLangEngine
from rondo.roles.engines.sglang.weights import ServerWeights
from tests.models.builders import full_tensors
from tests.roles.serve.serving import Served, prompt_ids, serving, until


def model(folder: Path, seed: int) -> Any:
    build(folder, hidden_size=32, num_heads=2, num_kv_heads=1, seed=seed)
    return load_model(str(folder))


def same(found: Completion, own: Completion) -> None:
    assert found.tokens.tolist() == own.tokens.tolist() and found.finish_reason == own.finish_reason
    assert np.allclose(found.log_probs, own.log_probs, atol=1e-6)
    assert found.policy_versions.tolist() == own.policy_versions.tolist()


async def engine_over(served: Served, folder: Path) -> SGLangEngine:
    found = await probe(served.client)
    assert found.seeds and found.version_spans and found.log_probs_after_temperature and not found.experts
    config = SGLangConfig(urls=(served.url,), weights="disk", checksums=False)
    weights = ServerWeights(config, served.client, folder=folder / "weights", model_path=str(folder / "model"))
    await weights.open()
    return SGLangEngine(served.client, weights=weights, pause="in_place", capabilities=found, version=0)


async def test_the_engine_over_sglang_servers_gets_from_this_one_what_the_embedded_engine_gives(tmp_path: Path) -> None:
    forward = Qwen3Forward(model(tmp_path / "model", 0), num_slots=4, max_length=256)
    other = model(tmp_path / "other", 1)
    prompt = np.array(prompt_ids(), np.int32)
    params = SamplingParams(24, temperature=0.8, top_p=0.95, stop_token_ids=(7,))
    asked = [Request(f"r{index}", prompt, params, seed=100 + index) for index in range(3)]
    async with serving(forward=forward, max_length=256, model_path=str(tmp_path / "model")) as served:
        engine = await engine_over(served, tmp_path)
        for version in (0, 5):
            own = [await served.engine.generate(replace(each, id=f"own{each.id}{version}")) for each in asked]
            for found, expected in zip(await asyncio.gather(*map(engine.generate, asked)), own, strict=True):
                same(found, expected)
                assert set(found.policy_versions.tolist()) == {version}
            if version == 0:
                await engine.update_weights(5, dict(full_tensors(other)))
        assert engine.version == served.engine.version == 5
        assert await engine.ready() and (await engine.load()).num_running == 0
        await engine.close()


async def test_a_sample_that_is_cancelled_and_asked_for_again_is_that_of_one_question(tmp_path: Path) -> None:
    forward = Qwen3Forward(model(tmp_path / "model", 0), num_slots=4, max_length=256)
    asked = Request("r", np.array(prompt_ids(), np.int32), SamplingParams(200), seed=11)
    async with serving(forward=forward, max_length=256, model_path=str(tmp_path / "model")) as served:
        engine = await engine_over(served, tmp_path)
        whole = await engine.generate(asked)
        task = asyncio.create_task(engine.generate(asked))
        await until(lambda: served.engine.stats().num_running > 0)
        engine.cancel("r")
        part = await task
        assert part.finish_reason == "cancelled" and 0 < len(part.tokens) < 200
        same(await engine.generate(asked.resumed(part)), whole)
        await engine.close()


async def test_a_sample_whose_progress_is_asked_for_comes_in_parts_and_is_the_same(tmp_path: Path) -> None:
    forward = Qwen3Forward(model(tmp_path / "model", 0), num_slots=4, max_length=256)
    asked = Request("r", np.array(prompt_ids(), np.int32), SamplingParams(40, num_top=2), seed=11)
    told: list[Prefix] = []
    async with serving(forward=forward, max_length=256, model_path=str(tmp_path / "model")) as served:
        engine = await engine_over(served, tmp_path)
        whole = await engine.generate(asked)
        same(await engine.generate(replace(asked, id="told", progress=told.append)), whole)
        await engine.close()
    assert len(told) > 1
    for so_far in told:
        num = len(so_far.tokens)
        assert so_far.tokens.tolist() == whole.tokens[:num].tolist() and so_far.policy_versions.tolist() == [0] * num
        assert so_far.top is not None and so_far.top.tokens.shape == (num, 2)
        assert np.allclose(so_far.log_probs, whole.log_probs[:num], atol=1e-6)
