"""Heartbeats: what a process writes is what the supervisor reads."""

from __future__ import annotations

from rondo.runtime.supervision.heartbeat import Beat, HeartbeatWriter, ask_to_leave, read_beats, segment_bytes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_slot_holds_beat_progress_and_leaving() -> None:
    memory, clock = memoryview(bytearray(segment_bytes(2))), Clock()
    writer = HeartbeatWriter(memory, 1, clock)
    writer.beat()
    writer.progress()
    writer.progress()
    assert read_beats(memory) == (Beat(0, 0.0, 0), Beat(1, 100.0, 2))
    writer.leave()
    assert read_beats(memory)[1].left


def test_of_several_open_sections_the_nearest_limit_shows() -> None:
    memory, clock = memoryview(bytearray(segment_bytes(1))), Clock()
    writer = HeartbeatWriter(memory, 0, clock)

    def seen() -> tuple[str, float]:
        beat = read_beats(memory)[0]
        return beat.section, beat.section_limit_s

    with writer.section("save", 600):
        assert seen() == ("save", 700.0)
        with writer.section("sync", 60):
            assert seen() == ("sync", 160.0)
        assert seen() == ("save", 700.0)
    assert seen() == ("", 0.0)


def test_the_end_of_a_section_is_a_sign_of_life() -> None:
    memory, clock = memoryview(bytearray(segment_bytes(1))), Clock()
    writer = HeartbeatWriter(memory, 0, clock)
    with writer.section("load", 600):
        clock.now = 400.0
    assert read_beats(memory)[0].beat_s == 400.0


def test_a_save_is_seen_beside_a_section_with_a_nearer_limit_and_silence_is_excused_where_any_excuses_it() -> None:
    memory = memoryview(bytearray(segment_bytes(1)))
    writer = HeartbeatWriter(memory, 0, Clock())
    with writer.section("save", 600), writer.section("train", 60, silent=False, patient=False):
        (beat,) = read_beats(memory)
        assert beat.section == "train" and beat.silent and beat.patient
        assert beat.save_limit_s - beat.section_limit_s == 540
    with writer.section("reward", 60, silent=False):
        (beat,) = read_beats(memory)
        assert beat.patient and not beat.silent and not beat.save_limit_s


def test_a_long_section_name_is_cut_and_leaves_the_next_slot_alone() -> None:
    memory = memoryview(bytearray(segment_bytes(2)))
    with HeartbeatWriter(memory, 0, Clock()).section("x" * 500, 1):
        first, second = read_beats(memory)
    assert (first.section, second) == ("x" * 64, Beat(1, 0.0, 0))


def test_every_rank_can_be_asked_to_leave() -> None:
    memory = memoryview(bytearray(segment_bytes(2)))
    writers = [HeartbeatWriter(memory, rank, Clock()) for rank in (0, 1)]
    assert not any(writer.asked_to_leave for writer in writers)
    ask_to_leave(memory)
    assert all(writer.asked_to_leave for writer in writers)
    assert read_beats(memory) == (Beat(0, 0.0, 0), Beat(1, 0.0, 0))
