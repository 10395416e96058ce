"""An SGLang server on a GPU: how long it takes to start, to sleep and to wake, and new weights by each path.

A few layers of a Qwen3-4B in bfloat16. "wake" is the first update after a sleep, which takes the memory again and brings
weights: beside it stands an update of a server that was awake. The paths are those of `rondo bench sglang_weights`. The server
has the last GPU: a process group of it and this process wants one for each of them. On the CPU there is no memory to give back.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import sglang_weights
from benchmarks.gpu import Options
from benchmarks.gpu_parts.shapes import QWEN3_4B, TINY, write_model
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.server import Launch

LAYERS = 6
Tell = Callable[[dict[str, Any]], None]


def measure(options: Options, tell: Tell) -> None:
    with tempfile.TemporaryDirectory(prefix="rondo-gpu-") as aside:
        folder = write_model(Path(aside) / "model", TINY if options.tiny else QWEN3_4B.of(LAYERS))
        asyncio.run(_measure(options, folder, Path(aside), tell))


def launch(options: Options, folder: Path) -> Launch:
    """A server of the last GPU, or of the CPU. RuntimeError without an environment for it."""
    if options.sglang is None:
        raise RuntimeError("SGLang must be installed, got no .venv-sglang. Run `make sglang`, or give --sglang")
    on_gpu: dict[str, Any] = {}
    if options.num_devices:
        saver = {"enable-memory-saver": True, "mem-fraction-static": 0.5}
        on_gpu = {"first_device": options.num_devices - 1, "arguments": saver}
    return Launch(
        options.sglang, str(folder), dtype="bfloat16", max_running=64, max_tokens=16384,
        environment=options.environment, **on_gpu,
    )  # fmt: skip


async def _measure(options: Options, folder: Path, aside: Path, tell: Tell) -> None:
    began = time.perf_counter()
    async with sglang_weights.running(launch(options, folder), aside) as client:
        found: dict[str, Any] = {"start_s": time.perf_counter() - began, "paths": {}}
        tell(found)
        if options.num_devices:
            found |= await sleep_and_wake(client, folder, aside, options.num_devices - 1)
            tell(found)
        for way in sglang_weights.WAYS:
            if way == "distributed" and options.num_devices == 1:
                found["paths"][way] = {"error": "NCCL wants a GPU for the server and one for who sends"}
                continue
            repetitions = 1 if options.tiny else 3
            try:
                device = "cuda:0" if options.num_devices > 1 else "cpu"  # the server has the last one
                found["paths"] |= await sglang_weights.measure_paths(client, folder, aside, repetitions, [way], device)
            except Exception as error:  # noqa: BLE001  # this way's outcome; the others go on
                traceback.print_exc()
                found["paths"][way] = {"error": f"{type(error).__name__}: {error}"}
            tell(found)


async def sleep_and_wake(client: SGLangClient, folder: Path, aside: Path, device: int) -> dict[str, Any]:
    """Seconds, and what a sleeping server gives back."""
    both = sglang_weights.versions(folder)
    async with sglang_weights.path(client, folder, aside, "tensor") as weights:
        await weights.update(0, both[0])
        update_s = await _seconds(weights.update(1, both[1]))
        held = torch.cuda.mem_get_info(device)[0]
        sleep_s = await _seconds(weights.release())
        freed = torch.cuda.mem_get_info(device)[0] - held
        wake_s = await _seconds(weights.update(2, both[0]))
    return {"sleep_s": sleep_s, "wake_s": wake_s, "update_s": update_s, "freed_gib": freed / 2**30}


async def _seconds(work: Awaitable[Any]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began
