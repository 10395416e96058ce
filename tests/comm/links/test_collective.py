"""A link over a process group: gloo between processes, killed in mid record, and a mirror whose payloads lie in a tensor."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from rondo.comm.groups.communicators import Communicator, open_group
from rondo.comm.groups.epochs import Epoch, GroupSpec, Life
from rondo.comm.links.collective import CollectiveReceiver, CollectiveSender
from rondo.comm.links.device_ring import DeviceMirror, DeviceView
from rondo.comm.links.mirror import Mirror
from rondo.comm.ring.ring import RingTail
from rondo.comm.ring.words import new_doorbell
from rondo.runtime.errors import ConfigError, GroupBroken, Refused
from rondo.runtime.processes import process
from rondo.runtime.supervision.launcher import Job
from rondo.runtime.supervision.nursery import Forked, Nursery
from tests.comm.links.ends import PATIENCE_S, QUICK, RING, TOKEN, Ends, Reader, column, rung
from tests.comm.memory import ROOT, MemorySegment

SPEC = GroupSpec("mirror", ("rollout-0/0", "actor-0/0"), timeout_s=PATIENCE_S)
HERE = "tests.comm.links.test_collective"


def member(rank: int, number: int, port: int) -> Communicator:
    epoch = Epoch(SPEC.name, number, (Life("rollout-0", 0, number), Life("actor-0", 0, 1)))
    return open_group(SPEC, epoch, SPEC.members[rank], ("127.0.0.1", port), deadline_s=PATIENCE_S)


def send(origin_fd: int, address: str, number: int, port: int) -> None:
    """A sender in this process until it is killed or its epoch is over."""

    async def main() -> None:
        communicator = await asyncio.to_thread(member, 0, number, port)
        sender = CollectiveSender(MemorySegment(fd=origin_fd), RING, token=TOKEN, attempt=0, config=QUICK)
        try:
            await sender.run(address, communicator, 1)
        except GroupBroken:
            os._exit(0)

    asyncio.run(main())


def sent() -> None:
    """`send`, with its arguments as a job has them."""
    address, number, port, origin_fd = sys.argv[1:]
    send(int(origin_fd), address, int(number), int(port))


Senders = Callable[[Ends, str, int, int], Awaitable[Forked]]


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Senders]:
    """Starts `send` in a process of its own, forked off one that has loaded torch."""
    log, environment = tmp_path_factory.mktemp("senders") / "log", {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(ends: Ends, address: str, number: int, port: int) -> Awaitable[Forked]:
        fds = (ends.origin.fd,)
        return nursery.start(Job(f"{HERE}:sent", (address, str(number), str(port)), environment, log, fds))

    process.set_child_subreaper()
    with Nursery() as nursery:
        nursery.belong(lambda _: (log, environment), [HERE])
        yield start
    ctypes.CDLL(None).prctl(process._PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)  # orphans of other tests are not ours


@pytest.fixture
def store() -> Iterator[TCPStore]:
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def doorbell() -> Iterator[int]:
    fd = new_doorbell()
    yield fd
    os.close(fd)


class Noting:
    """Mixed into mirrors: notes what arrived, and tells when so many pieces did."""

    pieces: list[tuple[int, int]]
    at: dict[int, Callable[[], None]]

    def arrived(self, pos: int, num_bytes: int) -> int:
        self.pieces.append((pos, num_bytes))
        self.at.get(len(self.pieces), int)()
        return super().arrived(pos, num_bytes)  # type: ignore[misc,no-any-return]


class NotingMirror(Noting, Mirror):
    pass


class NotingDeviceMirror(Noting, DeviceMirror):
    pass


def mirror_of(ends: Ends, kind: str, fd: int | None) -> Any:
    made: Any = NotingDeviceMirror(ends.copy, fd, RING, device="cpu") if kind == "device" else NotingMirror(
        ends.copy, fd, RING
    )  # fmt: skip
    made.pieces, made.at = [], {}
    return made


class TensorReader:
    """As `Reader`, out of the tensor of a device mirror."""

    def __init__(self, ends: Ends, mirror: DeviceMirror) -> None:
        self.ends, self.seen = ends, 0
        self.tail, self.view = RingTail(ends.copy, RING), DeviceView(ends.copy, mirror)

    def check(self) -> None:
        for ref, _ in self.tail.poll():
            assert (ref.pos, ref.seq, ref.num_bytes) == self.ends.refs[self.seen]
            record = self.view.read(ref.pos, ref.seq)
            found = record.column("x", 0)
            assert found.dtype == torch.uint8 and record.valid()
            wanted = torch.from_numpy(column(self.seen, self.ends.sizes(self.seen)).arrays[0])
            assert torch.equal(found.cpu(), wanted)
            self.seen += 1


def reader_of(ends: Ends, mirror: Any) -> Any:
    return TensorReader(ends, mirror) if isinstance(mirror, DeviceMirror) else Reader(ends)


@pytest.mark.parametrize("kind", ["host", "device"])
async def test_records_cross_between_processes_over_many_laps(
    kind: str, store: TCPStore, doorbell: int, sender: Senders
) -> None:
    ends = Ends()
    mirror = mirror_of(ends, kind, doorbell)
    receiver = CollectiveReceiver(mirror, TOKEN, QUICK)
    await receiver.start()
    child = await sender(ends, receiver.address, 1, store.port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            communicator = await asyncio.to_thread(member, 1, 1, store.port)
            run = asyncio.create_task(receiver.run(communicator, 0))
            reader = None
            while reader is None or reader.seen < 100:
                ends.fill(100)
                await rung(doorbell, lambda: mirror.head == ends.end or run.done())
                assert not run.done()
                reader = reader or reader_of(ends, mirror)
                reader.check()
                receiver.release(RING, reader.tail.cursor)
                ends.tail.poll()
                ends.tail.release(mirror.head)
            assert mirror.head > 3 * mirror.capacity and mirror.num_refused_chunks == 0
            end(child)
            with pytest.raises(GroupBroken):
                await run
            assert await asyncio.to_thread(communicator.close, PATIENCE_S)
    finally:
        end(child)
        await receiver.close()


@pytest.mark.parametrize("kind", ["host", "device"])
async def test_a_sender_killed_in_mid_record_is_followed_in_the_next_epoch_by_one_that_goes_on_there(
    kind: str, store: TCPStore, doorbell: int, sender: Senders
) -> None:
    ends = Ends(1 << 22, sizes=lambda group: 300_000)
    ends.put(6)
    mirror = mirror_of(ends, kind, doorbell)
    receiver = CollectiveReceiver(mirror, TOKEN, QUICK)
    await receiver.start()
    child = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            for number in (1, 2):
                child = await sender(ends, receiver.address, number, store.port)
                communicator = await asyncio.to_thread(member, 1, number, store.port)
                if number == 1:
                    mirror.at[50] = functools.partial(child.send_signal, signal.SIGKILL)
                run = asyncio.create_task(receiver.run(communicator, 0))
                if number == 2:
                    await rung(doorbell, lambda: mirror.head == ends.end)
                    end(child)
                with pytest.raises(GroupBroken):
                    await run
                end(child)
                await asyncio.to_thread(communicator.close, PATIENCE_S)
                if number == 1:
                    assert mirror.head in [ref[0] for ref in ends.refs] and mirror.have()[-1][1] < ends.end
            reader = reader_of(ends, mirror)
            reader.check()
            assert reader.seen == 6
            assert sum(num_bytes for _, num_bytes in mirror.pieces) == ends.end  # nothing came twice
    finally:
        if child is not None:
            end(child)
        await receiver.close()


def end(child: Forked) -> None:
    """Kill and reap; safe to call twice."""
    child.send_signal(signal.SIGKILL)
    child.wait()


def pair(store: TCPStore, number: int = 1) -> list[Communicator]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: member(rank, number, store.port), range(2)))


class Flipping:
    """A communicator that flips one bit of its third payload."""

    def __init__(self, communicator: Communicator) -> None:
        self._inner, self.num_sent = communicator, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, tensor: Any, peer: int) -> None:
        self.num_sent += 1
        data = tensor.clone()
        if self.num_sent == 3:
            data[100] ^= 4
        self._inner.send(data, peer)


async def test_a_flipped_bit_in_a_payload_is_refused_and_sent_again_in_the_same_epoch(store: TCPStore) -> None:
    ends = Ends(1 << 20, sizes=lambda group: 60_000)
    ends.put(3)
    mirror = mirror_of(ends, "device", None)
    receiver, (first, second) = CollectiveReceiver(mirror, TOKEN, QUICK), await asyncio.to_thread(pair, store)
    await receiver.start()
    sender, flipping = CollectiveSender(ends.origin, RING, token=TOKEN, attempt=0, config=QUICK), Flipping(first)
    there = asyncio.create_task(receiver.run(second, 0))
    here = asyncio.create_task(sender.run(receiver.address, flipping, 1))  # type: ignore[arg-type]
    await sender.mirrored_upto(ends.end, deadline_s=PATIENCE_S)
    reader = reader_of(ends, mirror)
    reader.check()
    assert (reader.seen, mirror.num_refused_chunks, sender.counts["num_resent"]) == (3, 1, 1)
    receiver.release(RING, mirror.head)
    await sender.released_upto(ends.end, deadline_s=PATIENCE_S)
    here.cancel()
    await asyncio.gather(here, return_exceptions=True)
    with pytest.raises(GroupBroken):
        await there
    assert first.close(PATIENCE_S) and second.close(PATIENCE_S)
    await receiver.close()
    sender.close()


async def test_a_wrong_token_and_another_ring_are_refused(store: TCPStore) -> None:
    ends = Ends()
    mirror = mirror_of(ends, "host", None)
    for number, (token, ring, match) in enumerate([("another", RING, "token"), (TOKEN, "ring/x", "must open")], 1):
        receiver, (first, second) = CollectiveReceiver(mirror, TOKEN, QUICK), await asyncio.to_thread(
            pair, store, number
        )  # fmt: skip
        await receiver.start()
        there = asyncio.create_task(receiver.run(second, 0))
        sender = CollectiveSender(ends.origin, ring, token=token, attempt=0, config=QUICK)
        with pytest.raises(Refused, match=match):
            await sender.run(receiver.address, first, 1)
        assert not there.done() and mirror.pieces == []
        there.cancel()
        await asyncio.gather(there, return_exceptions=True)
        assert first.close(PATIENCE_S) and second.close(PATIENCE_S)
        await receiver.close()


def test_a_device_mirror_opened_anew_begins_at_its_tail_since_payloads_died() -> None:
    ends = Ends()
    ends.put(2)
    mirror = DeviceMirror(ends.copy, None, RING, device="cpu")
    mirror.admit(0, 0, 0)
    mirror.target(0, ends.end)[:] = ends.origin.view()[4096 : 4096 + ends.end]
    assert mirror.arrived(0, ends.end) == 2
    mirror.release(ends.refs[1][0])
    again = DeviceMirror(ends.copy, None, RING, device="cpu")
    assert again.head == again.tail == ends.refs[1][0] and again.have() == []


async def test_an_address_that_is_not_tcp_is_refused() -> None:
    with pytest.raises(ConfigError, match="tcp:host:port"):
        await CollectiveReceiver(mirror_of(Ends(), "host", None), TOKEN).start("unix:/nowhere")
