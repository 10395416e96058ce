"""The ring beside one bulk memcpy: rows a second, CPU a row, and the latency of one row between two processes.

    rondo bench ring [--repetitions 5] [--seconds 0.5] [--ring-mib 256]

"memcpy" copies a batch that already lies in one piece into the same warm shared memory and does nothing else: it is the
bound, not a rival. "put" is `RingWriter.put` of the same rows from separate arrays; "put + read" adds the coordinator's
poll, a reader's view of every row of every column and the release, in one process; "two processes" is a producer and a
consumer that wait for each other by doorbell. Repetitions are interleaved; cells are the median (min to max), shares
the median over repetitions of the ratio within one. CPU counts all processes. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rondo.comm.ring.records import Column, plan
from rondo.comm.ring.ring import CONTROL_BYTES, RingTail, RingView, RingWriter, ring_bytes
from rondo.comm.ring.words import Words, drain, new_doorbell, ring_doorbell
from rondo.runtime.memory.segments import Segment

NAME = "ring/benchmark"


@dataclass(frozen=True, slots=True)
class Batch:
    """What one put carries."""

    name: str
    columns: list[Column]

    @property
    def num_rows(self) -> int:
        return len(self.columns[0].arrays)

    @property
    def spans(self) -> list[tuple[int, int, int, int]]:
        return [(0, 0, 0, self.num_rows)]

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for column in self.columns for array in column.arrays)


def text(num_rows: int = 64) -> Batch:
    """Tokens, log-probs and versions of 256 to 4,096 tokens: about 28 kB a row with three columns."""
    lengths = np.random.default_rng(0).integers(256, 4097, num_rows)
    return Batch(f"text, {num_rows} rows", _per_token(lengths))


def multimodal(num_rows: int = 4) -> Batch:
    """The same and pixel values, float32 [about 1.5k, 1176]: about 6.9 MB a row."""
    random = np.random.default_rng(1)
    pixels = [np.ones((n, 1176), np.float32) for n in random.integers(1300, 1600, num_rows)]
    columns = _per_token(random.integers(256, 4097, num_rows))
    return Batch(f"multimodal, {num_rows} rows", [*columns, Column("pixel_values", "float32", pixels)])


def _per_token(lengths: np.ndarray) -> list[Column]:
    fields = (("tokens", "int32"), ("rollout_log_probs", "float32"), ("policy_versions", "int32"))
    return [Column(name, dtype, [np.ones(n, dtype) for n in lengths]) for name, dtype in fields]


def memory(num_bytes: int) -> Segment:
    fd = os.memfd_create("benchmark", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, num_bytes)
    segment = Segment(NAME, num_bytes, fd)
    np.frombuffer(segment.view(), np.uint8)[::4096] = 0
    return segment


# ---- one process ----------------------------------------------------------------------------------------------------


def memcpy(batch: Batch, segment: Segment) -> Callable[[], None]:
    source = np.concatenate([array.reshape(-1).view(np.uint8) for column in batch.columns for array in column.arrays])
    target = np.frombuffer(segment.view(), np.uint8)[CONTROL_BYTES:]
    step = plan(batch.spans, batch.columns).num_bytes
    at = 0

    def once() -> None:
        nonlocal at
        if at + step > len(target):
            at = 0
        target[at : at + len(source)] = source
        at += step

    return once


def put(batch: Batch, segment: Segment, *, read: bool) -> Callable[[], None]:
    writer = RingWriter(segment, new_doorbell(), NAME)
    tail, view = RingTail(segment, NAME), RingView(segment, NAME)
    names = [column.name for column in batch.columns]
    spans = batch.spans

    def put_once() -> None:
        ref = writer.put(spans, batch.columns, epoch=0, attempt=0)
        tail.cursor = ref.pos + ref.num_bytes
        tail.release(tail.cursor)

    def put_and_read() -> None:
        writer.put(spans, batch.columns, epoch=0, attempt=0)
        _consume(tail, view, names)

    return put_and_read if read else put_once


def _consume(tail: RingTail, view: RingView, names: list[str]) -> int:
    """See, read and release what is there; the number of rows."""
    num_rows = 0
    for ref, descriptor in tail.poll():
        record = view.read(ref.pos, ref.seq)
        for name in names:
            record.arrays(name)
        assert record.valid()
        num_rows += descriptor.spans[0][3]
        tail.release(ref.pos + ref.num_bytes)
    return num_rows


# ---- two processes --------------------------------------------------------------------------------------------------


class Consumer:
    """A child process at the other end of a ring. It rings `back` after every release; `stop` ends it."""

    def __init__(self, ring_size: int) -> None:
        self.segment = memory(ring_size)
        self.shared = memory(4096)
        self.there, self.back = new_doorbell(), new_doorbell()
        self.writer = RingWriter(self.segment, self.there, NAME)
        self.stamp = Words(self.shared.view(), 0, 2)  # when the last record was readable, ns; how many rows were read
        fds = (self.segment.fd, self.shared.fd, self.there, self.back)
        command = [sys.executable, __file__, "--consumer", *map(str, fds)]
        self.process = subprocess.Popen(command, pass_fds=fds)
        self._poller = select.poll()
        self._poller.register(self.back, select.POLLIN)
        self.wait(lambda: self.stamp.load(0) > 0)

    def wait(self, until: Callable[[], bool]) -> None:
        while not until():
            if not self._poller.poll(30_000):
                raise TimeoutError("the consumer must answer within 30 s, got nothing.")
            drain(self.back)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        os.close(self.there)
        os.close(self.back)

    def send(self, batch: Batch) -> Callable[[], None]:
        spans, limit = batch.spans, self.writer.capacity - 2 * plan(batch.spans, batch.columns).num_bytes

        def once() -> None:
            self.wait(lambda: self.writer.head - self.writer.tail <= limit)
            self.writer.put(spans, batch.columns, epoch=0, attempt=0)

        return once

    def drained(self) -> None:
        self.wait(lambda: self.writer.head == self.writer.tail)

    def latencies_us(self, count: int) -> Iterator[float]:
        """From before the put of one 3 kB row to its values under the consumer's hand."""
        column = Column("tokens", "int32", [np.ones(750, np.int32)])
        for _ in range(count):
            self.drained()
            started = time.monotonic_ns()
            self.writer.put([(0, 0, 0, 1)], [column], epoch=0, attempt=0)
            self.drained()
            yield (self.stamp.load(0) - started) / 1e3


