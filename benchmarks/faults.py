"""What failures of servers cost: eight stub servers behind the dispatcher, 512 requests in flight, one fault after another.

    rondo bench faults [--only poison dead] [--update-s 32]

Everything but the servers is what a run has: `KeptEngine`, `SGLangEngine`, the dispatcher of `one_engine` with its own limits. A
server is a process that answers /generate in parts, as SGLang does, about two seconds after it was asked; its weights are a
number. Each fault has servers of its own. 512 callers ask one request after another; the fault comes when all are in flight:

    none, 32 s updates       nothing else happens; a server's update takes 0.5 s, or 32 s (real seconds, in two waves)
    500, poison, full        one request gets HTTP 500 of every server; one kills every server; one server says 503 to everything
    dead, hung, no restart   a server gets SIGKILL and comes back; SIGSTOP, and stays; SIGKILL, and cannot be started again

Columns: requests of others that failed; generations of others that a server which stayed healthy was told to give up (its
connection was closed); attempts that went with a server; servers that died; servers in use at the end; the seconds of the next
update (the median of the next three, where they are quick), and that over the same with nothing wrong. The fault has
`--settle-s` to be noticed before that update begins. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import orjson

from benchmarks.dispatch import NUM_NEW, NUM_PROMPT, STUB
from rondo.roles.engines.dispatch import Dispatcher
from rondo.roles.engines.engine import Request, SamplingParams
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.one_server import SGLangEngine
from rondo.roles.engines.sglang.open import one_engine
from rondo.roles.engines.sglang.restarts import KeptEngine, kept
from rondo.roles.engines.sglang.server import Server
from rondo.roles.engines.sglang.weights import ServerWeights
from rondo.runtime.errors import PeerGone, RondoError, WorkerDied

NUM_SERVERS, IN_FLIGHT = 8, 512
ANSWER_S, UPDATE_S = 2.0, 0.5
BAR = 1.1


# ---- a server -----------------------------------------------------------------------------------------------------------


class State:
    """Of one server. `orders`: what it is told to do."""

    version = "1"
    orders: dict[str, Any] = {}  # noqa: RUF012 - of this process, which is one server
    num_given_up = 0


class StubConnection(asyncio.Protocol):
    """One request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.received = bytearray()
        self.busy = False
        self.timers: list[asyncio.TimerHandle] = []

    def connection_lost(self, exc: Exception | None) -> None:
        State.num_given_up += self.busy
        for timer in self.timers:
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, rest = bytes(self.received).partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        size = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if not found or len(rest) < size:
            return
        self.received.clear()
        path = head.split(b" ", 2)[1].decode()
        self.called(path, orjson.loads(rest) if rest else {})

    def called(self, path: str, body: dict[str, Any]) -> None:
        if path == "/stub":
            State.orders = body.get("orders", State.orders)
            self.says({"num_given_up": State.num_given_up})
        elif path == "/generate":
            self.generate(body["rid"])
        elif path == "/update_weight_version":
            State.version = body["new_version"]
            asyncio.get_running_loop().call_later(State.orders.get("update_s", UPDATE_S), self.says, {"success": True})
        else:
            self.says({"weight_version": State.version, "loads": []})

    def generate(self, rid: str) -> None:
        orders = State.orders
        if rid.startswith("poison") and orders.get("dies"):
            os.kill(os.getpid(), signal.SIGKILL)
        if orders.get("full") or (rid.startswith("poison") and orders.get("fails")):
            self.says({"error": {"message": "told to"}}, "503 Busy" if orders.get("full") else "500 No")
            return
        self.busy = True
        loop, late_s = asyncio.get_running_loop(), 0.0 if rid.startswith("trial") else ANSWER_S
        self.timers = [loop.call_later(late_s / 10, self.part, 0, 8), loop.call_later(late_s, self.part, 8, NUM_NEW)]

    def part(self, first: int, end: int) -> None:
        """The tokens from `first` to `end`."""
        if first == 0:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
        over = end == NUM_NEW
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length", "length": NUM_NEW} if over else None, "completion_tokens": end,
            "prompt_tokens": NUM_PROMPT, "weight_version": State.version, "cached_tokens": 0,
            "output_token_logprobs": [[-1.0, 100 + i, None] for i in range(first, end)],
        }  # fmt: skip
        if over:
            meta["weight_versions"] = [{"version": State.version, "start": 0, "end": end}]
        event = b"data: " + orjson.dumps({"output_ids": [100 + i for i in range(first, end)], "meta_info": meta})
        event += b"\n\ndata: [DONE]\n\n" if over else b"\n\n"
        self.busy = not over
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event) + (b"0\r\n\r\n" if over else b""))

    def says(self, told: Mapping[str, Any], status: str = "200 OK") -> None:
        if not self.transport.is_closing():
            body = orjson.dumps(told)
            self.transport.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(StubConnection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().create_future()


class StubServer:
    """`Server` of a kept engine: one process and its successors, while it `restarts`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.restarts = True
        self.num_deaths = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, deadline_s: float) -> SGLangClient:
        if not self.restarts:
            raise WorkerDied(f"the server {self.name} must start, got that it cannot")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.faults", "--stub", stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        port = int(await self._process.stdout.readline())
        return SGLangClient(f"http://127.0.0.1:{port}")

    async def gone(self) -> str:
        assert self._process is not None
        await self._process.wait()
        self.num_deaths += 1
        return "it ended"

    def send(self, number: int) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def close(self) -> None:
        if self._process is not None:
            self.send(signal.SIGKILL)
            await self._process.wait()


class Number:
    """`ServerWeights` of weights that are a number."""

    proof, asleep = None, False

    def __init__(self, client: SGLangClient) -> None:
        self._client = client

    async def open(self) -> None: ...
    async def release(self) -> None: ...
    async def close(self) -> None: ...

    async def update(self, version: int, tensors: Mapping[str, Any]) -> None:
        await self._client.post("/update_weight_version", {"new_version": str(version)}, deadline_s=600)


# ---- a fault ------------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    failed: int = 0
    given_up: int = 0
    died_with: int = 0
    deaths: int = 0
    routable: int = 0
    update_s: float = 0.0
    error: str = ""


@dataclass
class World:
    """Eight servers, their dispatcher, and the callers."""

    servers: list[StubServer] = field(default_factory=lambda: [StubServer(f"s{i}") for i in range(NUM_SERVERS)])
    version: int = 1
    asked: int = 0
    failed: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def newest(self) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        yield self.version, {}

    @contextlib.asynccontextmanager
    async def dispatched(self) -> AsyncIterator[Dispatcher]:
        async def connect(client: SGLangClient) -> SGLangEngine:
            found = {name: getattr(STUB, name) for name in STUB.__dataclass_fields__}
            capabilities = type(STUB)(**found | {"tells_new_tokens": True})
            return SGLangEngine(
                client, weights=cast(ServerWeights, Number(client)), pause="in_place", capabilities=capabilities
            )

        async def tell(kind: str, data: Mapping[str, Any]) -> None:
            return

        self.engines = [
            KeptEngine(cast(Server, s), connect, newest=self.newest, deadline_s=60.0, silent_s=300.0, tell=tell)
            for s in self.servers
        ]
        async with kept(self.engines):
            dispatcher = one_engine(self.engines, newest=self.newest)
            try:
                await dispatcher.update_weights(self.version, {})
                yield dispatcher
            finally:
                await dispatcher.close()

    async def call(self, dispatcher: Dispatcher) -> None:
        chance = np.random.default_rng(id(asyncio.current_task()))
        while not self.over.is_set():
            self.asked += 1
            name, prompt = f"r{self.asked}", chance.integers(100, 400, NUM_PROMPT).astype(np.int32)
            try:
                await dispatcher.generate(Request(name, prompt, SamplingParams(NUM_NEW), seed=1))
            except RondoError:
                self.failed += 1

    async def order(self, index: int, **orders: Any) -> int:
        """What a server is to do; how many generations it was told to give up so far. -1 of one that is not there."""
        engine = self.engines[index].engine
        if engine is None:
            return -1
        try:
            told = await engine.client.post("/stub", {"orders": orders} if orders else {}, deadline_s=1.0)
        except (RondoError, PeerGone):
            return -1
        return int(told["num_given_up"])


Fault = Callable[[World, Dispatcher], Coroutine[Any, Any, None]]


async def poisoned(world: World, dispatcher: Dispatcher, **orders: Any) -> None:
    for index in range(NUM_SERVERS):
        await world.order(index, **orders)
    with contextlib.suppress(RondoError):
        async with asyncio.timeout(30):
            await dispatcher.generate(Request("poison", np.arange(1, 9, dtype=np.int32), SamplingParams(8), seed=1))


async def unstartable(world: World, dispatcher: Dispatcher) -> None:
    world.servers[0].restarts = False
    world.servers[0].send(signal.SIGKILL)


def killed(number: int) -> Fault:
    async def fault(world: World, dispatcher: Dispatcher) -> None:
        world.servers[0].send(number)

    return fault


async def nothing(world: World, dispatcher: Dispatcher) -> None:
    return


FAULTS: dict[str, Fault] = {
    "none": nothing,
    "slow updates": nothing,
    "500": lambda world, dispatcher: poisoned(world, dispatcher, fails=True),
    "poison": lambda world, dispatcher: poisoned(world, dispatcher, dies=True),
    "full": lambda world, dispatcher: full(world),
    "dead": killed(signal.SIGKILL),
    "hung": killed(signal.SIGSTOP),
    "no restart": unstartable,
}


async def full(world: World) -> None:
    await world.order(0, full=True)


async def one(name: str, settle_s: float, slow_s: float) -> Row:
    world, row = World(), Row()
    try:
        async with world.dispatched() as dispatcher:
            if name == "slow updates":
                for index in range(NUM_SERVERS):
                    await world.order(index, update_s=slow_s)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(IN_FLIGHT):
                    tasks.create_task(world.call(dispatcher))
                await asyncio.sleep(1.0)
                lost = dispatcher.dispatch_stats().num_lost_attempts
                await FAULTS[name](world, dispatcher)
                await asyncio.sleep(0.0 if name == "slow updates" else settle_s)
                took: list[float] = []
                while len(took) < 3 and sum(took) < 10.0:
                    world.version += 1
                    began = time.perf_counter()
                    await dispatcher.update_weights(world.version, {})
                    took.append(time.perf_counter() - began)
                row.update_s = statistics.median(took)
                await asyncio.sleep(3.0)
                stats = dispatcher.dispatch_stats()
                row.routable = sum(engine.routable for engine in stats.engines)
                given_up = [await world.order(index) for index in range(NUM_SERVERS)]
                row.given_up = sum(max(0, told) for told in given_up)
                row.deaths = sum(server.num_deaths for server in world.servers)
                row.died_with = stats.num_lost_attempts - lost - row.given_up
                row.failed = world.failed
                world.over.set()
                for server in world.servers:
                    server.send(signal.SIGCONT)
    except Exception as error:  # noqa: BLE001 - that the replica ended is a finding, not the benchmark's end
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        row.error = f"the replica ended: {type(first).__name__}: {first}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--settle-s", type=float, default=12.0)
    parser.add_argument("--update-s", type=float, default=32.0, help="of the slow updates")
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub:
        asyncio.run(serve())
        return
    rows: dict[str, Row] = {}
    heads = ("failed", "given up", "died with", "deaths", "in use", "update s", "over none")
    print(f"{'fault':<14}" + "".join(f"{head:>11}" for head in heads))
    for name in dict.fromkeys(["none", *options.only]):
        row = rows[name] = asyncio.run(one(name, options.settle_s, options.update_s))
        numbers = (row.failed, row.given_up, row.died_with, row.deaths, row.routable)
        ratio = row.update_s / rows["none"].update_s
        print(f"{name:<14}" + "".join(f"{number:>11}" for number in numbers), end="")
        print(f"{row.update_s:>11.3f}{ratio:>11.2f}  {row.error[:160]}", flush=True)
    ours = [row for name, row in rows.items() if name != "slow updates"]
    report = {
        "benchmark": "faults", "in_flight": IN_FLIGHT, "servers": NUM_SERVERS,
        "rows": {name: vars(row) for name, row in rows.items()},
        "bars_met": {
            "nothing of others lost": not any(row.failed or row.given_up or row.error for row in rows.values()),
            "next update": all(row.update_s <= BAR * rows["none"].update_s for row in ours),
        },
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
