from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError

import pytest

from rondo.comm.ring.litmus import Litmus, litmus
from rondo.comm.ring.words import LINE_BYTES, Words, drain, membarrier, new_doorbell, ring_doorbell
from tests.comm.memory import ROOT, MemorySegment


@pytest.fixture
def doorbell() -> Iterator[int]:
    fd = new_doorbell()
    yield fd
    os.close(fd)


def test_a_fresh_word_is_zero_and_holds_any_64_bits() -> None:
    words = Words(MemorySegment(4096).view(), 0, 4)
    assert [words.load(i) for i in range(4)] == [0, 0, 0, 0]
    words.store(3, 2**64 - 1)
    words.store(1, 1)
    assert [words.load(i) for i in range(4)] == [0, 1, 0, 2**64 - 1]


def test_words_lie_a_cache_line_apart() -> None:
    segment = MemorySegment(4096)
    Words(segment.view(), 256, 3).store(2, 0x1122334455667788)
    at = 256 + 2 * LINE_BYTES
    assert segment.view()[at : at + 8] == 0x1122334455667788.to_bytes(8, sys.byteorder)
    assert not any(segment.view()[:at]) and not any(segment.view()[at + 8 :])


def test_a_word_holds_64_bits_without_a_sign() -> None:
    words = Words(MemorySegment(4096).view(), 0, 1)
    for value in (-1, 2**64):
        with pytest.raises(ValueError):
            words.store(0, value)
    assert words.load(0) == 0


def test_a_reader_cannot_store() -> None:
    segment = MemorySegment(4096)
    words = Words(segment.view(readonly=True), 0, 1)
    with pytest.raises(TypeError):
        words.store(0, 1)
    Words(segment.view(), 0, 1).store(0, 7)
    assert words.load(0) == 7


@pytest.mark.parametrize(("offset", "count"), [(0, 65), (4096, 1), (-64, 1), (0, 0)])
def test_words_outside_their_segment_are_refused(offset: int, count: int) -> None:
    with pytest.raises(ValueError, match="must lie inside their segment"):
        Words(MemorySegment(4096).view(), offset, count)


def test_words_that_share_a_cache_line_are_refused() -> None:
    with pytest.raises(ValueError, match=r"words must start at a multiple of 64 bytes, got offset 8\."):
        Words(MemorySegment(4096).view(), 8, 1)


def test_a_drained_doorbell_is_silent_until_it_rings_again(doorbell: int) -> None:
    assert drain(doorbell) == 0
    ring_doorbell(doorbell)
    ring_doorbell(doorbell)
    assert [drain(doorbell), drain(doorbell)] == [2, 0]
    ring_doorbell(doorbell)
    assert drain(doorbell) == 1


def test_a_doorbell_that_nobody_drains_never_blocks_the_producer(doorbell: int) -> None:
    most = 2**64 - 2
    os.eventfd_write(doorbell, most)
    ring_doorbell(doorbell)
    assert drain(doorbell) == most


def test_no_wake_up_is_lost_and_no_word_is_torn_between_two_processes() -> None:
    assert litmus(20_000, deadline_s=120.0) == Litmus(num_rounds=20_000, lost=0, torn=0, unseen=0)


def test_the_litmus_test_notices_a_wake_up_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    result = litmus(10, deadline_s=0.05)
    assert result.lost == 1 and not result.ok
    with pytest.raises(FrozenInstanceError):
        result.lost = 0  # type: ignore[misc]


def test_the_ring_and_what_it_stands_on_import_no_torch() -> None:
    check = (
        "import sys, rondo.comm.ring.words, rondo.comm.ring.records, rondo.comm.ring.ring, rondo.comm.ring.litmus;"
        "print([name for name in ('torch', 'transformers', 'pydantic', 'aiohttp') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_kernel_settles_what_other_processors_have_stored() -> None:
    assert membarrier(1 << 2) and membarrier(1 << 1)  # registered, then done
    assert not membarrier(1 << 30)
