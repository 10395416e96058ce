"""Versions of a small model, real slabs and held copies, and gloo groups over fresh processes, for the tests here."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rondo.comm.weights.held import Held, Published, VersionId
from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.runtime.errors import PeerGone
from tests.comm.memory import ROOT, MemorySegment

BUCKET_BYTES = 16 * 1024


def weights(version: int, rate: float = 2e-5) -> dict[str, torch.Tensor]:
    """bfloat16 weights with one fp32 vector, an empty tensor and odd sizes; each version moves a little from the last."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (301, 64),
        "model.layers.0.mlp.up_proj.weight": (129, 65),
        "lm_head.weight": (301, 64),
    }
    made = {}
    for name, shape in shapes.items():
        master = torch.randn(shape, generator=generator) * 0.02
        step = torch.randn(shape, generator=generator).sign() * rate
        made[name] = (master + version * step).to(torch.bfloat16)
    made["model.norm.weight"] = torch.ones(64) + version * rate
    made["empty"] = torch.empty(0, 4)
    made["flag"] = torch.tensor([True, False, True])
    return made


def total_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def new_slab(num_slots: int = 3) -> WeightSlab:
    tensors = weights(0)
    return WeightSlab(
        MemorySegment(slab_bytes(total_bytes(tensors), len(tensors), num_slots) + 8192 * num_slots), num_slots
    )


def publish(slab: WeightSlab, slot: int, version: int, rate: float = 2e-5, attempt: int = 0) -> Published:
    writer = slab.write(slot, attempt=attempt, version=version, bucket_bytes=BUCKET_BYTES)
    for name, tensor in weights(version, rate).items():
        writer.add(name, tensor)
    return Published.in_slab(slab, slot, VersionId(attempt, version, writer.finish()))


def holding(published: Published) -> Held:
    """A receiver that has proved `published`."""
    held = Held(published.manifest.num_bytes + 4096)
    fill(held, published)
    held.prove()
    return held


def fill(held: Held, published: Published) -> None:
    held.begin(published.id, published.manifest.raw)
    for index in range(published.manifest.num_buckets):
        held.bucket(index)[:] = published.bucket(index)


def assert_serves(held: Held, version: int, rate: float = 2e-5) -> None:
    found, wanted = held.tensors(), weights(version, rate)
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


# ---- groups of real processes ---------------------------------------------------------------------------------------


class Gloo:
    """torch's default gloo group as a communicator: errors of its library become PeerGone."""

    def __init__(self, rank: int, world_size: int, store: str, timeout_s: float) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        span = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", f"file://{store}", timeout=span, rank=rank, world_size=world_size)
        self.rank, self.size = rank, world_size

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        self._moved(dist.send, tensor, peer)

    def recv(self, tensor: torch.Tensor, peer: int) -> None:
        self._moved(dist.recv, tensor, peer)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self._moved(dist.broadcast, tensor, root)

    def _moved(self, move: Callable[..., Any], tensor: torch.Tensor, peer: int) -> None:
        try:
            move(tensor, peer)
        except RuntimeError as error:
            raise PeerGone(f"rank {peer} must answer rank {self.rank}, got {error}") from error


def run_worlds(module: str, scenarios: list[list[Any]], folder: Path, deadline_s: float = 240.0) -> list[list[Any]]:
    """Each scenario, [function of `module`, number of ranks, arguments...], with a process a rank, over gloo.

    What `function(comm, *arguments)` returned on every rank, None for one that was killed. One interpreter imports torch and
    forks all ranks; no process is left.
    """
    call = (
        f"from tests.comm.weights.versions import fork_worlds; fork_worlds({module!r}, {scenarios!r}, {str(folder)!r})"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", call], cwd=ROOT, env=environment, stdout=subprocess.PIPE, process_group=0
    ) as child:
        try:
            return list(json.loads(child.communicate(timeout=deadline_s)[0].splitlines()[-1]))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def fork_worlds(module: str, scenarios: list[list[Any]], folder: str) -> None:
    import torch._dynamo  # which a mesh loads, on each rank

    torch.set_num_threads(1)
    found = [_fork_world(getattr(importlib.import_module(module), name), Path(folder) / str(index), *arguments)
             for index, (name, *arguments) in enumerate(scenarios)]  # fmt: skip
    print(json.dumps(found), flush=True)


def _fork_world(function: Callable[..., Any], folder: Path, world_size: int, *arguments: Any) -> list[Any]:
    folder.mkdir()
    children = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            try:
                result = function(Gloo(rank, world_size, str(folder / "store"), 120.0), *arguments)
                (folder / f"{rank}.json").write_text(json.dumps(result))
            except BaseException:  # noqa: BLE001 - a fork must end here, whatever it is
                traceback.print_exc()
            finally:
                os._exit(0)  # its sockets close; a group whose member was killed takes its time to close by itself
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    files = [folder / f"{rank}.json" for rank in range(world_size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def flip(data: np.ndarray, bit: int) -> None:
    data[bit // 8] ^= 1 << (bit % 8)
