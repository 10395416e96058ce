"""A link whose payloads cross a process group (gloo, nccl); headers, descriptors and control cross one TCP stream beside it.

Owns how one epoch of such a link begins and ends. Does not own its two ends (`collective_sender.py`, `collective_receiver.py`),
the group (`comm/groups/groups.py`), the rings, or what follows an epoch.

    sender                          control, TCP                                   receiver
                OPEN {ring, epoch, ...}  ->           <-  OPENED {head, tail, have}
    record      DATA header + descriptor ->                                        into the mirror
                PAYLOAD pos, num_bytes   ->
    payload     ============ communicator.send / recv ============                 staging, checked, then into the mirror
                                                      <-  CREDIT, RESEND, BEAT

    while True:                                             # the same lines at both ends, with `receiver.run` there
        communicator = await groups.join(spec)
        try:
            await sender.run(address, communicator, peer=1)
        except GroupBroken:
            continue                                        # the next epoch goes on behind the last piece that arrived

Invariants: an epoch has one control stream, and with either the other is over; the mirror alone says where to go on. A
broken call may still read or write its tensor, so payloads pass through tensors of the epoch's own, never straight from the ring
or into the mirror. Over nccl a checksum other than "none" costs a copy to the host. Not yet run on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from rondo.comm.groups.communicators import Communicator
from rondo.comm.links.frames import (
    FRAME_BYTES,
    Frame,
    unpack_frame,
)
from rondo.comm.links.sender import receive
from rondo.runtime.errors import (
    DeadlineExceeded,
    GroupBroken,
    PeerGone,
    ProtocolError,
)
from rondo.runtime.waits import waiting


def group_name(communicator: Communicator) -> str:
    """The group and its epoch, as both ends must name it."""
    return f"{communicator.spec.name}/{communicator.epoch.number}"


@contextlib.asynccontextmanager
async def one_epoch(communicator: Communicator) -> AsyncIterator[contextlib.ExitStack]:
    """However it ends: the sockets are closed and the communicator's epoch is over."""
    why = "the link ended here"
    try:
        with contextlib.ExitStack() as sockets:
            yield sockets
    except GroupBroken:
        raise
    except (PeerGone, ProtocolError, DeadlineExceeded, OSError) as error:
        why = str(error)
        raise GroupBroken(communicator.spec.name, communicator.epoch.number, "mirror", why) from error
    finally:
        communicator.abort(why)


async def together(*parts: Any) -> None:
    """Run coroutines until one ends with an error, which is raised as it is; the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for part in parts:
                group.create_task(part)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def read_frame(sock: socket.socket, most_bytes: int, deadline_s: float) -> tuple[Frame, bytearray]:
    """The next frame and its body. Raises ProtocolError for a body of more than `most_bytes`, DeadlineExceeded, PeerGone."""
    async with waiting("link frame", peer="the other end", deadline_s=deadline_s):
        frame = unpack_frame(await receive(sock, FRAME_BYTES))
        if frame.body_bytes > most_bytes:
            raise ProtocolError(f"a frame must have at most {most_bytes} bytes here, got {frame.body_bytes}.")
        return frame, await receive(sock, frame.body_bytes)


async def rung(event: asyncio.Event, deadline_s: float) -> bool:
    """Whether the event came before the deadline."""
    try:
        async with waiting("link work", peer="the ring", deadline_s=deadline_s):
            return await event.wait()
    except DeadlineExceeded:
        return False
