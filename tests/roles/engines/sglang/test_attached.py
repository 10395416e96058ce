"""Servers that join a run and leave it while it generates: real servers over HTTP, with weights that are proved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from rondo.models.load import load_model
from rondo.models.tiny.qwen3 import build
from rondo.roles.config import JobConfig
from rondo.roles.engines.dispatch import Dispatcher
from rondo.roles.engines.embedded.qwen3_forward import Qwen3Forward
from rondo.roles.engines.engine import Request, SamplingParams
from rondo.roles.engines.sglang.attached import AttachedServers, attachable
from rondo.roles.engines.sglang.open import attached_engine
from rondo.roles.engines.sglang.requirements import address_of
from rondo.roles.engines.sglang.server import held_port
from rondo.roles.engines.sglang.suitable import differences
from rondo.runtime.errors import ConfigError, DeadlineExceeded
from tests.models.builders import full_tensors
from tests.roles.engines.dispatch.engines import QUICK
from tests.roles.serve.serving import TOKEN, Served, serving, tokenizer, until
from tests.roles.test_config import changed

LENGTH = 256


def job(folder: Path, **rollout: Any) -> JobConfig:
    """Of a run whose servers ask for the token of the tests."""
    (folder / "key").write_text(TOKEN)
    sglang = {"python": "python", "api_key_file": str(folder / "key")}
    asked = {"prompts_per_step": 4, "samples_per_prompt": 8, "max_prompt_tokens": 16, "max_new_tokens": 200, **rollout}
    return JobConfig.model_validate(changed(("model.dtype", "float32"), ("rollout", {**asked, "sglang": sglang})))


@dataclass
class Rig:
    """A dispatcher without an engine yet, a run's newest weights, and what is told."""

    folder: Path
    dispatcher: Dispatcher
    make: Any
    told: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    weights: asyncio.Event = field(default_factory=asyncio.Event)
    """Until this is set, nobody gets them."""

    async def tell(self, kind: str, data: Mapping[str, Any]) -> None:
        self.told.append((kind, data))

    def attachable(self) -> Any:
        return attachable(self.dispatcher, self.make, self.folder / "engines.json", self.tell)


@asynccontextmanager
async def a_run(folder: Path, **rollout: Any) -> AsyncIterator[Rig]:
    """It has published version 3, and generates with a tiny model of which `folder`/model has other weights."""
    build(folder / "model", hidden_size=32, num_heads=2, num_kv_heads=1, seed=0)
    build(folder / "trained", hidden_size=32, num_heads=2, num_kv_heads=1, seed=1)
    tensors = dict(full_tensors(load_model(str(folder / "trained"))))

    @asynccontextmanager
    async def newest() -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        rig.asked.set()
        await rig.weights.wait()
        yield 3, tensors

    dispatcher = Dispatcher(reload=newest, limits=QUICK)
    dispatcher._fleet.promised = 3
    ctx: Any = SimpleNamespace(rt_dir=folder, group="rollout-0", incarnation=0, world_size=1, rank=0)
    own: Any = SimpleNamespace(config=job(folder, **rollout), model_path=str(folder / "model"), device="cpu")
    rig = Rig(folder, dispatcher, partial(attached_engine, ctx, own, newest=newest))
    ctx.report = rig.tell
    rig.weights.set()
    try:
        yield rig
    finally:
        await dispatcher.close()


@asynccontextmanager
async def a_server(folder: Path, **settings: Any) -> AsyncIterator[Served]:
    """`rondo serve` of the run's model, with the weights that it was published with."""
    model = load_model(str(folder / "model"))
    forward = Qwen3Forward(model, num_slots=4, max_length=LENGTH)
    held = partial(full_tensors, model)
    told = {"model_path": str(folder / "model"), "dtype": "float32", "weights": held, "max_length": LENGTH}
    async with serving(forward=forward, **{**told, **settings}) as served:
        yield served


