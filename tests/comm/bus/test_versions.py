from __future__ import annotations

from rondo.comm.bus.versions import Versions


def published(*numbers: int) -> Versions:
    versions = Versions(2)
    for number in numbers:
        slot = versions.writable()
        assert slot is not None
        versions.begin(slot, number)
        versions.publish(slot, number, 100 + number)
    return versions


def test_the_newest_version_is_never_written_over() -> None:
    versions = published(0, 1, 2, 3)
    newest = versions.newest
    assert newest is not None and versions.slots[newest].version == 3
    assert versions.writable() == 1 - newest


def test_a_held_slot_is_not_writable_until_its_reader_proves_lets_go_or_dies() -> None:
    versions = published(0, 1)
    old = versions.writable()
    assert old is not None
    versions.hold(old, "rollout-0/rollout")
    assert versions.writable() is None
    versions.prove("rollout-0/rollout", 1)
    assert versions.writable() == old
    versions.hold(old, "rollout-0/rollout")
    versions.let_go("rollout-0/rollout")
    assert versions.writable() == old and versions.proved == {"rollout-0/rollout": 1}
    versions.hold(old, "rollout-0/rollout")
    versions.forget("rollout-0")
    assert versions.writable() == old and versions.proved == {}


def test_a_repeated_publication_leaves_its_readers_their_hold() -> None:
    versions = published(0, 1)
    newest = versions.newest
    assert newest is not None
    versions.hold(newest, "rollout-0/rollout")
    versions.publish(newest, 1, 101)  # its answer was lost
    other = versions.writable()
    assert other is not None
    versions.begin(other, 2)
    versions.publish(other, 2, 102)
    assert versions.writable() is None


def test_roles_of_one_process_hold_and_prove_apart() -> None:
    versions = published(0)
    versions.prove("actor-0/actor_fwd", 0)
    versions.hold(0, "actor-0/rollout")
    versions.prove("actor-0/actor_fwd", 0)
    assert versions.slots[0].holders == {"actor-0/rollout"}


def test_a_half_written_slot_of_a_dead_publisher_was_never_ready() -> None:
    versions = published(0)
    slot = versions.writable()
    assert slot is not None
    versions.begin(slot, 1)
    versions.abort_writes()
    assert versions.slots[slot].state == "free" and versions.slots[versions.newest or 0].version == 0


def test_a_dump_loads_into_an_equal_ledger() -> None:
    versions = published(0, 1)
    versions.hold(0, "rollout-0/rollout")
    assert Versions.load(versions.dump()).dump() == versions.dump()
