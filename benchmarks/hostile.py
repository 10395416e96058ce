"""What strangers do to a live run: malformed requests and frames, a crowd at its endpoint, and callers that never end.

    rondo bench hostile [--malformed 10000] [--clients 1000] [--slow 200] [--seconds 15]

The quick start, made small and endless, in phases: `quiet` for so many seconds; `malformed`, nine of ten of them at the endpoint
(no HTTP, heads too long, bodies too large, torn and wrong, tokens that are none), the rest at the sockets of its processes (no
hello, a wrong token, frames without end), 32 at a time; `crowd`, clients at once, half of which hold the stream of events and
half of which ask one thing after another, a new connection each; `slow`, connections that send one byte a second and never end
their head; and `after`.

Told of each: how it was answered, how many a second; how long a caller on a connection of his own, who asks for /livez every
20 ms, waited for the leader's loop at most; memory and descriptors of the leader; the median step and how many there were. At the
end the run is stopped and must have lost no sample. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import resource
import statistics
import struct
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.chaos_run import PATIENCE_S, ChaosRun
from rondo.launch.report.records import step_records
from rondo.launch.report.status import ask
from rondo.launch.rundir import SupervisorRecord, supervisor_record

SMALL = (
    "num_steps=1000000", "sft=null", "evaluation=null", "data.held_out=0", "rollout.prompts_per_step=8",
    "rollout.num_slots=64", "train.save_every=500", "train.keep_checkpoints=1",
)  # fmt: skip
IN_FLIGHT = 32
PROBE_S = 0.02
ANSWER_S = 5.0
HEAD = b"%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\n"


def malformed_requests(token: bytes) -> list[bytes]:
    """What is no request, too large, or not allowed."""
    good = b"Authorization: Bearer " + token + b"\r\n"
    deep = b"[" * 100_000
    return [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
        b"\0" * 500 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /roles HTTP/9.9\r\n\r\n",
        b"GET /roles HTTP/1.1\r\nno colon\r\n\r\n",
        HEAD % (b"GET /" + b"x" * 20_000, b""),
        HEAD % (b"GET /roles", b"X: " + b"y" * 20_000 + b"\r\n"),
        HEAD % (b"GET /roles", b"".join(b"X%d: y\r\n" % n for n in range(500))),
        HEAD % (b"GET /roles", b"Content-Length: -1\r\n"),
        HEAD % (b"GET /roles", b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n"),
        HEAD % (b"GET /%2e%2e/%2e%2e/etc/passwd", b""),
        HEAD % (b"GET /none", b""),
        HEAD % (b"BREW /roles", b""),
        HEAD % (b"GET /roles?x=1", b""),
        HEAD % (b"GET /timeline?steps=x", b""),
        (HEAD % (b"GET /roles", b"")).replace(b"localhost", b"evil.example"),
        HEAD % (b"GET /samples", b"Authorization: Bearer wrong\r\n"),
        HEAD % (b"POST /stop", b"Content-Length: 2\r\n") + b"{}",
        HEAD % (b"POST /stop", good + b"Content-Length: 99999999\r\n"),
        HEAD % (b"POST /stop", good + b"Content-Length: 1\r\n") + b"{",
        HEAD % (b"POST /stop", good + b"Content-Length: 9\r\n") + b'{"no": 1}',
        HEAD % (b"POST /stop", good + b"Content-Length: %d\r\n" % len(deep)) + deep,
        HEAD % (b"POST /stop", good + b"Transfer-Encoding: chunked\r\n") + b"zz\r\n",
        HEAD % (b"POST /stop", good + b"Content-Length: 4\r\nContent-Encoding: gzip\r\n") + b"junk",
    ]


def malformed_frames(token: bytes) -> list[bytes]:
    """What is no hello, or behind one no frame."""
    from rondo.runtime.actors.transport import pack_hello

    hello, wrong = (pack_hello(text, "stranger", 1, 1 << 20) for text in (token.decode(), "wrong"))
    frame = struct.Struct("<HBxIIQ").pack
    return [
        b"\0" * 112, b"GET / HTTP/1.1\r\n\r\n", wrong, hello + b"\xff" * 64, hello + frame(0xF2D0, 1, 1 << 31, 1 << 31, 1),
        hello + frame(0xF2D0, 1, 1, 2, 1) + struct.pack("<Q", 1 << 62), hello + frame(0xF2D0, 200, 0, 2, 1) + b"{}",
        hello + frame(0xF2D0, 1, 0, 2, 1) + b"[[", hello + frame(0xF2D0, 1, 0, 60_000, 1) + b"[" * 60_000,
    ]  # fmt: skip


async def told(connect: Callable[[], Any], data: bytes) -> str:
    """The status, or what else became of the bytes."""
    try:
        reader, writer = await asyncio.wait_for(connect(), ANSWER_S)
    except OSError as error:
        return type(error).__name__
    try:
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(65536), ANSWER_S)
    except OSError as error:
        return type(error).__name__
    except TimeoutError:
        return "no answer"
    finally:
        writer.close()
    if not answer:
        return "hung up on"
    return answer[9:12].decode(errors="replace") if answer.startswith(b"HTTP/1.") else "refused"


class Leader:
    """The run's leader, as who stands outside sees it."""

    def __init__(self, run: Path, record: SupervisorRecord) -> None:
        self.run, self.record, self.url = run, record, f"http://127.0.0.1:{record.admin_port}"
        self.token = Path(record.token_path).read_text().strip()
        self.waits: list[float] = []

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.record.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_fds(self) -> int:
        return len(list(Path(f"/proc/{self.record.pid}/fd").iterdir()))

    def sockets(self) -> list[str]:
        return sorted(str(path) for path in Path(self.record.rt_dir).glob("*.sock"))

    async def probe(self) -> None:
        """On one connection, which is there before the crowd."""
        async with aiohttp.ClientSession() as session:
            while True:
                began = time.perf_counter()
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/livez") as answer:
                        await answer.read()
                self.waits.append(time.perf_counter() - began)
                await asyncio.sleep(PROBE_S)

    @contextlib.asynccontextmanager
    async def phase(self, name: str, result: dict[str, Any]) -> AsyncIterator[Counter[str]]:
        answered: Counter[str] = Counter()
        rss, fds, began, at = self.rss_bytes(), self.num_fds(), time.perf_counter(), time.time()
        self.waits.clear()
        yield answered
        seconds = time.perf_counter() - began
        steps = [record["time"] for record in step_records(self.run / "metrics.jsonl") if record["time"] >= at]
        step_s = [after - before for before, after in itertools.pairwise(steps)]
        result[name] = {
            "seconds": round(seconds, 1), "answered": dict(answered.most_common()), "a_second": round(answered.total() / seconds),
            "probe_p50_ms": round(statistics.median(self.waits) * 1e3, 1), "probe_worst_ms": round(max(self.waits) * 1e3, 1),
            "rss_mb": [rss >> 20, self.rss_bytes() >> 20], "fds": [fds, self.num_fds()],
            "steps": len(steps), "step_s": round(statistics.median(step_s), 3) if step_s else None,
        }  # fmt: skip
        print(name, result[name], flush=True)

    async def malformed(self, count: int, answered: Counter[str]) -> None:
        random.seed(0)
        port, token = self.record.admin_port, self.token.encode()
        requests, frames, sockets = malformed_requests(token), malformed_frames(token), self.sockets()
        left = list(range(count))

        async def work() -> None:
            while left:
                number = left.pop()
                if number % 10:
                    data = requests[number % len(requests)]
                    answered[await told(lambda: asyncio.open_connection("127.0.0.1", port), data)] += 1
                else:
                    path, data = random.choice(sockets), frames[number // 10 % len(frames)]
                    answered["frame: " + await told(functools.partial(asyncio.open_unix_connection, path), data)] += 1

        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))

    async def crowd(self, count: int, seconds: float, answered: Counter[str]) -> None:
        end = time.perf_counter() + seconds
        paths = ("/roles", "/metrics", "/healthz", "/bus", "/timeline?steps=0:1")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=30)

        async def listen(session: aiohttp.ClientSession) -> None:
            async with session.get(f"{self.url}/events") as answer:
                answered[f"events: {answer.status}"] += 1
                while answer.status == 200 and (left := end - time.perf_counter()) > 0:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(answer.content.readline(), left)

        async def get(session: aiohttp.ClientSession, number: int) -> None:
            while time.perf_counter() < end:
                async with session.get(self.url + paths[number % len(paths)]) as answer:
                    await answer.read()
                    answered[str(answer.status)] += 1
                if answer.status == 503:
                    await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))

        async def client(session: aiohttp.ClientSession, number: int) -> None:
            while time.perf_counter() < end:
                try:
                    await (listen(session) if number % 2 else get(session, number))
                except (aiohttp.ClientError, TimeoutError) as error:
                    answered[type(error).__name__] += 1
                await asyncio.sleep(1.0)

        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(client(session, number) for number in range(count)))

    async def slow(self, count: int, answered: Counter[str]) -> None:
        async def one() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.record.admin_port)
            writer.write(b"GET /roles HTTP/1.1\r\nX: ")
            began, ended = time.perf_counter(), asyncio.ensure_future(reader.read())
            while not ended.done() and time.perf_counter() - began < 60:
                with contextlib.suppress(ConnectionError):
                    writer.write(b"y")
                await asyncio.wait([ended], timeout=1.0)
            answered["hung up on" if ended.done() else "held"] += 1
            ended.cancel()
            writer.close()

        await asyncio.gather(*(one() for _ in range(count)))


