"""Requests through a router, everything else past it; and a router that would lose something is refused."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import ClientSession, web
from pydantic import ValidationError

from rondo.roles.config import SGLangConfig
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.router import RoutedServers
from rondo.runtime.errors import ConfigError, PeerGone
from tests.roles.engines.dispatch.stub import Nursery, Stub, record_of, stubs


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as found:
        yield found


@contextlib.asynccontextmanager
async def routing(servers: list[str], *dropped: str) -> AsyncIterator[str]:
    """A router that passes on /generate to one server after another, without some fields, and nothing else."""
    turns = 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal turns
        turns += 1
        body = {name: value for name, value in (await request.json()).items() if name not in dropped}
        async with ClientSession() as session, session.post(servers[turns % 2] + "/generate", json=body) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


async def tell(stub: Stub, **faults: Any) -> None:
    async with SGLangClient(stub.url) as client:
        await client.post("/stub", {"faults": faults}, deadline_s=120)


def body(rid: str) -> dict[str, Any]:
    return {"rid": rid, "input_ids": [2, 9], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}


async def test_requests_go_through_and_all_else_to_every_server(nursery: Nursery, tmp_path: Path) -> None:
    with stubs(nursery, "a", "b", folder=tmp_path) as found:
        urls = [stub.url for stub in found.values()]
        async with routing(urls) as router:
            server = RoutedServers(router, urls)
            async with await server.start(120) as client:
                for i in range(4):
                    told = await client.post("/generate", body(f"r{i}"), deadline_s=120)
                    assert told["meta_info"]["id"] == f"r{i}"
                await client.post("/update_weights_from_disk", {"weight_version": "7"}, deadline_s=120)
                assert (await client.get("/model_info", deadline_s=120))["weight_version"] == "7"
                assert (await client.get("/server_info", deadline_s=120))["max_running_requests"] == 128
                assert len((await client.get("/v1/loads", deadline_s=120))["loads"]) == 2
                async with SGLangClient(urls[0]) as one:
                    await one.post("/update_weights_from_disk", {"weight_version": "8"}, deadline_s=120)
                assert (await client.get("/model_info", deadline_s=120))["weight_version"] == "mixed"
                found["b"].kill()
                heard = client.num_heard
                with pytest.raises(PeerGone, match=found["b"].url):
                    await client.get("/model_info", deadline_s=120)
                assert client.num_heard == heard
    asked = {line["rid"]: line["stub"] for line in record_of(tmp_path) if line["event"] == "begin"}
    assert {asked[f"r{i}"] for i in range(4)} == {"a", "b"}


async def test_a_router_that_would_lose_routed_experts_is_refused(nursery: Nursery, tmp_path: Path) -> None:
    with stubs(nursery, "a", "b", folder=tmp_path) as found:
        urls = [stub.url for stub in found.values()]
        for stub in found.values():
            await tell(stub, experts=True)
        async with routing(urls) as router:
            async with await RoutedServers(router, urls).start(120):
                pass
        async with routing(urls, "return_routed_experts") as router:
            with pytest.raises(ConfigError, match=r"rollout\.sglang\.router must pass on .* without routed_experts"):
                await RoutedServers(router, urls).start(120)


def test_a_router_needs_its_servers_and_one_way_for_all_their_weights() -> None:
    router = "http://127.0.0.1:1"
    with pytest.raises(ValidationError, match=r"sglang\.router must come with sglang\.urls"):
        SGLangConfig(python="python", router=router)
    with pytest.raises(
        ValidationError, match=r"sglang\.router must come with sglang\.weights 'disk' and sglang\.checksums"
    ):
        SGLangConfig(urls=("http://x",), router=router, weights="tensor", checksums=False)
    SGLangConfig(urls=("http://x",), router=router, checksums=False)
    assert orjson.loads(SGLangConfig(urls=("http://x",)).model_dump_json())["router"] is None
