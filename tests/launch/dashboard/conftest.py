"""How long a look at a run's files takes: what it reads depends on nothing but its files."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from rondo.launch.dashboard import metrics, samples


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question takes a microsecond, and nothing else takes any time."""
    asked = itertools.count()
    for module in (metrics, samples):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(asked) * 1e-6))
