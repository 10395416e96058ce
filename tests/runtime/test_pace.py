"""How long a computation may take, with a made-up clock; what the supervisor would see of it."""

from __future__ import annotations

import pytest

from rondo.runtime.config import SupervisionConfig
from rondo.runtime.pace import Work, limit_s
from rondo.runtime.supervision.heartbeat import Beat, HeartbeatWriter, read_beats, segment_bytes

LIMITS = SupervisionConfig(work_factor=10, work_floor_s=60, work_ceiling_s=1000)


class Seen:
    """One process's words, and its clock."""

    def __init__(self, at_least_s: float = 0.0) -> None:
        self.now = 100.0
        self._memory = memoryview(bytearray(segment_bytes(1)))
        heartbeat = HeartbeatWriter(self._memory, 0, lambda: self.now)
        self.work = Work(heartbeat, "train", LIMITS, at_least_s, lambda: self.now)

    def beat(self) -> Beat:
        return read_beats(self._memory)[0]

    def take(self, seconds: float) -> float:
        """One computation; the limit that it had."""
        with self.work:
            limit = self.beat().section_limit_s - self.now
            self.now += seconds
        return limit


@pytest.mark.parametrize(("longest_s", "limit"), [(None, 1000), (0.01, 60), (6, 60), (20, 200), (500, 1000)])
def test_the_limit_is_a_multiple_of_the_longest_between_floor_and_ceiling(
    longest_s: float | None, limit: float
) -> None:
    assert limit_s(LIMITS, longest_s) == limit


def test_limits_follow_what_was_seen_and_the_first_has_the_ceiling() -> None:
    seen = Seen()
    assert [seen.take(seconds) for seconds in (2, 30, 4, 1)] == [1000, 60, 300, 300]
    assert Seen(at_least_s=5000).take(1) == 5000
    bounded = Seen(at_least_s=5000)
    with bounded.work:
        assert bounded.beat().patient


def test_a_computation_is_a_section_that_excuses_no_silence_and_nothing_is_open_beside_it() -> None:
    seen = Seen()
    with seen.work:
        beat = seen.beat()
        assert (beat.section, beat.section_since_s, beat.section_limit_s) == ("train", 100.0, 1100.0)
        assert not beat.silent and not beat.patient and beat.beat_s == 0
    assert seen.beat() == Beat(0, 0.0, 0)


def test_of_several_at_once_the_time_counts_in_which_none_ends() -> None:
    seen = Seen()
    with seen.work:
        seen.now += 5
        with seen.work:
            assert seen.beat().section_since_s == 100.0
            seen.now += 3
        assert (seen.beat().section_since_s, seen.beat().section_limit_s) == (108.0, 108.0 + 80)
        seen.now += 7
    assert seen.take(1) == 80


def test_each_part_of_a_long_computation_has_the_limit() -> None:
    seen = Seen()
    with seen.work:
        for _ in range(1000):
            seen.now += 9
            seen.work.moved()
        assert seen.beat().section_limit_s == seen.now + 90
