"""Adapters at a real server: what it computes with them, what becomes of requests beside a new one, and a whole run."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from rondo.models.config import LoraConfig
from rondo.models.load import load_model
from rondo.models.lora import adapt, adapted, load_published, published_adapter
from rondo.models.tiny import qwen3
from rondo.roles.engines.sglang import adapters as adapters_module
from rondo.roles.engines.sglang.adapter_folder import target_modules
from rondo.roles.engines.sglang.adapters import ServerAdapters
from rondo.roles.engines.sglang.capabilities import probe
from rondo.roles.engines.sglang.model_folder import ModelFolder
from rondo.roles.engines.sglang.one_server import Pause, SGLangEngine
from rondo.roles.engines.sglang.server import SGLangServer
from rondo.roles.training.adapter_probe import Prober, write
from rondo.roles.training.mismatch import Canary
from rondo.runtime.errors import Fatal
from tests.e2e.runs import ROOT, left_behind, start
from tests.roles.engines.embedded.test_media_engine import Made, frames, image, sample, trained
from tests.roles.engines.engines import full_log_probs, request
from tests.sglang.served_runs import events, finish, launchers, line, read_until
from tests.sglang.servers import GRACE_S, START_S, Served, launch, moe, serve
from tests.sglang.test_media import made as seen
from tests.sglang.test_weights import CALL_S, running

__all__ = ["seen"]

LORA = LoraConfig(rank=4, alpha=8.0)
TAKES = {"enable-lora": True, "max-lora-rank": 4, "max-loras-per-batch": 4, "lora-backend": "torch_native"}
NEAR = 1e-5
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapting")
    qwen3.build(folder / "model", hidden_size=64, num_layers=2)
    takes = {**TAKES, "lora-target-modules": target_modules(LORA, ModelFolder.of(str(folder / "model")))}
    with asyncio.Runner() as runner, serve(runner, launch(folder / "model", takes), folder) as made:
        yield made


class Trainer:
    """What a trainer with adapters has, tells and publishes."""

    def __init__(self, model: Path, run_dir: Path, lora: LoraConfig = LORA) -> None:
        self.model, self.run_dir = load_model(str(model)).eval(), run_dir
        adapt(self.model, lora)
        run_dir.mkdir(exist_ok=True)
        canary = Canary.of(self.model, lora)
        canary.write(run_dir)
        self._prober = Prober(self.model, canary.prompts)

    def publishes(self, version: int) -> Tensors:
        """Another adapter for every version; that of 0 changes nothing."""
        made = torch.Generator().manual_seed(version)
        for product in adapted(self.model).values():
            with torch.no_grad():
                shape = product.lora_B.weight.shape
                product.lora_B.weight.copy_(torch.randn(shape, generator=made) * 0.05 * (version > 0))
        write(self.run_dir, f"0.{version}", self._prober.prompts, self._prober.base, self._prober.measure())
        return {name: tensor.clone() for name, tensor in published_adapter(self.model).items()}

    def log_probs(self, asked: Any, tokens: np.ndarray, tensors: Tensors) -> np.ndarray:
        load_published(self.model, tensors)
        return full_log_probs(self.model, asked, tokens)


@asynccontextmanager
async def engine(
    served: Served, trainer: Trainer, folder: Path, pause: Pause = "in_place"
) -> AsyncIterator[SGLangEngine]:
    client = await served.client().__aenter__()
    adapters = ServerAdapters(
        client, lora=LORA, folder=folder / "adapters", model_path=str(served.model), run_dir=trainer.run_dir, attempt=0,
        room=3, exact=True, deadline_s=CALL_S,
    )  # fmt: skip
    await adapters.open()
    made = SGLangEngine(client, weights=adapters, pause=pause, capabilities=served.capabilities, adapters=adapters)
    try:
        yield made
    finally:
        await made.close()


async def names(served: Served) -> list[str]:
    async with served.client() as client:
        told = await client.get("/v1/models", deadline_s=CALL_S)
    return [each["id"] for each in told["data"][1:]]


async def test_log_probs_under_every_version_are_the_trainers_and_old_ones_leave(
    adapting: Served, tmp_path: Path
) -> None:
    trainer = Trainer(adapting.model, tmp_path / "run")
    async with engine(adapting, trainer, tmp_path) as made:
        for version in range(3):
            tensors = trainer.publishes(version)
            await made.update_weights(version, tensors)
            asked = [request(f"r{n}", n, 24) for n in (1, 4, 9)]
            done = await asyncio.gather(*map(made.generate, asked))
            for each, got in zip(asked, done, strict=True):
                assert got.policy_versions.tolist() == [version] * 24
                gap = np.abs(got.log_probs - trainer.log_probs(each, got.tokens, tensors)).max()
                assert gap < NEAR, f"version {version}: {gap}"
            assert await names(adapting) == [made._adapters.name_of(version)]  # type: ignore[union-attr]
            stats = made._adapters.stats()  # type: ignore[union-attr]
            assert stats is not None and stats.shown == (version > 0)
    assert await names(adapting) == []


async def test_the_attention_of_a_mixture_takes_adapters_and_its_experts_stay_as_they_are(tmp_path: Path) -> None:
    model = moe(tmp_path / "model")
    trainer = Trainer(model, tmp_path / "run")
    takes = {**TAKES, "lora-target-modules": target_modules(LORA, ModelFolder.of(str(model)))}
    server = SGLangServer(launch(model, takes), log=tmp_path / "log", folder=tmp_path, name="mixture", grace_s=GRACE_S)
    client = await server.start(START_S)
    try:
        made = Served(client.url, server.key, model, server, await probe(client))
        async with engine(made, trainer, tmp_path) as adapting:
            tensors = trainer.publishes(1)
            await adapting.update_weights(1, tensors)
            asked = request("r", 9, 24)
            got = await adapting.generate(asked)
            np.testing.assert_allclose(got.log_probs, trainer.log_probs(asked, got.tokens, tensors), atol=5e-5)
    finally:
        await client.__aexit__()
        await server.close()


@pytest.fixture(scope="module")
def seeing(seen: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    takes = {**TAKES, "lora-target-modules": target_modules(LORA, ModelFolder.of(str(seen.films)))}
    folder = tmp_path_factory.mktemp("seeing")
    with asyncio.Runner() as runner, serve(runner, launch(seen.films, takes), folder) as made:
        yield made


async def test_adapters_of_the_language_model_go_with_pictures_and_films(
    seen: Made, seeing: Served, tmp_path: Path
) -> None:
    trainer = Trainer(seen.films, tmp_path / "run")
    prompts = {"image": [image(1)], "video": [frames(3, 4)], "both": [image(4), frames(5, 4), image(6)]}
    asked = [sample(name, seen.ask(*refs), 24) for name, refs in prompts.items()]
    async with engine(seeing, trainer, tmp_path) as made:
        for version in (1, 2):
            await made.update_weights(version, trainer.publishes(version))
            done = {got.request_id: got for got in await asyncio.gather(*map(made.generate, asked))}
            expected = trained(trainer.model, asked, done)
            gaps = np.concatenate([np.abs(expected[name] - done[name].log_probs) for name in prompts])
            print(f"log-prob difference of version {version}: {gaps.mean():.1e}, at most {gaps.max():.1e} nats")
            assert gaps.mean() < NEAR and gaps.max() < 5e-5


async def test_no_prefix_outlives_its_version(adapting: Served, tmp_path: Path) -> None:
    trainer, asked = Trainer(adapting.model, tmp_path / "run"), request("r", 40, 8, temperature=0.0)
    async with engine(adapting, trainer, tmp_path) as made:
        for version in (1, 2):
            tensors = trainer.publishes(version)
            await made.update_weights(version, tensors)
            before = made.stats().shared_prompt_tokens
            first = await made.generate(replace(asked, id=f"first{version}"))
            assert made.stats().shared_prompt_tokens == before
            again = await made.generate(replace(asked, id=f"again{version}"))
            assert made.stats().shared_prompt_tokens > before  # within a version they are shared
            for got in (first, again):
                np.testing.assert_allclose(got.log_probs, trainer.log_probs(asked, got.tokens, tensors), atol=NEAR)


@pytest.mark.parametrize("pause", ["in_place", "retract", "abort"])
async def test_a_request_ends_under_its_adapter_or_goes_on_under_the_newer_one(
    adapting: Served, tmp_path: Path, pause: Pause
) -> None:
    trainer, asked = Trainer(adapting.model, tmp_path / "run"), request("r", 8, 300)
    async with engine(adapting, trainer, tmp_path, pause) as made:
        first = trainer.publishes(1)
        await made.update_weights(1, first)
        asking = asyncio.create_task(made.generate(asked))
        await running(made.client, 1)
        second = trainer.publishes(2)
        await made.update_weights(2, second)
        assert made._adapters.name_of(2) in await names(adapting)  # type: ignore[union-attr]
        got = await asking
    versions = got.policy_versions.tolist()
    assert len(versions) == 300 and versions == sorted(versions)
    expected = np.where(
        got.policy_versions == 1,
        trainer.log_probs(asked, got.tokens, first),
        trainer.log_probs(asked, got.tokens, second),
    )
    assert set(versions) == ({1} if pause == "in_place" else {1, 2})
    np.testing.assert_allclose(got.log_probs, expected, atol=NEAR)


async def test_an_adapter_that_a_server_skips_is_found_before_the_first_sample(
    adapting: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes weights whose names it does not know, and generates without them."""
    trainer, known = Trainer(adapting.model, tmp_path / "run"), adapters_module.completed

    def renamed(*args: Any) -> Tensors:
        return {name.replace(".layers.", ".blocks."): tensor for name, tensor in known(*args).items()}

    monkeypatch.setattr(adapters_module, "completed", renamed)
    async with engine(adapting, trainer, tmp_path) as made:
        with pytest.raises(Fatal, match=r"must compute with the adapters that it is given, got http"):
            await made.update_weights(0, trainer.publishes(0))


