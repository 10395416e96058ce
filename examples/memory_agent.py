"""A memory agent: two CPU cores, no downloads, about two minutes. A tiny Qwen3 reads a text that is longer than its context.

    rondo train examples/memory_agent.py

Three digits of a key are hidden in a text of letters, which is read in chunks: "xk7hqw" is to be noted as "7". For each chunk the
policy is given what it has written down so far and the chunk; what it says is its memory from then on. At last it answers from
its memory alone. Each of these contexts is a row of the sample, and all of them are trained by whether the answer was right. A
warm-up on notes of which a fifth have a wrong digit has shown the policy how to take them.
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
    EvalConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from rondo.roles.data.datasets import Row
from rondo.roles.sampling.episode import Episode
from rondo.roles.sampling.workflow import Client, Context

NUM_CHUNKS, IN_CHUNK, IN_KEY = 4, 8, 3


def texts(num_rows: int = 6000, seed: int = 0) -> list[dict[str, Any]]:
    """Rows such as {"prompt": "key?", "metadata": {"text": "xk7hqwoe..."}, "label": "731"}."""
    draw, rows = random.Random(seed), []
    for _ in range(num_rows):
        text = [draw.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(NUM_CHUNKS * IN_CHUNK)]
        for at in draw.sample(range(len(text)), IN_KEY):
            text[at] = str(draw.randrange(10))
        rows.append(
            {"prompt": "key?", "metadata": {"text": "".join(text)}, "label": "".join(filter(str.isdigit, text))}
        )
    return rows


def chunks_of(text: str) -> list[str]:
    """The text in pieces, and nothing behind the last one."""
    return [text[at : at + IN_CHUNK] for at in range(0, len(text), IN_CHUNK)] + [""]


def context_of(memory: str, chunk: str) -> str:
    return f"{memory}|{chunk}>"


def demonstrations(num_rows: int = 20480, seed: int = 1) -> list[dict[str, str]]:
    """Notes: what was known and what the chunk adds, "-" for nothing; a fifth have a wrong digit."""
    draw, notes = random.Random(seed), []
    for row in texts(num_rows, seed + 1):
        chunks = chunks_of(row["metadata"]["text"])
        at = draw.randrange(len(chunks))
        before, note = ("".join(filter(str.isdigit, "".join(chunks[:end]))) or "-" for end in (at, at + 1))
        if draw.random() < 0.2:
            place = draw.randrange(len(note))
            note = note[:place] + str(draw.randrange(10)) + note[place + 1 :]
        notes.append({"prompt": context_of(before, chunks[at]), "answer": note})
    return notes


async def read(row: Row, client: Client, context: Context) -> None:
    async def play(episode: Episode) -> None:
        memory = "-"
        for chunk in chunks_of(row.metadata["text"]):
            await episode.new_context(context_of(memory, chunk))
            memory = (await episode.generate()).text

    await context.each(client, play)


def right(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """Of the last row, which is the answer."""
    return float(response == label)


config = RunConfig(
    name="memory_agent",
    num_steps=40,
    max_staleness=1,
    role_groups=fully_async(),
    model=ModelConfig(
        build="rondo.models.tiny.qwen3:build",
        build_args={"hidden_size": 128, "num_layers": 2},
    ),
    data=DataConfig(rows=texts, metadata="metadata", held_out=256),
    evaluation=EvalConfig(num_prompts=256),
    reward=RewardConfig(function=right),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, loss_aggregation="token"),
    rollout=RolloutConfig(
        prompts_per_step=16,
        samples_per_prompt=8,
        max_prompt_tokens=24,
        max_new_tokens=IN_KEY + 2,
        max_rows=NUM_CHUNKS + 1,
        workflow=read,
        num_slots=128,
    ),
    train=TrainConfig(lr=5e-4, warmup_steps=5, micro_batch_tokens=8192),
    sft=SftConfig(rows=demonstrations, steps=250, batch_size=64, lr=2e-3, warmup_steps=20),
)
