"""Versions of an adapter at a server: loaded beside each other, proved, and unloaded when nobody uses them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rondo.models.config import LoraConfig
from rondo.roles.engines.engine import Request
from rondo.roles.engines.sglang.adapter_folder import completed, target_modules, write
from rondo.roles.engines.sglang.adapters import ServerAdapters
from rondo.roles.engines.sglang.one_server import SGLangEngine
from rondo.runtime.errors import ConfigError, Fatal, Refused
from tests.roles.engines.sglang.adapter_server import AT, LORA, AdapterServer, adapter, trained
from tests.roles.engines.sglang.test_one_server import FOUND, request
from tests.roles.engines.sglang.weights_server import serving, version, write_model

S = 60.0


def name(folder: Path, version: str) -> str:
    """Of the run whose folder lies in `folder`."""
    where = hashlib.blake2b(str(folder / "run").encode(), digest_size=4).hexdigest()
    return f"run-{where}@{version}"


@asynccontextmanager
async def opened(server: AdapterServer, folder: Path, attempt: int = 0) -> AsyncIterator[ServerAdapters]:
    model = write_model(folder / "model", version(0))
    trained(folder / "run", attempt, *range(8))
    async with serving(server) as client:
        made = ServerAdapters(
            client, lora=LORA, folder=folder / "adapters", model_path=str(model), run_dir=folder / "run", attempt=attempt, room=3,
            exact=True, deadline_s=S,
        )  # fmt: skip
        await made.open()
        yield made


@asynccontextmanager
async def engine(server: AdapterServer, folder: Path, pause: Any) -> AsyncIterator[SGLangEngine]:
    async with opened(server, folder) as adapters:
        made = SGLangEngine(adapters._client, weights=adapters, pause=pause, capabilities=FOUND, adapters=adapters)
        await made.update_weights(4, adapter(4))
        yield made
        await adapters.close()


async def test_a_version_has_a_name_of_its_own_is_proved_and_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    server = AdapterServer(enable_priority_scheduling=True)
    async with opened(server, tmp_path, attempt=2) as adapters:
        await adapters.update(0, adapter(0))
        assert server.names() == [name(tmp_path, "2.0")] and (stats := adapters.stats()) is not None and stats.shown
        await adapters.update(1, adapter(1))
        assert server.names() == [name(tmp_path, "2.1")]
        assert [path.name for path in (tmp_path / "adapters").iterdir()] == [name(tmp_path, "2.1")]
        loaded = server.loaded[name(tmp_path, "2.1")]
        assert torch.equal(loaded[f"{AT}mlp.down_proj.lora_B.weight"], adapter(1)[f"{AT}mlp.down_proj.lora_B.weight"])
        await adapters.close()
    assert server.names() == [] and not (tmp_path / "adapters").exists()
    loads = [body["lora_name"] for path, body in server.calls if path == "/load_lora_adapter"]
    assert loads == [name(tmp_path, "2.canary"), name(tmp_path, "2.0"), name(tmp_path, "2.1")]
    assert not {"/pause_generation", "/flush_cache"} & {path for path, _ in server.calls}
    assert {body["priority"] for path, body in server.calls if path == "/generate"} == {
        2**31 - 1
    }  # before all that waits


async def test_what_earlier_processes_of_the_run_left_at_a_server_goes_and_what_is_others_stays(tmp_path: Path) -> None:
    server = AdapterServer()
    others = ["other@0.7", name(tmp_path / "elsewhere", "0.7")]  # a run of one name, that lies elsewhere
    server.loaded = {each: {} for each in (name(tmp_path, "0.7"), name(tmp_path, "0.canary"), *others)}
    async with opened(server, tmp_path, attempt=1) as adapters:
        assert server.names() == others
        await adapters.update(7, adapter(0))
        assert server.names() == [*others, name(tmp_path, "1.7")]


async def test_an_adapter_that_a_server_leaves_out_ends_the_run_before_the_first_sample(tmp_path: Path) -> None:
    server = AdapterServer()
    server.drops = ["canary"]
    async with opened(server, tmp_path) as adapters:
        with pytest.raises(Fatal, match=r"an engine must compute with the adapters that it is given, got http"):
            await adapters.update(0, adapter(0))
        assert server.names() == []


async def test_a_version_that_does_not_arrive_is_loaded_once_more_and_ends_the_run_then(tmp_path: Path) -> None:
    server = AdapterServer()
    async with opened(server, tmp_path) as adapters:
        await adapters.update(0, adapter(0))
        server.drops = [name(tmp_path, "0.1")]
        await adapters.update(1, adapter(1))
        assert server.names() == [name(tmp_path, "0.1")] and server.loaded[name(tmp_path, "0.1")]
        server.drops = [name(tmp_path, "0.2"), name(tmp_path, "0.2")]
        with pytest.raises(Fatal, match=r"version 2 of the adapter must arrive"):
            await adapters.update(2, adapter(2))


async def test_a_server_that_refuses_the_adapter_ends_the_run_with_its_words(tmp_path: Path) -> None:
    server = AdapterServer()

    def refuse(body: Any) -> Any:
        raise ValueError("incompatible with the current LoRA memory pool")

    server.load_lora_adapter = refuse  # type: ignore[method-assign]
    async with opened(server, tmp_path) as adapters:
        with pytest.raises(Fatal, match="incompatible with the current LoRA memory pool"):
            await adapters.update(0, adapter(0))


@pytest.mark.parametrize(
    ("info", "got"),
    [
        ({"enable_lora": None}, "no adapters"),
        ({"max_lora_rank": 1}, "ranks up to 1"),
        ({"max_loras_per_batch": 3}, "3 at once"),
        ({"max_loaded_loras": 3}, "3 loaded"),
        ({"dp_size": 2}, "dp_size 2"),
    ],
)
async def test_a_server_that_cannot_hold_the_versions_is_refused(
    tmp_path: Path, info: dict[str, Any], got: str
) -> None:
    with pytest.raises(ConfigError, match=rf"3 versions of an adapter of rank 2 .*got {got}.*--max-loras-per-batch 4"):
        async with opened(AdapterServer(**info), tmp_path):
            raise AssertionError


async def test_a_request_ends_under_the_adapter_it_began_with_which_stays_so_long(tmp_path: Path) -> None:
    server = AdapterServer()
    async with engine(server, tmp_path, "in_place") as made:
        server.held.clear()
        asking = asyncio.create_task(made.generate(request(8)))
        await server.until(lambda: server.running[name(tmp_path, "0.4")] > 0)
        await made.update_weights(5, adapter(5))
        assert server.names() == [name(tmp_path, "0.4"), name(tmp_path, "0.5")] and made.version == 5
        server.go_on()
        old = await asking
        new = await made.generate(replace(request(8), id="new"))
        await server.until(lambda: server.names() == [name(tmp_path, "0.5")])
    assert old.policy_versions.tolist() == [4] * 8 and new.policy_versions.tolist() == [5] * 8
    asked = [
        body.get("lora_path")
        for path, body in server.calls
        if body.get("sampling_params", {}).get("max_new_tokens") == 8
    ]
    assert asked == [name(tmp_path, "0.4"), name(tmp_path, "0.5")]


@pytest.mark.parametrize(("pause", "handed_back"), [("retract", False), ("abort", False), ("abort", True)])
async def test_a_request_goes_on_under_the_newer_adapter_where_new_weights_take_it_back(
    tmp_path: Path, pause: str, handed_back: bool
) -> None:
    server = AdapterServer()
    asked: Request = replace(request(8), on_new_weights="interrupt" if handed_back else "recompute")
    async with engine(server, tmp_path, pause) as made:
        server.held.clear()
        asking = asyncio.create_task(made.generate(asked))
        await server.until(lambda: server.running[name(tmp_path, "0.4")] > 0)
        await made.update_weights(5, adapter(5))
        if not handed_back:
            await server.until(lambda: server.running[name(tmp_path, "0.5")] > 0)
            server.go_on()
        got = await asking
    assert got.finish_reason == ("interrupted" if handed_back else "length")
    assert got.policy_versions.tolist() == ([4, 4] if handed_back else [4, 4, *[5] * 6])


async def test_an_answer_that_names_no_models_leaves_old_adapters_to_the_next_update(tmp_path: Path) -> None:
    server = AdapterServer()
    async with opened(server, tmp_path) as adapters:
        await adapters.update(0, adapter(0))
        with adapters.used(0):
            await adapters.update(1, adapter(1))
            server.v1_models = lambda _: {"data": None}  # type: ignore[method-assign]
        assert adapters._sweeping is not None
        await adapters._sweeping
        del server.v1_models
        await adapters.update(2, adapter(2))
        assert server.names() == [name(tmp_path, "0.2")]


async def test_who_leaves_waits_for_the_update_that_goes_on_and_nothing_of_it_stays(tmp_path: Path) -> None:
    server = AdapterServer()
    async with opened(server, tmp_path) as adapters:
        async with adapters._updating:
            leaving = asyncio.create_task(adapters.close())
            await adapters._names()  # time to ask for all that is there
            server.loaded[name(tmp_path, "0.3")] = {}  # by the update
        await leaving
        assert server.names() == []


async def test_a_server_whose_base_others_change_is_refused(tmp_path: Path) -> None:
    server = AdapterServer()
    async with engine(server, tmp_path, "in_place") as made:
        server.weight_version = "other"
        with pytest.raises(Refused, match="somebody else gave it weights"):
            await made.generate(request(8))


async def test_a_server_that_slept_has_its_adapters_still(tmp_path: Path) -> None:
    server = AdapterServer()
    async with opened(server, tmp_path) as adapters:
        await adapters.update(3, adapter(3))
        await adapters.release()
        assert adapters.asleep
        await adapters.update(3, adapter(3))
        assert not adapters.asleep
    paths = [path for path, _ in server.calls if path not in ("/v1/models", "/generate")]
    assert paths[-4:] == [
        "/pause_generation", "/release_memory_occupation", "/resume_memory_occupation", "/continue_generation",
    ]  # fmt: skip


def test_products_that_sglang_computes_as_one_are_completed_with_zeros(tmp_path: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in version(0).items()}
    found = completed(adapter(0), shapes)
    write(tmp_path / "a", found, LORA)
    read = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert {name: tuple(read[f"{AT}self_attn.{name}_proj.lora_B.weight"].shape) for name in "qkv"} == {
        "q": (16, 2), "k": (8, 2), "v": (8, 2),
    }  # fmt: skip
    assert not read[f"{AT}self_attn.k_proj.lora_A.weight"].any() and read[f"{AT}self_attn.q_proj.lora_A.weight"].any()
    assert len(read) == 8


@pytest.mark.parametrize("path", ["visual.blocks.0.attn.proj", "model.layers.0.mlp.experts.gate_up_proj_adapter"])
def test_adapters_of_encoders_and_of_experts_are_refused(path: str) -> None:
    name = f"base_model.model.{path}.lora_A.weight"
    with pytest.raises(ConfigError, match=rf"must be of the decoder's layers, without their experts, got '{name}'"):
        completed({name: torch.zeros(2, 8)}, {})


def test_a_server_is_started_for_the_products_that_the_settings_name() -> None:
    names = [*version(0), "model.layers.0.mlp.experts.0.gate_proj.weight", "model.visual.blocks.0.attn.qkv.weight"]
    plain = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert target_modules(LORA, names) == plain
    assert target_modules(LoraConfig(targets=("q_proj", "mlp.down_proj")), names) == [
        "down_proj",
        "k_proj",
        "q_proj",
        "v_proj",
    ]
    assert target_modules(LORA, [*names, "model.layers.1.linear_attn.in_proj_qkv.weight"]) == ["all"]
