"""What rondo's client and dispatcher cost: against a bare aiohttp load generator, on a stub and on a real SGLang server.

    rondo bench dispatch [--sglang VENV/bin/python [--model FOLDER] [--shim FOLDER]] [--repetitions 5]

Both sides send the same bodies to the same server and keep so many requests in flight. "bare" is an aiohttp session that posts
bytes, reads the answer and takes it apart with orjson, and does nothing with it. "rondo" is `Dispatcher.generate` over an
`SGLangEngine`: placement, queue, waits, breaker, cancellation, versions, log-probs as arrays. CPU is that of the client process,
in microseconds a request; tokens/s are of the wall clock. The stub is a process of its own that costs little itself and answers
after the time that a server needs at that load (`STEP_S` a token, spread by a tenth); with "flat out" it answers at once, so that
only the clients' own speed is left. The two sides take turns within each repetition; figures are medians, ratios are medians of
ratios.

The last line is one JSON object. Bar: tokens/s through rondo at 97 % of the bare generator's at every load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import numpy as np
import orjson
import uvloop

from rondo.roles.engines.dispatch import Dispatcher, DispatchLimits
from rondo.roles.engines.engine import Request, SamplingParams
from rondo.roles.engines.sglang.capabilities import Capabilities, probe
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.one_server import SGLangEngine
from rondo.roles.engines.sglang.weights import ServerWeights

BAR = 0.97
STEP_S = 0.01
NUM_PROMPT, NUM_NEW = 64, 64
Figures = dict[str, float]


# ---- the stub -----------------------------------------------------------------------------------------------------------


class StubConnection(asyncio.Protocol):
    """Answers /generate after a while with the tokens asked for, to one request at a time."""

    step_s = STEP_S
    chance = random.Random(0)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        self.received += data
        head = self.received.find(b"\r\n\r\n")
        if head < 0:
            return
        headers = bytes(self.received[:head]).lower()
        at = headers.find(b"content-length:")
        length = int(headers[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self.received) < head + 4 + length:
            return
        if self.received.startswith(b"GET"):  # a probe
            self.received.clear()
            self.transport.write(b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"loads":[]}')
            return
        self.received.clear()
        late_s = self.step_s * NUM_NEW * self.chance.uniform(0.9, 1.1)
        if late_s > 0:
            asyncio.get_running_loop().call_later(late_s, self.answer)
        else:
            self.answer()

    def answer(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(ANSWER)


def _answer() -> bytes:
    triples = [[-1.2345678 - i / 1000, 100 + i, None] for i in range(NUM_NEW)]
    meta = {
        "id": "0123456789abcdef", "finish_reason": {"type": "length", "length": NUM_NEW}, "prompt_tokens": NUM_PROMPT,
        "weight_version": "1", "weight_versions": [{"version": "1", "start": 0, "end": NUM_NEW}], "dp_rank": None,
        "total_retractions": 0, "num_retractions": 0, "completion_tokens": NUM_NEW, "cached_tokens": 0, "e2e_latency": 0.6,
        "output_token_logprobs": triples, "output_token_logprobs_length": NUM_NEW, "reasoning_tokens": 0,
        "cached_tokens_details": None, "response_sent_to_client_ts": 1.5,
    }  # fmt: skip
    body = orjson.dumps({"text": "word " * NUM_NEW, "output_ids": [100 + i for i in range(NUM_NEW)], "meta_info": meta})
    head = "HTTP/1.1 200 OK\r\ndate: Sat, 21 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


ANSWER = _answer()


async def run_stub(step_s: float) -> None:
    StubConnection.step_s = step_s
    server = await asyncio.get_running_loop().create_server(StubConnection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().create_future()


@contextlib.contextmanager
def stub(step_s: float) -> Iterator[str]:
    process = subprocess.Popen([sys.executable, __file__, "--stub", str(step_s)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate()


# ---- the two sides --------------------------------------------------------------------------------------------------------


def requests(count: int, label: str) -> list[Request]:
    """Prompts of their own length, eight samples of each."""
    chance = np.random.default_rng(0)
    prompts = [chance.integers(100, 400, NUM_PROMPT).astype(np.int32) for _ in range(-(-count // 8))]
    params = SamplingParams(NUM_NEW)
    return [Request(f"{label}/{i}", prompts[i // 8], params, seed=i) for i in range(count)]


async def timed(one: Any, asked: list[Request], in_flight: int) -> Figures:
    """`one(request)` gives its number of tokens; so many of them at a time."""
    left = iter(asked)

    async def lane() -> int:
        return sum([await one(request) for request in left])

    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = sum(await asyncio.gather(*(lane() for _ in range(in_flight))))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert tokens == len(asked) * NUM_NEW
    return {"cpu_us": cpu / len(asked) * 1e6, "tokens_per_s": tokens / wall}


async def bare(url: str, key: str | None, asked: list[Request], in_flight: int) -> Figures:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:

        async def one(request: Request) -> int:
            sampling = {
                "max_new_tokens": NUM_NEW, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True
            }  # fmt: skip
            body = {
                "rid": request.id, "input_ids": request.prompt.tolist(), "sampling_params": sampling, "return_logprob": True
            }  # fmt: skip
            async with session.post(url + "/generate", data=orjson.dumps(body)) as answer:
                return len(orjson.loads(await answer.read())["output_ids"])

        await asyncio.gather(*(one(request) for request in requests(in_flight, "warm")))
        return await timed(one, asked, in_flight)


class NoWeights:
    async def open(self) -> None: ...
    async def update(self, version: int, tensors: Any) -> None: ...
    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def no_weights() -> AsyncIterator[tuple[int, dict[str, Any]]]:
    yield 0, {}


@contextlib.asynccontextmanager
async def dispatched(url: str, key: str | None, found: Capabilities, in_flight: int) -> AsyncIterator[Dispatcher]:
    client = await SGLangClient(url, api_key=key).__aenter__()
    engine = SGLangEngine(client, weights=cast(ServerWeights, NoWeights()), pause="in_place", capabilities=found)
    dispatcher = Dispatcher([engine], reload=no_weights, limits=DispatchLimits(in_flight=in_flight))
    try:
        yield dispatcher
    finally:
        await dispatcher.close()


async def ours(url: str, key: str | None, found: Capabilities, asked: list[Request], in_flight: int) -> Figures:
    async with dispatched(url, key, found, in_flight) as dispatcher:

        async def one(request: Request) -> int:
            return len((await dispatcher.generate(request)).tokens)

        await asyncio.gather(*(one(request) for request in requests(in_flight, "warm")))
        return await timed(one, asked, in_flight)


STUB = Capabilities(
    version="0.5.23", model_path="stub", architecture="stub", tensor_parallel=1, data_parallel=1, max_running=256,
    max_cached_tokens=1 << 20, lengths=None, vocabulary=500, version_spans=True, log_probs_after_temperature=True,
    seeds=False, priority=0, in_order=True, tells_new_tokens=False, experts=None, media=(), takes_processed_media=False,
)  # fmt: skip


def load(url: str, key: str | None, found: Capabilities, in_flight: int, count: int, repetitions: int) -> Figures:
    rows: list[tuple[Figures, Figures]] = []
    for repetition in range(repetitions):
        asked = requests(count, f"{in_flight}/{repetition}")
        sides = {
            "bare": lambda: uvloop.run(bare(url, key, asked, in_flight)),  # noqa: B023 - called within the turn
            "ours": lambda: uvloop.run(ours(url, key, found, asked, in_flight)),  # noqa: B023
        }
        order = ("bare", "ours") if repetition % 2 == 0 else ("ours", "bare")
        got = {side: sides[side]() for side in order}
        rows.append((got["bare"], got["ours"]))
    return {
        "bare_cpu_us": statistics.median(b["cpu_us"] for b, _ in rows),
        "rondo_cpu_us": statistics.median(o["cpu_us"] for _, o in rows),
        "bare_tokens_per_s": statistics.median(b["tokens_per_s"] for b, _ in rows),
        "rondo_tokens_per_s": statistics.median(o["tokens_per_s"] for _, o in rows),
        "ratio": statistics.median(o["tokens_per_s"] / b["tokens_per_s"] for b, o in rows),
    }


# ---- the real server ------------------------------------------------------------------------------------------------------


def real(options: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """Starts a server of SGLang, or takes the one at `--url`, and measures it."""
    from rondo.roles.engines.sglang.server import Launch, SGLangServer

    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        model = options.model or _tiny(Path(folder) / "model")
        environment = {} if options.shim is None else {"PYTHONPATH": str(Path(options.shim).resolve())}
        how = Launch(
            options.sglang, str(model), dtype="float32", max_running=32, max_tokens=16384, environment=environment
        )
        server = SGLangServer(how, log=Path(folder) / "server.log", folder=Path(folder))

        async def start() -> tuple[str, Capabilities]:
            client = await server.start(600)
            try:
                return client.url, await probe(client)
            finally:
                await client.__aexit__()

        try:
            url, found = runner.run(start())
            for in_flight in (1, 8, 32):
                yield (
                    f"sglang {in_flight}",
                    load(url, server.key, found, in_flight, max(8, 4 * in_flight), options.repetitions),
                )
        finally:
            runner.run(server.close())


def _tiny(folder: Path) -> Path:
    """A dense Qwen3 of about a million parameters."""
    import transformers

    from rondo.models.tiny.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def measured(options: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """One load after another."""
    with stub(STEP_S) as url:
        yield "stub 256", load(url, None, STUB, 256, 2048, options.repetitions)
    with stub(0.0) as url:
        yield "stub 32, flat out", load(url, None, STUB, 32, 4096, options.repetitions)
    if options.sglang is not None:
        yield from real(options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--sglang", help="an interpreter that has SGLang; without it the stub alone is measured")
    parser.add_argument("--model", help="a folder; without it a tiny model is made")
    parser.add_argument("--shim", help="a folder before the server's own packages, for machines without a GPU")
    parser.add_argument("--stub", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub is not None:
        uvloop.run(run_stub(options.stub))
        return
    rows: dict[str, Figures] = {}
    print(f"{'load':<20}{'bare us':>10}{'rondo us':>10}{'bare tok/s':>13}{'rondo tok/s':>13}{'ratio':>8}")
    for name, row in measured(options):
        rows[name] = row
        print(
            f"{name:<20}{row['bare_cpu_us']:>10.0f}{row['rondo_cpu_us']:>10.0f}{row['bare_tokens_per_s']:>13.0f}"
            f"{row['rondo_tokens_per_s']:>13.0f}{row['ratio']:>8.3f}",
            flush=True,
        )
    report = {
        "benchmark": "dispatch",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "repetitions": options.repetitions,
        "loads": {name: {key: round(value, 4) for key, value in row.items()} for name, row in rows.items()},
        "bars_met": {name: row["ratio"] >= BAR for name, row in rows.items() if "flat out" not in name},
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
