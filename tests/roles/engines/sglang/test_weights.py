from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rondo.roles.config import SGLangConfig
from rondo.roles.engines.sglang.client import ServerError
from rondo.roles.engines.sglang.numbers import STRANGE, version_of
from rondo.roles.engines.sglang.shared_memory import FOLDER
from rondo.roles.engines.sglang.weights import ServerWeights
from rondo.runtime.errors import Closed, ConfigError, CorruptData
from tests.roles.engines.sglang.weights_server import CONFIG, WeightServer, serving, version, write_model

SMALL = 1 << 16


@asynccontextmanager
async def opened(server: WeightServer, folder: Path, **settings: Any) -> AsyncIterator[ServerWeights]:
    """A path to `server`, which was started from `version(0)`."""
    model = write_model(folder / "model", version(0), settings.pop("config", CONFIG))
    async with serving(server) as client:
        config = SGLangConfig(urls=(client.url,), **({"weights": "tensor", "bucket_bytes": SMALL} | settings))
        path = ServerWeights(config, client, folder=folder / "weights", model_path=str(model))
        await path.open()
        try:
            yield path
        finally:
            await path.close()


def holds(server: WeightServer, tensors: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(server.tensors[name], tensor) for name, tensor in tensors.items())


def leftovers() -> list[Path]:
    return list(FOLDER.glob(f"rondo_weights_{os.getpid()}_*"))


@pytest.mark.parametrize("way", ["tensor", "disk"])
@pytest.mark.parametrize("size", [1, 2, 4])
async def test_every_tensor_of_every_rank_is_proved_to_be_the_one_that_was_sent(
    tmp_path: Path, way: str, size: int
) -> None:
    server = WeightServer(version(0), size=size)
    async with opened(server, tmp_path, weights=way) as path:
        for number, seed in ((5, 1), (6, 0), (7, 2)):
            await path.update(number, version(seed))
            assert holds(server, version(seed)) and server.version == str(number)
            assert path.proof is not None and path.proof.version == number
            assert path.proof.num_tensors == path.proof.num_equal == 7 * size
    assert not server.paused and not server.session and not leftovers()


@pytest.mark.parametrize(("pause", "flushes"), [("in_place", False), ("retract", True), ("abort", True)])
async def test_only_the_last_bucket_flushes_and_names_the_version(tmp_path: Path, pause: str, flushes: bool) -> None:
    server = WeightServer(version(0))
    async with opened(server, tmp_path, pause=pause) as path:
        path._transfer._bucket_bytes = 600  # smaller than the config allows, so that this model has several
        await path.update(3, version(1))
    bodies = [body for name, body in server.calls if name == "/update_weights_from_tensor"]
    assert len(bodies) > 3
    assert [body["flush_cache"] for body in bodies] == [False] * (len(bodies) - 1) + [flushes]
    assert [body.get("weight_version") for body in bodies] == [None] * (len(bodies) - 1) + ["3"]
    order = [name for name in server.paths() if "update_weights" not in name]
    assert order[-6:] == [
        "/pause_generation", "/begin_weight_update", "/end_weight_update", "/model_info", "/weights_checker",
        "/continue_generation",
    ]  # fmt: skip
    assert ("/pause_generation", {"mode": pause}) in server.calls


async def test_a_server_without_sessions_is_updated_without_them(tmp_path: Path) -> None:
    server = WeightServer(version(0), sessions=False)
    async with opened(server, tmp_path) as path:
        await path.update(1, version(1))
        await path.update(2, version(2))
    assert holds(server, version(2))
    assert server.paths().count("/begin_weight_update") == 1


async def test_a_session_that_a_killed_process_left_open_is_closed_first(tmp_path: Path) -> None:
    server = WeightServer(version(0))
    server.session = True
    async with opened(server, tmp_path) as path:
        await path.update(1, version(1))
    assert holds(server, version(1)) and not server.session


@pytest.mark.parametrize("way", ["tensor", "disk"])
async def test_a_flipped_bit_is_refused_and_repaired_by_sending_once_more(tmp_path: Path, way: str) -> None:
    server = WeightServer(version(0))
    damaged: list[str] = []

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        if not damaged and "model.layers.0.self_attn.k_proj.weight" in tensors:
            tensors["model.layers.0.self_attn.k_proj.weight"].view(torch.int32)[3, 3] ^= 1
            damaged.append("k_proj")

    server.loaded = flip
    async with opened(server, tmp_path, weights=way) as path:
        await path.update(1, version(1))
        assert damaged and holds(server, version(1))
        stats = path.stats()
        assert stats is not None and stats.num_sendings == 2
        await path.update(2, version(2))
        assert (stats := path.stats()) is not None and stats.num_sendings == 1


