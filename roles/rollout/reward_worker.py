"""What a reward worker runs: the user's reward function on one item, and what its result must look like.

Owns loading the function and checking what it returns. Does not own the process around it (`runtime/pool_worker.py`) or what
a failed score means (`rewards.py`). Imports the standard library and orjson, and what the user's module imports.

    score = open_function("rewards.py:exact")
    score(["1234", "1234", "s3142>", {}])      # [1.0, {}]: response, label, prompt, metadata -> score, details
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import orjson

from rondo.runtime.reference import load_reference


def open_function(function: str) -> Callable[[list[Any]], list[Any]]:
    """The function that scores one item."""
    reward = load_reference(function, "reward.function")

    def score(item: list[Any]) -> list[Any]:
        response, label, prompt, metadata = item
        return list(checked(reward(response, label, prompt=prompt, metadata=metadata)))

    return score


def checked(value: Any) -> tuple[float, dict[str, Any]]:
    """(score, details) of what a reward function returned. TypeError or ValueError for what is no finite number."""
    details: dict[str, Any] = {}
    if isinstance(value, dict):
        if "score" not in value:
            raise ValueError(f"reward must return a dict with 'score', got the keys {', '.join(map(str, value))}")
        details = {str(name): detail for name, detail in value.items() if name != "score"}
        details = orjson.loads(orjson.dumps(details, default=repr, option=orjson.OPT_SERIALIZE_NUMPY))
        value = value["score"]
    if not hasattr(value, "__float__"):
        raise TypeError(f"reward must return a number or a dict with 'score', got {value!r}")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"reward must return a finite number, got {score}")
    return score, details
