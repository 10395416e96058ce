"""Games of TextArena, by the package itself."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rondo.roles.config import DataConfig, EnvironmentConfig
from rondo.roles.data.datasets import open_dataset
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import load_reference

pytest.importorskip("textarena", reason="`make test-environments` installs textarena")

ROOT = Path(__file__).parents[2]
ONE_GROUP = "role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages']}]"


def told(name: str, seed: int, *moves: str) -> Iterator[tuple[str, float | None]]:
    from rondo.roles.data.text_games import Game

    game = Game(name, seed)
    yield game.prompt, None
    for move in moves:
        yield game.act(move)


def test_a_game_is_a_function_of_its_seed_and_moves_whatever_is_played_beside_it() -> None:
    moves = ("[up]", "[left]", "[down]", "[up]", "[right]")
    alone = list(told("2048-v0", 3, *moves))
    before, beside, others = random.getstate(), list[object](), told("2048-v0", 4, *moves)
    for each in told("2048-v0", 3, *moves):
        beside.append(each)
        next(others)
    assert beside == alone, "a tile is drawn behind each move"
    assert list(told("2048-v0", 4, *moves)) != alone and random.getstate() == before


def test_rows_say_their_game_and_the_environment_plays_it_to_its_worth() -> None:
    config = DataConfig(path="textarena:GuessTheNumber-v0@[:9]", args={"seed": 5}, label=None, metadata="metadata")
    row = open_dataset(config).row(3)
    assert row.metadata == {"textarena": {"name": "GuessTheNumber-v0", "seed": 8}}
    assert isinstance(row.prompt, str) and "between 1 and 20" in row.prompt
    factory = EnvironmentConfig(factory="textarena").factory
    assert factory is not None
    made = load_reference(factory, "environment.factory")
    wins = set()
    for guess in range(1, 21):
        game = made()
        game.reset(**row.metadata)
        step = game.step(f"[{guess}]")
        if step.over:
            wins.add((guess, step.reward))
        else:
            assert step.say in ("The target number is higher.", "The target number is lower.") and step.reward is None
    [(number, worth)] = wins
    assert worth == 1.0
    game = made()
    game.reset(**row.metadata)
    assert "invalid move" in game.step("hello").say and game.reward == 0.0
    lost = game.step("again")
    assert lost.over and lost.say is None and lost.reward is not None and lost.reward < 1 != number


@pytest.mark.parametrize(
    ("path", "args", "said"),
    [
        ("textarena:GuessTheNumbr-v0", {}, "Did you mean 'GuessTheNumber-v0'?"),
        ("textarena:TicTacToe-v0", {}, "for one player, got AssertionError: The number of players has to be 2"),
        ("textarena:GuessTheNumber-v0", {"level": 3}, "must be size and seed, whole numbers"),
        ("textarena:GuessTheNumber-v0", {"size": "3"}, "must be size and seed, whole numbers"),
    ],
)
def test_what_the_package_cannot_play_alone_is_refused(path: str, args: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_dataset(DataConfig(path=path, args=args, label=None))
    assert said in str(refused.value)


def test_the_example_plays_its_games(tmp_path: Path) -> None:
    sets = (
        "num_steps=1", "max_staleness=0", ONE_GROUP, "sft.steps=2", "sft.batch_size=4", "sft.warmup_steps=1", "evaluation=null",
        "rollout.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_turns=2", "train.warmup_steps=0",
        "rollout.max_new_tokens=120",
    )  # fmt: skip
    command = [sys.executable, "-m", "rondo.launch.cli", "train", str(ROOT / "examples/text_game.py")]
    subprocess.run(
        [*command, *(word for each in sets for word in ("--set", each))],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=300,
    )  # fmt: skip
    lines = (tmp_path / "runs/text_game/metrics.jsonl").read_text().splitlines()
    played = [each["environments"] for each in map(json.loads, lines) if each.get("environments")]
    assert played[-1]["Guessing"]["steps"] > 0 and played[-1]["Guessing"]["errors"] == 0
