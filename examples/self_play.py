"""Self-play: two CPU cores, no downloads, about a minute and a half. A tiny Qwen3 learns a game by playing both of its seats.

    rondo train examples/self_play.py

There are some stones ("11:"); whoever's turn it is takes one to three of them ("3."), and who takes the last one has won. Both
players of a game are samples of one prompt group: each sees what is left whenever it is its turn, and is worth 1 if it has won. A
move that is none has lost. In evaluations the other seat is a player's who moves at random; where only one of the two samples is
to be made, as after a lost lease, it is the policy's, and nothing that it says is trained. A warm-up on random moves shows how
moves are written.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.roles.config import AlgorithmConfig, DataConfig, EvalConfig, RolloutConfig, SftConfig, TrainConfig
from rondo.roles.data.datasets import Row
from rondo.roles.sampling.episode import Episode
from rondo.roles.sampling.workflow import Client, Context

MOVE = re.compile(r"([123])\.")
Move = Callable[[int], Awaitable[int]]
"""What a player takes of so many stones; 0 for a move that is none."""


def boards(num_rows: int = 4000, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    return [{"prompt": f"{draw.randint(5, 20)}:"} for _ in range(num_rows)]


def demonstrations(num_rows: int = 7680, seed: int = 1) -> list[dict[str, str]]:
    """Games of one seat, in which both move at random."""
    draw, rows = random.Random(seed), []
    for row in boards(num_rows, seed + 1):
        left, said = int(row["prompt"][:-1]), ""
        while left:
            mine = draw.randint(1, min(3, left))
            said += f"{mine}."
            left -= mine
            if left:
                left -= draw.randint(1, min(3, left))
                said += f"{left}:" if left else ""
        rows.append({"prompt": row["prompt"], "answer": said})
    return rows


def by_policy(episode: Episode, begins: int) -> Move:
    """A seat that the policy has. It is told what is left, but where its prompt has just said so."""

    async def move(left: int) -> int:
        if episode.num_turns or left != begins:
            await episode.say(f"{left}:")
        found = MOVE.fullmatch((await episode.generate()).text)
        return int(found[1]) if found and int(found[1]) <= left else 0

    return move


def at_random(seed: int) -> Move:
    draw = random.Random(seed)

    async def move(left: int) -> int:
        return draw.randint(1, min(3, left))

    return move


async def game(left: int, players: tuple[Move, Move]) -> int:
    """Which of the two has won."""
    turn = 0
    while True:
        taken = await players[turn](left)
        if not taken:
            return 1 - turn
        left -= taken
        if not left:
            return turn
        turn = 1 - turn


async def play(row: Row, client: Client, context: Context) -> None:
    """Samples 0 and 1 play each other, 2 and 3, and so on; the even ones begin."""
    left = int(str(row.prompt)[:-1])

    async def meet(mine: tuple[int, ...]) -> None:
        """One game, of one or two samples."""
        episodes = {number % 2: client.episode(number) for number in mine}
        seats = []
        for seat in (0, 1):
            if seat in episodes:
                seats.append(by_policy(episodes[seat], left))
            elif context.evaluates:
                seats.append(at_random(mine[0]))
            else:
                seats.append(by_policy(client.beside(mine[0], "other"), left))
        won = await game(left, (seats[0], seats[1]))
        for seat, episode in episodes.items():
            context.done(replace(episode.made(), reward=float(seat == won)))

    pairs = [[number] for number in context.missing]
    if not context.evaluates:
        pairs = [
            [number for number in context.missing if number // 2 == pair] for pair in range(max(context.missing) + 1)
        ]
    async with asyncio.TaskGroup() as tasks:
        for mine in filter(None, pairs):
            tasks.create_task(meet(tuple(mine)))


config = RunConfig(
    name="self_play",
    num_steps=40,
    max_staleness=1,
    role_groups=fully_async(),
    model=ModelConfig(
        build="rondo.models.tiny.qwen3:build",
        build_args={"hidden_size": 128, "num_layers": 2},
    ),
    data=DataConfig(rows=boards, label=None, held_out=256),
    evaluation=EvalConfig(num_prompts=256),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=32,
        samples_per_prompt=8,
        max_prompt_tokens=4,
        max_new_tokens=48,
        max_turns=10,
        stop=(".",),
        workflow=play,
        num_slots=256,
    ),
    train=TrainConfig(lr=5e-4, warmup_steps=5, micro_batch_tokens=4096),
    sft=SftConfig(rows=demonstrations, steps=60, batch_size=128, lr=2e-3, warmup_steps=10),
)
