"""Weights from a trainer to an engine: shared memory against one memcpy, a flip's pause, a delta's bytes.

    rondo bench weights [--repetitions 5] [--gib 1]

"shared memory": this process publishes, another one verifies every bucket and has views of all tensors: from the first tensor
handed to the publisher to the other's word that it is done. Beside it, in the same repetition, one memcpy of as many bytes in
as many threads as the publisher has, from torch's memory into a segment of the same kind. The reader has as many threads too, and
works while the publisher does, so the rows are those where each has half of the cores, and where each has all of them.
A memcpy passes over the bytes twice (reads, writes); a publication reads, writes, and reads again to prove. So where both sides
share all cores, and no cache helps, it can be at most 2/3 of a memcpy that uses them all; where the reader has cores of its own,
all of it. "sum" and "read" are what one thread of a reader does: the proof's sum of bytes in no cache, and a plain look at them.

"flip": how long an engine in full decode stands still for new weights, in steps of the same engine. "delta": real AdamW steps
(fp32 master, published as bfloat16) of a small Qwen3 on a policy-gradient loss: what each version costs on a wire against its
whole bytes.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import numpy as np
import torch

from benchmarks.generation import SIZES, build, workload
from rondo.comm.weights.delta import apply, encode
from rondo.comm.weights.held import Held, Published, VersionId
from rondo.comm.weights.publication import publish
from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.comm.weights.sums import bucket_sum
from rondo.models.optimizer import make_optimizer
from rondo.models.published import own_weights
from rondo.roles.engines.embedded.embedded import slot_engine
from rondo.runtime.memory.segments import Segment

_BUCKET_BYTES = 16 << 20


class Memory(Segment):
    """A memfd whose pages are there, as the supervisor makes them."""

    def __init__(self, num_bytes: int = 0, fd: int | None = None) -> None:
        memory = os.memfd_create("weights") if fd is None else fd
        if fd is None:
            os.posix_fallocate(memory, 0, num_bytes)
        super().__init__("weights", os.fstat(memory).st_size, memory)
        self._map = mmap.mmap(self.fd, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def view(self, readonly: bool = False) -> memoryview:
        view = memoryview(self._map)
        return view.toreadonly() if readonly else view


# ---- shared memory --------------------------------------------------------------------------------------------------


def layers(num_bytes: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights of about `num_bytes`: an embedding, and layers of a large and a small tensor each."""
    width = 2048
    num_rows = num_bytes // dtype.itemsize // width
    sizes = [num_rows // 8, *[num_rows // 32] * 28]
    made = {}
    for index, rows in enumerate(sizes):
        made[f"model.layers.{index}.mlp.down_proj.weight"] = torch.randn(rows, width).mul_(0.02).to(dtype)
        made[f"model.layers.{index}.norm.weight"] = torch.ones(width, dtype=dtype)
    return made


def reader(segment_fd: int, num_slots: int, num_threads: int) -> None:
    """Verifies each version that it is told of, while it is written, and answers when it has the tensors."""
    slab = WeightSlab(Memory(fd=segment_fd), num_slots, readonly=True)
    for line in sys.stdin:
        slot, version = json.loads(line)
        ahead = slab.read_ahead(slot, attempt=0, version=version, patience_s=60.0, num_threads=num_threads)
        checksum = json.loads(sys.stdin.readline())
        tensors = slab.read(slot, attempt=0, version=version, checksum=checksum, num_threads=num_threads, ahead=ahead)
        print(len(tensors), flush=True)


def shared_memory(dtype: torch.dtype, num_bytes: int, repetitions: int, num_threads: int) -> dict[str, Any]:
    tensors = layers(num_bytes, dtype)
    total = sum(tensor.nbytes for tensor in tensors.values())
    memory = Memory(slab_bytes(total, len(tensors), 2))
    slab = WeightSlab(memory, 2)
    # The limit: the same bytes, out of torch's memory into a segment of the same kind.
    target, source = np.frombuffer(Memory(total).view(), np.uint8), torch.ones(total, dtype=torch.uint8).numpy()
    command = [sys.executable, "-m", "benchmarks.weights", "--reader", str(memory.fd), "2", str(num_threads)]
    child = subprocess.Popen(command, pass_fds=[memory.fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", "read", "sum", "copy", "proved")}
    pool = ThreadPoolExecutor(num_threads)
    parts = [slice(total * i // num_threads, total * (i + 1) // num_threads) for i in range(num_threads)]
    try:
        for version in range(repetitions + 1):
            limits = [
                _seconds(lambda: list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))),
                _seconds(lambda: source.view(np.uint64).max()),
                _seconds(lambda: bucket_sum(source)),
            ]

            def tell(what: Any, to: IO[bytes] = child.stdin) -> None:
                to.write(json.dumps(what).encode() + b"\n")
                to.flush()

            tell([version % 2, version])
            began = time.perf_counter()
            published = publish(
                slab, version % 2, attempt=0, version=version, tensors=tensors.items(), bucket_bytes=_BUCKET_BYTES,
                num_threads=num_threads,
            )  # fmt: skip
            trainer_s = time.perf_counter() - began
            tell(published.checksum)
            assert int(child.stdout.readline()) == len(tensors)
            if version:  # the first one warms up
                for name, seconds in zip(times, (*limits, trainer_s, time.perf_counter() - began), strict=True):
                    times[name].append(seconds)
    finally:
        child.stdin.close()
        child.wait()
        pool.shutdown()
    share = statistics.median(one / all_ for one, all_ in zip(times["memcpy"], times["proved"], strict=True))
    pause = statistics.median(one / own for one, own in zip(times["memcpy"], times["copy"], strict=True))
    rates = {f"{name}_gb_s": round(total / statistics.median(found) / 1e9, 2) for name, found in times.items()}
    return rates | {"of_memcpy": round(share, 3), "trainer_of_memcpy": round(pause, 3), "bytes": total}


# ---- the flip -------------------------------------------------------------------------------------------------------


def flip(size_name: str, flips: int) -> dict[str, Any]:
    """How long an engine in full decode stands still for new weights, against its decode step, both on one core."""
    size = SIZES[size_name]
    model = build(size, torch.bfloat16)
    engine = slot_engine(model, num_slots=size.num_slots, max_length=size.num_prompt[1] + size.num_new)
    weights = [{name: t.clone() for name, t in own_weights(model)} for _ in range(2)]
    for tensor in weights[1].values():
        tensor.mul_(1.001)
    steps: list[float] = []
    pauses: list[float] = []
    for request in workload(size, ragged=False):
        engine.add(request)
    for _ in range(8):  # prompts are in, the first steps have warmed up
        engine.step()
    for version in range(flips):
        for _ in range(3):
            steps.append(_seconds(engine.step))
        pauses.append(_seconds(lambda: engine.load_weights(version + 1, weights[version % 2])))  # noqa: B023
        if not engine.has_work:
            break
    step, pause = statistics.median(steps), statistics.median(pauses)
    num_bytes = sum(tensor.nbytes for tensor in weights[0].values())
    return {"step_ms": round(step * 1e3, 3), "pause_ms": round(pause * 1e3, 3), "pause_steps": round(pause / step, 3),
            "slots": size.num_slots, "bytes": num_bytes}  # fmt: skip


def _seconds(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


# ---- the delta ------------------------------------------------------------------------------------------------------


def delta(lr: float, num_steps: int) -> dict[str, Any]:
    """Share of a version's bytes, by step of AdamW at `lr`, applied to a copy that follows and is compared bit by bit."""
    size = SIZES["small"]
    model = build(size, torch.float32).train()
    optimizer = make_optimizer(model, lr=lr)
    slab: WeightSlab | None = None
    generator = torch.Generator().manual_seed(1)
    base: Published | None = None
    held: Held | None = None
    shares, encode_s, apply_s = [], [], []
    for version in range(num_steps + 1):
        tensors = dict(own_weights(model, "bfloat16"))
        if slab is None:
            total = sum(tensor.nbytes for tensor in tensors.values())
            slab = WeightSlab(Memory(slab_bytes(total, len(tensors), 2)), 2)
        writer = slab.write(version % 2, attempt=0, version=version)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        new = Published.in_slab(slab, version % 2, VersionId(0, version, writer.finish()))
        if base is None or held is None:
            held = Held(new.manifest.num_bytes)
            held.begin(new.id, new.manifest.raw)
            for index in range(new.manifest.num_buckets):
                held.bucket(index)[:] = new.bucket(index)
            held.prove()
        else:
            began = time.perf_counter()
            message = encode(base, new)
            encode_s.append(time.perf_counter() - began)
            if message is None:
                raise RuntimeError(f"a step at learning rate {lr:g} must leave something as it was, got none.")
            began = time.perf_counter()
            apply(held, message)
            apply_s.append(time.perf_counter() - began)
            if not np.array_equal(held.published().data, new.data):
                raise RuntimeError("a delta must make exactly the next version, got another.")
            shares.append(len(message) / new.manifest.num_bytes)
        base = new
        policy_step(model, optimizer, generator, size.vocab)
    rate = base.manifest.num_bytes / 1e9 if base is not None else 0.0
    return {
        "share": round(statistics.mean(shares), 4), "first_step": round(shares[0], 4), "last_step": round(shares[-1], 4),
        "encode_gb_s": round(rate / statistics.median(encode_s), 2), "apply_gb_s": round(rate / statistics.median(apply_s), 2),
    }  # fmt: skip


def policy_step(model: Any, optimizer: torch.optim.Optimizer, generator: torch.Generator, vocab: int) -> None:
    """One REINFORCE step on 8 random sequences of 64 tokens with normalised advantages, gradients clipped to norm 1."""
    tokens = torch.randint(1, vocab, (8, 64), generator=generator)
    advantages = torch.randn(8, 1, generator=generator)
    log_probs = model(tokens).logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    optimizer.zero_grad()
    (-(advantages * log_probs).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# ---- all ------------------------------------------------------------------------------------------------------------


def table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, row in rows.items():
        yield f"{name:22} " + "  ".join(f"{key} {value:,}" for key, value in row.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--gib", type=float, default=1.0, help="of weights over shared memory")
    parser.add_argument(
        "--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="of the publisher, and of the reader"
    )
    parser.add_argument("--steps", type=int, default=8, help="of training for the deltas")
    parser.add_argument("--reader", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.reader:
        reader(*arguments.reader)
        return
    num_bytes = int(arguments.gib * (1 << 30))
    result: dict[str, Any] = {"benchmark": "weights", "python": platform.python_version(), "cores": os.cpu_count()}
    rows = sorted({arguments.threads, os.cpu_count() or 2})
    print(f"shared memory: one version to one reader; publisher, reader and memcpy have {rows} threads each")
    shm: dict[str, dict[str, Any]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for threads in rows:
            name = f"{str(dtype).removeprefix('torch.')}, {threads} threads"
            shm[name] = shared_memory(dtype, num_bytes, arguments.repetitions, threads)
    print(*table(shm), sep="\n", flush=True)
    flips = {size: flip(size, 30) for size in SIZES}
    print("\nflip: pause of an engine in full decode", *table(flips), sep="\n", flush=True)
    deltas = {f"lr {lr:g}": delta(lr, arguments.steps) for lr in (1e-6, 1e-5, 1e-4)}
    print("\ndelta: share of a version's bytes", *table(deltas), sep="\n", flush=True)
    result |= {
        "shared_memory": shm, "flip": flips, "delta": deltas,
        "threads": arguments.threads,
        "shm_of_memcpy": min(row["of_memcpy"] for name, row in shm.items() if f" {arguments.threads} threads" in name),
        "shm_of_memcpy_all_cores": min(row["of_memcpy"] for name, row in shm.items() if f" {rows[-1]} threads" in name),
        "flip_pause_steps": flips["tiny"]["pause_steps"],
        "delta_bytes_share": deltas["lr 1e-06"]["share"],
    }  # fmt: skip
    print(json.dumps(result))


if __name__ == "__main__":
    main()
