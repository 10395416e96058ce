"""Several reward functions as one: all of them beside each other, or one for each row.

Owns what is called of them and how their results become one. Does not own how each is loaded (`worker.py`), or the weights
(`reward.components`). Imports the standard library and orjson.

    together({"right": math, "form": tags}, ...)   ->   {"right": 1.0, "form": 0.0, "right.said": "72"}
    chosen({"gsm8k": gsm8k, "*": math}, "data_source")   ->   what gsm8k returns, where the metadata or the row's column
                                                              "data_source" is "gsm8k"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rondo.roles.rewards.scores import RewardError, checked, checked_group

OTHERWISE = "*"
"""The name of the function for rows that name no other."""
Call = Callable[[list[Any]], Any]
Score = list[Any]
"""[score, details]"""


def together(calls: Mapping[str, Call], per_group: bool) -> Call:
    """A dict with the score of each by its name, and its details behind it; per group a list of these."""

    def joined(values: Sequence[Any]) -> Any:
        if not per_group:
            return _named(calls, [checked(value) for value in values])
        scores = [checked_group(value) for value in values]
        if len(set(map(len, scores))) > 1:
            numbers = ", ".join(f"{len(each)} of {name}" for name, each in zip(calls, scores, strict=True))
            raise RewardError(f"rewards must each return one score a response, got {numbers}. Score each of them")
        return [_named(calls, each) for each in zip(*scores, strict=True)]

    def call(item: list[Any]) -> Any:
        values = [each(item) for each in calls.values()]
        return _awaited(values, joined) if any(hasattr(value, "__await__") for value in values) else joined(values)

    return call


def chosen(calls: Mapping[str, Call], by: str) -> Call:
    """What the function returns that `metadata[by]` names, or else the column `by`."""

    def call(item: list[Any]) -> Any:
        name = (item[3] or {}).get(by, item[4].get(by))
        reward = calls.get(name, calls.get(OTHERWISE)) if isinstance(name, str) else calls.get(OTHERWISE)
        if reward is None:
            raise RewardError(
                f"metadata[{by!r}] must name one of reward.function, {', '.join(calls)}, got {name!r}. Add it, or a function for "
                f"all others as {OTHERWISE!r}"
            )
        return reward(item)

    return call


def _named(names: Mapping[str, Any], scores: Sequence[Score]) -> dict[str, Any]:
    values = {name: score for name, (score, _) in zip(names, scores, strict=True)}
    details = zip(names, (details for _, details in scores), strict=True)
    return values | {f"{name}.{key}": value for name, found in details for key, value in found.items()}


async def _awaited(values: Sequence[Any], joined: Callable[[Sequence[Any]], Any]) -> Any:
    import asyncio

    async def one(value: Any) -> Any:
        return await value if hasattr(value, "__await__") else value

    return joined(await asyncio.gather(*map(one, values)))
