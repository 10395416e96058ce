"""Servers in SGLang's dialect that can be killed: processes of their own, started in milliseconds, that write down what they did.

Owns the servers and their record. A token's value follows from its prompt and position, and its log-prob from the version it was
sampled under, so that whoever reads a completion can tell where each token came from and under what.

    with Nursery() as nursery, stubs(nursery, "a", "b", folder=tmp_path) as found:
        found["a"].url; found["a"].kill(); found["a"].start()       # SIGKILL, and again on the same port

A stub decodes one token every `step_s` for each of its requests; with `step_s` 0 it answers when it is told "release".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from rondo.runtime.processes.guard import die_with_parent

STEP_S = 0.002
VOCAB = 1000


def token_of(prompt_sum: int, position: int) -> int:
    """What is sampled at a position of the response."""
    return (prompt_sum * 31 + position * 7) % VOCAB


class _Running:
    def __init__(self) -> None:
        self.aborted = asyncio.Event()


class StubServer:
    """One server."""

    def __init__(self, name: str, record: str, step_s: float) -> None:
        self.name, self.step_s = name, step_s
        self.record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.version = "default"
        self.unpaused, self.released = asyncio.Event(), asyncio.Event()
        self.unpaused.set()
        self.running: dict[str, _Running] = {}
        self.faults: dict[str, Any] = {}

    def wrote(self, event: str, **more: Any) -> None:
        line = {"stub": self.name, "pid": os.getpid(), "at": time.monotonic(), "event": event, **more}
        os.write(self.record, orjson.dumps(line) + b"\n")

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        add = app.router
        add.add_post("/generate", self.generate)
        add.add_post("/abort_request", self.abort)
        add.add_post("/pause_generation", self.pause)
        add.add_post("/continue_generation", self.go_on)
        add.add_post("/update_weights_from_disk", self.update)
        add.add_post("/stub", self.told)
        for path in ("/ready", "/health", "/health_generate"):
            add.add_get(path, self.ready)
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            add.add_get(path, self.info)
        add.add_get("/v1/loads", self.loads)
        return app

    async def generate(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        rid, most = asked.get("rid") or f"own-{time.monotonic_ns()}", asked["sampling_params"]["max_new_tokens"]
        if rid in self.running:
            return web.json_response({"error": {"message": f"duplicate {rid}"}}, status=400)
        if self.faults.get("generate"):
            return web.json_response({"error": {"message": "told to fail"}}, status=self.faults["generate"])
        if (reason := self.faults.get("dies_of")) and rid.startswith(reason):
            os.kill(os.getpid(), signal.SIGKILL)
        mine = self.running[rid] = _Running()
        self.wrote("begin", rid=rid, keys=sorted(asked))
        versions: list[str] = []
        try:
            if self.step_s:
                for _ in range(most):
                    await self._gate(self.unpaused, mine)
                    if mine.aborted.is_set():
                        break
                    versions.append(self.version)
                    await asyncio.sleep(self.step_s)
            else:
                versions = [self.version] * self.faults.get("partial", 0)
                await self._gate(self.released, mine)
                if not mine.aborted.is_set():
                    await self._gate(self.unpaused, mine)
                    versions += [self.version] * (most - len(versions))
        finally:
            del self.running[rid]
            self.wrote("end", rid=rid, tokens=len(versions))
        aborted = len(versions) < most
        finish = {"type": "abort", "message": "aborted"} if aborted else {"type": "length", "length": most}
        seed, before = _seed(asked)
        ids = [token_of(seed, before + i) for i in range(len(versions))]
        triples = [[-float(v) - 1.0 if v.isdigit() else 0.0, t, None] for v, t in zip(versions, ids, strict=True)]
        meta = {
            "id": rid, "finish_reason": finish, "prompt_tokens": len(asked["input_ids"]), "cached_tokens": 0,
            "completion_tokens": len(ids), "output_token_logprobs": triples, "weight_version": self.version,
            "weight_versions": _spans(versions),
        }  # fmt: skip
        if asked.get("return_routed_experts") and self.faults.get("experts"):
            meta["routed_experts"] = "AAAAAA=="
        return web.Response(
            body=orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta}), content_type="application/json"
        )

    async def _gate(self, event: asyncio.Event, mine: _Running) -> None:
        """Until the event, or the request is aborted."""
        if event.is_set():
            return
        waits = [asyncio.create_task(each.wait()) for each in (event, mine.aborted)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def abort(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        for rid, mine in self.running.items():
            if asked.get("abort_all") or rid == asked.get("rid"):
                mine.aborted.set()
        return web.Response()

    async def pause(self, request: web.Request) -> web.Response:
        self.unpaused.clear()
        self.wrote("pause")
        return web.json_response({"status": "ok"})

    async def go_on(self, request: web.Request) -> web.Response:
        self.wrote("continue")
        self.unpaused.set()
        return web.json_response({"status": "ok"})

    async def update(self, request: web.Request) -> web.Response:
        asked = orjson.loads(await request.read())
        if fault := self.faults.get("update"):
            if fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hang":
                await asyncio.Event().wait()
            return web.json_response({"success": False, "message": "told to fail"}, status=400)
        await asyncio.sleep(self.faults.get("update_s", 0.01))
        self.version = asked["weight_version"]
        self.wrote("update", version=self.version)
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def told(self, request: web.Request) -> web.Response:
        """Orders of the test: {"faults": {...}}, {"release": true}, {"hold": true}."""
        orders = orjson.loads(await request.read())
        self.faults |= orders.get("faults", {})
        if orders.get("release"):
            self.released.set()
        if orders.get("hold"):
            self.released.clear()
        return web.json_response({"running": sorted(self.running)})

    async def ready(self, request: web.Request) -> web.Response:
        ok = self.unpaused.is_set() and not self.faults.get("unready")
        return web.Response(status=200 if ok else 503)

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "stub", "served_model_name": "stub", "is_generation": True, "weight_version": self.version,
                "tokenizer_path": "stub", "version": "0.5.23", "max_running_requests": 64, "status": "ready", "tp_size": 1,
                "dp_size": 1, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
                "enable_return_routed_experts": bool(self.faults.get("experts")),
            }
        )  # fmt: skip

    async def loads(self, request: web.Request) -> web.Response:
        others = self.faults.get("others", 0)
        return web.json_response({"loads": [{"num_running_reqs": len(self.running) + others, "num_waiting_reqs": 0}]})


def _seed(asked: dict[str, Any]) -> tuple[int, int]:
    """What the tokens follow from, and how many of them are there already: the first input id says the prompt's length."""
    ids = asked["input_ids"]
    return sum(ids[: ids[0]]), len(ids) - ids[0]


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for at, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": at, "end": at})
        spans[-1]["end"] = at + 1
    return spans


