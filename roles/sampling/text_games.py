"""Games of TextArena, as the environment of their rows: `environment.factory="textarena"`.

Owns that what the policy says is played, and what comes of it. Does not own the games and their rows (`data/text_games.py`).
"""

from __future__ import annotations

from typing import Any

from rondo.roles.data.text_games import Game
from rondo.roles.sampling.environments import Step


class TextGame:
    """One game, which a row of `data.path="textarena:NAME"` says. A game that is not over at the end is worth 0."""

    reward, replays = 0.0, True

    def reset(self, textarena: dict[str, Any]) -> None:
        self._game = Game(**textarena)

    def step(self, said: str) -> Step:
        answer, worth = self._game.act(said)
        return Step(answer or None, worth, over=worth is not None)
