"""`rondo explain` on a whole run in which one role after another is made the slowest: its words are right about each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.report.explain import show
from rondo.launch.report.records import step_records
from tests.e2e.runs import left_behind
from tests.e2e.shell import Rondo, to_the_end
from tests.e2e.slowed import NAME, steps_of

WORDS = {
    "rollout": ("rollout limits this run.", "rollout_replicas=2"),
    "reward": ("rewards limit this run.", "reward.num_workers=2"),
    "reference": ("reference limits this run.", "reference_replicas=2"),
    "actor_fwd": ("actor_fwd limits this run.", "actor_fwd_replicas=2"),
    "actor": ("actor limits this run: the others keep up with the trainer.", "give it more: actor_processes=2"),
}


def test_the_role_that_is_slowest_is_named_with_what_to_change(tmp_path: Path, capfdbinary: Any, rondo: Rondo) -> None:
    run = tmp_path / NAME
    ended = to_the_end(rondo, ["-m", "tests.e2e.slowed", str(tmp_path)], run)
    assert ended.code == 0, ended.output
    assert all(record["own_entropy"] == record["entropy"] for record in step_records(run / "metrics.jsonl"))
    for role, (text, change) in WORDS.items():
        assert show(run, steps_of(role), as_json=True) == 0
        sys.stdout.flush()
        told = capfdbinary.readouterr().out
        found = orjson.loads(told)["findings"][0]
        assert found["text"] == text, (role, told)
        assert found["change"][0].startswith(change), (role, found)
    assert left_behind(tmp_path) == []