async def measure(leader: Leader, options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    probing = asyncio.create_task(leader.probe())
    await asyncio.sleep(1.0)
    async with leader.phase("quiet", result):
        await asyncio.sleep(options.seconds)
    async with leader.phase("malformed", result) as answered:
        await leader.malformed(options.malformed, answered)
    async with leader.phase("crowd", result) as answered:
        await leader.crowd(options.clients, options.seconds, answered)
    async with leader.phase("slow", result) as answered:
        await leader.slow(options.slow, answered)
    await asyncio.sleep(2.0)
    async with leader.phase("after", result):
        await asyncio.sleep(options.seconds)
    probing.cancel()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("malformed", 10_000), ("clients", 1000), ("slow", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tempfile.TemporaryDirectory(prefix="rondo-hostile-") as folder:
        with ChaosRun(Path(folder), SMALL) as run:  # with the limits of whoever starts it
            run.steps(3)
            record = supervisor_record(run.run_dir)
            assert record is not None
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))
            result = asyncio.run(measure(Leader(run.run_dir, record), options))
            ask(record, "/stop", {"reason": "measured"})
            code = run.wait(PATIENCE_S)
            summary = json.loads((run.run_dir / "summary.json").read_bytes())
            events = (run.run_dir / "events.jsonl").read_text().splitlines()
        result["run"] = {"exit_code": code} | {
            name: summary[name] for name in ("samples_lost", "samples_trained_twice", "restarts", "steps")
        }
        result["run"]["lines_written_down"] = sum('"kind":"asked"' in line for line in events)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
