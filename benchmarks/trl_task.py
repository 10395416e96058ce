"""The load that both sides of `benchmarks/trl.py` get: prompts, the length of every answer, and the reward.

Owns these three. Imports the standard library only, since the peer's interpreter has no rondo.

Lengths are forced, so that both sides make equally many tokens whatever they sample: "equal" gives every answer
`NUM_EQUAL` tokens; "ragged" draws them log-normal (sigma 0.8), none beyond `NUM_LONGEST`, with the same mean. The list holds
for position and sample: prompt 9's third answer has one length, on both sides and in every repetition.
"""

from __future__ import annotations

import math
import random

NUM_PROMPTS, NUM_SAMPLES = 8, 8
"""Prompts of a step, and answers to each."""
NUM_PROMPT_TOKENS = 16
NUM_EQUAL, NUM_LONGEST, SIGMA = 64, 256, 0.8
VOCAB = 4096


def prompts(num_steps: int) -> list[str]:
    """One for each prompt of the run, each of 16 bytes, which are 16 tokens."""
    return [(f"{index:03d} " * 8)[:NUM_PROMPT_TOKENS] for index in range(num_steps * NUM_PROMPTS)]


def answer_lengths(load: str, position: int) -> list[int]:
    """Tokens of each answer to the prompt at `position` of the data order."""
    if load == "equal":
        return [NUM_EQUAL] * NUM_SAMPLES
    draw = random.Random(position)
    # Cutting at the longest takes a little from the mean, which the centre gives back.
    centre = math.log(NUM_EQUAL * 1.015) - SIGMA**2 / 2
    return [min(NUM_LONGEST, max(4, round(draw.lognormvariate(centre, SIGMA)))) for _ in range(NUM_SAMPLES)]


def longest(load: str) -> int:
    return NUM_EQUAL if load == "equal" else NUM_LONGEST


def token_names() -> list[str]:
    """What stands for the token ids behind the 256 bytes, up to the two special tokens at the end."""
    return [f"{'+' if index % 2 else '-'}{index}" for index in range(256, VOCAB - 2)]


def score(response: str) -> float:
    """The part of the answer's signs that are plus: half of them at random, and learnt within some steps."""
    plus, minus = response.count("+"), response.count("-")
    return plus / max(1, plus + minus)


def reward(response: str, label: object, *, prompt: str, metadata: object) -> float:
    """`score`, as a run's settings name a reward function."""
    return score(response)