async def test_a_version_that_a_server_skips_is_found_by_its_log_probs(
    adapting: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, known = Trainer(adapting.model, tmp_path / "run"), adapters_module.completed
    async with engine(adapting, trainer, tmp_path) as made:
        await made.update_weights(0, trainer.publishes(0))
        monkeypatch.setattr(
            adapters_module, "completed",
            lambda *args: {n.replace(".layers.", ".blocks."): t for n, t in known(*args).items()},
        )  # fmt: skip
        with pytest.raises(Fatal, match=r"version 1 of the adapter must arrive"):
            await made.update_weights(1, trainer.publishes(1))


def test_a_run_trains_adapters_that_its_servers_generate_with_also_one_that_was_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "small"
    lora = "train.lora={'rank': 4, 'alpha': 8.0}"
    running_ = start(line(tmp_path, lora, "train.lr=1e-2", "max_staleness=1"), tmp_path)
    read_until(running_, run_dir, "step=3/8")
    [launcher] = launchers(tmp_path)
    launcher.kill()
    ended = finish(running_, run_dir)
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == 8 * 4 * 4 and summary["restarts"] == {}
    print(f"log-prob difference to the trainer over a run with adapters: {summary['log_prob_gap']}")
    assert summary["log_prob_gap"]["all"] < NEAR
    [back] = events(run_dir, "sglang_back")
    print("a killed server generates with the newest adapter again after", back["after_s"])
    log = next(run_dir.glob("logs/attempt_0/*.sglang-0.log")).read_text(errors="replace")
    assert re.search(r"small-[0-9a-f]{8}@0\.[78]", log)
    assert not list((run_dir / "adapters").glob("*/*")) and left_behind(tmp_path) == []


def test_a_run_whose_server_skips_a_version_ends_with_what_it_is(adapting: Served, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(adapting.key)
    sets = (
        f"rollout.sglang={orjson.dumps({'urls': [adapting.url], 'api_key_file': str(key)}).decode()}",
        "train.lora={'rank': 4, 'alpha': 8.0}", f"model={{'path': '{adapting.model}'}}",
    )  # fmt: skip
    command = [sys.executable, "-m", "tests.e2e.adapted", str(tmp_path), "skips", *sets]
    ended = finish(start(command, ROOT), tmp_path / "adapted")
    assert ended.code == 1, ended.output
    assert "of the adapter must arrive at the SGLang server" in ended.output
    assert left_behind(tmp_path) == []
