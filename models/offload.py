"""AdamW whose moments lie in host memory, and pass through the device a piece at a time while it steps.

Owns where moments lie and how they come and go. Does not own which parameters step together (`optimizer.py`), nor the arithmetic,
which is torch's fused kernel on the parameters' device. Weights and gradients stay there: FSDP2 gathers the ones with every
micro-batch and adds to the others, and would wait for the host in every layer to do that out of host memory.

    host     | m v m v m v | m v m v |   a block a piece, pinned where the device is CUDA
    device        room 0      room 1     the next piece comes, and the last one goes, while one is computed

Invariants: after `step` the host memory holds the moments, and nothing is on its way. The result is that of AdamW to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.adamw import adamw

from rondo.models.names import local_part, with_local_part

PIECE_ELEMENTS = 1 << 26
"""Of a piece, of which two are on the device: 1 GiB. Pinned memory comes in powers of two, and pieces nearly fill them."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Parameters that step together, and their moments."""

    group: dict[str, Any]
    parameters: list[torch.Tensor]
    host: torch.Tensor  # float32 [2, elements]


class OffloadedAdamW(torch.optim.AdamW):
    """Of float32 parameters on one device."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, fused=True, **options)
        self._pieces: list[_Piece] = []
        for group in self.param_groups:
            for parameters in _cut(group["params"], PIECE_ELEMENTS):
                sizes = [local_part(parameter).numel() for parameter in parameters]
                device = parameters[0].device
                host = torch.zeros(2, sum(sizes), pin_memory=device.type == "cuda")
                self._pieces.append(_Piece(group, parameters, host))
                for parameter, *moments in zip(parameters, *(kind.split(sizes) for kind in host), strict=True):
                    shape = local_part(parameter).shape
                    first, second = (with_local_part(parameter, moment.view(shape)) for moment in moments)
                    step = torch.zeros((), dtype=torch.float32, device=device)
                    self.state[parameter] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # nothing here has one
        device = self._pieces[0].parameters[0].device
        largest = max(piece.host.size(1) for piece in self._pieces)
        rooms = [torch.empty(2 * largest, device=device) for _ in self._pieces[:2]]
        lanes = _Lanes(device)
        for number, piece in enumerate(self._pieces):
            moments = rooms[number % 2][: piece.host.numel()].view(2, -1)
            lanes.bring(moments, piece.host)
            self._update(piece, moments)
            lanes.take(piece.host, moments)
        lanes.wait()

    def _update(self, piece: _Piece, moments: torch.Tensor) -> None:
        sizes = [local_part(parameter).numel() for parameter in piece.parameters]
        with_gradient = [
            (own, local_part(parameter.grad), first.view_as(own), second.view_as(own), self.state[parameter]["step"])
            for parameter, first, second in zip(piece.parameters, *(kind.split(sizes) for kind in moments), strict=True)
            for own in [local_part(parameter)]
            if parameter.grad is not None
        ]
        if not with_gradient:
            return
        parameters, gradients, firsts, seconds, steps = map(list, zip(*with_gradient, strict=True))
        adamw(
            parameters, gradients, firsts, seconds, [], steps, fused=True, amsgrad=False,
            beta1=piece.group["betas"][0], beta2=piece.group["betas"][1], lr=piece.group["lr"],
            weight_decay=piece.group["weight_decay"], eps=piece.group["eps"], maximize=False,
        )  # fmt: skip


class _Lanes:
    """What comes to the device and what goes from it, on streams beside the one that computes; on the CPU all in order."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._gone: list[Any] = []
        if self._on_device:
            self._main = torch.cuda.current_stream(device)
            self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._coming.wait_stream(self._main)

    def bring(self, room: torch.Tensor, host: torch.Tensor) -> None:
        """Into `room` of the device, once what was in it two pieces ago is gone."""
        with torch.cuda.stream(self._coming) if self._on_device else contextlib.nullcontext():
            if self._on_device and len(self._gone) > 1:
                self._coming.wait_event(self._gone[-2])
            room.copy_(host, non_blocking=True)
        if self._on_device:
            self._main.wait_event(self._coming.record_event())

    def take(self, host: torch.Tensor, room: torch.Tensor) -> None:
        if self._on_device:
            self._going.wait_event(self._main.record_event())
        with torch.cuda.stream(self._going) if self._on_device else contextlib.nullcontext():
            host.copy_(room, non_blocking=True)
        if self._on_device:
            self._gone.append(self._going.record_event())

    def wait(self) -> None:
        if self._on_device:
            self._going.synchronize()


def _cut(parameters: Iterable[torch.Tensor], most: int) -> list[list[torch.Tensor]]:
    """Runs of parameters of one dtype and device with at most so many elements on this rank, or one alone with more."""
    found: list[list[torch.Tensor]] = []
    room = 0
    for parameter in parameters:
        size = local_part(parameter).numel()
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(parameter)
        room -= size
    return found
