from __future__ import annotations

from dataclasses import replace

from rondo.roles.engines.embedded.waiting import Waiting
from tests.roles.engines.engines import request


def waiting(**priorities: int) -> Waiting:
    found = Waiting()
    for name, priority in priorities.items():
        found.add(replace(request(name, 3, 4), priority=priority))
    return found


def order(of: Waiting) -> list[str]:
    names = []
    while of:
        names.append(of.first().id)
        assert of.pop(names[-1]) is not None
    return names


def test_the_highest_priority_goes_first_and_of_equal_ones_the_oldest() -> None:
    assert order(waiting(a=0, b=-1, c=3, d=0, e=3)) == ["c", "e", "a", "d", "b"]


def test_what_is_computed_anew_goes_before_all_the_last_that_was_put_there_first() -> None:
    found = waiting(urgent=9, plain=0)
    for name in ("second", "first"):
        found.put_first(request(name, 3, 4))
    assert order(found) == ["first", "second", "urgent", "plain"]


def test_what_is_taken_out_no_longer_waits() -> None:
    found = waiting(a=1, b=0)
    assert "a" in found and len(found) == 2
    assert found.pop("a") is not None and found.pop("a") is None
    assert "a" not in found and found.first().id == "b"
    found.clear()
    assert not found and "b" not in found
