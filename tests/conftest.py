"""How the whole suite runs: what hypothesis tries, which files come first, and what the garbage collector leaves alone.

Owns nothing of any test. Examples are the same in every run and have no time limit, so that neither chance nor a busy machine
decides whether the suite passes; RONDO_HYPOTHESIS=random looks for new ones. How many there are: `strength.py`.

    RONDO_HYPOTHESIS=random pytest tests/comm/test_records.py
    RONDO_TEST_LONG=1 pytest tests/comm                             # as `make test-long`
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("random", settings.get_profile("steady"), derandomize=False)
settings.load_profile(os.environ.get("RONDO_HYPOTHESIS", "steady"))

LONGEST = (
    "test_docs.py", "parity/test_parity.py", "e2e/test_runs.py", "chaos/test_bus.py", "e2e/test_updates.py",
    "e2e/test_omni.py", "e2e/test_evaluated.py", "e2e/test_explained.py", "e2e/test_routed.py",
    "runtime/test_supervisor.py",
    "comm/test_groups.py", "comm/partitions/test_crash_points.py",
    "launch/test_check_target.py", "models/test_fsdp_media.py", "models/test_fsdp.py", "roles/test_media.py",
    "comm/links/test_collective.py", "comm/test_crash_points.py", "comm/test_model.py",
)  # fmt: skip
"""Files that take longest, longest first: begun last, one of them would keep a single core busy at the end."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector, and what was collected is never walked again: modules and tests stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others as they come. Stable, so that each file stays in one piece."""
    place = {f"tests/{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))
