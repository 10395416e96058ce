"""A link between two network namespaces: its cable is pulled, or carries little."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
from collections.abc import Iterator

import pytest

from rondo.comm.ring.words import new_doorbell
from tests.comm.links.ends import PATIENCE_S, Ends, Reader, rung
from tests.comm.memory import start_child

HERE = "tests.comm.links.ends"
LEFT, RIGHT = f"rondo-l{os.getpid()}", f"rondo-r{os.getpid()}"


def run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")


@pytest.fixture
def cable() -> Iterator[None]:
    """Two namespaces and a cable between `left` and `right`."""
    made = []
    try:
        try:
            for name in (LEFT, RIGHT):
                run(f"ip netns add {name}")
                made.append(name)
            run(f"ip -n {LEFT} link add left type veth peer name right netns {RIGHT}")
            for name, end, address in ((LEFT, "left", "10.99.0.1/24"), (RIGHT, "right", "10.99.0.2/24")):
                run(f"ip -n {name} addr add {address} dev {end}")
                run(f"ip -n {name} link set {end} up")
            run(f"tc -n {LEFT} qdisc add dev left root tbf rate 100mbit burst 64kb latency 50ms")
        except OSError as error:
            pytest.skip(f"network namespaces, veth and tc must be permitted here: {error}")
        yield
    finally:
        for name in made:
            run(f"ip netns del {name}")


@pytest.mark.parametrize("cuts", [0, 2])
async def test_records_cross_a_slow_cable_each_once_however_often_it_is_pulled(cable: None, cuts: int) -> None:
    doorbell = new_doorbell()
    ends = Ends(1 << 23, sizes=lambda group: 150_000)
    ends.put(20)
    children = []

    async def line(child: subprocess.Popen[bytes]) -> str:
        assert child.stdout is not None
        return (await asyncio.to_thread(child.stdout.readline)).decode().strip()

    def head() -> int:
        return reader.tail.head if reader else 0

    def reached(upto: int) -> bool:
        return head() >= upto

    reader: Reader | None = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            there = start_child(
                f"{HERE}:receive_in", RIGHT, ends.copy.fd, doorbell, "10.99.0.2", fds=[ends.copy.fd, doorbell]
            )
            children.append(there)
            address = await line(there)
            here = start_child(f"{HERE}:send_in", LEFT, ends.origin.fd, address, fds=[ends.origin.fd])
            children.append(here)
            assert await line(here) == "open"
            reader = Reader(ends)
            for _ in range(cuts):
                await rung(doorbell, functools.partial(reached, ends.refs[-10][0]))
                run(f"ip -n {LEFT} link set left down")
                ends.put(15)  # seen by the sender when it connects again: there is always more to come
                assert await line(here) == "lost"
                assert head() < ends.end
                run(f"ip -n {LEFT} link set left up")
                assert await line(here) == "open"
            await rung(doorbell, lambda: head() == ends.end)
            reader.check()
            assert reader.seen == len(ends.refs)
    finally:
        for child in children:
            child.kill()
            child.communicate()
        os.close(doorbell)
