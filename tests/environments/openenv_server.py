"""A server of OpenEnv: a number is guessed, and it says whether a guess is too low or too high. Runs in OpenEnv's own Python.

python openenv_server.py PORT
"""

from __future__ import annotations

import os
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Seen(Observation):
    hint: str = ""
    tries: int = 0


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number, self._state = 0, State(episode_id="none", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Seen:
        self._number, self._state = int(seed or 0), State(episode_id=episode_id, step_count=0)
        return Seen(hint="Guess.", reward=None, done=False)

    def step(self, action: Guess, timeout_s: float | None = None, **given: Any) -> Seen:
        self._state.step_count += 1
        if action.message == "die":
            os._exit(1)
        guess, tries = int(action.message), self._state.step_count
        if guess == self._number:
            return Seen(hint="right", tries=tries, reward=1.0, done=True)
        return Seen(hint="higher" if guess < self._number else "lower", tries=tries, reward=0.0, done=False)

    @property
    def state(self) -> State:
        return self._state


app = create_app(Guessing, Guess, Seen, env_name="guessing", max_concurrent_envs=4)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]))
