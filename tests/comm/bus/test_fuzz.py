"""Bytes that are not what was written: journal lines, records of a ring. They are refused, or what is left is as it was."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rondo.comm.bus.journal import Journal, encode, read
from rondo.comm.ring.records import Column
from rondo.comm.ring.ring import CONTROL_BYTES, RecordRef
from rondo.runtime.errors import ConfigError, CorruptData
from tests.comm.memory import TestRing
from tests.strength import strength

MANY = settings(max_examples=strength(quick=60, full=5000))
EVENTS: list[dict[str, Any]] = [
    {"event": "admit", "group": number, "step": 0, "position": number} for number in range(5)
]
LINES = [encode(event) for event in EVENTS]
WHOLE = b"".join(LINES)


@MANY
@given(st.integers(0, len(WHOLE)), st.integers(0, 12), st.binary(max_size=12))
def test_a_journal_gives_a_prefix_of_what_was_written_or_is_refused_and_goes_on_after_a_torn_line(
    at: int, taken: int, put: bytes
) -> None:
    with tempfile.TemporaryDirectory(prefix="rondo-") as folder:
        path = Path(folder) / "00000001.journal"
        path.write_bytes(WHOLE[:at] + put + WHOLE[at + taken :])
        try:
            found = list(read(path))
        except CorruptData:
            return
        assert found == EVENTS[: len(found)]
        with Journal(Path(folder)) as journal:
            journal.append([{"event": "drained"}])
        assert list(read(path)) == [*found, {"event": "drained"}]


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@MANY
@given(
    st.lists(st.binary(max_size=60) | st.builds(lambda value: encode({"event": "x", "value": value}), json), max_size=6)
)
def test_any_lines_are_events_or_a_torn_end_or_refused(lines: list[bytes]) -> None:
    with tempfile.TemporaryDirectory(prefix="rondo-") as folder:
        path = Path(folder) / "00000001.journal"
        path.write_bytes(b"".join(lines))
        try:
            for event in read(path):
                assert isinstance(event, dict)
        except (CorruptData, ConfigError) as error:
            assert str(path) in str(error)


def ring() -> tuple[TestRing, list[RecordRef]]:
    made = TestRing(4096)
    refs = []
    for group in range(3):
        column = Column("tokens", "int32", [np.full(5, group, np.int32), np.full(2, group, np.int32)])
        refs.append(made.writer.put([(group, 0, 0, 2)], [column], epoch=0, attempt=0, meta={"reservation": "r"}))
    return made, refs


@MANY
@given(st.data())
def test_a_ring_gives_what_was_put_or_is_refused_wherever_its_descriptors_were_changed(data: st.DataObject) -> None:
    made, refs = ring()
    memory = made.segment.view()
    ref = data.draw(st.sampled_from(refs))
    heads = [memory[CONTROL_BYTES + each.pos : CONTROL_BYTES + each.pos + each.num_bytes] for each in refs]
    before = [bytes(head) for head in heads]
    at = data.draw(st.integers(0, 63) | st.integers(0, ref.num_bytes - 1))
    put = data.draw(st.binary(min_size=1, max_size=16))[: ref.num_bytes - at]
    start = CONTROL_BYTES + ref.pos + at
    memory[start : start + len(put)] = put
    seen = []
    with suppress(CorruptData):
        seen = made.tail.poll()
    for each, descriptor in seen:
        assert each in refs and descriptor.spans == [[refs.index(each), 0, 0, 2]]
    for number, each in enumerate(refs):
        try:
            record = made.view.read(each.pos, each.seq)
            arrays = record.arrays("tokens")
        except CorruptData:
            assert bytes(heads[number]) != before[number]
            continue
        assert [len(array) for array in arrays] == [5, 2]
        assert each is ref or [array.tolist() for array in arrays] == [[number] * 5, [number] * 2]


@MANY
@example([(0, 4045)], b"")  # less than a header before the ring's end
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**64 - 1)), max_size=3), st.binary(max_size=512))
def test_a_ring_of_any_bytes_and_words_is_refused_or_empty(words: list[tuple[int, int]], noise: bytes) -> None:
    made, _ = ring()
    memory = made.segment.view()
    memory[CONTROL_BYTES : CONTROL_BYTES + len(noise)] = noise
    for index, value in words:
        memory[64 * index : 64 * index + 8] = value.to_bytes(8, "little")
    for look in (made.tail.poll, lambda: made.view.read(words[0][1] if words else 0, 1)):
        try:
            look()
        except CorruptData as error:
            assert str(error)