async def test_a_server_that_stays_wrong_goes_on_unproved_until_a_whole_update(tmp_path: Path) -> None:
    server = WeightServer(version(0))

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"].view(torch.int32)[0] ^= 1

    async with opened(server, tmp_path) as path:
        await path.update(1, version(1))
        server.loaded = flip
        with pytest.raises(CorruptData, match=r"version 2 as it was sent.*model\.norm\.weight") as failed:
            await path.update(2, version(2))
        assert any("not proved" in note for note in failed.value.__notes__)
        assert not server.paused and not server.session
        assert path.proof is None and server.version == "unproved-2" and version_of(server.version) == STRANGE
        server.loaded = lambda tensors: None
        await path.update(3, version(3))
        assert path.proof is not None and server.version == "3" and holds(server, version(3))


async def test_a_refused_bucket_leaves_the_server_generating_and_unproved(tmp_path: Path) -> None:
    server = WeightServer(version(0))

    def refuse(path: str, body: dict[str, Any]) -> None:
        if path == "/update_weights_from_tensor" and "weight_version" in body:
            raise ValueError("no room")

    async with opened(server, tmp_path) as path:
        await path.update(1, version(1))
        server.before = refuse
        with pytest.raises(ServerError, match="no room"):
            await path.update(2, version(2))
        assert not server.paused and not server.session and path.proof is None and server.version == "unproved-2"


async def test_an_update_that_is_cancelled_leaves_the_server_generating_and_unproved(tmp_path: Path) -> None:
    server = WeightServer(version(0))
    loading = asyncio.Event()

    def note(path: str, body: dict[str, Any]) -> None:
        if path == "/update_weights_from_tensor":
            loading.set()

    server.before = note
    async with opened(server, tmp_path) as path:
        path._transfer._bucket_bytes = 100
        updating = asyncio.create_task(path.update(2, version(2)))
        await asyncio.wait_for(loading.wait(), 60)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert not server.paused and not server.session and path.proof is None and server.version == "unproved-2"
        await path.update(3, version(3))
        assert holds(server, version(3)) and path.proof is not None
    assert not leftovers()


async def test_a_pause_that_is_refused_keeps_the_proved_version(tmp_path: Path) -> None:
    server = WeightServer(version(0))

    def refuse(path: str, body: dict[str, Any]) -> None:
        if path == "/pause_generation":
            raise ValueError("not now")

    async with opened(server, tmp_path) as path:
        await path.update(1, version(1))
        server.before = refuse
        with pytest.raises(ServerError, match="not now"):
            await path.update(2, version(2))
        assert path.proof is not None and path.proof.version == 1 and server.version == "1"


@pytest.mark.parametrize("fault", ["unknown", "shape", "missing"])
async def test_other_names_and_shapes_are_refused_before_the_server_is_paused(tmp_path: Path, fault: str) -> None:
    server = WeightServer(version(0))
    tensors = version(1)
    if fault == "unknown":
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(1)
    elif fault == "shape":
        tensors["model.norm.weight"] = torch.zeros(9)
    else:
        del tensors["model.layers.0.mlp.up_proj.weight"]
    async with opened(server, tmp_path) as path:
        before = len(server.calls)
        with pytest.raises(ConfigError):
            await path.update(1, tensors)
        assert len(server.calls) == before


async def test_a_tied_head_may_be_left_out_or_come_along(tmp_path: Path) -> None:
    without = {name: tensor for name, tensor in version(1).items() if name != "lm_head.weight"}
    async with opened(WeightServer(version(0)), tmp_path, config=CONFIG | {"tie_word_embeddings": True}) as path:
        path._model.check(without)
        path._model.check(version(1))
    async with opened(WeightServer(version(0)), tmp_path / "untied") as path:
        with pytest.raises(ConfigError, match="1 missing"):
            path._model.check(without)


async def test_a_server_with_other_weights_than_its_folder_is_learned_from_the_first_update(tmp_path: Path) -> None:
    server = WeightServer(version(9))
    async with opened(server, tmp_path) as path:
        await path.update(1, version(1))
        assert path.proof is not None and path.proof.num_equal == 7
        assert (stats := path.stats()) is not None and stats.num_sendings == 1


async def test_a_tensor_without_recipe_is_named_as_unknown_once_it_came_alike_twice(tmp_path: Path) -> None:
    server = WeightServer(version(0))
    server.extra = {"model.layers.0.mlp.packed": torch.ones(3)}
    async with opened(server, tmp_path) as path:
        await path.update(1, version(1))
        assert path.proof is not None and path.proof.unknown == ("model.layers.0.mlp.packed",)
        assert path.proof.num_equal == 7 and path.proof.num_tensors == 8
        assert (stats := path.stats()) is not None and stats.num_sendings == 2
        await path.update(2, version(2))
        assert (stats := path.stats()) is not None and stats.num_sendings == 1


