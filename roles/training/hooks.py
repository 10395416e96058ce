"""The user's functions before and after a step of the actor, with what they may return.

Owns the calls and how an error of theirs is told. Does not own when a step begins and ends (`roles/actor.py`).

    hooks = Hooks(before="mine.py:begin", after="mine.py:end")
    hooks.before(step); hooks.after(step, {"loss": 0.1})    ->    {"my_number": 3.0}

Invariant: a metric that is there is never replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from rondo.runtime.errors import Fatal
from rondo.runtime.reference import in_one_line, load_reference

BEFORE, AFTER = "train.before_step", "train.after_step"


class Hooks:
    """Functions by reference; ConfigError for one that cannot be had. Fatal for an error in one: no restart repairs it."""

    def __init__(self, before: str | None = None, after: str | None = None) -> None:
        self._before = None if before is None else load_reference(before, BEFORE)
        self._after = None if after is None else load_reference(after, AFTER)

    def before(self, step: int) -> None:
        if self._before is not None:
            _call(BEFORE, self._before, step)

    def after(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """What the step's metrics have beside `metrics`."""
        if self._after is None:
            return {}
        made = _call(AFTER, self._after, step, dict(metrics))
        made = {} if made is None else made
        if not isinstance(made, dict) or not all(isinstance(name, str) and _is_number(made[name]) for name in made):
            raise Fatal(
                f"{AFTER} must return None or finite numbers by name, got {made!r} after step {step}. Correct it"
            )
        if taken := sorted(made.keys() & metrics.keys()):
            raise Fatal(f"{AFTER} must return metrics of other names, got {', '.join(taken)}. Rename them")
        return {name: float(value) for name, value in made.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _call(setting: str, function: Callable[..., Any], step: int, *args: Any) -> Any:
    try:
        return function(step, *args)
    except Exception as error:
        raise Fatal(f"{setting} must not fail, got {in_one_line(error)} at step {step}. Correct it") from error
