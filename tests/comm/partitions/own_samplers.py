"""Samplers as a user writes them, good and bad."""

from __future__ import annotations

import random


class Shuffled:
    """A user's sampler: any ready rows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ids: list[int] = []

    def add(self, rows) -> None:
        self.ids += [row.id for row in rows]

    def pick(self, ask):
        if len(self.ids) < ask.ranks * ask.batch and not ask.partial:
            return None
        self.random.shuffle(self.ids)
        parts = [[self.ids.pop() for _ in range(min(ask.batch, len(self.ids)))] for _ in range(ask.ranks)]
        return parts


class Wrong:
    """Breaks the contract in the way it is told."""

    def __init__(self, how: str) -> None:
        self.how = how

    def add(self, rows) -> None:
        self.ids = [row.id for row in rows]

    def pick(self, ask):
        if self.how == "raise":
            raise ZeroDivisionError("oops")
        return {
            "twice": [[self.ids[0], self.ids[0]]], "unknown": [[99]], "many": [self.ids * 99], "ranks": [[], []],
            "text": "rows", "type": [["0"]],
        }[self.how]  # fmt: skip
