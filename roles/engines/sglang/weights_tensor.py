"""Weights to a server on the same node by handles of memory: shared memory for tensors on the CPU, CUDA IPC on a GPU.

Only a handle travels over HTTP; the server copies out of our memory while it answers. Two blocks take turns: one is packed while
the server loads the other.

    pack 0 | pack 1     | pack 2     |
           | server: 0  | server: 1  | server: 2

Owns the blocks and their order. Does not own the payload's bytes (`weights_payload.py`) nor the protocol around the updates
(`weights.py`). Every tensor-parallel rank of the server gets a payload of its own; on the CPU they are equal. A server on a GPU
takes shared memory too, and copies it to its device.

Invariant: a block stays as it is, and has its name, until the server has answered for it. A server that cannot open the handle
ends itself; so servers on other nodes are refused before (`weights.py`). CUDA IPC has not yet run against a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from rondo.comm.weights.ipc import share
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.shared_bytes import SharedBytes
from rondo.roles.engines.sglang.weights_buckets import Bucket, largest, pack, plan
from rondo.roles.engines.sglang.weights_payload import cuda_payload, shared_memory_payload

_NUM_BLOCKS = 2


class TensorTransfer:
    """Sends versions to the server behind `client`, whose `tensor_parallel` ranks are on this node."""

    in_session = True

    def __init__(self, client: SGLangClient, *, tensor_parallel: int, bucket_bytes: int, deadline_s: float) -> None:
        self._client = client
        self._tensor_parallel = tensor_parallel
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s

    async def open(self) -> None:
        """Nothing: blocks last as long as one update."""

    async def prepare(self, version: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Nothing: buckets are packed while the server loads those before."""

    async def send(self, version: str, tensors: Mapping[str, torch.Tensor], *, flush: bool) -> None:
        buckets = plan(tensors, self._bucket_bytes)
        device = next(iter(tensors.values())).device
        with _blocks(device, min(_NUM_BLOCKS, len(buckets)), largest(buckets)) as blocks:
            packing = asyncio.create_task(asyncio.to_thread(pack, buckets[0], tensors, blocks[0][0]))
            try:
                for number, bucket in enumerate(buckets):
                    packed = await packing
                    handle = blocks[number % len(blocks)][1]
                    if number + 1 < len(buckets):
                        room = blocks[(number + 1) % len(blocks)][0]
                        packing = asyncio.create_task(asyncio.to_thread(pack, buckets[number + 1], tensors, room))
                    last = number + 1 == len(buckets)
                    body = {
                        "serialized_named_tensors": self._payloads(bucket, packed, handle),
                        "load_format": "flattened_bucket",
                        "flush_cache": flush and last,
                        **({"weight_version": version} if last else {}),
                    }
                    await self._client.post("/update_weights_from_tensor", body, deadline_s=self._deadline_s)
            finally:
                # A thread cannot be stopped, and writes into the blocks until it is done.
                await asyncio.shield(asyncio.wait([packing]))

    async def proved(self, version: str) -> None:
        """Nothing is left of a version."""

    async def refused(self, version: str) -> None:
        """Nor of one that is wrong."""

    async def close(self) -> None:
        """Nothing to free."""

    def _payloads(self, bucket: Bucket, packed: torch.Tensor, handle: str) -> list[str]:
        if handle:
            return [shared_memory_payload(bucket, handle)] * self._tensor_parallel
        torch.cuda.current_stream(packed.device).synchronize()  # the copies are there before anybody opens them
        return [cuda_payload(bucket, share(packed)) for _ in range(self._tensor_parallel)]


@contextmanager
def _blocks(device: torch.device, num_blocks: int, num_bytes: int) -> Iterator[list[tuple[torch.Tensor, str]]]:
    """Blocks of uint8 [num_bytes], each with its handle (none on a GPU, where each sending makes one)."""
    if device.type == "cuda":
        yield [(torch.empty(num_bytes, dtype=torch.uint8, device=device), "") for _ in range(num_blocks)]
        return
    with ExitStack() as stack:
        made = [stack.enter_context(SharedBytes(num_bytes)) for _ in range(num_blocks)]
        yield [(block.tensor, block.handle) for block in made]
