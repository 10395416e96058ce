"""What the autoscaler does under the loads that are measured: it follows them, and does not turn back and forth."""

from __future__ import annotations

import pytest

from benchmarks.autoscale import RULES, follow, kept, ours, relax, scenarios

SCENARIOS = scenarios(kept())


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_load_is_followed_from_one_replica_with_hardly_a_turn(name: str) -> None:
    found = follow(SCENARIOS[name], ours(RULES), RULES, 1)
    assert found["turns"] <= 1 and found["above"] < 0.06 and 2 <= found["most"] <= 5


def test_a_burst_and_a_drift_are_followed_down_too() -> None:
    found = [follow(SCENARIOS[name], ours(RULES), RULES, 1) for name in ("burst", "drift")]
    assert all(each["in"] >= 2 and each["last"] <= 3 for each in found)


def test_the_world_tells_rules_apart() -> None:
    """Else it would show nothing: one of no replica more, and those that look at engines alone."""
    fixed = follow(SCENARIOS["steady"], None, RULES, 1)
    assert fixed["above"] == 1.0 and fixed["waits"] > 0.3
    assert follow(SCENARIOS["steady"], relax(RULES), RULES, 1)["last"] == 7