def request(name: str, num_new: int = 60) -> Request:
    return Request(name, np.arange(10, 15, dtype=np.int32), SamplingParams(num_new), seed=7)


def events(rig: Rig) -> list[str]:
    return [kind for kind, _ in rig.told if kind.startswith("engine_")]


async def test_a_server_serves_once_it_has_proved_the_newest_weights_and_leaves_its_requests_to_others(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as ends:
        rig = await ends.enter_async_context(a_run(tmp_path))
        first, second = [await ends.enter_async_context(a_server(tmp_path)) for _ in range(2)]
        attached = await ends.enter_async_context(rig.attachable())
        assert await attached.attach(first.url, deadline_s=60)
        assert first.engine.version == 3 and rig.dispatcher.version == 3
        whole = await rig.dispatcher.generate(request("whole"))
        assert whole.policy_versions.tolist() == [3] * len(whole.tokens)
        assert await attached.attach(second.url + "/", deadline_s=60)
        assert not await attached.attach(second.url, deadline_s=60)  # it is there
        asking = [asyncio.create_task(rig.dispatcher.generate(request(f"r{n}"))) for n in range(8)]
        await until(lambda: first.engine.stats().num_running > 0 and second.engine.stats().num_running > 0)
        assert await attached.detach(first.url, drain_s=0.0)
        for each in await asyncio.gather(*asking):
            assert each.tokens.tolist() == whole.tokens.tolist() and set(each.policy_versions.tolist()) == {3}
        stats = rig.dispatcher.dispatch_stats()
        assert (stats.num_completed, [engine.name for engine in stats.engines]) == (9, [second.url])
        assert rig.dispatcher.stats().num_completed == 9  # what was counted of the one that left stays
        assert attached.states() == {second.url: "active"} and not await attached.detach(first.url, drain_s=0.0)
        assert first.engine.stats().num_running == 0  # it was told of those that it lost
    assert events(rig) == ["engine_attached", "engine_attached", "engine_detached"]


async def test_what_is_attached_stays_through_a_new_process_and_goes_with_its_detachment(tmp_path: Path) -> None:
    async with a_run(tmp_path) as rig, a_server(tmp_path) as served:
        async with rig.attachable() as attached:
            await attached.attach(served.url, deadline_s=60)
        await rig.dispatcher.remove(served.url)  # with the process
        async with rig.attachable() as attached:
            assert attached.states() == {served.url: "active"}
            await rig.dispatcher.generate(request("r"))
            await attached.detach(served.url, drain_s=60)
        async with rig.attachable() as attached:
            assert attached.states() == {}


async def test_a_detachment_that_is_cancelled_while_it_drains_leaves_the_server_where_it_was(tmp_path: Path) -> None:
    async with a_run(tmp_path) as rig, a_server(tmp_path) as served, rig.attachable() as attached:
        await attached.attach(served.url, deadline_s=60)
        asking = asyncio.create_task(rig.dispatcher.generate(request("r")))
        await until(lambda: served.engine.stats().num_running > 0)
        detaching = asyncio.create_task(attached.detach(served.url, drain_s=60))
        await until(lambda: attached.states() == {served.url: "leaving"})
        assert [m.routable for m in rig.dispatcher.dispatch_stats().engines] == [False]
        detaching.cancel()
        await asyncio.wait([detaching])
        assert attached.states() == {served.url: "active"}
        await rig.dispatcher.generate(request("s"))
        assert len((await asking).tokens) == 60
        assert orjson.loads((tmp_path / "engines.json").read_bytes()) == [served.url]


@pytest.mark.parametrize("state", ["connecting", "weights"])
async def test_an_attachment_that_is_cancelled_or_too_late_leaves_nothing(tmp_path: Path, state: str) -> None:
    async with AsyncExitStack() as ends:
        rig = await ends.enter_async_context(a_run(tmp_path))
        rig.weights.clear()
        attached: AttachedServers = await ends.enter_async_context(rig.attachable())
        if state == "weights":
            url = (await ends.enter_async_context(a_server(tmp_path))).url
        else:
            url = f"http://127.0.0.1:{ends.enter_context(held_port())}"  # nobody listens
        attaching = asyncio.create_task(attached.attach(url, deadline_s=60))
        await until(lambda: attached.states().get(url) == state and (state == "connecting" or rig.asked.is_set()))
        attaching.cancel()
        await asyncio.wait([attaching])
        assert attaching.cancelled() and attached.states() == {}
        if state == "connecting":
            with pytest.raises(DeadlineExceeded, match=r"attach engine"):
                await attached.attach(url, deadline_s=0.0)
        assert attached.states() == {} and rig.dispatcher.dispatch_stats().engines == ()
    assert events(rig) == [] and not (tmp_path / "engines.json").exists()


async def test_a_server_that_does_not_suit_the_run_joins_nothing(tmp_path: Path) -> None:
    async with a_run(tmp_path) as rig, rig.attachable() as attached:
        async with a_server(tmp_path, max_length=100) as served:
            with pytest.raises(
                ConfigError, match=r"room for 100 tokens of a sample .* run's longest have 216\. Start it"
            ):
                await attached.attach(served.url, deadline_s=60)
        other = tokenizer()
        build(tmp_path / "other", hidden_size=32, num_heads=2, num_kv_heads=1, seed=0)
        async with a_server(tmp_path, own=Turned(other)) as served:
            with pytest.raises(ConfigError, match=r"got another tokenizer: '1234 "):
                await attached.attach(served.url, deadline_s=60)
        assert attached.states() == {} and rig.dispatcher.dispatch_stats().engines == ()


class Turned:
    """A tokenizer whose texts are read from behind."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __call__(self, text: str, **settings: Any) -> Any:
        return self._own(text[::-1], **settings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __len__(self) -> int:
        return len(self._own)


SERVER = {"model_path": "", "dtype": "float32", "max_req_input_len": 1000}
SHAPE = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "vocab_size": 100}


@pytest.mark.parametrize(
    ("info", "told", "why"),
    [
        ({}, {"architectures": ["Qwen3ForCausalLM"]}, None),
        ({"dtype": "auto"}, {}, None),
        (
            {},
            {"architectures": ["LlamaForCausalLM"]},
            "architecture LlamaForCausalLM, where the run's is Qwen3ForCausalLM",
        ),
        ({"dtype": "bfloat16"}, {}, "dtype bfloat16, where model.dtype is float32"),
        ({"max_req_input_len": 16}, {}, "room for prompts of 15 tokens, where rollout.max_prompt_tokens is 16"),
    ],
)
def test_what_a_server_says_of_itself_is_compared_with_the_run(
    tmp_path: Path, info: dict[str, Any], told: dict[str, Any], why: str | None
) -> None:
    config = job(tmp_path, max_new_tokens=4)
    assert list(differences(SERVER | info, told, SHAPE, config)) == ([] if why is None else [why])


def test_the_shape_of_a_server_whose_model_can_be_read_here_is_the_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 64, "vocab_size": 100, "head_dim": 8}}')
    info = SERVER | {"model_path": str(tmp_path)}
    assert list(differences(info, {}, SHAPE, job(tmp_path))) == ["hidden_size 64, where the run's is 32"]


def test_an_address_is_compared_by_where_it_leads_and_carries_no_key() -> None:
    assert address_of(" HTTP://Host.Example:80/a/ ") == "http://host.example:80/a"
    assert address_of("https://[::1]:30000") == "https://[::1]:30000"
    for wrong in (
        "host:1",
        "ftp://h:1",
        "http://u:p@h:1",
        "http://h:99999",
        "http://h:1?key=2",
        "http://",
        "http://h\n:1",
    ):
        with pytest.raises(ConfigError, match=r"the address of an engine must look like"):
            address_of(wrong)
