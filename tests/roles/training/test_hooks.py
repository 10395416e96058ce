"""The user's functions before and after a step: what they are given, what they may return, and how an error of theirs is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.roles.training.hooks import Hooks
from rondo.runtime.errors import Fatal

CODE = """
import numpy as np
seen = []
def begins(step): seen.append(step)
def ended(step, metrics):
    metrics["loss"] = 5.0
    return {"begun": len(seen), "single": np.float32(0.5)}
def nothing(step, metrics): ...
def taken(step, metrics): return {"loss": 1.0}
def text(step, metrics): return {"mine": "much"}
def endless(step, metrics): return {"mine": float("inf")}
def number(step, metrics): return 3.0
def fails(step, metrics=None): return {}[step]
"""


def hooks(folder: Path, after: str | None = None, before: str | None = None) -> Hooks:
    (folder / "own.py").write_text(CODE)
    named = (None if name is None else f"{folder}/own.py:{name}" for name in (before, after))
    return Hooks(*named)


def test_they_are_given_the_step_and_its_metrics_and_add_numbers_of_their_own(tmp_path: Path) -> None:
    metrics, both = {"loss": 0.1}, hooks(tmp_path, "ended", "begins")
    both.before(3)
    both.before(4)
    assert both.after(4, metrics) == {"begun": 2.0, "single": 0.5} and metrics == {"loss": 0.1}
    assert hooks(tmp_path, "nothing").after(4, metrics) == hooks(tmp_path).after(4, metrics) == {}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("taken", "train.after_step must return metrics of other names, got loss"),
        ("text", "train.after_step must return None or finite numbers by name, got {'mine': 'much'} after step 7"),
        ("endless", "must return None or finite numbers by name, got {'mine': inf}"),
        ("number", "must return None or finite numbers by name, got 3.0"),
        ("fails", r"train.after_step must not fail, got KeyError: 7 \(.*own.py:13\) at step 7"),
    ],
)
def test_what_no_restart_repairs_ends_the_run_with_its_name(tmp_path: Path, name: str, error: str) -> None:
    with pytest.raises(Fatal, match=error):
        hooks(tmp_path, name).after(7, {"loss": 0.1})
    if name == "fails":
        with pytest.raises(Fatal, match=r"train.before_step must not fail, got KeyError: 7"):
            hooks(tmp_path, before=name).before(7)
