"""Weights to a server on the same node by handles of memory: shared memory for tensors on the CPU, CUDA IPC on a GPU.

Only a handle travels over HTTP; the server copies out of our memory while it answers.

Owns the blocks. Does not own the payload's bytes (`weights_payload.py`) nor the protocol around the updates
(`weights.py`). Every tensor-parallel rank of the server gets a payload of its own; on the CPU they are equal. A server on a GPU
takes shared memory too, and copies it to its device.

Invariant: a block stays as it is, and has its name, until the server has answered for it. A server that cannot open the handle
ends itself; so servers on other nodes are refused before (`weights.py`). CUDA IPC has not yet run against a server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager

import torch

from rondo.comm.weights.ipc import share
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.shared_memory import SharedBytes
from rondo.roles.engines.sglang.weights_buckets import NUM_BLOCKS, Bucket, Transfer, largest, packed, plan
from rondo.roles.engines.sglang.weights_payload import cuda_payload, shared_memory_payload


class TensorTransfer(Transfer):
    """Sends versions to the server behind `client`, whose `tensor_parallel` ranks are on this node. Blocks last as long as one
    update."""

    def __init__(self, client: SGLangClient, *, tensor_parallel: int, bucket_bytes: int, deadline_s: float) -> None:
        self._client = client
        self._tensor_parallel = tensor_parallel
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s

    async def send(self, version: str, tensors: Mapping[str, torch.Tensor], *, flush: bool) -> None:
        buckets = plan(tensors, self._bucket_bytes)
        device = next(iter(tensors.values())).device
        with _blocks(device, min(NUM_BLOCKS, len(buckets)), largest(buckets)) as blocks:
            async with aclosing(packed(buckets, tensors, [block for block, _ in blocks])) as coming:
                async for number, bucket, filled in coming:
                    last = bucket is buckets[-1]
                    body = {
                        "serialized_named_tensors": self._payloads(bucket, filled, blocks[number][1]),
                        "load_format": "flattened_bucket",
                        "flush_cache": flush and last,
                        **({"weight_version": version} if last else {}),
                    }
                    await self._client.post("/update_weights_from_tensor", body, deadline_s=self._deadline_s)

    def _payloads(self, bucket: Bucket, filled: torch.Tensor, handle: str) -> list[str]:
        if handle:
            return [shared_memory_payload(bucket, handle)] * self._tensor_parallel
        torch.cuda.current_stream(filled.device).synchronize()  # the copies are there before anybody opens them
        return [cuda_payload(bucket, share(filled)) for _ in range(self._tensor_parallel)]


@contextmanager
def _blocks(device: torch.device, num_blocks: int, num_bytes: int) -> Iterator[list[tuple[torch.Tensor, str]]]:
    """Blocks of uint8 [num_bytes], each with its handle (none on a GPU, where each sending makes one)."""
    if device.type == "cuda":
        yield [(torch.empty(num_bytes, dtype=torch.uint8, device=device), "") for _ in range(num_blocks)]
        return
    with ExitStack() as stack:
        made = [stack.enter_context(SharedBytes(num_bytes)) for _ in range(num_blocks)]
        yield [(block.tensor, block.handle) for block in made]
