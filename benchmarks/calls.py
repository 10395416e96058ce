"""Actor calls: the floor, ours idle and beside a busy compute thread, and Ray and Monarch when they are at hand.

    rondo bench calls [--repetitions 3] [--peers-python PEERS_VENV/bin/python]

Each system has one actor with `inc(x)` in another process. Sequential: 2,000 calls one after another, p50 and p99 in
microseconds. Pipelined: 500 calls at a time, calls per second. "floor" is a bare uvloop echo with orjson frames on a Unix
socket and no features; "busy" runs a pure-Python loop on a second thread of the actor's process, with the switch interval
that workers set (0.2 ms). Repetitions of all are interleaved; figures are medians, ratios are medians of ratios within a
repetition. The peers need an environment of their own:

    pip install torch==2.13.0 ray==2.60.0 torchmonarch==0.7.0 uvloop orjson

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import uvloop

from rondo.runtime.actors.actor import Actor, endpoint, serve
from rondo.runtime.actors.ref import ActorRef

NUM_WARM, NUM_SEQUENTIAL, NUM_PIPELINED, WINDOW = 300, 2000, 10_000, 500
SWITCH_INTERVAL_S = 0.0002
TOKEN = "benchmark"
PEERS = ("ray", "monarch")
BARS = {"floor": 3.0, "ray": 1 / 15, "monarch": 1 / 15, "busy_p50_us": 100.0}
"""Ours over the floor at most 3, ours over a peer at most 1/15, ours beside a busy thread at most 100 us."""

Figures = dict[str, float]


class Counter(Actor):
    """What is called."""

    @endpoint
    async def inc(self, x: int) -> int:
        return x + 1


class Frames(asyncio.Protocol):
    """The floor's two ends: a length and JSON."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.received = bytearray()

    def data_received(self, data: bytes) -> None:
        received = self.received
        received += data
        while len(received) >= 4:
            (num_bytes,) = struct.unpack_from("<I", received)
            if len(received) < 4 + num_bytes:
                break
            message = orjson.loads(memoryview(received)[4 : 4 + num_bytes])
            del received[: 4 + num_bytes]
            self.got(message)

    def send(self, message: dict[str, Any]) -> None:
        data = orjson.dumps(message)
        self.transport.write(struct.pack("<I", len(data)) + data)

    def got(self, message: dict[str, Any]) -> None:
        raise NotImplementedError


class FloorServer(Frames):
    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def got(self, message: dict[str, Any]) -> None:
        task = asyncio.ensure_future(self.handle(message))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def handle(self, message: dict[str, Any]) -> None:
        self.send({"i": message["i"], "r": message["a"][0] + 1})


class FloorCaller(Frames):
    def __init__(self) -> None:
        self.pending: dict[int, asyncio.Future[int]] = {}
        self.last_id = 0

    def got(self, message: dict[str, Any]) -> None:
        self.pending.pop(message["i"]).set_result(message["r"])

    def call(self, *arguments: int) -> asyncio.Future[int]:
        self.last_id += 1
        future = self.pending[self.last_id] = asyncio.get_running_loop().create_future()
        self.send({"i": self.last_id, "m": "inc", "a": arguments})
        return future


async def run_server(system: str, path: str) -> None:
    """The actor's process: serves, and says so on standard output."""
    if system == "busy":
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        threading.Thread(target=spin, daemon=True).start()
    if system == "floor":
        await asyncio.get_running_loop().create_unix_server(FloorServer, path)
    else:
        await serve(Counter(), f"unix:{path}", token=TOKEN, name="counter")
    print("ready", flush=True)
    await asyncio.get_running_loop().create_future()


def spin() -> None:
    x = 0
    while True:
        x += 1


async def measured(call: Callable[[int], Awaitable[int]]) -> Figures:
    for i in range(NUM_WARM):
        assert await call(i) == i + 1
    seconds = []
    for i in range(NUM_SEQUENTIAL):
        start = time.perf_counter()
        await call(i)
        seconds.append(time.perf_counter() - start)
    seconds.sort()
    start = time.perf_counter()
    for _ in range(NUM_PIPELINED // WINDOW):
        await asyncio.gather(*[call(1) for _ in range(WINDOW)])
    calls_per_s = NUM_PIPELINED / (time.perf_counter() - start)
    return {
        "p50_us": seconds[NUM_SEQUENTIAL // 2] * 1e6,
        "p99_us": seconds[NUM_SEQUENTIAL * 99 // 100] * 1e6,
        "calls_per_s": calls_per_s,
    }


async def run_caller(system: str, path: str) -> Figures:
    if system == "floor":
        transport, floor = await asyncio.get_running_loop().create_unix_connection(FloorCaller, path)
        figures = await measured(floor.call)
        transport.close()
        return figures
    with ActorRef(f"unix:{path}", token=TOKEN, peer="counter") as ref:
        return await measured(lambda x: ref.call("inc", x))


def measure(system: str) -> Figures:
    """One repetition of the floor, ours idle ("ours") or ours beside a busy thread ("busy")."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/calls"
        server = subprocess.Popen([sys.executable, __file__, "--server", system, path], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            if server.stdout.readline() != b"ready\n":
                raise RuntimeError(f"the {system} server must start, got exit code {server.wait()}")
            return uvloop.run(run_caller(system, path))
        finally:
            server.kill()
            server.communicate()


def measure_peer(system: str, python: str) -> Figures:
    """One repetition of a peer, in its own interpreter; its script prints the figures on its last line."""
    script = Path(__file__).parent / "peers" / f"{system}_calls.py"
    result = subprocess.run([python, str(script)], capture_output=True, text=True, timeout=300, env={**os.environ})
    if result.returncode:
        raise RuntimeError(f"{script.name} must run under {python}, got:\n{result.stderr[-2000:]}")
    figures: Figures = json.loads(result.stdout.strip().splitlines()[-1])
    return figures


def median(rows: list[Figures], key: str) -> float:
    return statistics.median(row[key] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers-python", help="an interpreter with ray and torchmonarch installed")
    parser.add_argument("--server", nargs=2, metavar=("SYSTEM", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        uvloop.run(run_server(*options.server))
        return

    systems = ["floor", "ours", "busy", *(PEERS if options.peers_python else ())]
    rows: dict[str, list[Figures]] = {system: [] for system in systems}
    for _ in range(options.repetitions):
        for system in systems:
            rows[system].append(measure_peer(system, options.peers_python) if system in PEERS else measure(system))

    p50s = {system: [row["p50_us"] for row in rows[system]] for system in systems}
    ours_over = {
        system: statistics.median(ours / other for ours, other in zip(p50s["ours"], p50s[system], strict=True))
        for system in systems
    }
    print(f"{'system':<10}{'p50 us':>10}{'p99 us':>10}{'calls/s':>12}{'p50 against ours':>20}")
    for system in systems:
        p50, p99, rate = (median(rows[system], key) for key in ("p50_us", "p99_us", "calls_per_s"))
        print(f"{system:<10}{p50:>10.1f}{p99:>10.1f}{rate:>12.0f}{1 / ours_over[system]:>19.2f}x")
    met = {system: ours_over[system] <= BARS[system] for system in systems if system in BARS}
    met["busy_p50_us"] = median(rows["busy"], "p50_us") <= BARS["busy_p50_us"]
    report = {
        "benchmark": "calls",
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "repetitions": options.repetitions,
        "systems": {s: {key: round(median(rows[s], key), 1) for key in rows[s][0]} for s in systems},
        "ours_p50_over": {system: round(ratio, 4) for system, ratio in ours_over.items()},
        "bars_met": met,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
