"""What strangers do to `rondo serve`: honest requests beside hostile ones, and agents whose context grows.

    rondo bench strangers [--hostile 1000] [--honest 64] [--agents 48] [--turns 40] [--seconds 20]

One server in a process of its own, with a tiny model. First `--honest` callers ask in turn for chats of 32 tokens, for so many
seconds by themselves; then beside `--hostile` requests of twenty kinds, 16 at a time: too long, too deep, too many, no JSON,
templates and names that are not theirs, bodies that never come, callers that leave. Told are the honest ones' latencies and
failures, the memory of the server and its workers, and how the hostile ones were answered. Then `--agents` hold `--turns` turns
each in a session, every one with all before it: how many calls are recorded, and what the record takes for each new token. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.serve import served
from rondo.models.tiny.qwen3 import build

CHAT, TEXTS, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
NUM_NEW = 32
MAX_LENGTH = 4096
IN_FLIGHT = 16
PATIENCE_S = 120.0
USER = {"role": "user", "content": "hi"}
LOOPS = "{% for i in range(3000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}"


def chat(**more: Any) -> tuple[str, bytes]:
    return CHAT, json.dumps({"messages": [USER], "max_tokens": 4} | more).encode()


def native(**more: Any) -> tuple[str, bytes]:
    return NATIVE, json.dumps({"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}} | more).encode()


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


KINDS: dict[str, Callable[[], tuple[str, bytes]]] = {
    "own template": lambda: chat(chat_template_kwargs={"chat_template": LOOPS}),
    "own arguments": lambda: chat(chat_template_kwargs={"tokenize": True, "tools": [1]}),
    "long text": lambda: (TEXTS, json.dumps({"prompt": "a b" * 1_000_000}).encode()),
    "long chat": lambda: chat(messages=[USER | {"content": "word " * 500_000}]),
    "long ids": lambda: native(input_ids=[5] * 400_000),
    "long stop": lambda: chat(stop="a" * 60_000, max_tokens=64),
    "many stops": lambda: chat(stop=["ab"] * 20_000),
    "many prompts": lambda: (TEXTS, json.dumps({"prompt": ["a"] * 3000}).encode()),
    "many samples": lambda: chat(n=256, max_tokens=1),
    "many messages": lambda: chat(messages=[USER] * 20_000),
    "many tools": lambda: chat(tools=[{"type": "function"}] * 5000),
    "deep": lambda: chat(tools=[{"function": deep(900)}]),
    "wide": lambda: (NATIVE, b'{"input_ids": [' + b"[]," * 300_000 + b"[]]}"),
    "no json": lambda: (CHAT, b"\xff{" * 1000),
    "unknown fields": lambda: chat(messages=[USER | {"junk": "x" * 1_000_000}]),
    "numbers": lambda: native(sampling_params={"top_k": 2**63, "temperature": 1e-50, "stop_token_ids": [2**63]}),
    "no text": lambda: native(input_ids=[-1, 2**31]),
    "wrong token": lambda: (CHAT, b""),
    "no end": lambda: chat(max_tokens=2000, stream=True),
    "no body": lambda: (CHAT, b"{"),
}


BODIES = {kind: make() for kind, make in KINDS.items()}
"""Made once: writing them is no time that an honest caller waits for the server."""


class Caller:
    """Sends one request after another as its kind says."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        self._session = session
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"}

    async def post(self, path: str, body: bytes, **headers: str) -> tuple[int, bytes]:
        async with self._session.post(self._url + path, data=body, headers=self._headers | headers) as answer:
            return answer.status, await answer.read()

    async def get(self, path: str) -> Any:
        async with self._session.get(self._url + path, headers=self._headers) as answer:
            return await answer.json()

    async def hostile(self, kind: str) -> str:
        """How it was answered."""
        path, body = BODIES[kind]
        try:
            if kind == "wrong token":
                return str(
                    (await self.raw(path, b"Authorization: Bearer \xff\xfe\r\nContent-Length: 2\r\n\r\n{}"))[
                        9:12
                    ].decode()
                )
            if kind in ("no body", "no end"):
                size = 1_000_000 if kind == "no body" else len(body)
                authorization = (
                    f"Authorization: {self._headers['Authorization']}\r\nContent-Length: {size}\r\n\r\n".encode()
                )
                await self.raw(path, authorization + body, reads=1 if kind == "no end" else 0)
                return "left"
            return str((await self.post(path, body))[0])
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return type(error).__name__

    async def raw(self, path: str, rest: bytes, reads: int = 4096) -> bytes:
        host, _, port = self._url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\n".encode() + rest)
            return await asyncio.wait_for(reader.read(reads), PATIENCE_S) if reads else b""
        finally:
            writer.close()


async def honest(
    caller: Caller, number: int, goes_on: Callable[[], bool], took: list[float], failed: Counter[str]
) -> None:
    while goes_on():
        began = time.perf_counter()
        body = {"messages": [USER | {"content": f"number {number}"}], "max_tokens": NUM_NEW, "ignore_eos": True}
        try:
            status, _ = await caller.post(CHAT, json.dumps(body).encode())
        except (aiohttp.ClientError, TimeoutError) as error:
            failed[type(error).__name__] += 1
            continue
        if status != 200:
            failed[str(status)] += 1
        took.append(time.perf_counter() - began)


