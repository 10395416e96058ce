"""Rings as the coordinator reads them on a processor that shows stores in any order, which this one is made to look like."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rondo.comm.bus import rings as rings_module
from rondo.comm.bus.puts import put_event
from rondo.comm.bus.rings import Rings
from rondo.comm.ring import ring as ring_module
from rondo.comm.ring.records import Column
from rondo.comm.ring.ring import CONTROL_BYTES, RingTail, RingWriter
from rondo.comm.ring.words import drain
from tests.comm.inprocess import Store

NAME = "ring/rollout-0/0"


class Weak:
    """One ring whose records become visible late: `put` shows the head, and bytes below it with the doorbell or `settle`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store()
        self.segment = self.store.segment(NAME, 1 << 16)
        self.bell = self.store.doorbell(NAME)
        self.order: list[str] = []
        self._late: list[tuple[int, bytes]] = []
        self._data = self.segment.view()[CONTROL_BYTES:]
        self._writer = RingWriter(self.segment, None, NAME)
        load, words = RingTail.head.fget, RingTail
        assert load is not None

        def head(tail: RingTail) -> int:
            self.order.append("head")
            return load(tail)

        def drained(fd: int) -> int:
            rang = drain(fd)
            self.order.append(f"drain {rang}")
            return rang

        monkeypatch.setattr(words, "head", property(head))
        monkeypatch.setattr(rings_module, "drain", drained)
        monkeypatch.setattr(rings_module, "PEEK_IS_SAFE", False)
        monkeypatch.setattr(ring_module, "settle", self._settled)

    def put(self, group: int, *, rings: bool) -> None:
        column = Column("tokens", "int32", [np.full(4, group, np.int32)])
        ref = self._writer.put([(group, 0, 0, 1)], [column], epoch=0, attempt=0, meta={"reservation": "r"})
        at = ref.pos % self._writer.capacity
        if rings:
            self.ring()
        else:
            self._late.append((at, bytes(self._data[at : at + ref.num_bytes])))
            self._data[at : at + ref.num_bytes] = bytes(ref.num_bytes)

    def ring(self) -> None:
        self._settled()
        os.eventfd_write(self.bell, 1)

    def _settled(self) -> None:
        self.order.append("settle")
        for at, data in self._late:
            self._data[at : at + len(data)] = data
        self._late.clear()


@pytest.fixture
def weak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Weak]:
    made = Weak(monkeypatch)
    yield made
    made.store.close()


def groups(events: list[dict[str, Any]]) -> list[int]:
    return [event["spans"][0][0] for event in events]


async def test_a_record_whose_doorbell_has_not_rung_is_not_looked_at(weak: Weak) -> None:
    seen: list[Any] = []
    rings = Rings(weak.store, seen.append, lambda: None, put_event)  # type: ignore[arg-type]
    rings.open(NAME)
    weak.put(1, rings=False)
    weak.order.clear()
    assert rings.read([NAME]) == [] and weak.order == ["drain 0"]
    weak.ring()
    weak.order.clear()
    assert groups(rings.read([NAME])) == [1]
    assert weak.order[:3] == ["drain 1", "head", "settle"]
    rings.close()


async def test_a_record_behind_one_that_has_rung_is_read_only_as_it_was_put(weak: Weak) -> None:
    rings = Rings(weak.store, lambda _: None, lambda: None, put_event)  # type: ignore[arg-type]
    rings.open(NAME)
    weak.put(1, rings=True)
    weak.put(2, rings=False)  # its head is there, and nothing else
    assert groups(rings.read([NAME])) == [1, 2]
    rings.close()


async def test_what_never_rang_is_read_once_its_producer_is_dead_and_by_a_coordinator_that_starts(weak: Weak) -> None:
    rings = Rings(weak.store, lambda _: None, lambda: None, put_event)  # type: ignore[arg-type]
    rings.open(NAME)
    weak.put(1, rings=False)
    assert groups(rings.read([NAME], once_more=True)) == [1]
    rings.close()


async def test_the_loop_reads_what_rings(weak: Weak) -> None:
    came = asyncio.get_running_loop().create_future()
    rings = Rings(weak.store, came.set_result, lambda: None, put_event)  # type: ignore[arg-type]
    rings.open(NAME)
    weak.put(1, rings=True)
    assert groups(await asyncio.wait_for(came, 60)) == [1]
    rings.close()
