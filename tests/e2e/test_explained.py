"""`rondo explain` on a whole run in which one role after another is slow: that is told as a wait for it, whatever others take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.report.explain import show
from rondo.launch.report.records import step_records
from tests.e2e.runs import left_behind
from tests.e2e.shell import Rondo, to_the_end
from tests.e2e.slowed import NAME, ORDER, SLOW_S, steps_of

_SCORERS = ("reference", "actor_fwd")


def test_what_a_slow_role_holds_up_is_told_as_a_wait_for_it(tmp_path: Path, capfdbinary: Any, rondo: Rondo) -> None:
    run = tmp_path / NAME
    ended = to_the_end(rondo, ["-m", "tests.e2e.slowed", str(tmp_path)], run)
    assert ended.code == 0, ended.output
    assert all(record["own_entropy"] == record["entropy"] for record in step_records(run / "metrics.jsonl"))
    least = 0.99 * SLOW_S  # the clock of the timeline may be set meanwhile
    for role in ORDER:
        assert show(run, steps_of(role), as_json=True) == 0
        sys.stdout.flush()
        told = orjson.loads(capfdbinary.readouterr().out)
        # Of two that score the same rows at once, the trainer waits for the later one, which need not be the slow one.
        parts = (
            [f"wait for {each}" for each in (_SCORERS if role in _SCORERS else (role,))]
            if role != "actor"
            else ["train"]
        )
        assert sum(told["trainer"].get(part, 0.0) for part in parts) >= least, (role, told)
        if role in told["roles"]:  # rewards are worked out by the rollout's processes
            assert told["roles"][role]["busy"] * told["step_s"] >= least, (role, told)
        assert told["findings"][0]["why"], (role, told)
    assert left_behind(tmp_path) == []
