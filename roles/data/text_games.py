"""Games of TextArena that one player plays: rows that say which, and the games themselves.

Owns what `data.path="textarena:NAME"` makes, and a game from its first words to what it was worth. Does not own the turns between
it and the policy (`sampling/text_games.py`).

    rows = GameRows("GuessTheNumber-v0", {"size": 100})
    rows[3]  ->  {"prompt": "You are Player 0. ... Enter your guess.", "metadata": {"textarena": {"name": ..., "seed": 3}}}
    game = Game("GuessTheNumber-v0", seed=3)
    game.act("[10]")  ->  Said("The target number is higher.", worth=None)

Invariant: a game is a function of its name, its seed and what was played, whatever is played beside it: the package draws from
Python's own generator, of which each game has a state of its own.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import in_one_line
from rondo.runtime.section import nearest

try:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY
except ModuleNotFoundError as error:
    if error.name != "textarena":
        raise
    raise ConfigError(
        "textarena must be installed for data.path 'textarena:NAME' and environment.factory 'textarena', got no such package. "
        "Run: pip install 'rondo-rl[textarena]'"
    ) from error

KEY = "textarena"
"""In a row's metadata, its game and seed."""
_RAW = "-raw"
"""Of the names of games without what the package wraps around them: they tell what is new alone."""
_ARGS = ("size", "seed")
_drawing = threading.Lock()
T = TypeVar("T")


class Said(NamedTuple):
    """What a game says. `worth` is the player's reward in the package's own terms once the game is over, None before."""

    text: str
    worth: float | None


class Game:
    """One game. ConfigError for a name that the package has not, or cannot make for one player."""

    def __init__(self, name: str, seed: int) -> None:
        if name + _RAW not in ENV_REGISTRY:
            known = sorted(each.removesuffix(_RAW) for each in ENV_REGISTRY if each.endswith(_RAW))
            raise ConfigError(f"data.path must name a game behind 'textarena:', got {name!r}. {nearest(name, known)}")
        self._state = random.Random(f"{name}/{seed}").getstate()
        self.worth: float | None = None
        try:
            self._game = self._drawn(lambda: textarena.make(name + _RAW))
            self._drawn(lambda: self._game.reset(num_players=1, seed=seed))
            self.prompt = self._new()
        except Exception as error:  # the package's own, of whatever its game needs
            raise ConfigError(
                f"textarena must make {name} for one player, got {in_one_line(error):.300}. Take another game, or install what "
                "it needs"
            ) from error

    def act(self, said: str) -> Said:
        """What the game says to that, and is worth if it is over with it."""
        over, _ = self._drawn(lambda: self._game.step(action=said))
        text = self._new()
        if over:
            rewards, _ = self._drawn(self._game.close)
            self.worth = float((rewards or {}).get(0, 0.0))
        return Said(text, self.worth)

    def _new(self) -> str:
        """What it has said to the player, in his absence."""
        _, told = self._drawn(self._game.get_observation)
        return told if isinstance(told, str) else "\n".join(text for who, text, _ in told if who != 0)

    def _drawn(self, call: Callable[[], T]) -> T:
        with _drawing:
            before = random.getstate()
            random.setstate(self._state)
            try:
                return call()
            finally:
                self._state = random.getstate()
                random.setstate(before)


class GameRows(Sequence[dict[str, Any]]):
    """Those of one game, a seed each. `args`: `size` (10,000) of them, from `seed` (0) on."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        known = {"size": 10_000, "seed": 0, **args}
        if len(known) > len(_ARGS) or not all(type(known[each]) is int and known[each] >= 0 for each in _ARGS):
            raise ConfigError(f"data.args must be size and seed, whole numbers of at least 0, got {args}. Correct them")
        self._name, self._size, self._seed = name, known["size"], known["seed"]
        Game(name, self._seed)  # it can be made

    def __len__(self) -> int:
        return int(self._size)

    def __getitem__(self, index: Any) -> Any:
        of = {"name": self._name, "seed": self._seed + index}
        return {"prompt": Game(**of).prompt, "metadata": {KEY: of}}
