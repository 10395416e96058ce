"""Predict: what a run makes of one row that somebody sends while it goes on, by its own workflow and reward.

Owns how many rows are under way at a time, and what a row may be. Does not own the way of a row (`evaluation.py`).

Invariant: nothing of it reaches the bus or a lease. Its requests are of the class "evaluation", behind all others of that class.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import Row, RowError, row_of
from rondo.roles.engines.engine import Engine
from rondo.roles.sampling.evaluation import Evaluator
from rondo.runtime.actors.actor import Actor, endpoint
from rondo.runtime.errors import ConfigError, Refused

MOST_AT_ONCE = 4


class Predictor(Actor):
    """Of one rollout process."""

    def __init__(self, evaluator: Evaluator, engine: Engine) -> None:
        self._evaluator, self._engine = evaluator, engine
        self._num_under_way = 0
        self._ids = itertools.count()

    @endpoint
    async def predict(self, row: dict[str, Any], num_samples: int, seed: int) -> list[dict[str, Any]]:
        """The samples of a row (`asked_row`), as `Evaluator.predict`. ConfigError for one that is of no use, Refused while too
        many are under way; a call that is cancelled ends them."""
        if self._num_under_way >= MOST_AT_ONCE:
            raise Refused(f"at most {MOST_AT_ONCE} rows must be under way here, got as many. Ask again later")
        self._num_under_way += 1
        try:
            asked = asked_row(row, self._evaluator.config.data)
            name = f"predict/{next(self._ids)}"
            return await self._evaluator.predict(self._engine, name, asked, num_samples=num_samples, seed=seed)
        except RowError as error:
            raise ConfigError(str(error)) from error  # which arrives as what the caller did
        finally:
            self._num_under_way -= 1


def asked_row(given: Mapping[str, Any], config: DataConfig) -> Row:
    """Of {"row": a row as the run's data have them}, or {"prompt", "label", "metadata"}. RowError for what is no row, and for
    media, which would be read here."""
    name = "the row that is asked"
    columns = {
        config.prompt: given.get("prompt"),
        config.label: given.get("label"),
        config.metadata: given.get("metadata"),
    }
    values = given.get("row") or {column: value for column, value in columns.items() if column is not None}
    row = row_of(values, config, name)
    if row.media:
        raise RowError(f"{name} must be text alone, got {len(row.media)} media. Put it into an evaluation set")
    return row
