"""Tokens a second of one tiny model: `rondo serve` beside its engine without HTTP, SGLang, and two ways of transformers.

    rondo bench serve [--repetitions 5] [--new-tokens 64] [--in-flight 1 8 32]
                      [--sglang-python ENV/bin/python [--sglang-shim FOLDER]]

Every contender samples `--new-tokens` tokens at temperature 1 for each prompt of 16, with so many requests in flight and one
thread. The engine and the servers tell log-probs, transformers tells tokens alone. "engine": the embedded engine in this process.
"serve": the same behind /generate of `rondo serve`, in a process of its own. "stream": the engine with somebody listening to the
progress of every request. "generate": static batches. "continuous": transformers' continuous batching with a cache of the size it
needs. "sglang": a server of SGLang with --sglang-python; the folder of --sglang-shim is put on its PYTHONPATH. The repetitions of
all are interleaved; a ratio is the median over repetitions. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rondo.models.load import load_model
from rondo.models.tiny.qwen3 import build
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.engine import Request, SamplingParams
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.runtime.errors import RondoError

NUM_PROMPT = 16
NUM_SLOTS = 32
START_S = 300.0
ANSWER_S = 600.0
VOCAB = 256
Contender = Callable[[int], Awaitable[float]]
"""With so many requests in flight, its tokens a second."""


def prompt(number: int) -> list[int]:
    found: list[int] = np.random.default_rng(number).integers(1, VOCAB, NUM_PROMPT).tolist()
    return found


async def closed_loop(in_flight: int, waves: int, num_new: int, ask: Callable[[int], Awaitable[int]]) -> float:
    """So many workers, each asking `waves` times in turn; tokens a second over all."""

    async def worker(number: int) -> None:
        for wave in range(waves):
            got = await ask(number * waves + wave)
            if got != num_new:
                raise SystemExit(f"an answer must have {num_new} tokens, got {got}")

    began = time.perf_counter()
    await asyncio.gather(*map(worker, range(in_flight)))
    return in_flight * waves * num_new / (time.perf_counter() - began)


def waves_of(in_flight: int) -> int:
    """Enough that a measurement lasts long beside its edges."""
    return max(3, 24 // in_flight)


@asynccontextmanager
async def embedded(model: Any, num_new: int, *, listens: bool) -> AsyncIterator[Contender]:
    with ThreadPoolExecutor(max_workers=1) as thread:

        async def compute(function: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(thread, function, *arguments)

        slots = slot_engine(model, num_slots=NUM_SLOTS, max_length=NUM_PROMPT + num_new)
        engine = EmbeddedEngine(slots, compute)
        params = SamplingParams(num_new)

        async def ask(number: int) -> int:
            tokens = np.array(prompt(number), np.int32)
            progress = (lambda so_far: None) if listens else None
            return len((await engine.generate(Request(str(number), tokens, params, number, progress=progress))).tokens)

        async def measure(in_flight: int) -> float:
            return await closed_loop(in_flight, waves_of(in_flight), num_new, ask)

        yield measure
        await engine.close()


@asynccontextmanager
async def over_http(url: str, key: str | None, num_new: int) -> AsyncIterator[Contender]:
    async with SGLangClient(url, api_key=key) as client:

        async def ask(number: int) -> int:
            body = {
                "input_ids": prompt(number), "return_logprob": True,
                "sampling_params": {"max_new_tokens": num_new, "temperature": 1.0, "ignore_eos": True},
            }  # fmt: skip
            told = await client.post("/generate", body, deadline_s=ANSWER_S)
            return len(told["meta_info"]["output_token_logprobs"])

        async def measure(in_flight: int) -> float:
            return await closed_loop(in_flight, waves_of(in_flight), num_new, ask)

        yield measure


def static_batches(model: Any, num_new: int) -> Contender:
    async def measure(in_flight: int) -> float:
        waves = waves_of(in_flight)
        began = time.perf_counter()
        for wave in range(waves):
            ids = torch.tensor([prompt(wave * in_flight + number) for number in range(in_flight)])
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=num_new,
                    min_new_tokens=num_new, pad_token_id=0,
                )  # fmt: skip
            assert out.shape == (in_flight, NUM_PROMPT + num_new)
        return in_flight * waves * num_new / (time.perf_counter() - began)

    return measure


def continuous_batches(folder: Path, num_new: int) -> Contender:
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="paged|sdpa").eval()
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=num_new, eos_token_id=-1, pad_token_id=0)

    async def measure(in_flight: int) -> float:
        waves = waves_of(in_flight)
        inputs = [prompt(number) for number in range(in_flight * waves)]
        # What in_flight sequences need, and no more: by default it takes most of the memory and is far slower for it.
        batching = ContinuousBatchingConfig(
            page_size=32, num_blocks=in_flight * (-(-(NUM_PROMPT + num_new) // 32) + 1),
            max_batch_tokens=max(64, in_flight * NUM_PROMPT), max_requests_per_batch=in_flight,
        )  # fmt: skip
        began = time.perf_counter()
        out = await asyncio.to_thread(
            model.generate_batch, inputs, generation_config=config, continuous_batching_config=batching, warmup=False
        )
        took = time.perf_counter() - began
        assert [len(each.generated_tokens) for each in out.values()] == [num_new] * len(inputs)
        return len(inputs) * num_new / took

    return measure


@contextmanager
def served(folder: Path, num_new: int) -> Iterator[tuple[str, str]]:
    """(URL, token) of `rondo serve`."""
    command = [
        sys.executable, "-m", "rondo.launch.cli", "serve", str(folder), "--port", "0", "--num-slots", str(NUM_SLOTS),
        "--max-length", str(NUM_PROMPT + num_new), "--device", "cpu", "--dtype", "float32",
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        found = re.search(r"at (\S+)  token: (\S+)", process.stdout.readline())
        if found is None:
            raise SystemExit("rondo serve must say where it listens, and did not. See the error above")
        yield found[1], Path(found[2]).read_text().strip()
        process.send_signal(signal.SIGTERM)


@asynccontextmanager
async def sglang(python: str, shim: str | None, folder: Path) -> AsyncIterator[str]:
    """The URL of a server of SGLang that is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    environment |= {"PYTHONPATH": shim} if shim else {}
    command = [
        python, "-m", "sglang.launch_server", "--model-path", str(folder), "--device", "cpu", "--attention-backend",
        "torch_native", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port), "--max-total-tokens", "16384",
        "--max-running-requests", str(NUM_SLOTS), "--mem-fraction-static", "0.2", "--skip-server-warmup",
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs yet
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            async with SGLangClient(url := f"http://127.0.0.1:{port}") as client, asyncio.timeout(START_S):
                while True:
                    if process.poll() is not None:
                        log.seek(0)
                        raise SystemExit(f"SGLang must start, and ended:\n{log.read().decode()[-2000:]}")
                    try:
                        await client.get("/health", deadline_s=30)
                        break
                    except RondoError:
                        await asyncio.sleep(1)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    num_new = options.new_tokens
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        build(folder)
        contenders: dict[str, Contender] = {}
        model = load_model(str(folder))
        contenders["engine"] = await stack.enter_async_context(embedded(model, num_new, listens=False))
        contenders["stream"] = await stack.enter_async_context(embedded(model, num_new, listens=True))
        url, token = stack.enter_context(served(folder, num_new))
        contenders["serve"] = await stack.enter_async_context(over_http(url, token, num_new))
        if options.sglang_python:
            url = await stack.enter_async_context(sglang(options.sglang_python, options.sglang_shim, folder))
            contenders["sglang"] = await stack.enter_async_context(over_http(url, None, num_new))
        plain = load_model(str(folder))
        plain.generation_config.eos_token_id = None
        contenders["generate"] = static_batches(plain, num_new)
        contenders["continuous"] = continuous_batches(folder, num_new)
        figures: dict[str, dict[int, list[float]]] = {name: {} for name in contenders}
        for repetition in range(options.repetitions + 1):
            for in_flight in options.in_flight:
                for name, contender in contenders.items():
                    rate = await contender(in_flight)
                    if repetition:  # the first one warms up
                        figures[name].setdefault(in_flight, []).append(rate)
    return report(figures)


def report(figures: dict[str, dict[int, list[float]]]) -> dict[str, Any]:
    """Prints the table; per number in flight the median tokens a second, and how much faster the engine is."""
    result: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "tokens_per_s": {}, "ratio": {}}
    print(f"{'contender':12}{'in flight':>10}{'tokens/s':>12}{'engine over it':>16}")
    for name, by_load in figures.items():
        for in_flight, rates in by_load.items():
            ratio = statistics.median(a / b for a, b in zip(figures["engine"][in_flight], rates, strict=True))
            rate = statistics.median(rates)
            result["tokens_per_s"].setdefault(name, {})[in_flight] = round(rate)
            result["ratio"].setdefault(name, {})[in_flight] = round(ratio, 3)
            print(f"{name:12}{in_flight:>10}{rate:>12.0f}{ratio:>16.2f}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--sglang-python", help="the interpreter of SGLang's environment")
    parser.add_argument("--sglang-shim", help="a folder for its PYTHONPATH")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    print(json.dumps(asyncio.run(measure_all(options)), default=str))


if __name__ == "__main__":
    main()
