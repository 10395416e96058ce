"""What `rondo bench gpu` asks of servers, on small sizes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import Options
from benchmarks.gpu_parts import gap, sglang
from tests.sglang.servers import environment, python
from tests.strength import LONG


@pytest.mark.skipif(not LONG, reason="starts two servers: RONDO_TEST_LONG=1")
def test_start_and_updates_of_a_server_are_timed_and_its_log_probs_are_off_by_rounding_alone() -> None:
    options = Options("cpu", tiny=True, sglang=python(), environment=environment())
    told = list[dict[str, Any]]()
    sglang.measure(options, told.append)
    assert told[-1]["start_s"] > 0 and {"disk", "tensor", "distributed"} <= told[-1]["paths"].keys()
    assert [way for way, row in told[-1]["paths"].items() if "error" in row] == []
    gap.measure(options, told.append)
    assert 0 < told[-1]["sglang"]["log_prob_gap"] < 0.1
