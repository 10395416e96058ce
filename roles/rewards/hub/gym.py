"""The reward of rows of reasoning-gym: the package's own `score_answer`, by data set.

reasoning_gym("<answer>142</answer>", "142", prompt="...", metadata={"reasoning_gym": {...}})    ->   1.0
"""

from __future__ import annotations

from typing import Any

from rondo.roles.data.gym import KEY, score
from rondo.roles.rewards.hub.answers import found_in
from rondo.roles.rewards.hub.named import named
from rondo.runtime.errors import ConfigError


@named
def reasoning_gym(response: str, label: Any, *, prompt: Any, metadata: Any, inside: str | None = "answer") -> float:
    """What the data set of the row says of the answer, mostly from 0 to 1. `inside` None: the whole response."""
    row = (metadata or {}).get(KEY)
    if row is None:
        raise ConfigError(
            f"metadata must have {KEY!r} for the reward reasoning_gym, as rows of data.path 'gym:NAME' have, got none. Set "
            "data.metadata to 'metadata'"
        )
    return score(found_in(response, inside), row["name"], row["args"], row["index"], label)