async def serve(name: str, port: int, record: str, step_s: float, ready_fd: int) -> None:
    server = StubServer(name, record, step_s)
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True, reuse_port=True, backlog=1024)
    await site.start()
    assert site._server is not None
    bound = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    server.wrote("up")
    os.write(ready_fd, f"{os.getpid()} {bound}\n".encode())
    os.close(ready_fd)
    await asyncio.Event().wait()


def nursery() -> None:
    """Forks a server for every line on standard input ("name port record step_s"), and reaps; ends with its input."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    nursed, ready = os.getpid(), os.dup(1)
    kept: dict[
        str, socket.socket
    ] = {}  # bound and not listening: nobody else gets the port of a server that was killed
    for line in sys.stdin:
        name, port, record, step_s = line.split()
        if port == "0":
            free = socket.socket()
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
            kept[port] = free
        if os.fork() == 0:
            die_with_parent(nursed)
            os.close(0)
            asyncio.run(serve(name, int(port), record, float(step_s), ready))
            os._exit(0)


class Nursery:
    """The process that the servers are forked from: it has imported what they need."""

    def __enter__(self) -> Nursery:
        call = "from tests.roles.engines.dispatch.stub import nursery; nursery()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", call], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[4]
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # its servers die with it
        self._process.communicate()

    def start(self, *words: object) -> tuple[int, int]:
        """(pid, port) of a new server."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self._process.stdin.flush()
        pid, port = map(int, self._process.stdout.readline().split())
        return pid, port


class Stub:
    """One server, seen from the test."""

    def __init__(self, nursery: Nursery, name: str, record: Path, step_s: float) -> None:
        self._nursery, self._record, self._step_s = nursery, record, step_s
        self.name = name
        self.pid = self.port = 0
        self.stopped = False
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Or start again, on the same port."""
        self.pid, self.port = self._nursery.start(self.name, self.port, self._record, self._step_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.stopped = number == signal.SIGSTOP
        os.kill(self.pid, number)


@contextlib.contextmanager
def stubs(nursery: Nursery, *names: str, folder: Path, step_s: float = STEP_S) -> Iterator[dict[str, Stub]]:
    """Servers of these names; all of them end with the block."""
    found: dict[str, Stub] = {}
    try:
        for name in names:
            found[name] = Stub(nursery, name, folder / "record.jsonl", step_s)
        yield found
    finally:
        for stub in found.values():
            with contextlib.suppress(ProcessLookupError):
                stub.kill()


def record_of(folder: Path) -> list[dict[str, Any]]:
    """What the servers wrote down, by time."""
    lines = (folder / "record.jsonl").read_bytes().splitlines()
    return sorted(map(orjson.loads, lines), key=lambda line: line["at"])
