"""Segments and doorbells over a real socket, with real processes at the other end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.runtime.errors import Closed, OutOfSpace, PeerGone, Refused
from rondo.runtime.memory import segments
from rondo.runtime.memory.segments import NoSuchSegment, Registration, SegmentClient, SegmentServer
from rondo.runtime.processes.process import start_time

TOKEN = "a-token-of-the-run"
LARGE = 8 << 20
CHILD = """
import os, sys
from rondo.runtime.memory.segments import SegmentClient
client = SegmentClient(sys.argv[1], sys.argv[2])
"""


@pytest.fixture
def registered() -> list[Registration]:
    return []


@pytest.fixture
def server(tmp_path: Path, registered: list[Registration]) -> Iterator[SegmentServer]:
    def accept(registration: Registration) -> None:
        if registration.incarnation != 1:
            raise Refused(f"incarnation must be 1, got {registration.incarnation}")
        registered.append(registration)

    made = SegmentServer(tmp_path / "handover.sock", TOKEN, accept)
    made.start()
    yield made
    made.close()


def connect(server: SegmentServer) -> SegmentClient:
    return SegmentClient(server.path, TOKEN)


def child(server: SegmentServer, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", CHILD + code, str(server.path), TOKEN], capture_output=True, text=True, timeout=120
    )


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_two_clients_see_each_others_bytes(server: SegmentServer) -> None:
    with connect(server) as one, connect(server) as two:
        with one.segment("ring", 4096) as written, two.segment("ring", 4096) as read:
            written.view()[:5] = b"hello"
            assert bytes(read.view(readonly=True)[:5]) == b"hello"


def test_a_wrong_token_is_refused_and_gets_nothing(server: SegmentServer) -> None:
    with pytest.raises(Refused, match="the token must be the run's own"):
        SegmentClient(server.path, TOKEN + "x")
    assert server.stats().segments == ()


def test_a_request_before_the_token_is_not_answered(server: SegmentServer) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(60)
        raw.connect(str(server.path))
        raw.send(b'{"ask":"segment","name":"ring","num_bytes":4096}')
        data, descriptors, _, _ = socket.recv_fds(raw, 1 << 16, 4)
        assert b"Refused" in data and descriptors == []
        assert raw.recv(1 << 16) == b""
    assert server.stats().segments == ()


def test_the_first_asker_fixes_the_size(server: SegmentServer) -> None:
    with connect(server) as one, connect(server) as two:
        assert one.segment("ring", 5000).num_bytes == 5000
        assert two.segment("ring", 1 << 20).num_bytes == 5000
        assert len(two.segment("ring", 0).view()) == 5000


def test_asking_for_existing_memory_that_is_not_there_is_a_key_error(server: SegmentServer) -> None:
    with connect(server) as client:
        with pytest.raises(KeyError) as caught:
            client.segment("ring", 0)
        assert isinstance(caught.value, NoSuchSegment)
        assert str(caught.value) == "segment 'ring' must exist to be asked for without a size. Give num_bytes"
        assert client.segment("ring", 4096).num_bytes == 4096  # the connection goes on


def test_many_first_askers_at_once_get_one_memory(server: SegmentServer) -> None:
    barrier, sizes = threading.Barrier(8), []

    def ask(number: int) -> None:
        with connect(server) as client:
            barrier.wait(60)
            with client.segment("ring", 4096 + number) as segment:
                segment.view()[number] = 1
                sizes.append(segment.num_bytes)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(sizes) == 8 and len(set(sizes)) == 1
    with connect(server) as client:
        assert bytes(client.segment("ring", 0).view()[:8]) == b"\1" * 8


def test_memory_survives_the_death_of_its_producer(server: SegmentServer) -> None:
    done = child(server, "client.segment('ring', 4096).view()[:4] = b'left'; os.kill(os.getpid(), 9)")
    assert done.returncode == -9
    with connect(server) as client:
        assert bytes(client.segment("ring", 0).view()[:4]) == b"left"


def test_dropped_memory_lives_until_its_last_mapping_and_the_name_is_free(server: SegmentServer) -> None:
    with connect(server) as client:
        old = np.frombuffer(client.segment("ring", 4096).view(), np.uint8)
        old[0] = 7
        client.drop("ring")
        new = client.segment("ring", 8192)
        assert (old[0], new.num_bytes, new.view()[0]) == (7, 8192, 0)


def test_a_segment_cannot_shrink_or_grow(server: SegmentServer) -> None:
    with connect(server) as client, client.segment("ring", 4096) as segment:
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)


def test_a_read_only_view_refuses_writes(server: SegmentServer) -> None:
    with connect(server) as client, client.segment("ring", 4096) as segment:
        with pytest.raises(TypeError):
            segment.view(readonly=True)[0] = 1
        assert segment.view(readonly=True) is segment.view(readonly=True)


def test_a_view_outlives_a_segment_that_nobody_holds(server: SegmentServer) -> None:
    with connect(server) as client:
        view = client.segment("ring", 4096).view()
        view[0] = 3
        assert view[0] == 3


def test_closing_leaves_the_mapping_to_the_arrays_that_view_it(server: SegmentServer) -> None:
    with connect(server) as client:
        segment = client.segment("ring", 4096)
        array = np.frombuffer(segment.view(), np.uint8)
        segment.close()
        assert array[0] == 0
        with pytest.raises(Closed):
            segment.view()


def test_a_name_that_is_dropped_while_its_descriptor_is_sent_gives_no_other_memory(
    server: SegmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, others = segments._send, list[Any]()

    def drop_then_send(connection: socket.socket, reply: dict[str, Any], fd: int) -> None:
        if fd >= 0 and not others:
            server.drop("x")
            others.append(server.segment("y", 4096))  # a new descriptor takes the lowest number that is free
            others[0].view()[:1] = b"y"
        send(connection, reply, fd)

    monkeypatch.setattr(segments, "_send", drop_then_send)
    with connect(server) as client, client.segment("x", 4096) as found:
        assert bytes(found.view()[:1]) == bytes(1) and len(others) == 1
    others.clear()
    with connect(server) as client:
        client_end = client.doorbell("x")
        assert str(Path(f"/proc/self/fd/{client_end}").readlink()) == "anon_inode:[eventfd]" and len(others) == 1
        os.close(client_end)


def test_a_first_asker_who_waited_for_memory_that_was_dropped_gets_what_the_next_asker_gets(
    server: SegmentServer,
) -> None:
    dropped = server._memories["x"] = segments._Memory()
    with ThreadPoolExecutor(1) as threads, connect(server) as client:
        with dropped.lock:
            waiting = threads.submit(client.segment, "x", 4096)
            threading.Thread(target=server.drop, args=("x",)).start()
            while "x" in server._memories and server._memories["x"] is dropped:
                pass
        with waiting.result() as first, client.segment("x", 4096) as second:
            first.view()[:1] = b"1"
            assert bytes(second.view()[:1]) == b"1"


def test_more_memory_than_there_is_is_an_error_and_leaves_nothing(server: SegmentServer) -> None:
    with connect(server) as client:
        with pytest.raises(
            OutOfSpace, match=r"slab must fit into the \d+ bytes of memory that are free in .*, got 4611"
        ):
            client.segment("slab", 1 << 62)
        assert server.stats().segments == ()
        assert client.segment("slab", 4096).num_bytes == 4096


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Making pages of "large" segments begins with the first event, and ends with the second."""
    begun, end, fallocate = threading.Event(), threading.Event(), os.posix_fallocate

    def made(fd: int, at: int, num_bytes: int) -> None:
        if num_bytes >= LARGE:
            begun.set()
            assert end.wait(300)
        fallocate(fd, at, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", made)
    yield begun, end
    end.set()


def test_what_was_granted_counts_while_it_is_made(
    tmp_path: Path, slow: tuple[threading.Event, threading.Event]
) -> None:
    with contextlib.ExitStack() as opened:
        free = LARGE + 4096
        server = SegmentServer(tmp_path / "handover.sock", TOKEN, lambda _: None, free=lambda: (free, "the cgroup"))
        server.start()
        opened.callback(server.close)
        client, pool = opened.enter_context(connect(server)), opened.enter_context(ThreadPoolExecutor())
        opened.callback(slow[1].set)
        first = pool.submit(client.segment, "first", LARGE)
        assert slow[0].wait(60)
        with pytest.raises(OutOfSpace, match="fit into the 4096 bytes of memory that are free in the cgroup, got 8192"):
            client.segment("second", 8192)
        assert client.segment("second", 4096).num_bytes == 4096
        slow[1].set()
        assert first.result(60).num_bytes == LARGE
        assert client.segment("third", LARGE).num_bytes == LARGE  # by now it is the kernel's to count
        with pytest.raises(OutOfSpace):
            client.segment("fourth", 1 << 62)  # and what was refused is not counted
        assert client.segment("fifth", LARGE).num_bytes == LARGE


def test_a_client_is_answered_while_large_memory_is_made_for_it(
    server: SegmentServer, slow: tuple[threading.Event, threading.Event]
) -> None:
    with connect(server) as client, ThreadPoolExecutor() as pool:
        askers = [pool.submit(client.segment, "large", LARGE) for _ in range(3)]
        assert slow[0].wait(60)
        beside = pool.submit(client.segment, "small", 4096)
        try:
            assert beside.result(60).num_bytes == 4096
        finally:
            slow[1].set()
        for number, asker in enumerate(askers):  # all have the same memory
            asker.result(60).view()[number] = 1
        assert bytes(client.segment("large", 0).view()[:3]) == b"\1" * 3


def test_a_doorbell_rung_in_one_process_is_heard_in_another(server: SegmentServer) -> None:
    with connect(server) as client:
        doorbell = client.doorbell("ring")
        with pytest.raises(BlockingIOError):
            os.eventfd_read(doorbell)
        assert child(server, "os.eventfd_write(client.doorbell('ring'), 2)").returncode == 0
        assert os.eventfd_read(doorbell) == 2
        os.close(doorbell)


def test_descriptors_do_not_pass_to_programs_that_are_started(server: SegmentServer) -> None:
    with connect(server) as client, client.segment("ring", 4096) as segment:
        doorbell = client.doorbell("ring")
        assert not os.get_inheritable(segment.fd) and not os.get_inheritable(doorbell)
        os.close(doorbell)


def test_a_process_registers_as_itself_only(server: SegmentServer, registered: list[Registration]) -> None:
    pid = os.getpid()
    mine = Registration("actor-0", 1, 0, pid, start_time(pid), os.getsid(0))
    with connect(server) as client:
        client.register("actor-0", 1, 0, pid, mine.start_time, mine.session)
        with pytest.raises(Refused, match="pid must be the caller's own, got 1 from"):
            client.register("actor-0", 1, 0, 1, 1, 1)
        with pytest.raises(Refused, match="incarnation must be 1, got 2"):
            client.register("actor-0", 2, 0, pid, mine.start_time, mine.session)
    assert registered == [mine]


def test_nonsense_is_answered_and_the_connection_goes_on(server: SegmentServer) -> None:
    with connect(server) as client:
        with pytest.raises(ValueError, match="a segment's name must have 1 to 200 bytes"):
            client.segment("", 10)
        with pytest.raises(KeyError):
            client._ask(60.0, ask="segment")
        assert client.segment("ring", 10).num_bytes == 10


def test_clear_drops_what_begins_with_a_prefix(server: SegmentServer) -> None:
    with connect(server) as client:
        for name in ("ring/a", "ring/b", "slab"):
            client.segment(name, 4096)
        server.clear("ring/")
        assert server.stats().segments == (("slab", 4096),)
        assert server.stats().num_bytes == 4096


def test_closing_the_server_hangs_up_and_removes_the_socket(tmp_path: Path) -> None:
    server = SegmentServer(tmp_path / "handover.sock", TOKEN, lambda registration: None)
    server.start()
    client = connect(server)
    segment = client.segment("ring", 4096)
    server.close()
    server.close()
    with pytest.raises(PeerGone):
        client.segment("ring", 4096)
    assert segment.view()[0] == 0
    assert not server.path.exists()
    assert server.stats().segments == () and server.stats().num_clients == 0
    with pytest.raises(PeerGone, match="the supervisor must listen"):
        connect(server)
    client.close()
    with pytest.raises(Closed):
        client.segment("ring", 4096)


def test_no_descriptor_is_left_behind(tmp_path: Path) -> None:
    before = num_descriptors()
    server = SegmentServer(tmp_path / "handover.sock", TOKEN, lambda registration: None)
    server.start()
    with connect(server) as client:
        segment = client.segment("ring", 4096)
        doorbell = client.doorbell("ring")
        segment.close()
        os.close(doorbell)
    server.close()
    assert num_descriptors() <= before  # garbage of other tests may go meanwhile