async def beside(caller: Caller, options: argparse.Namespace, pid: int) -> dict[str, Any]:
    """The honest ones by themselves, then beside the hostile ones."""
    result: dict[str, Any] = {}
    memory: list[int] = []
    for name in ("warm up", "quiet", "hostile"):
        took: list[float] = []
        failed: Counter[str] = Counter()
        end = time.perf_counter() + options.seconds * (0.2 if name == "warm up" else 1)
        left = [kind for _ in range(-(-options.hostile // len(KINDS))) for kind in KINDS] if name == "hostile" else []
        answered: Counter[str] = Counter()
        working = [True]

        async def ask(left: list[str] = left, answered: Counter[str] = answered) -> None:
            while left:
                kind = left.pop()
                answered[f"{kind}: {await caller.hostile(kind)}"] += 1

        async def watch(working: list[bool] = working) -> None:
            while working[0]:
                memory.append(memory_of(pid))
                await asyncio.sleep(0.2)

        watching = asyncio.create_task(watch())
        hostile = [asyncio.create_task(ask()) for _ in range(IN_FLIGHT)]

        def goes_on(end: float = end, hostile: list[asyncio.Task[None]] = hostile) -> bool:
            return time.perf_counter() < end or not all(task.done() for task in hostile)

        began = time.perf_counter()
        await asyncio.gather(
            *(honest(caller, number, goes_on, took, failed) for number in range(options.honest)), *hostile
        )
        working[0] = False
        await watching
        result[name] = {
            "requests": len(took), "failed": dict(failed), "p50_s": round(float(np.quantile(took, 0.5)), 3),
            "p99_s": round(float(np.quantile(took, 0.99)), 3), "seconds": round(time.perf_counter() - began, 1),
            "memory_mb": [memory[0] >> 20, max(memory) >> 20, memory[-1] >> 20],
        }  # fmt: skip
        memory.clear()
        print(name, result[name], flush=True)
    result["answered"] = dict(sorted(answered.items()))
    result["p99_ratio"] = round(result["hostile"]["p99_s"] / result["quiet"]["p99_s"], 2)
    return result


async def agents(caller: Caller, options: argparse.Namespace, pid: int) -> dict[str, Any]:
    """Sessions whose context grows."""
    before = memory_of(pid)
    calls: Counter[int] = Counter()

    async def agent(number: int) -> int:
        messages: list[dict[str, Any]] = []
        tokens = 0
        for turn in range(options.turns):
            messages.append(USER | {"content": f"turn {turn} of {number}"})
            body = {"messages": messages, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
            status, told = await caller.post(CHAT, json.dumps(body).encode(), **{"X-Rondo-Session": f"agent-{number}"})
            calls[status] += 1
            if status == 200:
                answer = json.loads(told)
                messages.append(answer["choices"][0]["message"])
                tokens = len(answer["prompt_token_ids"]) + len(answer["choices"][0]["token_ids"])
        return tokens

    tokens = sum(await asyncio.gather(*map(agent, range(options.agents))))
    stats = (await caller.get("/server_info"))["trajectories"]
    kept = await caller.get("/rondo/trajectories")
    whole = [
        len((await caller.get(f"/rondo/trajectories/{name}"))["calls"]) == options.turns for name in kept["sessions"]
    ]
    return {
        "asked": options.agents * options.turns, "answered": dict(calls), "recorded": stats, "whole_sessions": sum(whole),
        "new_tokens": tokens, "bytes_per_new_token": round(stats.get("num_bytes", 0) / tokens, 1),
        "memory_per_new_token": round((memory_of(pid) - before) / tokens, 1),
    }  # fmt: skip


def memory_of(pid: int) -> int:
    """Bytes of the process and all that it started."""
    found, left = 0, [pid]
    while left:
        one = left.pop()
        with contextlib.suppress(OSError):
            found += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            left += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    return found


def child() -> int:
    """The server, which is what this process started last."""
    return max(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@contextlib.contextmanager
def server() -> Iterator[tuple[str, str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "model", max_positions=MAX_LENGTH)
        with served(Path(folder) / "model", MAX_LENGTH - 16) as (url, token):
            yield url, token, child()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, part in (("strangers", beside), ("agents", agents)):
        with server() as (url, token, pid):
            timeout = aiohttp.ClientTimeout(PATIENCE_S)
            async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
                caller = Caller(session, url, token)
                try:
                    result[name] = await part(caller, options, pid)
                    status, _ = await caller.post(CHAT, chat()[1])
                    result[name]["answers_at_the_end"] = status == 200
                except (aiohttp.ClientError, TimeoutError) as error:
                    result[name] = {"answers_at_the_end": False, "error": type(error).__name__}
        print(name, result[name], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hostile", 1000), ("honest", 64), ("agents", 48), ("turns", 40), ("seconds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
