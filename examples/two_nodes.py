"""Any machine, no GPU, about fifteen seconds: what moves between nodes, with two processes in the place of two nodes.

    python examples/two_nodes.py

1. A link mirrors a ring: records put here are read there, at the same positions, and room comes back when they are released.
2. A process group over both: named, with an epoch and a deadline.
3. Weights over that group: a version whole, the next one as an exact delta; each counts once every bucket has its sum.

On two machines the same lines run with their addresses in the place of 127.0.0.1, on a private network: links need the token and
do not encrypt, stores and groups have no credentials.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from rondo.comm.groups.epochs import GroupSpec
from rondo.comm.groups.groups import ProcessGroups
from rondo.comm.groups.meeting import Meeting
from rondo.comm.links import LinkReceiver, LinkSender, Mirror
from rondo.comm.ring.records import Column
from rondo.comm.ring.ring import RingTail, RingView, RingWriter, ring_bytes
from rondo.comm.ring.words import drain, new_doorbell
from rondo.comm.weights import Held, Published, publish, receive_version, send_version
from rondo.comm.weights.slab import WeightSlab, slab_bytes
from rondo.runtime.actors.actor import serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.memory.segments import Segment
from rondo.runtime.processes.guard import die_with_parent

RING, TOKEN, RECORDS, RING_BYTES = "ring/rollout-0/0", "the run's token", 200, ring_bytes(1 << 20)
SPEC = GroupSpec("weights", ("actor-0/0", "rollout-0/0"), timeout_s=60.0)


def memory(num_bytes: int) -> Segment:
    """In a run the supervisor keeps it."""
    fd = os.memfd_create("example", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, num_bytes)
    return Segment("example", num_bytes, fd)


# ---- 1. a link ------------------------------------------------------------------------------------------------------


async def put_and_mirror(address: str) -> None:
    """This node: puts records of 30 kB, 6 MB in all, into a ring of 1 MB; a record waits until there is room over there."""
    segment = memory(RING_BYTES)
    writer, tail = RingWriter(segment, None, RING), RingTail(segment, RING)

    def released(mirrored: int, released: int) -> None:
        for _ in tail.poll():  # the origin's releaser is its link: what the other node let go of is free here
            pass
        tail.release(released)

    sender = LinkSender(segment, RING, address, token=TOKEN, node="there", attempt=0, progress=released)
    task = asyncio.create_task(sender.run())
    waits = 0
    for number in range(RECORDS):
        rows = [Column("tokens", "int32", [np.full(7500, number, np.int32)])]
        if writer.head - writer.tail > writer.capacity - (64 << 10):
            waits += 1
            await sender.released_upto(writer.tail + (64 << 10), deadline_s=60.0)
        writer.put([(number, 0, 0, 1)], rows, epoch=0, attempt=0)
        sender.wake()
    await sender.released_upto(writer.head, deadline_s=60.0)
    stats = sender.stats()
    print(
        f"link: {stats.num_records} records, {stats.num_bytes / 1e6:.1f} MB, {waits} waits for room there",
        flush=True,
    )
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def read_mirror(pipe: Any) -> Any:
    """The other node: reads every record in place, and lets go of it. Returns what it is told at the end."""
    segment, doorbell = memory(RING_BYTES), new_doorbell()
    receiver = LinkReceiver("there", TOKEN, lambda ring, capacity: Mirror(segment, doorbell, ring))
    await receiver.start("tcp:127.0.0.1:0")
    pipe.send(receiver.address)
    rung, seen = asyncio.Event(), 0
    asyncio.get_running_loop().add_reader(doorbell, rung.set)
    view = tail = None
    while seen < RECORDS:
        await rung.wait()
        rung.clear()
        drain(doorbell)
        view, tail = view or RingView(segment, RING), tail or RingTail(segment, RING)
        for ref, descriptor in tail.poll():
            tokens = view.read(ref.pos, ref.seq).column("tokens", 0)
            assert descriptor.spans == [[seen, 0, 0, 1]] and (tokens == seen).all()
            seen += 1
        receiver.release(RING, tail.cursor)
    asyncio.get_running_loop().remove_reader(doorbell)
    told = await asyncio.to_thread(pipe.recv)  # the sender has heard of the last release
    await receiver.close()
    return told


# ---- 2. a group, and 3. weights over it -----------------------------------------------------------------------------


def weights(step: int) -> dict[str, torch.Tensor]:
    """Each version differs in one weight of a hundred, as after a step at a small learning rate."""
    made = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    made[::100] += step
    return {"model.embed_tokens.weight": made.view(1024, -1), "model.norm.weight": torch.ones(1024)}


async def send_weights(store: tuple[str, int], meeting: ActorRef) -> None:
    groups = ProcessGroups(store, "actor-0/0", 1, meeting)
    group = await groups.join(SPEC, deadline_s=60.0)
    print(f"group: epoch {group.epoch.number}, rank {group.rank} of {group.size}", flush=True)
    num_bytes = sum(tensor.nbytes for tensor in weights(0).values())
    slab, before = WeightSlab(memory(slab_bytes(num_bytes, 2, 2)), 2), None
    for version in range(2):
        slot = version % 2
        id = publish(slab, slot, attempt=0, version=version, tensors=weights(version).items())
        published = Published.in_slab(slab, slot, id)
        # On a thread of its own: in a run beside the next training step.
        sent = await asyncio.to_thread(send_version, group, published, base=before)
        how, before = "a delta" if sent.by_delta else "whole", published
        print(
            f"weights: version {sent.id.version} as {how}, {sent.sent_bytes:,} of {sent.version_bytes:,} bytes",
            flush=True,
        )
    await groups.close()


async def serve_weights(store: tuple[str, int], meeting: ActorRef) -> None:
    groups = ProcessGroups(store, "rollout-0/0", 1, meeting)
    group = await groups.join(SPEC, deadline_s=60.0)
    held = Held(4 << 20)
    for version in range(2):
        proved = await asyncio.to_thread(receive_version, group, held)
        assert proved.version == version
        served = held.tensors()["model.embed_tokens.weight"]
        assert torch.equal(served, weights(version)["model.embed_tokens.weight"])
    await groups.close()


# ---- both nodes -----------------------------------------------------------------------------------------------------


def there(pipe: Any) -> None:
    async def run() -> None:
        port, address = json.loads(await read_mirror(pipe))
        with ActorRef(address, token=TOKEN, peer="meeting") as meeting:
            await serve_weights(("127.0.0.1", port), meeting)

    die_with_parent()
    torch.set_num_threads(1)
    asyncio.run(run())


async def here() -> int:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    other = context.Process(target=there, args=(theirs,), daemon=True)
    other.start()
    theirs.close()  # its end is the other's alone: when that dies, this one hears of it
    await put_and_mirror(await asyncio.to_thread(pipe.recv))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # in a run: a child of the supervisor
    async with await serve(
        Meeting(), "tcp:127.0.0.1:0", token=TOKEN, name="meeting"
    ) as server:  # in a run: the coordinator
        pipe.send(json.dumps([store.port, server.address]))
        with ActorRef(server.address, token=TOKEN, peer="meeting") as meeting:
            await send_weights(("127.0.0.1", store.port), meeting)
    await asyncio.to_thread(other.join)
    return other.exitcode or 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(asyncio.run(here()))
