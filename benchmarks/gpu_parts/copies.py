"""Copies out of the trainer: hot snapshot and publication, in GB/s, alone and beside a step.

The part of a Qwen3-4B that every rank trains (few layers, so that two versions with their moments fit into a quarter of the free
memory) is copied as the actor does it after a step: the snapshot of weights and moments into the memory that outlives the
process, then the bfloat16 weights into the slab, on a thread of their own beside the next step's micro-batches. "hidden" is the
part of the copies' seconds that the step beside them did not grow by. "pinned" is the rate of a plain copy from the device into
page-locked memory, the most that there is to reach. The first rank measures; several copy at once.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu import Options
from benchmarks.gpu_parts import ranks
from benchmarks.gpu_parts.shapes import QWEN3_4B, TINY, Shape, write_model
from benchmarks.gpu_parts.training import timed
from rondo.comm.weights.publication import publish as publish_version
from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.comm.weights.snapshot import HotSnapshot, snapshot_bytes
from rondo.comm.weights.together import other_part
from rondo.roles.training.objective import open_policy
from rondo.runtime.memory.free import free_memory_bytes
from rondo.runtime.memory.segments import Segment

_VERSIONS = 2
_SNAPSHOT_BYTES = 12 * _VERSIONS
"""Of a parameter: weights and two moments in float32."""
_MOST_LAYERS = 12
_GROUPS = 2


def measure(options: Options, tell: Callable[[dict[str, Any]], None]) -> None:
    shape = TINY if options.tiny else largest(free_memory_bytes()[0])
    with tempfile.TemporaryDirectory(prefix="rondo-gpu-") as aside:
        folder = write_model(Path(aside) / "model", shape)
        found = ranks.run(work, options, folder, {"shape": asdict(shape), "tokens": 256 if options.tiny else 8192})
    for name in ("snapshot", "publication"):
        row = found[name]
        print(f"{name:12} {row['bytes'] / 1e9:6.2f} GB in {row['seconds']:.3f} s, {row['gb_s']:.2f} GB/s")
    print(f"a step of {found['step_s']:.3f} s hides {found['hidden']:.0%} of both")
    tell(found | {"parameters": shape.parameters, "ranks": max(1, options.num_devices)})


def largest(free_bytes: int) -> Shape:
    """So many layers that the snapshots take a quarter of what is free."""
    parameters = free_bytes / 4 / _SNAPSHOT_BYTES
    layers = int((parameters - QWEN3_4B.of(0).parameters) // QWEN3_4B.layer_parameters)
    return QWEN3_4B.of(max(1, min(_MOST_LAYERS, layers)))


def work(options: Options, device: str, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    shape, tokens = Shape(**settings["shape"]), settings["tokens"]
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    trainer = open_policy(ranks.job(folder, micro_batch_tokens=tokens), str(folder), world_size=size, device=device)
    answers = [tokens // 10] * 8
    rows = ranks.group(shape.vocab, tokens // 5, answers, np.random.default_rng(rank))

    def forwards() -> None:
        for number in range(_GROUPS):
            trainer.accumulate(0, rows, ranks.spans(number, len(rows)), last=number == _GROUPS - 1)

    forwards()
    trainer.finish(0)  # there are moments now
    tensors, _ = trainer.state()
    weights = trainer.shapes().values()
    sizes = {
        "snapshot": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        "publication": sum(tensor.nbytes for tensor in weights),
    }
    pinned = pinned_rate(device, sizes["snapshot"])
    with (
        memory("snapshot", snapshot_bytes(sizes["snapshot"], len(tensors))) as held,
        memory("slab", slab_bytes(sizes["publication"], len(weights), _VERSIONS), trainer.publishing) as shared,
    ):
        snapshot, slab = HotSnapshot(held), WeightSlab(shared, _VERSIONS)
        versions = itertools.count(1)

        def save() -> None:
            snapshot.write(next(versions), *trainer.state())

        def publish(tensors: Any = None) -> None:
            tensors, version = tensors or trainer.weights(), next(versions)
            if rank == 0:
                publish_version(
                    slab, version % _VERSIONS, attempt=0, version=version, tensors=tensors, beside=trainer.publishing
                )
            else:
                assert trainer.publishing is not None
                other_part(slab, tensors, trainer.publishing, attempt=0, version=version)

        def both_beside() -> None:
            state, live = trainer.state(), trainer.weights()

            def copy() -> None:
                snapshot.write(next(versions), *state)
                publish(live)

            beside = threading.Thread(target=copy)
            beside.start()
            forwards()
            beside.join()

        seconds: dict[str, list[float]] = {name: [] for name in ("snapshot", "publication", "step", "beside")}
        for _ in range(2 if options.tiny else 5):
            for name, function in zip(seconds, (save, publish, forwards, both_beside), strict=True):
                seconds[name].append(timed(function, device))
                trainer.discard()
        middle = {name: statistics.median(each[1:]) for name, each in seconds.items()}  # pages are made in the first
        snapshot.close()
        slab.close()
    copied_s = middle["snapshot"] + middle["publication"]
    found: dict[str, Any] = {
        name: {"bytes": sizes[name], "seconds": middle[name], "gb_s": sizes[name] / middle[name] / 1e9}
        for name in sizes
    }
    hidden = min(1.0, max(0.0, (middle["step"] + copied_s - middle["beside"]) / copied_s))
    return found | {"step_s": middle["step"], "beside_s": middle["beside"], "hidden": hidden, "pinned_gb_s": pinned}


def memory(name: str, num_bytes: int, group: dist.ProcessGroup | None = None) -> Segment:
    """As the supervisor makes it: its pages are there. With a group all of its ranks have the first one's."""
    if group is None or dist.get_rank(group) == 0:
        descriptor = os.memfd_create(name)
        os.posix_fallocate(descriptor, 0, num_bytes)
        place = torch.tensor([os.getpid(), descriptor])
    else:
        place = torch.zeros(2, dtype=torch.int64)
    if group is not None:
        dist.broadcast(place, group=group, group_src=0)
        if dist.get_rank(group):
            descriptor = os.open(f"/proc/{int(place[0])}/fd/{int(place[1])}", os.O_RDWR)
    return Segment(name, num_bytes, descriptor)


def pinned_rate(device: str, num_bytes: int) -> float | None:
    """GB/s of one copy from the device; None without one."""
    if not device.startswith("cuda"):
        return None
    source = torch.empty(min(num_bytes, 1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty(len(source), dtype=torch.uint8, pin_memory=True)
    seconds = [timed(lambda: target.copy_(source, non_blocking=True), device) for _ in range(5)][1:]
    return len(source) / statistics.median(seconds) / 1e9
