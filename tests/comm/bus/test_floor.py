"""The floor: too few healthy engines are told, waited for by name, and given up after the deadline; enough of them is enough."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.comm.bus.floor import Floor
from rondo.runtime.waits import pending
from tests.comm.served import served


@pytest.mark.parametrize(("then", "kind", "field"), [("stop", "stop", "reason"), ("fail", "fatal", "cause")])
def test_too_few_engines_are_told_once_then_given_up_once_and_told_again_when_they_are_back(
    then: str, kind: str, field: str
) -> None:
    floor = Floor(3, 60.0, then)
    assert floor.look(0.0) == []  # nobody has told of an engine yet: they start
    floor.tell("rollout-0", 0, healthy=2, of=2)
    floor.tell("rollout-1", 0, healthy=2, of=2)
    assert floor.look(1.0) == [] and floor.why == ""
    floor.tell("rollout-1", 0, healthy=1, of=2)
    assert floor.look(2.0) == []  # degraded, and it goes on
    floor.forget("rollout-1")
    below = {"healthy": 2, "of": 2, "least": 3, "deadline_s": 60.0, "then": then}
    assert floor.look(3.0) == [("engines_below", below)]
    assert floor.look(62.9) == [] and floor.why == "2 of 2 engines are healthy, 3 must be"
    [(told, data)] = floor.look(63.0)
    assert told == kind and data[field].startswith(f"{floor.why} (rollout.min_engines), for 60 s")
    assert floor.look(64.0) == []
    floor.tell("rollout-1", 0, healthy=1, of=1)
    assert floor.look(65.0) == [("engines_back", {"healthy": 3, "of": 3, "after_s": 62.0})]
    floor.forget("rollout-0")
    assert [kind for kind, _ in floor.look(66.0)] == ["engines_below"]


def test_a_floor_of_none_is_never_missed() -> None:
    floor = Floor(0, 1.0, "fail")
    floor.tell("rollout-0", 0, healthy=0, of=2)
    assert floor.look(0.0) == floor.look(100.0) == []


def reports(run: Any) -> list[tuple[str, dict[str, Any]]]:
    return [run.coordinator._reports.get_nowait() for _ in range(run.coordinator._reports.qsize())]


async def test_a_dead_replica_takes_its_engines_along_and_the_wait_for_them_is_listed_until_they_are_back() -> None:
    async with served() as run:
        run.coordinator._floor = Floor(2, 60.0, "stop")
        first, second = await run.bus("rollout-0"), await run.bus("rollout-1")
        for bus in (first, second):
            await bus.call("engines", 0, 1, 1)
        run.coordinator.tick()
        assert reports(run) == [] and run.coordinator.status()["engines"]["healthy"] == 2
        await run.die("rollout-1")
        run.coordinator.tick()
        assert [kind for kind, _ in reports(run)] == ["engines_below"]
        assert run.coordinator.status()["engines"]["below"] == "1 of 1 engines are healthy, 2 must be"
        [wait] = [each for each in pending() if each.name == "engines"]
        assert (wait.peer, wait.deadline_s) == ("rollout: 1 of 1 engines are healthy, 2 must be", 60.0)
        again = await run.bus("rollout-1", 2)
        await again.call("engines", 0, 1, 1)
        run.coordinator.tick()
        assert [kind for kind, _ in reports(run)] == ["engines_back"]
        assert not [each for each in pending() if each.name == "engines"]
