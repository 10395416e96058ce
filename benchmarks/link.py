"""A link over loopback beside iperf3 with as many streams: GB/s of records that are visible on the other side.

    python benchmarks/link.py [--repetitions 5] [--seconds 1.0] [--streams 4] [--checksum fold]

A child process holds the mirror and lets go of every record as it becomes visible. Records of 6.9 MB or 28 kB fill the ring,
then cross; only the crossing is timed, from the wake-up to the last release reported, CPU is that of both processes without
the puts. iperf3 (a Debian package) runs for the same time between the repetitions,
client and server on the same loopback. Cells are medians (min to max), the share is the median of the ratio within one
repetition. The last line is one JSON object; `tcp_of_iperf3` is the smaller share, null without iperf3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import uvloop

from rondo.comm.links.config import LinkConfig
from rondo.comm.links.mirror import Mirror
from rondo.comm.links.receiver import LinkReceiver
from rondo.comm.links.sender import LinkSender
from rondo.comm.ring.records import Column
from rondo.comm.ring.ring import RingTail, RingWriter, ring_bytes
from rondo.comm.ring.words import drain, new_doorbell
from rondo.runtime.memory.segments import Segment

RING, TOKEN = "ring/benchmark", "benchmark"
SIZES = {"6.9 MB": 6_900_000, "28 kB": 28_000}


def memory(num_bytes: int) -> Segment:
    fd = os.memfd_create("benchmark", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, num_bytes)
    segment = Segment(RING, num_bytes, fd)
    np.frombuffer(segment.view(), np.uint8)[::4096] = 0
    return segment


async def receive(ring_size: int) -> None:
    """The other node: writes the mirror, and lets go of every record as it sees it."""
    segment, doorbell = memory(ring_size), new_doorbell()
    receiver = LinkReceiver("there", TOKEN, lambda ring, capacity: Mirror(segment, doorbell, ring))
    await receiver.start()
    tail: RingTail | None = None

    def rung() -> None:
        nonlocal tail
        drain(doorbell)
        tail = tail or RingTail(segment, RING)
        receiver.release(RING, tail.head)

    asyncio.get_running_loop().add_reader(doorbell, rung)
    print(receiver.address, flush=True)
    await asyncio.Event().wait()


async def link(row_bytes: int, ring_size: int, config: LinkConfig, seconds: float) -> tuple[float, float]:
    """GB/s and CPU seconds a GB, of both processes, without the puts."""
    command = [sys.executable, __file__, "--receive", str(ring_size)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220  # before anything runs
    assert child.stdout is not None
    address = child.stdout.readline().strip()
    segment = memory(ring_size)
    writer, tail = RingWriter(segment, None, RING), RingTail(segment, RING)
    columns = [Column("x", "uint8", [np.ones(row_bytes, np.uint8)])]
    task: asyncio.Task[None] | None = None
    try:
        sender = LinkSender(segment, RING, address, token=TOKEN, node="there", attempt=0, config=config)
        limit = writer.capacity - 4 * row_bytes
        loop_s = 0.0

        def fill() -> None:
            nonlocal loop_s
            started = time.process_time()
            tail.cursor = writer.head
            tail.release(sender.released)
            while writer.head - writer.tail < limit:
                writer.put([(0, 0, 0, 1)], columns, epoch=0, attempt=0)
            loop_s += time.process_time() - started

        fill()
        task = asyncio.create_task(sender.run())
        rates: list[float] = []
        sender.wake()
        await sender.released_upto(writer.head, deadline_s=60.0)  # the first lap maps every page, and is not counted
        fill()
        used, loop_s = cpu(child.pid), 0.0
        num_bytes, link_s, until = 0, 0.0, time.perf_counter() + seconds
        while not rates or time.perf_counter() < until:
            started, before = time.perf_counter(), sender.released
            sender.wake()
            await sender.released_upto(writer.head, deadline_s=60.0)
            link_s += time.perf_counter() - started
            num_bytes += sender.released - before
            rates.append(num_bytes / link_s / 1e9)
            fill()
        return rates[-1], (cpu(child.pid) - used - loop_s) / num_bytes * 1e9
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        child.kill()
        child.communicate()


def cpu(pid: int) -> float:
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()  # noqa: PTH123, SIM115  # one short read
    return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def iperf(num_streams: int, seconds: float) -> tuple[float, float] | None:
    """GB/s that arrive and CPU seconds a GB of client and server, or None without iperf3."""
    if shutil.which("iperf3") is None:
        return None
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        ["iperf3", "-s", "-1", "-p", port, "--forceflush"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert server.stdout is not None
    try:
        while "listening" not in server.stdout.readline():
            pass
        command = [
            "iperf3",
            "-c",
            "127.0.0.1",
            "-p",
            port,
            "-P",
            str(num_streams),
            "-t",
            str(max(1, round(seconds))),
            "-J",
        ]
        done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    finally:
        server.kill()
        server.communicate()
    end = done["end"]
    busy = (end["cpu_utilization_percent"]["host_total"] + end["cpu_utilization_percent"]["remote_total"]) / 100
    rate = end["sum_received"]["bits_per_second"] / 8e9
    return rate, busy / rate


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def compare(config: LinkConfig, ring_size: int, repetitions: int, seconds: float) -> dict[str, Any]:
    """Both beside each other; prints the table. `tcp_of_iperf3`: the smaller share, None without iperf3."""
    rates: dict[str, list[float]] = {name: [] for name in ("iperf3", *SIZES)}
    used: dict[str, list[float]] = {name: [] for name in ("iperf3", *SIZES)}
    for _ in range(repetitions):
        if (found := iperf(config.num_streams, seconds)) is not None:
            rates["iperf3"].append(found[0])
            used["iperf3"].append(found[1])
        for name, row_bytes in SIZES.items():
            rate, cpu_s = uvloop.run(link(row_bytes, ring_size, config, seconds))
            rates[name].append(rate)
            used[name].append(cpu_s)
    result: dict[str, Any] = {
        "streams": config.num_streams, "checksum": config.checksum, "tcp_of_iperf3": None,
    }  # fmt: skip
    print(f"{config.num_streams} streams over loopback, checksum {config.checksum}")
    print(f"{'':10} {'GB/s':>24} {'CPU s/GB':>24} {'of iperf3':>10}")
    shares = []
    for name, values in rates.items():
        if not values:
            continue
        cost = spread(used[name])
        result[name] = {
            "gb_per_s": round(statistics.median(values), 3),
            "cpu_s_per_gb": round(statistics.median(used[name]), 3),
        }
        share = ""
        if name in SIZES and rates["iperf3"]:
            shares.append(statistics.median(a / b for a, b in zip(values, rates["iperf3"], strict=True)))
            result[name]["of_iperf3"] = round(shares[-1], 3)
            share = f"{shares[-1]:.0%}"
        print(f"{name:10} {spread(values):>24} {cost:>24} {share:>10}", flush=True)
    if shares:
        result["tcp_of_iperf3"] = round(min(shares), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--checksum", default=LinkConfig().checksum)
    parser.add_argument("--chunk-kib", type=int, default=LinkConfig().chunk_bytes >> 10)
    parser.add_argument("--ring-mib", type=int, default=256)
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive:
        uvloop.run(receive(arguments.receive))
    config = LinkConfig(
        num_streams=arguments.streams, checksum=arguments.checksum, chunk_bytes=arguments.chunk_kib << 10
    )
    found = compare(config, ring_bytes(arguments.ring_mib << 20), arguments.repetitions, arguments.seconds)
    print(json.dumps({"benchmark": "link", "python": platform.python_version(), "machine": platform.machine()} | found))


if __name__ == "__main__":
    main()
