"""A text game: two CPU cores, no downloads, some minutes. A tiny Qwen3 learns to guess a number in few turns, by TextArena.

    pip install 'rondo-rl[textarena]'
    rondo train examples/text_game.py

A guess is answered with "higher" or "lower". A game that is won is worth 1, one whose ten guesses are used up, or that ends with
a second thing that is no guess, what the last guess was near. A warm-up on games of a player who halves what is left, but guesses
anywhere every third time, shows how guesses are written; reinforcement learning then has them halve more often.
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

GAME = "GuessTheNumber-v0"
HELD_OUT = 64


def played(num_games: int = 2400, seed: int = 1 << 20) -> list[dict[str, Any]]:
    """Games of a player who is not always careful, as conversations."""
    from rondo.roles.data.text_games import Game

    draw, games = random.Random(seed), []
    for number in range(num_games):
        game, low, high, said = Game(GAME, seed + number), 1, 20, None
        messages = [{"role": "user", "content": game.prompt}]
        while said is None or said.worth is None:
            careless = draw.random() < 1 / 3
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
    num_steps=40,
    max_staleness=1,
    groups=fully_async(),
    model=ModelConfig(
        build="rondo.models.tiny.qwen3:build",
        build_args={"hidden_size": 128, "num_layers": 2},
    ),
    data=DataConfig(
        path=f"textarena:{GAME}", args={"size": 4000}, label=None, metadata="metadata", apply_chat_template=True,
        held_out=HELD_OUT,
    ),
    evaluation=EvalConfig(num_prompts=HELD_OUT),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, normalizer="token"),
    rollout=RolloutConfig(
        prompts_per_step=16,
        samples_per_prompt=8,
        max_prompt_tokens=640,
        max_new_tokens=800,
        max_turns=10,
        environment=EnvironmentConfig(factory="textarena"),
        num_slots=64,
    ),
    train=TrainConfig(lr=3e-4, warmup_steps=5, micro_batch_tokens=8192),
    sft=SftConfig(
        data=DataConfig(rows=played, prompt="messages", label=None, apply_chat_template=True),
        turns="all",
        steps=150,
        batch_size=16,
        lr=2e-3,
        warmup_steps=10,
        micro_batch_tokens=8192,
    ),
)  # fmt: skip
