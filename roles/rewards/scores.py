"""What a reward function's result must look like, and what of it travels.

Owns the check of a score, its details and components. Does not own how the function is called (`worker.py`). Imports the standard
library and orjson.

    checked({"score": 1, "said": "72"})   ->   [1.0, {"said": "72"}]: score, details
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from rondo.runtime.errors import RondoError
from rondo.runtime.values import Encoded, encode

LARGEST = 1.7e38
"""Size of a reward, at most: that of differences between two of them fits into float32."""
_SHOWN_CHARACTERS = 80


class RewardError(RondoError, ValueError):
    """A reward function returned what is no score."""


def scored_group(values: Any, components: Mapping[str, float] = MappingProxyType({})) -> Encoded:
    """[[score, details], ...] of what a reward function returned for a prompt group."""
    return encode(checked_group(values, components))


def scored(value: Any, components: Mapping[str, float] = MappingProxyType({})) -> Encoded:
    """[score, details] of what a reward function returned."""
    return encode(checked(value, components))


def checked_group(values: Any, components: Mapping[str, float] = MappingProxyType({})) -> list[Any]:
    if not hasattr(values, "__iter__") or isinstance(values, str | dict):
        raise RewardError(
            f"reward must return a list of one score a response, got {_shown(values)}. Or set reward.per to 'response'"
        )
    return [checked(value, components) for value in values]


def checked(value: Any, components: Mapping[str, float] = MappingProxyType({})) -> list[Any]:
    """[score, details]. RewardError for what is no finite number."""
    details: dict[Any, Any] = {}
    if components:
        value = _summed(value, components)
    if isinstance(value, dict):
        if "score" not in value:
            raise RewardError(
                f"reward must return a dict with 'score', got the keys {', '.join(map(str, value)) or 'of none'}. Name it so"
            )
        details = {name: detail for name, detail in value.items() if name != "score"}
        value = value["score"]
    score = _finite(value)
    try:
        encode(details)
    except TypeError:
        details = {_kept(name): _kept(detail, name) for name, detail in details.items()}
    return [score, details]


def _summed(value: Any, components: Mapping[str, float]) -> dict[Any, Any]:
    """The dict with its components as numbers, and their weighted sum as its score where it has none."""
    given = value if isinstance(value, dict) else {}
    if missing := [name for name in components if name not in given]:
        raise RewardError(
            f"reward must return a dict with each of reward.components, got {_shown(value)} without {', '.join(missing)}. "
            "Add what is missing"
        )
    parts = {name: _finite(given[name]) for name in components}
    return {"score": sum(weight * parts[name] for name, weight in components.items())} | given | parts


def _finite(value: Any) -> float:
    number = _number(value)
    if not math.isfinite(number):
        raise RewardError(f"reward must return a finite number, got {number}. Return a number for such a response too")
    if (problem := too_large(number)) is not None:
        raise RewardError(problem)
    return number


def too_large(reward: float, what: str = "reward") -> str | None:
    """Return what is wrong with a reward beyond `LARGEST`, and with a sum of rewards that is no number."""
    if abs(reward) <= LARGEST:
        return None
    return f"{what} must be a number of at most {LARGEST:g} in size, got {reward:g}. Scale it down"


def _number(value: Any) -> float:
    if hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass  # an array of several numbers, or an int without end
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        got, way = "a generator", "Use return in the place of yield"
    elif value is None:
        got, way = "None", "Let each of its paths return one"
    elif isinstance(value, list | tuple):
        got, way = (
            _shown(value),
            "It is given one response a call: return its score alone",
        )
    else:
        got, way = _shown(value), "Convert it with float()"
    raise RewardError(f"reward must return a number or a dict with 'score', got {got}. {way}")


def _kept(value: Any, name: Any = "") -> Any:
    """The value, or in its place why it does not travel."""
    try:
        encode(value)
    except TypeError as error:
        return str(error).replace("value", f"detail {name}".strip(), 1)
    return value


def _shown(value: Any) -> str:
    text = repr(value).replace("\n", " ")
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
