"""The load that both sides of `benchmarks/trl.py` get: prompts, the length of every answer, and the reward.

Owns these three. Imports the standard library only, since the peer's interpreter has no rondo.

"pretrained" is sums of two numbers for a model that has learnt to chat: their text and their reward are real, and answers end
where the model ends them. For the others lengths are forced, so that both sides make equally many tokens whatever they sample:
"equal" gives every answer `NUM_EQUAL` tokens; "ragged" draws them log-normal (sigma 0.8), none beyond `NUM_LONGEST`, with the
same mean. The list holds for position and sample: prompt 9's third answer has one length, on both sides and in every
repetition.
"""

from __future__ import annotations

import math
import random
import re

NUM_PROMPTS, NUM_SAMPLES = 8, 8
"""Prompts of a step, and answers to each."""
NUM_PROMPT_TOKENS = 16
PRETRAINED = "pretrained"
NUM_CHAT_TOKENS, NUM_CHAT_ANSWER = 64, 24
"""Of "pretrained": the most tokens of a prompt in its chat template, and of an answer."""
NUM_EQUAL, NUM_LONGEST, SIGMA = 64, 256, 0.8
VOCAB = 4096


def prompts(num_steps: int) -> list[str]:
    """One for each prompt of the run, each of 16 bytes, which are 16 tokens."""
    return [(f"{index:03d} " * 8)[:NUM_PROMPT_TOKENS] for index in range(num_steps * NUM_PROMPTS)]


def sums(num_steps: int) -> list[tuple[str, str]]:
    """A question and its answer for each prompt of a run of "pretrained"."""
    draw = random.Random(0)
    pairs = [(draw.randint(10, 99), draw.randint(10, 99)) for _ in range(num_steps * NUM_PROMPTS)]
    return [(f"What is {a} + {b}? Answer with the number only.", str(a + b)) for a, b in pairs]


def sum_score(response: str, answer: str) -> float:
    """1 where the last number of the response is the sum, and 0.1 for any number at all."""
    numbers = re.findall(r"\d+", response)
    return 1.0 if numbers and numbers[-1] == answer else 0.1 * bool(numbers)


def sum_reward(response: str, label: str, *, prompt: str, metadata: object) -> float:
    """`sum_score`, as a run's settings name a reward function."""
    return sum_score(response, label)


def answer_lengths(load: str, position: int) -> list[int]:
    """Tokens of each answer to the prompt at `position` of the data order."""
    if load == "equal":
        return [NUM_EQUAL] * NUM_SAMPLES
    draw = random.Random(position)
    # Cutting at the longest takes a little from the mean, which the centre gives back.
    centre = math.log(NUM_EQUAL * 1.015) - SIGMA**2 / 2
    return [min(NUM_LONGEST, max(4, round(draw.lognormvariate(centre, SIGMA)))) for _ in range(NUM_SAMPLES)]


def longest(load: str) -> int:
    return {"equal": NUM_EQUAL, PRETRAINED: NUM_CHAT_ANSWER}.get(load, NUM_LONGEST)


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
