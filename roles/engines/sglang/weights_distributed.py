"""Weights to a server through a process group of our own with its ranks: gloo for a server on the CPU, NCCL for one on a GPU.

    this process: rank 0, and a store   ->   the server's tensor-parallel ranks: 1, 2, ...
    POST /update_weights_from_distributed (names, dtypes, shapes of a bucket)     and beside it: broadcast(bucket, from 0)

Owns the group: its store, its forming, and its end with the server. Does not own the protocol around the updates (`weights.py`),
nor the thread that alone calls the library (`Communicator`).
The group is outside torch's default one. Its keys lie where the server's torch puts them: `<group>/<group>//<device>/`. The store
listens on the one address by which this process reaches the server; like gloo and NCCL it asks for no password.

Invariants: a group that failed once is not used again; the next update forms another one under a new name. No call outlives its
deadline here: the thread that waits in the library may be abandoned, since gloo cannot be interrupted, and takes the group down
itself when the server leaves it, or dies. NCCL has not yet run.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from rondo.comm.groups.carriers import Gloo, Nccl, local_address, span
from rondo.comm.groups.communicators import Communicator
from rondo.comm.groups.epochs import Epoch, GroupSpec
from rondo.comm.ring.tensors import dtype_name
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.weights_buckets import NUM_BLOCKS, Bucket, Transfer, largest, packed, plan
from rondo.runtime.errors import ConfigError, RondoError

FORM_DEADLINE_S = 120.0


class DistributedTransfer(Transfer):
    """Sends versions to the server behind `client`, which is `on_device` or computes on the CPU, from `device` ("cpu", "cuda:3"),
    this process's own."""

    def __init__(
        self,
        client: SGLangClient,
        *,
        tensor_parallel: int,
        device: str,
        on_device: bool,
        bucket_bytes: int,
        deadline_s: float,
    ) -> None:
        if on_device and device == "cpu":
            raise ConfigError(
                "sglang.weights must be 'disk' or 'tensor' for a server on a GPU where this process has none, got "
                "'distributed'. Change it, or give the rollout's group devices=1: NCCL wants one for each rank"
            )
        self._client = client
        self._size = 1 + tensor_parallel
        self._device = device if on_device else "cpu"
        self._bucket_bytes = bucket_bytes
        self._deadline_s = deadline_s
        self._group: _Group | None = None

    async def open(self) -> None:
        """Form the group now, so that the first update need not."""
        await self._formed()

    async def prepare(self, version: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Another group, after one that failed."""
        await self._formed()

    async def send(self, version: str, tensors: Mapping[str, torch.Tensor], *, flush: bool) -> None:
        buckets = plan(tensors, self._bucket_bytes)
        group = await self._formed()
        size = largest(buckets)
        blocks = [torch.empty(size, dtype=torch.uint8, device=self._device) for _ in buckets[:NUM_BLOCKS]]
        try:
            async with aclosing(packed(buckets, tensors, blocks)) as coming:
                async for _, bucket, filled in coming:
                    last = bucket is buckets[-1]
                    body = _described(bucket) | {"group_name": group.spec.name, "flush_cache": flush and last}
                    if last:
                        body["weight_version"] = version
                    await self._bucket(group, body, filled)
        except BaseException:
            await self._leave()
            raise

    async def close(self) -> None:
        await self._leave()

    async def _bucket(self, group: _Group, body: dict[str, Any], filled: torch.Tensor) -> None:
        """Both sides of one broadcast. Whichever fails first ends the other's wait."""
        telling = asyncio.create_task(
            self._client.post("/update_weights_from_distributed", body, deadline_s=self._deadline_s)
        )
        sending = asyncio.create_task(asyncio.to_thread(group.broadcast, filled, 0, self._deadline_s))
        try:
            await asyncio.wait([telling, sending], return_when=asyncio.FIRST_EXCEPTION)
            if telling.done():  # its error says more: the server refused, or is gone
                telling.result()
            elif sending.done():
                sending.result()
            await sending
            await telling
        finally:
            for task in (telling, sending):
                task.cancel()
            await asyncio.gather(telling, sending, return_exceptions=True)

    async def _formed(self) -> _Group:
        if self._group is not None:
            return self._group
        at = urlsplit(self._client.url)
        group = _Group(self._size, self._device, local_address(at.hostname, at.port or 80))
        joining = asyncio.create_task(asyncio.to_thread(group.wait_formed))
        body = {
            "master_address": group.address, "master_port": group.port, "rank_offset": 1, "world_size": self._size,
            "group_name": group.spec.name, "backend": group.spec.backend,
        }  # fmt: skip
        try:
            await self._client.post("/init_weights_update_group", body, deadline_s=FORM_DEADLINE_S)
            await joining
        except BaseException:
            group.abort()
            await asyncio.gather(joining, return_exceptions=True)
            raise
        self._group = group
        return group

    async def _leave(self) -> None:
        """Take the group down on both sides; a server that is gone, or does not know it, has left already."""
        group, self._group = self._group, None
        if group is None:
            return
        group.abort()
        with suppress(RondoError):
            await self._client.post("/destroy_weights_update_group", {"group_name": group.spec.name}, deadline_s=30)


class _Group(Communicator):
    """One group, from its store to its end: a communicator that meets where the server's torch does. `address` and `port` are
    where the others find the store. It is joined when `wait_formed` returns, and ended by `abort`."""

    def __init__(self, size: int, device: str, address: str) -> None:
        name = f"rondo_{secrets.token_hex(4)}"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen()
        self.address, self.port = address, listener.getsockname()[1]
        # The store owns the descriptor from here on.
        self._store: Any = dist.TCPStore(
            address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        members = tuple(f"{name}/{rank}" for rank in range(size))
        spec = GroupSpec(name, members, "gloo" if device == "cpu" else "nccl")
        meeting = (address, self.port)
        super().__init__(spec, Epoch(name, 1, ()), members[0], meeting, device=device, deadline_s=FORM_DEADLINE_S)

    def _form(self, address: tuple[str, int]) -> None:
        keys: Any = dist.PrefixStore(self.spec.name, self._store)
        keys = dist.PrefixStore(f"{self.spec.name}/", keys)
        keys = dist.PrefixStore("cuda/" if self.spec.backend == "nccl" else "cpu/", keys)
        make = _Nccl if self.spec.backend == "nccl" else Gloo
        carrier = make(keys, 0, self.size, self._left())
        with self._changed:
            self._carrier = carrier


class _Nccl(Nccl):
    """Whose communicator is made by the first broadcast: the server makes its own as late."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = span(timeout_s)
        self._group = dist.ProcessGroupNCCL(store, rank, size, options)


def _described(bucket: Bucket) -> dict[str, Any]:
    return {
        "names": [place.name for place in bucket.places],
        "dtypes": [dtype_name(place.dtype) for place in bucket.places],
        "shapes": [list(place.shape) for place in bucket.places],
        "load_format": "flattened_bucket",
    }
