"""A text game: two CPU cores, no downloads, some minutes. A tiny Qwen3 guesses a number in five turns, by TextArena.

    pip install 'rondo-rl[textarena]'
    rondo train examples/text_game.py

A guess is answered with "higher" or "lower". A game that is won is worth 1, one that is not won by the fifth guess 0: who always
halves what is left wins every time. A warm-up on games of a player who does so every other time, and else guesses anywhere, shows
how guesses are written and where the middle is; reinforcement learning then has it halve more often. A guess is one token of
this model, and so is each sentence of the game: in letters a game, and with it a step, would be six times as long.
"""

from __future__ import annotations

import random
from typing import Any

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from rondo.roles.sampling.environments import Step

GAME = "GuessTheNumber-v0"
WORDS = (
    "You are Player 0. You are playing Guess The Number.",
    "You have to guess the number between 1 and 20 within 10 turns.",
    "As you enter your guess, the game will provide you with hints such as 'higher' or 'lower'.",
    "You may provide your response in any manner.",
    "Only the number that is wrapped in square brackets will be considered as your guess. For example, [5].",
    "As you play, the history of your guesses will be appended below.",
    "Use the information to complete the game before you run out of guesses.",
    "Enter your guess.",
    "The target number is higher.",
    "The target number is lower.",
    *(f"[{number}]" for number in range(1, 21)),
)
HELD_OUT = 256


class Guessing:
    """The game, won or not: for a near guess at its end the package gives something, by which a policy learns to end it."""

    replays = True
    reward = 0.0

    def reset(self, textarena: dict[str, Any]) -> None:
        from rondo.roles.data.text_games import Game

        self._game = Game(**textarena)

    def step(self, said: str) -> Step:
        answer, worth = self._game.act(said)
        return Step(answer or None, None if worth is None else float(worth == 1), over=worth is not None)


def played(num_games: int = 6000, seed: int = 1 << 20) -> list[dict[str, Any]]:
    """Games of a player who is careful every other time, as conversations."""
    from rondo.roles.data.text_games import Game

    draw, games = random.Random(seed), []
    for number in range(num_games):
        game, low, high, said = Game(GAME, seed + number), 1, 20, None
        messages = [{"role": "user", "content": game.prompt}]
        while said is None or said.worth is None:
            careless = draw.random() < 1 / 2
            guess = draw.randint(1, 20) if careless else (low + high) // 2
            said = game.act(f"[{guess}]")
            messages.append({"role": "assistant", "content": f"[{guess}]"})
            messages.append({"role": "user", "content": said.text})
            if "higher" in said.text:
                low = max(low, guess + 1)
            elif "lower" in said.text:
                high = min(high, guess - 1)
        games.append({"messages": messages[:-1]})
    return games


config = RunConfig(
    name="text_game",
    num_steps=50,
    max_staleness=1,
    role_groups=fully_async(),
    model=ModelConfig(
        build="rondo.models.tiny.qwen3:build",
        build_args={"hidden_size": 128, "num_layers": 2, "words": WORDS},
    ),
    data=DataConfig(
        path=f"textarena:{GAME}", args={"size": 4000}, label=None, metadata="metadata", apply_chat_template=True,
        held_out=HELD_OUT,
    ),
    evaluation=EvalConfig(num_prompts=HELD_OUT),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=16,
        samples_per_prompt=8,
        max_prompt_tokens=64,
        max_new_tokens=256,
        max_turns=5,
        environment=EnvironmentConfig(factory=Guessing),
        num_slots=128,
    ),
    train=TrainConfig(lr=5e-4, warmup_steps=5, micro_batch_tokens=8192),
    sft=SftConfig(
        data=DataConfig(rows=played, prompt="messages", label=None, apply_chat_template=True),
        turns="all",
        steps=400,
        batch_size=32,
        lr=2e-3,
        warmup_steps=10,
        micro_batch_tokens=8192,
    ),
)  # fmt: skip