def consume(segment_fd: int, shared_fd: int, there: int, back: int) -> None:
    segment = Segment(NAME, os.fstat(segment_fd).st_size, segment_fd)
    stamp = Words(Segment("shared", 4096, shared_fd).view(), 0, 2)
    tail, view = RingTail(segment, NAME), RingView(segment, NAME)
    np.frombuffer(segment.view(readonly=True), np.uint8)[::4096].sum()  # map every page once
    poller = select.poll()
    poller.register(there, select.POLLIN)
    stamp.store(0, 1)
    ring_doorbell(back)
    while True:
        poller.poll()
        drain(there)
        for ref, descriptor in tail.poll():
            record = view.read(ref.pos, ref.seq)
            for column in descriptor.columns:
                record.arrays(column.name)[-1][-1:].sum()
            stamp.store(0, time.monotonic_ns())
            assert record.valid()
            tail.release(ref.pos + ref.num_bytes)
            ring_doorbell(back)


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    rows_per_s: float
    cpu_us_per_row: float


def cpu_s(pids: list[int]) -> float:
    """User and system seconds of these processes so far."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # noqa: PTH123
            fields = file.read().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(
    once: Callable[[], None], num_rows: int, seconds: float, pids: list[int], end: Callable[[], None] | None = None
) -> Sample:
    once()
    if end:
        end()
    count, used = 0, cpu_s(pids)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        once()
        count += 1
    if end:
        end()
    took, used = time.perf_counter() - started, cpu_s(pids) - used
    return Sample(count * num_rows / took, used / (count * num_rows) * 1e6)


def run(batch: Batch, repetitions: int, seconds: float, ring_size: int) -> dict[str, list[Sample]]:
    me = os.getpid()
    num_rows = batch.num_rows
    one = {
        "memcpy": memcpy(batch, memory(ring_size)),
        "put": put(batch, memory(ring_size), read=False),
        "put + read": put(batch, memory(ring_size), read=True),
    }
    consumer = Consumer(ring_size)
    samples: dict[str, list[Sample]] = {name: [] for name in [*one, "two processes"]}
    try:
        for _ in range(repetitions):
            for name, once in one.items():
                samples[name].append(measure(once, num_rows, seconds, [me]))
            both = [me, consumer.process.pid]
            send = consumer.send(batch)
            samples["two processes"].append(measure(send, num_rows, seconds, both, consumer.drained))
    finally:
        consumer.stop()
    return samples


def latency(count: int) -> dict[str, float]:
    consumer = Consumer(ring_bytes(1 << 24))
    try:
        list(consumer.latencies_us(200))
        values = np.array(list(consumer.latencies_us(count)))
    finally:
        consumer.stop()
    return {f"p{q}_us": round(float(np.percentile(values, q)), 1) for q in (50, 99)}


def spread(values: list[float], digits: int = 0) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one measurement")
    parser.add_argument("--ring-mib", type=int, default=256)
    parser.add_argument("--consumer", type=int, nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.consumer:
        consume(*arguments.consumer)
    result: dict[str, Any] = {"benchmark": "ring", "python": platform.python_version(), "machine": platform.machine()}
    for batch in (text(1), text(), multimodal()):
        samples = run(batch, arguments.repetitions, arguments.seconds, ring_bytes(arguments.ring_mib << 20))
        num_rows = batch.num_rows
        row_bytes = batch.num_bytes / num_rows
        print(f"\n{batch.name} a put, {row_bytes / 1e3:,.1f} kB a row")
        print(f"{'':14} {'rows/s':>34} {'GB/s':>7} {'CPU us/row':>28} {'of memcpy':>10}")
        bound = samples["memcpy"]
        result[batch.name] = {"row_bytes": round(row_bytes)}
        for name, found in samples.items():
            rates, used = [s.rows_per_s for s in found], [s.cpu_us_per_row for s in found]
            share = statistics.median(s.rows_per_s / b.rows_per_s for s, b in zip(found, bound, strict=True))
            rate = statistics.median(rates)
            print(
                f"{name:14} {spread(rates):>34} {rate * row_bytes / 1e9:7.2f} {spread(used, 2):>28} {share:10.0%}",
                flush=True,
            )
            result[batch.name][name] = {
                "rows_per_s": round(rate),
                "cpu_us_per_row": round(statistics.median(used), 2),
                "of_memcpy": round(share, 3),
            }
    result["latency_3kB"] = latency(3000)
    print(f"\none 3 kB row, put to readable in another process: {result['latency_3kB']}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
