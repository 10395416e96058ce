"""A link over real sockets: equality of all records, each once, whatever happens to the network and to the processes."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator

import numpy as np
import pytest

from rondo.comm.links.frames import CHECKSUMS
from rondo.comm.links.mirror import Mirror
from rondo.comm.links.receiver import LinkReceiver
from rondo.comm.links.sender import LinkSender
from rondo.comm.ring.ring import RingView, ring_bytes
from rondo.comm.ring.words import new_doorbell
from rondo.runtime.errors import ConfigError, PeerGone, ProtocolError, Refused
from tests.comm.links.ends import PATIENCE_S, QUICK, RING, TOKEN, Ends, Proxy, Reader, cross, rung, running
from tests.comm.memory import MemorySegment, start_child

HERE = "tests.comm.links.ends"


@pytest.fixture
def doorbell() -> Iterator[int]:
    fd = new_doorbell()
    yield fd
    os.close(fd)


@pytest.mark.parametrize("checksum", CHECKSUMS)
async def test_records_cross_in_order_over_many_laps_with_the_same_positions(checksum: str) -> None:
    ends = Ends()
    receiver = ends.receiver()
    await receiver.start()
    sender = ends.sender(receiver.address, dataclasses.replace(QUICK, checksum=checksum))
    async with running(sender):
        await cross(ends, sender, receiver, 200)
        [mirror] = receiver.stats()
        stats = sender.stats()
    assert mirror.num_records == stats.num_records == 200 and mirror.head_pos == ends.end > 5 * mirror.capacity_bytes
    assert (stats.num_resumes, stats.num_resent, mirror.num_refused_chunks) == (0, 0, 0)
    await receiver.close()


async def test_a_mirror_rings_its_doorbell_behind_its_head(doorbell: int) -> None:
    ends = Ends()
    receiver = ends.receiver(fd=doorbell)
    await receiver.start()
    sender = ends.sender(receiver.address)
    async with running(sender):
        ends.put(3)
        await rung(doorbell, lambda: receiver.stats() != () and receiver.stats()[0].head_pos == ends.end)
        reader = Reader(ends)
        reader.check()
        assert reader.seen == 3
    await receiver.close()


async def test_a_full_mirror_stalls_its_sender_by_name_and_drops_nothing() -> None:
    ends = Ends(1 << 17)
    receiver = ends.receiver()
    await receiver.start()
    moved = asyncio.Event()
    sender = LinkSender(
        ends.origin, RING, receiver.address, token=TOKEN, node="node-1", attempt=0, config=QUICK,
        progress=lambda mirrored, released: moved.set(),
    )  # fmt: skip
    async with running(sender), asyncio.timeout(PATIENCE_S):
        ends.fill(100)
        await sender.mirrored_upto(ends.end, deadline_s=PATIENCE_S)
        ends.tail.poll()
        ends.tail.release(sender.mirrored)  # the origin is free, the mirror's reader lets go of nothing
        ends.fill(100)
        sender.wake()
        ends.put(2)
        sender.wake()
        while sender.stats().state != "waits for room at node-1":
            moved.clear()
            await moved.wait()
        assert sender.mirrored < ends.end and sender.released == 0
        reader = Reader(ends)
        reader.check()
        receiver.release(RING, reader.tail.cursor)
        await sender.mirrored_upto(ends.end, deadline_s=PATIENCE_S)
        reader.check()
        assert reader.seen == len(ends.refs) and sender.stats().num_stalls >= 1
        assert sender.stats().state == "sends"
    await receiver.close()


FAULTS = [(offset, kind) for offset in (0, 60, 150, 700, 20_000, 70_001) for kind in ("reset", "truncate", "flip")]


@pytest.mark.parametrize("seed", range(3))
async def test_a_network_that_resets_truncates_and_flips_loses_and_doubles_nothing(seed: int) -> None:
    ends = Ends()
    config = dataclasses.replace(QUICK, silent_s=2.0, connect_s=2.0)  # a flipped length is noticed by silence alone
    receiver = ends.receiver(config)
    await receiver.start()
    order = np.random.default_rng(seed).permutation(len(FAULTS))
    async with Proxy(receiver.address, [FAULTS[i] for i in order]) as proxy:
        sender = ends.sender(proxy.address, config)
        async with running(sender) as task:
            await cross(ends, sender, receiver, 150)
            assert not task.done() and proxy.faults == []
            assert sender.stats().num_resumes > 3
            assert receiver.stats()[0].num_records == 150
    await receiver.close()


async def test_a_stream_that_stalls_is_noticed_and_made_again() -> None:
    ends = Ends()
    config = dataclasses.replace(QUICK, silent_s=0.3, connect_s=0.5)
    receiver = ends.receiver(config)
    await receiver.start()
    async with Proxy(receiver.address, [(200, "stall"), (50_000, "stall")]) as proxy:
        sender = ends.sender(proxy.address, config)
        async with running(sender):
            await cross(ends, sender, receiver, 60)
            assert proxy.faults == [] and sender.stats().num_resumes >= 1
    await receiver.close()


async def test_chunks_of_a_stream_that_lags_behind_the_others_take_their_place_when_they_come() -> None:
    ends = Ends()
    order: list[tuple[int, int]] = []  # where a chunk went, and where the head was then

    class Noting(Mirror):
        def arrived(self, pos: int, num_bytes: int) -> int:
            order.append((pos, self.head))
            return super().arrived(pos, num_bytes)

    receiver = LinkReceiver("node-1", TOKEN, lambda ring, capacity: Noting(ends.copy, None, ring), QUICK)
    await receiver.start()
    async with Proxy(receiver.address, [(offset, "hold") for offset in (20_000, 90_000, 200_000)]) as proxy:
        sender = ends.sender(proxy.address)
        async with running(sender):
            await cross(ends, sender, receiver, 100)
            assert proxy.faults == [] and sender.stats().num_resumes == 0
    assert max(pos - head for pos, head in order) > proxy.OVERTAKES // 2
    assert [pos for pos, _ in order] != sorted(pos for pos, _ in order)
    await receiver.close()


async def test_a_flipped_bit_in_a_payload_is_refused_and_sent_again_without_a_new_connection() -> None:
    ends = Ends(sizes=lambda group: 15_000)
    receiver = ends.receiver()
    await receiver.start()
    async with Proxy(receiver.address, []) as proxy:
        sender = ends.sender(proxy.address, dataclasses.replace(QUICK, num_streams=1, beat_s=50.0))
        async with running(sender):
            ends.put(1)
            await sender.mirrored_upto(ends.end, deadline_s=PATIENCE_S)
            proxy.faults.append((9_000, "flip"))
            await cross(ends, sender, receiver, 3)
            assert proxy.faults == []
            assert (sender.stats().num_resent, receiver.stats()[0].num_refused_chunks) == (1, 1)
            assert sender.stats().num_resumes == 0
    await receiver.close()


@pytest.mark.parametrize("checksum", ["fold", "crc32"])
@pytest.mark.parametrize("num_bytes", [64, 4096, 1 << 20])
def test_a_checksum_sees_one_flipped_bit_two_that_cancel_in_a_fold_and_pages_in_each_others_place(
    checksum: str, num_bytes: int
) -> None:
    of = CHECKSUMS[checksum]
    data = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    whole = of(data.data)
    for at in np.random.default_rng(1).integers(0, num_bytes, 20):
        for others in ([], [8 * 512], [8 * 521]):
            bad = data.copy()
            for index in [at, *[(at + other) % num_bytes for other in others]]:
                bad[index] ^= 4
            if not np.array_equal(bad, data):
                assert of(bad.data) != whole
    if num_bytes > 8192:
        bad = data.copy()
        bad[:4096], bad[4096:8192] = data[4096:8192], data[:4096]
        assert of(bad.data) != whole


def test_chunks_that_arrive_in_any_order_show_records_in_order_and_whole() -> None:
    for seed in range(20):
        ends = Ends()
        ends.put(8)
        mirror, origin = Mirror(ends.copy, None, RING), RingView(ends.origin, RING)
        mirror.admit(0, 0, 0)
        reader = Reader(ends)
        random = np.random.default_rng(seed)
        cuts = [0, *sorted(random.choice(np.arange(64, ends.end, 64), 30, replace=False).tolist()), ends.end]
        pieces = list(itertools.pairwise(cuts))
        for i in random.permutation(len(pieces)):
            start, end = pieces[i]
            mirror.target(start, end - start)[:] = origin._data[start:end]
            mirror.arrived(start, end - start)
            assert mirror.head in (0, *[pos + num_bytes for pos, _, num_bytes in ends.refs])
            reader.check()
        assert reader.seen == 8 and mirror.have() == [] and mirror.head == ends.end


def test_a_chunk_outside_the_room_or_over_checked_bytes_is_refused() -> None:
    ends = Ends()
    mirror = Mirror(ends.copy, None, RING)
    mirror.admit(0, 0, 0)
    mirror.target(640, 128)
    mirror.arrived(640, 128)
    capacity = mirror.capacity
    for pos, num_bytes in [(640, 64), (576, 128), (32, 64), (0, 32), (capacity - 64, 128), (capacity, 64)]:
        with pytest.raises(ProtocolError, match="a chunk for mirror"):
            mirror.target(pos, num_bytes)


async def test_a_wrong_token_an_older_sender_another_attempt_and_another_size_are_refused(doorbell: int) -> None:
    ends = Ends()
    receiver = ends.receiver(fd=doorbell)
    await receiver.start()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(Refused, match="token"):
            await ends.sender(receiver.address, token="another").run()
        async with running(ends.sender(receiver.address, incarnation=3)) as task:
            await rung(doorbell, lambda: receiver.stats() != () and receiver.stats()[0].num_sessions == 1)
            assert not task.done()
            with pytest.raises(Refused, match="incarnation 3 or later, got 2"):
                await ends.sender(receiver.address, incarnation=2).run()
        other = LinkSender(ends.origin, RING, receiver.address, token=TOKEN, node="n", attempt=1, incarnation=9)
        with pytest.raises(Refused, match="attempt 0, got attempt 1"):
            await other.run()
        small = MemorySegment(ring_bytes(1 << 12))
        other = LinkSender(small, RING, receiver.address, token=TOKEN, node="n", attempt=0, incarnation=9)
        with pytest.raises(ConfigError, match="as its origin"):
            await other.run()
    await receiver.close()


async def test_a_newer_sender_hangs_up_the_older_one_which_is_refused_from_then_on() -> None:
    ends = Ends()
    ends.put(3)
    receiver = ends.receiver()
    await receiver.start()
    older, newer = ends.sender(receiver.address), ends.sender(receiver.address, incarnation=1)
    async with asyncio.timeout(PATIENCE_S), running(older) as task:
        await older.mirrored_upto(ends.end, deadline_s=PATIENCE_S)
        async with running(newer):
            with pytest.raises(Refused, match="incarnation 1 or later, got 0"):
                await task
            ends.put(3)
            newer.wake()
            await newer.mirrored_upto(ends.end, deadline_s=PATIENCE_S)
            reader = Reader(ends)
            reader.check()
            assert reader.seen == 6
    await receiver.close()


async def test_a_node_that_is_not_there_ends_the_link_within_its_deadline() -> None:
    ends = Ends()
    receiver = ends.receiver()
    await receiver.start()
    address = receiver.address
    await receiver.close()
    sender = ends.sender(address, dataclasses.replace(QUICK, reconnect_s=0.2))
    with pytest.raises(PeerGone, match=r"must be made again within 0\.2 s"):
        await sender.run()


async def test_a_ring_in_use_before_its_link_is_mirrored_from_its_tail() -> None:
    ends = Ends()
    ends.put(4)
    ends.tail.poll()
    ends.tail.release(ends.refs[2][0])
    receiver = ends.receiver()
    await receiver.start()
    sender = ends.sender(receiver.address)
    async with running(sender):
        await sender.mirrored_upto(ends.end, deadline_s=PATIENCE_S)
        reader = Reader(ends)
        assert reader.tail.tail == ends.refs[2][0]
        reader.seen = 2
        reader.check()
        assert reader.seen == 4
    await receiver.close()


async def test_a_receiver_killed_in_mid_record_is_followed_by_one_that_goes_on_at_its_head() -> None:
    ends = Ends(1 << 24, sizes=lambda group: 1_000_000)
    port, reader = 0, None
    sender, task = None, None
    try:
        for life in range(3):
            child = start_child(f"{HERE}:receive", ends.copy.fd, port, fds=[ends.copy.fd])
            assert child.stdout is not None
            address = (await asyncio.to_thread(child.stdout.readline)).decode().strip()
            port = int(address.rpartition(":")[2])
            ends.put(5)  # whatever has come before, this needs the connection of this life
            if sender is None:
                sender = ends.sender(address)
                task = asyncio.create_task(sender.run())
            sender.wake()
            await sender.mirrored_upto(ends.end if life == 2 else ends.refs[-4][0], deadline_s=PATIENCE_S)
            child.kill()
            child.communicate()
            reader = reader or Reader(ends)
            reader.check()
        assert reader is not None and reader.seen == 15 and sender is not None
        assert sender.stats().num_resumes >= 2
    finally:
        if task is not None and sender is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            sender.close()


async def test_a_sender_killed_in_mid_record_is_followed_by_one_that_goes_on_there(doorbell: int) -> None:
    ends = Ends(1 << 24, sizes=lambda group: 1_000_000)
    receiver = ends.receiver(fd=doorbell)
    await receiver.start()

    def reached(upto: int) -> bool:
        return receiver.stats() != () and receiver.stats()[0].head_pos >= upto

    reader = None
    async with asyncio.timeout(PATIENCE_S):
        for life in range(3):
            ends.put(5)  # whatever has come before, this needs the session of this life
            child = start_child(f"{HERE}:send", ends.origin.fd, receiver.address, fds=[ends.origin.fd])
            upto = ends.end if life == 2 else ends.refs[-4][0]
            await rung(doorbell, functools.partial(reached, upto))
            child.kill()
            child.communicate()
            reader = reader or Reader(ends)
            reader.check()
    assert reader is not None and reader.seen == 15
    assert receiver.stats()[0].num_records == 15 and receiver.stats()[0].num_sessions == 3
    await receiver.close()