async def test_another_version_told_by_the_server_is_refused(tmp_path: Path) -> None:
    server = WeightServer(version(0))

    def usurp(path: str, body: dict[str, Any]) -> None:
        if path == "/model_info":
            server.version = "8"

    async with opened(server, tmp_path) as path:
        server.before = usurp
        with pytest.raises(CorruptData, match="must tell version 1 after its update, got '8'"):
            await path.update(1, version(1))


async def test_without_checksums_a_version_is_proved_by_its_name_alone(tmp_path: Path) -> None:
    server = WeightServer(version(0))
    async with opened(server, tmp_path, checksums=False) as path:
        await path.update(1, version(1))
        assert path.proof is not None and path.proof.num_tensors == 0
    assert "/weights_checker" not in server.paths()


async def test_only_the_folder_of_the_proved_version_stays_on_disk(tmp_path: Path) -> None:
    server = WeightServer(version(0))
    async with opened(server, tmp_path, weights="disk") as path:
        await path.update(1, version(1))
        await path.update(2, version(2))
        (folder,) = (tmp_path / "weights").iterdir()
        assert folder.name == "version_000002"
        assert {"config.json", "tokenizer.json", "model-00001-of-00001.safetensors"} <= {
            file.name for file in folder.iterdir()
        }


async def test_a_version_is_on_disk_before_the_server_is_paused(tmp_path: Path) -> None:
    server = WeightServer(version(0))
    at_pause: list[bool] = []

    def look(path: str, body: dict[str, Any]) -> None:
        if path == "/pause_generation":
            at_pause.append((tmp_path / "weights" / "version_000001" / "config.json").exists())

    async with opened(server, tmp_path, weights="disk") as path:
        server.before = look
        await path.update(1, version(1))
    assert at_pause == [True]


def refusing(path: str) -> Any:
    """What a server does that answers this path with an error."""

    def before(asked: str, body: dict[str, Any]) -> None:
        if asked == path:
            raise ValueError("planted")

    return before


async def test_released_memory_comes_back_with_the_next_weights_the_cache_behind_them(tmp_path: Path) -> None:
    server = WeightServer(version(0))
    async with opened(server, tmp_path) as path:
        await path.update(1, version(1))
        before = len(server.paths())
        await path.release()
        await path.release()
        assert server.paused and path.asleep and path.proof is None
        server.tensors = version(7)  # what was released comes back as anything
        await path.update(2, version(2))
        assert not server.paused and not path.asleep
        assert path.proof is not None and path.proof.version == 2 and server.version == "2"
        told = [name for name in server.paths()[before:] if re.search("memory|generation|from_tensor", name)]
        bodies = [body for name, body in server.calls if name.endswith("_memory_occupation")]
        await path.update(3, version(3))
        assert server.paths().count("/pause_generation") == 3
    assert told[:3] == ["/pause_generation", "/release_memory_occupation", "/resume_memory_occupation"]
    assert told[-2:] == ["/resume_memory_occupation", "/continue_generation"]
    assert set(told[3:-2]) == {"/update_weights_from_tensor"}
    assert bodies == [{"tags": ["kv_cache", "weights"]}, {"tags": ["weights"]}, {"tags": ["kv_cache"]}]


async def test_an_update_of_a_server_that_sleeps_may_fail_and_leaves_it_with_its_memory(tmp_path: Path) -> None:
    server = WeightServer(version(0))
    async with opened(server, tmp_path) as path:
        await path.update(1, version(1))
        await path.release()
        server.before = refusing("/update_weights_from_tensor")
        with pytest.raises(ServerError):
            await path.update(2, version(2))
        assert not server.paused and not path.asleep and path.proof is None and server.version == "unproved-2"
        server.before = refusing("")
        await path.update(3, version(3))
        assert path.proof is not None and path.proof.version == 3


async def test_a_server_that_cannot_release_memory_goes_on_generating(tmp_path: Path) -> None:
    server = WeightServer(version(0))
    async with opened(server, tmp_path) as path:
        server.before = refusing("/release_memory_occupation")
        with pytest.raises(ServerError):
            await path.release()
        assert not server.paused and not path.asleep


async def test_an_update_after_close_is_refused(tmp_path: Path) -> None:
    server = WeightServer(version(0))
    async with opened(server, tmp_path) as path:
        await path.close()
        with pytest.raises(Closed):
            await path.update(1, version(1))
