"""What lies on a device into host memory, by DMA.

Owns the two pinned pieces through which every byte comes, since only from and to pinned memory does a device copy by itself:
while one fills, the other is copied to its place. Copies are ordered with what else the calling thread gives its stream; on one
of its own (`torch.cuda.stream`) they go on beside what the device computes. Imports torch: for whoever has it.

    with torch.cuda.stream(beside): to_host(slot, parameter)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

PIECE_BYTES = 32 << 20
_of_thread = threading.local()


def to_host(into: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `tensor` into `into` on the CPU, of the same dtype and shape; when it returns the bytes are there."""
    if tensor.device.type != "cuda":
        into.copy_(tensor.detach())
        return
    if not hasattr(_of_thread, "pieces"):
        _of_thread.pieces = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    through(_of_thread.pieces, _bytes(into), _bytes(tensor))


def host_bytes(tensor: torch.Tensor) -> np.ndarray:
    """uint8 [N]; those of the tensor itself where it lies in host memory without gaps."""
    host = tensor.detach()
    if host.device.type != "cpu":
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        to_host(host, tensor)
    return np.asarray(_bytes(host).numpy())


def on_its_way(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a small `tensor` to the CPU. What it returns gives the copy: it waits for that, and for nothing that the
    device is given meanwhile."""
    if tensor.device.type != "cuda":
        return lambda: tensor.detach()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    there = torch.cuda.current_stream(tensor.device).record_event()

    def wait() -> torch.Tensor:
        there.synchronize()
        return host

    return wait


def through(pieces: list[torch.Tensor], into: torch.Tensor, source: torch.Tensor) -> None:
    """uint8 [N] each, but for the two pieces of another size."""
    size, coming = pieces[0].numel(), None
    for number, start in enumerate(range(0, source.numel(), size)):
        part = source[start : start + size]
        piece = pieces[number % 2][: part.numel()]
        piece.copy_(part, non_blocking=True)
        there = torch.cuda.current_stream(source.device).record_event() if source.is_cuda else None
        _settle(coming)
        coming = into[start : start + size], piece, there
    _settle(coming)


def _settle(coming: tuple[torch.Tensor, torch.Tensor, Any] | None) -> None:
    """What comes into a piece is copied from there to its place."""
    if coming is not None:
        place, piece, there = coming
        if there is not None:
            there.synchronize()
        place.copy_(piece)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
