"""The public router itself, in front of stubs in SGLang's dialect. SGLANG_ROUTER_VENV names its environment, which `make
test-sglang` makes."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.router import RoutedServers
from rondo.roles.engines.sglang.server import held_port
from rondo.runtime.errors import ConfigError
from tests.roles.engines.dispatch.stub import Nursery, record_of, stubs

_PYTHON = Path(os.environ.get("SGLANG_ROUTER_VENV", "")) / "bin" / "python"


@contextmanager
def router(servers: list[str], log: Path) -> Iterator[str]:
    with held_port() as port, held_port() as metrics:
        yield from _router(servers, log, port, metrics)


def _router(servers: list[str], log: Path, port: int, metrics: int) -> Iterator[str]:
    command = [
        str(_PYTHON), "-m", "sglang_router.launch_router",
        "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--worker-urls", *servers,
        "--worker-startup-check-interval", "1", "--prometheus-port", str(metrics),
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def test_requests_go_through_sglang_router_but_not_with_routed_experts(tmp_path: Path) -> None:
    with Nursery() as nursery, stubs(nursery, "a", "b", folder=tmp_path) as found:
        urls = [stub.url for stub in found.values()]
        with router(urls, tmp_path / "router.log") as url:
            client = await RoutedServers(url, urls).start(120)
            async with client:
                bodies = [
                    {
                        "rid": f"r{i}", "input_ids": [2, 9], "sampling_params": {"max_new_tokens": 3}, "session_id": "s",
                        "return_logprob": True, "return_routed_experts": True, "priority": 3,
                    }
                    for i in range(8)
                ]  # fmt: skip
                told = await asyncio.gather(*(client.post("/generate", body, deadline_s=60) for body in bodies))
                for each in told:
                    assert len(each["output_ids"]) == 3 and each["meta_info"]["weight_versions"]
            for stub in found.values():
                async with SGLangClient(stub.url) as one:
                    await one.post("/stub", {"faults": {"experts": True}}, deadline_s=30)
            with pytest.raises(ConfigError, match=r"rollout\.sglang\.router must pass on .* without routed_experts"):
                await RoutedServers(url, urls).start(120)
    begun = [line for line in record_of(tmp_path) if line["event"] == "begin" and line["rid"].startswith("r")]
    mine = [line for line in begun if line["rid"] in {f"r{i}" for i in range(8)}]
    assert {line["stub"] for line in mine} == {"a", "b"} and len(mine) == 8
    for line in mine:
        assert {"return_logprob", "priority", "rid"} <= set(line["keys"])
        assert not {"return_routed_experts", "session_id"} & set(line["keys"]), (
            "it drops them; if not, rondo may be told so"
        )
