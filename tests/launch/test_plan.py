"""From settings to what is started: where processes compute."""

from __future__ import annotations

from rondo.launch.groups import RoleGroup
from rondo.launch.plan import first_devices


def test_every_process_that_asks_for_a_device_has_one_of_its_own() -> None:
    groups = [
        RoleGroup(name="rollout", roles=("rollout",), replicas=3, devices=1),
        RoleGroup(name="advantages", roles=("advantages",)),
        RoleGroup(name="actor", roles=("actor",), processes=4, devices=1),
        RoleGroup(name="reference", roles=("reference",), devices=1),
    ]
    assert first_devices(groups) == {"rollout-0": 0, "rollout-1": 1, "rollout-2": 2, "actor-0": 3, "reference-0": 7}
