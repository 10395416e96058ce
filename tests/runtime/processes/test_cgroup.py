"""Control groups, as far as their folders go: what is left over is taken away, and nobody else's is."""

from __future__ import annotations

import fcntl
from pathlib import Path

from rondo.runtime.processes.cgroup import Cgroup, lock, sweep


def test_a_group_that_nobody_has_any_more_goes_and_those_that_are_held_used_or_not_ours_stay(tmp_path: Path) -> None:
    for name in ("rondo-left0ver", "rondo-hasowner", "rondo-hasprocs/below", "rondo-chaos-12345", "another"):
        (tmp_path / name).mkdir(parents=True)
    held = tmp_path / "rondo-hasowner"
    lock(held, fcntl.LOCK_SH)
    sweep(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "rondo-hasowner", "rondo-hasprocs", "rondo-chaos-12345", "another"
    }  # fmt: skip
    Cgroup(held).remove()
    assert not held.exists()
