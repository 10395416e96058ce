"""A memory agent: two CPU cores, no downloads, about two minutes. A tiny Qwen3 reads a text that is longer than its context.

    rondo train examples/memory_agent.py

The text, such as "k3 b7 x1 ...", is read in chunks. For each the policy is given the question ("b"), what it has written down so
far, and the chunk; what it says is its memory from then on. At last it answers from its memory alone. Each of these contexts is a
row of the sample, and all of them are trained by whether the answer was right. A warm-up on notes of which a quarter are wrong
has shown the policy how to take them; one wrong note in five spoils an answer.
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

NUM_CHUNKS, IN_CHUNK = 4, 5
NOTHING = "-"
"""What is written down before anything is."""


def texts(num_rows: int = 6000, seed: int = 0) -> list[dict[str, Any]]:
    """Rows such as {"question": "b", "of": {"text": "k3 b7 x1 ..."}, "answer": "7"}."""
    draw, rows = random.Random(seed), []
    for _ in range(num_rows):
        keys = draw.sample("abcdefghijklmnopqrstuvwxyz", NUM_CHUNKS * IN_CHUNK)
        values = [str(draw.randrange(10)) for _ in keys]
        at = draw.randrange(len(keys))
        text = " ".join(key + value for key, value in zip(keys, values, strict=True))
        rows.append({"question": keys[at], "of": {"text": text}, "answer": values[at]})
    return rows


def chunks_of(text: str) -> list[str]:
    """The text in pieces, and nothing behind the last one."""
    words = text.split()
    return [" ".join(words[at : at + IN_CHUNK]) for at in range(0, len(words), IN_CHUNK)] + [""]


def context_of(question: str, memory: str, chunk: str) -> str:
    return f"{question}:{memory} {chunk}>"


def demonstrations(num_rows: int = 20480, seed: int = 1) -> list[dict[str, str]]:
    """Notes: what the chunk says of the question, else what was known before; a quarter are a digit by chance."""
    draw, notes = random.Random(seed), []
    for row in texts(num_rows, seed + 1):
        chunks = chunks_of(row["of"]["text"])
        where = next(at for at, chunk in enumerate(chunks) if row["question"] in chunk)
        at = draw.choice((where, draw.randrange(len(chunks))))
        before = row["answer"] if at > where else NOTHING
        note = row["answer"] if at >= where else NOTHING
        note = note if draw.random() < 0.75 else str(draw.randrange(10))
        notes.append({"prompt": context_of(row["question"], before, chunks[at]), "answer": note})
    return notes


async def read(row: Row, client: Client, context: Context) -> None:
    question, text = str(row.prompt), row.metadata["text"]

    async def play(episode: Episode) -> None:
        memory = NOTHING
        for chunk in chunks_of(text):
            await episode.new_context(context_of(question, memory, chunk))
            memory = (await episode.generate()).text

    await context.each(client, play)


def right(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """Of the last row, which is the answer."""
    return float(response == label)


config = RunConfig(
    name="memory_agent",
    num_steps=60,
    max_staleness=1,
    groups=fully_async(),
    model=ModelConfig(
        build="rondo.models.tiny.qwen3:build",
        build_args={"hidden_size": 128, "num_layers": 2},
    ),
    data=DataConfig(rows=texts, prompt="question", label="answer", metadata="of", held_out=256),
    evaluation=EvalConfig(num_prompts=256),
    reward=RewardConfig(function=right),
    algorithm=AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, normalizer="token"),
    rollout=RolloutConfig(
        prompts_per_step=16,
        samples_per_prompt=8,
        max_prompt_tokens=24,
        max_new_tokens=3,
        max_rows=NUM_CHUNKS + 1,
        workflow=read,
        num_slots=128,
    ),
    train=TrainConfig(lr=5e-4, warmup_steps=5, micro_batch_tokens=8192),
    sft=SftConfig(rows=demonstrations, steps=400, batch_size=64, lr=2e-3, warmup_steps=20),
)
