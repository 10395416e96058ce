"""New weights for a real SGLang server: seconds by each path against one memcpy, and what requests in flight see.

    rondo bench sglang_weights --python PATH/TO/ENVIRONMENT/bin/python [--gb 1] [--repetitions 5] [--environment NAME=VALUE ...]

"paths": two versions of random weights in turn, float32, for a tiny Qwen3 and for one of `--gb`; from the call of `update` to its
return, the server's checksums compared and not, and how long of it the server was paused. Beside it, in the same repetition, one
memcpy of as many bytes in one thread. The first update by each path is not counted: it forms the process group, and the
server's torch starts its helper.

"pauses": eight requests of 256 tokens each with an update by the tensor path in their middle, on the tiny model: what became of
them, and how much longer they took than eight others without an update.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rondo.models.tiny.qwen3 import build
from rondo.roles.config import SGLangConfig
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.server import Launch, SGLangServer
from rondo.roles.engines.sglang.weights import ServerWeights

WAYS = ("disk", "tensor", "distributed")
PAUSES = ("in_place", "retract", "abort")
_NUM_REQUESTS, _NUM_TOKENS = 8, 256
_DEADLINE_S = 900.0
Tensors = Mapping[str, torch.Tensor]


def model(folder: Path, num_bytes: int) -> Path:
    """A Qwen3 of about so many bytes; the tiny one for 0."""
    if num_bytes:
        layers = max(1, round(num_bytes / 67.2e6))
        build(folder, hidden_size=1024, num_layers=layers, num_heads=16, num_kv_heads=8, intermediate_size=4096)
    else:
        build(folder)
    return folder


def versions(folder: Path) -> list[Tensors]:
    """What the folder holds, and as much of something else."""
    first = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    made = torch.Generator().manual_seed(1)
    second = {name: torch.randn(each.shape, generator=made).mul_(0.02).to(each.dtype) for name, each in first.items()}
    return [first, second]


@asynccontextmanager
async def running(how: Launch, aside: Path) -> AsyncIterator[SGLangClient]:
    """A client of a server while the body runs; its log is `<model>.log` in `aside`."""
    server = SGLangServer(how, log=aside / f"{Path(how.model_path).name}.log", folder=aside, name="measured")
    try:
        client = await server.start(_DEADLINE_S)
        try:
            yield client
        finally:
            await client.__aexit__()
    finally:
        await server.close()


@asynccontextmanager
async def path(
    client: SGLangClient,
    folder: Path,
    aside: Path,
    way: Any,
    pause: Any = "retract",
    *,
    checksums: bool = True,
    device: str = "cpu",
) -> AsyncIterator[ServerWeights]:
    """`device`: this process's own, from which a process group sends."""
    config = SGLangConfig(urls=(client.url,), weights=way, pause=pause, checksums=checksums)
    weights = ServerWeights(config, client, folder=aside / "weights", model_path=str(folder), device=device)
    await weights.open()
    try:
        yield weights
    finally:
        await weights.close()


def memcpy_s(num_bytes: int) -> float:
    source, target = (torch.full((num_bytes,), n, dtype=torch.uint8) for n in (1, 2))
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


async def measure_paths(
    client: SGLangClient, folder: Path, aside: Path, repetitions: int, ways: Sequence[str] = WAYS, device: str = "cpu"
) -> dict[str, dict[str, float]]:
    both = versions(folder)
    num_bytes = sum(tensor.nbytes for tensor in both[0].values())
    rows: dict[str, dict[str, float]] = {}
    number = 0
    for way in ways:
        for checksums in (True, False):
            seen: dict[str, list[float]] = {"total_s": [], "paused_s": [], "memcpy_s": []}
            async with path(client, folder, aside, way, checksums=checksums, device=device) as weights:
                for repetition in range(repetitions + 1):
                    number += 1
                    copied_s = memcpy_s(num_bytes)
                    await weights.update(number, both[number % 2])
                    stats = weights.stats()
                    assert stats is not None and stats.num_sendings == 1
                    if repetition:
                        for name, value in zip(seen, (stats.total_s, stats.paused_s, copied_s), strict=True):
                            seen[name].append(value)
            row = {name: statistics.median(values) for name, values in seen.items()}
            row |= {"mb": num_bytes / 1e6, "of_memcpy": row["total_s"] / row["memcpy_s"]}
            label = f"{way}{'' if checksums else ', no checksums'}"
            rows[label] = row
            print(
                f"{folder.name:6} {label:26} {row['mb']:8.1f} MB  {row['total_s']:7.3f} s  paused {row['paused_s']:7.3f} s  "
                f"memcpy {row['memcpy_s']:.4f} s  x{row['of_memcpy']:.1f}",
                flush=True,
            )
    return rows


