"""A run whose data do not fit into memory: killed with all of its processes, it goes on with the rows that it would have had."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.data import make, whole_run
from tests.strength import LONG


@pytest.mark.skipif(not LONG, reason="makes 300 MB of rows and three runs")
def test_a_killed_run_over_windows_of_groups_trains_the_rows_of_one_that_nobody_touches(tmp_path: Path) -> None:
    make(tmp_path / "rows", 1_200_000, 10_000)  # beyond what is held in memory, so that rows are read by windows
    found = whole_run(tmp_path / "rows", tmp_path / "runs", windows=4)
    assert found["equal"] and found["steps"] == 12 and found["rows"] == 12 * 8 * 2, found
