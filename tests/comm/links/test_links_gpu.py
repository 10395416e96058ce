"""Mirrors on GPUs, fed over NCCL."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore

from rondo.comm.groups.communicators import Communicator, open_group
from rondo.comm.groups.epochs import Epoch, GroupSpec, Life
from rondo.comm.links.collective import CollectiveReceiver, CollectiveSender
from rondo.comm.links.device_ring import DeviceMirror
from rondo.comm.ring.ring import CONTROL_BYTES, RingView
from rondo.runtime.errors import GroupBroken
from tests.comm.links.ends import QUICK, RING, TOKEN, Ends
from tests.comm.links.test_collective import TensorReader

LIMIT_S = 60.0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)])
def test_payloads_lie_on_the_device_and_are_read_there(device: str) -> None:
    ends = Ends()
    ends.put(3)
    mirror, origin = DeviceMirror(ends.copy, None, RING, device=device), RingView(ends.origin, RING)
    mirror.admit(0, 0, 0)
    data = ends.origin.view()[CONTROL_BYTES:]
    for pos, seq, num_bytes in ends.refs:
        middle = pos + origin.read(pos, seq).descriptor.payload
        mirror.target(pos, middle - pos)[:] = data[pos:middle]
        mirror.arrived(pos, middle - pos)
        mirror.store_payload(middle, torch.tensor(list(data[middle : pos + num_bytes]), dtype=torch.uint8).to(device))
        mirror.arrived(middle, pos + num_bytes - middle)
    reader = TensorReader(ends, mirror)
    reader.check()
    assert reader.seen == 3 and mirror.payload.device == torch.device(device)


@pytest.mark.cuda(2)
async def test_records_cross_from_ring_to_gpu_over_nccl() -> None:
    ends = Ends()
    ends.put(5)
    spec = GroupSpec("mirror", ("rollout-0/0", "actor-0/0"), "nccl", timeout_s=LIMIT_S)
    epoch = Epoch(spec.name, 1, (Life("rollout-0", 0, 1), Life("actor-0", 0, 1)))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def join(rank: int) -> Communicator:
        address = store.host, store.port
        return open_group(spec, epoch, spec.members[rank], address, device=f"cuda:{rank}", deadline_s=LIMIT_S)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(join, range(2))
    mirror = DeviceMirror(ends.copy, None, RING, device="cuda:1")
    receiver = CollectiveReceiver(mirror, TOKEN, QUICK)
    await receiver.start()
    sender = CollectiveSender(ends.origin, RING, token=TOKEN, attempt=0, config=QUICK)
    there = asyncio.create_task(receiver.run(second, 0, device="cuda:1"))
    here = asyncio.create_task(sender.run(receiver.address, first, 1, device="cuda:0"))
    await sender.mirrored_upto(ends.end, deadline_s=LIMIT_S)
    reader = TensorReader(ends, mirror)
    reader.check()
    assert reader.seen == 5
    here.cancel()
    await asyncio.gather(here, return_exceptions=True)
    with pytest.raises(GroupBroken):
        await there
    await receiver.close()
