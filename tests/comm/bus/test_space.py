from __future__ import annotations

from rondo.comm.bus.space import Space


def space(capacity: int = 4096) -> Space:
    made = Space()
    made.add("ring", capacity, "rollout-0")
    return made


def test_a_reservation_is_refused_when_the_others_could_not_all_be_put() -> None:
    rings = space()
    assert rings.has_room("ring", [1024, 1024])
    rings.reserve("group.0.0", "ring", [1024, 1024])
    assert not rings.has_room("ring", [2048, 1024])
    rings.release("group.0.0")
    assert rings.has_room("ring", [2048, 1024])


def test_puts_use_up_their_reservation_and_the_rest_returns_with_the_last_one() -> None:
    rings = space()
    rings.reserve("group.0.0", "ring", [1024, 1024])
    rings.record("ring", 0, 128, 1, "group.0.0", 1)
    assert rings.rings["ring"].reserved_bytes == 1024
    rings.record("ring", 128, 128, 1, "group.0.0", 1)
    assert rings.rings["ring"].reserved == {}


def test_the_tail_moves_over_free_records_only_and_in_log_order() -> None:
    rings = space()
    for pos in (0, 128, 256):
        rings.record("ring", pos, 128, 1, "none", 1)
    assert rings.unuse("ring", 128) is None
    assert rings.unuse("ring", 0) == 256
    assert rings.unuse("ring", 256) == 384
    assert rings.rings["ring"].idle


def test_a_record_shared_by_groups_stays_until_the_last_of_them() -> None:
    rings = space()
    rings.record("ring", 0, 128, 2, "none", 2)
    assert rings.unuse("ring", 0) is None
    assert rings.unuse("ring", 0) == 128


def test_a_dump_loads_into_an_equal_space() -> None:
    rings = space()
    rings.reserve("group.0.0", "ring", [1024])
    rings.record("ring", 0, 128, 1, "other", 1)
    assert Space.load(rings.dump()).dump() == rings.dump()
