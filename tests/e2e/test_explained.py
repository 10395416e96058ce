"""`rondo explain` on whole runs in which one role after another is made the slowest: its words are right about each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.e2e.runs import ROOT, finish, left_behind, start
from tests.e2e.slowed import ORDER, steps_of

ONE_THREAD = "{} and the trainer share one process: what one computes, the other waits for."
TEXTS = {
    "fully_async": {
        "rollout": "rollout limits this run.",
        "reward": "rewards limit this run.",
        "reference": "reference limits this run.",
        "actor_fwd": "actor_fwd limits this run.",
        "actor": "actor limits this run: the others keep up with the trainer.",
    },
    "hybrid": {
        "rollout": "rollout limits this run.",
        "reference": ONE_THREAD.format("reference"),
        "actor": "actor limits this run: the others keep up with the trainer.",
    },
}
CHANGES = {
    "fully_async": {
        "rollout": "rollout_replicas=2",
        "reward": "reward.num_workers=2",
        "reference": "reference_replicas=2",
        "actor_fwd": "actor_fwd_replicas=2",
        "actor": "give it more: actor_processes=2",
    },
    "hybrid": {
        "rollout": "rollout_replicas=2",
        "reference": "more threads or a device for that process",
        "actor": "give it more: processes=2",
    },
}


@pytest.mark.parametrize("mode", ["hybrid", "fully_async"])
def test_the_role_that_is_slowest_is_named_with_what_to_change(mode: str, tmp_path: Path) -> None:
    ended = finish(start([sys.executable, "-m", "tests.e2e.slowed", mode, str(tmp_path)], ROOT), tmp_path / mode)
    assert ended.code == 0, ended.output
    for role in ORDER[mode]:
        line = [sys.executable, "-m", "rondo.launch.cli", "explain", str(ended.run_dir), "--steps", steps_of(mode, role)]
        told = subprocess.run([*line, "--json"], capture_output=True, text=True, timeout=120, check=True)
        found: dict[str, Any] = orjson.loads(told.stdout)["findings"][0]
        assert (found["text"], found["why"]) == (TEXTS[mode][role], found["why"]), (role, told.stdout)
        assert any(change.startswith(CHANGES[mode][role]) for change in found["change"]), (role, found)
    assert left_behind(tmp_path) == []