async def ask(client: SGLangClient, number: int) -> dict[str, Any]:
    body = {
        "input_ids": [40 + number] * 16, "sampling_params": {"max_new_tokens": _NUM_TOKENS, "ignore_eos": True},
        "return_logprob": True,
    }  # fmt: skip
    answer: dict[str, Any] = await client.post("/generate", body, deadline_s=_DEADLINE_S)
    return answer["meta_info"]


async def halfway(client: SGLangClient) -> None:
    """Returns when the requests have about half of their tokens."""
    while True:
        loads = (await client.get("/v1/loads", deadline_s=_DEADLINE_S))["loads"]
        if sum(load["num_used_tokens"] for load in loads) > _NUM_REQUESTS * (16 + _NUM_TOKENS // 2):
            return


async def measure_pauses(client: SGLangClient, folder: Path, aside: Path) -> dict[str, dict[str, Any]]:
    both = versions(folder)
    rows: dict[str, dict[str, Any]] = {}
    for pause in PAUSES:
        async with path(client, folder, aside, "tensor", pause) as weights:
            await weights.update(1, both[0])
            began = time.perf_counter()
            await asyncio.gather(*(ask(client, n) for n in range(_NUM_REQUESTS)))
            undisturbed_s = time.perf_counter() - began
            await client.post("/flush_cache", deadline_s=_DEADLINE_S)
            began = time.perf_counter()
            asking = [asyncio.create_task(ask(client, n)) for n in range(_NUM_REQUESTS)]
            await halfway(client)
            await weights.update(2, both[1])
            told = await asyncio.gather(*asking)
            disturbed_s = time.perf_counter() - began
            stats = weights.stats()
            assert stats is not None
        rows[pause] = {
            "finish": sorted({meta["finish_reason"]["type"] for meta in told}),
            "versions": sorted({"+".join(span["version"] for span in meta["weight_versions"]) for meta in told}),
            "tokens_under_old": sum(meta["weight_versions"][0]["end"] for meta in told),
            "tokens": sum(meta["completion_tokens"] for meta in told),
            "num_retractions": max(meta["num_retractions"] for meta in told),
            "paused_s": stats.paused_s,
            "undisturbed_s": undisturbed_s,
            "disturbed_s": disturbed_s,
        }
        print(f"{pause:9} {rows[pause]}", flush=True)
    return rows


async def measure(arguments: argparse.Namespace, aside: Path) -> dict[str, Any]:
    environment = dict(each.split("=", 1) for each in arguments.environment)

    def launch(folder: Path) -> Launch:
        return Launch(
            arguments.python, str(folder), dtype="float32", max_running=32, max_tokens=8192, environment=environment
        )

    found: dict[str, Any] = {}
    tiny = model(aside / "tiny", 0)
    async with running(launch(tiny), aside) as client:
        found["tiny"] = await measure_paths(client, tiny, aside, arguments.repetitions)
        found["pauses"] = await measure_pauses(client, tiny, aside)
    if arguments.gb:
        large = model(aside / "large", round(arguments.gb * 1e9))
        async with running(launch(large), aside) as client:
            found["large"] = await measure_paths(client, large, aside, arguments.repetitions)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rondo bench sglang_weights", description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="the interpreter of SGLang's environment")
    parser.add_argument("--environment", nargs="*", default=[], metavar="NAME=VALUE", help="for the server")
    parser.add_argument("--gb", type=float, default=1.0, help="of the large model; 0 leaves it out")
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="rondo_") as aside:
        found = asyncio.run(measure(arguments, Path(aside)))
    print(json.dumps(found | {"machine": platform.machine(), "cores": os.cpu_count(), "load_before": load}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
