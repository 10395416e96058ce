"""Episodes: what is trained is what was sampled, token by token, over templates that extend and one that rewrites."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from rondo.comm.bus.group import NO_VERSION
from rondo.models.tiny.tokenizer import END_OF_TURN, build_tokenizer
from rondo.roles.config import DataConfig
from rondo.roles.data.chat import Chat
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.prompts import render_prompt
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.rewards.pool import RewardResult
from rondo.roles.sampling.columns import loss_mask, pieces_of, turn_rewards, with_score
from rondo.roles.sampling.episode import Episode, Limits, Made, Turn
from rondo.roles.sampling.evaluation import scored
from rondo.roles.sampling.workflow import Client, Context
from rondo.runtime.errors import Closed, ConfigError
from tests.schedules import later
from tests.strength import LONG

THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3's: thoughts of earlier replies go once a user speaks again."""
TRIMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
"""As Llama's, which takes spaces off what is said."""
LIMITS = Limits(4096, 8192)


def tokenizer_with(template: str | None = None) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return tokenizer


TOKENIZERS = {
    name: tokenizer_with(each) for name, each in {"plain": None, "thinking": THINKING, "trim": TRIMMING}.items()
}
DATA = DataConfig(path="x", apply_chat_template=True)
ROW = Row("row 9", "2+2?", "4", {})


class Policy:
    """Answers with random tokens of its own, and keeps what it was asked behind and what it said, by request."""

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer, self._draw = tokenizer, np.random.default_rng(seed)
        self.end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
        self.said = list[Asked]()
        self.version = 0

    async def ask(self, request: Request) -> Completion:
        draw = self._draw
        text = ("<think>a</think>" if draw.random() < 0.4 else "") + " " * int(draw.integers(0, 3))
        tokens = [*self._tokenizer(text)["input_ids"], *draw.integers(0, 256, draw.integers(1, 6)).tolist()]
        closes = draw.random() < 0.7
        tokens = np.array([*tokens, *([self.end] if closes else [])], np.int32)
        log_probs = draw.standard_normal(len(tokens)).astype(np.float32)
        self.version += int(draw.integers(0, 2))
        versions = np.full(len(tokens), self.version, np.int32)
        self.said.append((request.sequence, tokens, log_probs, versions))
        before = request.prefix
        parts = (tokens, log_probs, versions)
        if before is not None:
            parts = tuple(
                np.concatenate(pair)
                for pair in zip((before.tokens, before.log_probs, before.policy_versions), parts, strict=True)
            )  # type: ignore[assignment]
        return Completion(request.id, *parts, "stop")


def episode(
    policy: Policy, tokenizer: Any, *, limits: Limits = LIMITS, row: Row = ROW, data: DataConfig = DATA
) -> Episode:
    prompt = render_prompt(tokenizer, row, data, 4096)
    params = SamplingParams(limits.max_new_tokens, stop_token_ids=(policy.end,))
    request = Request("g/0", prompt, params, seed=7)
    return Episode.opened(0, request, policy.ask, limits, tokenizer, Chat.of(tokenizer, row, data), lambda: None)


Asked = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""What the policy was asked behind, and what it said: its tokens, their log-probs and versions."""


def check_trained(made: Made, said: list[Asked]) -> None:
    """Every sampled token is trained once, with its log-prob and version, behind the very tokens that it was sampled behind."""
    left = [tuple(each.tobytes() for each in asked) for asked in said]
    for row in made.rows:
        done = row.completion
        whole, mask, first = np.concatenate([row.prompt, done.tokens]), loss_mask(done), len(row.prompt)
        assert not done.log_probs[mask == 0].any() and (done.policy_versions[mask == 0] == NO_VERSION).all()
        at = 0
        for turn in (tokens for tokens, sampled in pieces_of(done) if sampled):
            at += int(np.argmax(mask[at:]))
            # Two turns that nothing was said between lie behind each other.
            end = at + len(turn)
            while at < end:
                behind, own = (
                    whole[: first + at].tobytes(),
                    (done.tokens[at:], done.log_probs[at:], done.policy_versions[at:]),
                )
                # Branches may go on from one place: then what they sampled tells them apart.
                fitting = [
                    key
                    for key in left
                    if key[0] == behind and all(a.tobytes().startswith(b) for a, b in zip(own, key[1:], strict=True))
                ]
                key = max(fitting, key=lambda key: len(key[1]))
                left.remove(key)
                at += len(key[1]) // 4
    assert not left


async def wander(first: Episode, draw: np.random.Generator) -> None:
    """A few turns: answered in messages or text, in other contexts, and in branches."""
    lines = [(first, True)]  # whether messages began it
    for _ in range(int(draw.integers(1, 7))):
        at = int(draw.integers(len(lines)))
        line, chats = lines[at]
        await line.generate()
        what, text = draw.random(), "".join(map(chr, draw.integers(32, 500, draw.integers(0, 9))))
        if what < 0.5 and chats:
            roles = ["tool", "user"] if draw.random() < 0.3 else [("tool", "user")[int(draw.integers(2))]]
            await line.say([{"role": role, "content": text} for role in roles])
        elif what < 0.7:
            await line.say(text)
        elif what < 0.8:
            await line.new_context([{"role": "user", "content": text}])
            lines[at] = line, True
        elif what < 0.9:
            lines.append((await line.branch(), chats))
        elif what < 0.95:
            lines.append((await line.branch(text + "?"), False))


async def random_episode(tokenizer: Any, seed: int) -> tuple[Made, Policy]:
    policy = Policy(tokenizer, seed)
    first = episode(policy, tokenizer, limits=replace(LIMITS, max_rows=12))
    await wander(first, np.random.default_rng([1, seed]))
    return first.made(), policy


@pytest.mark.parametrize("template", TOKENIZERS)
async def test_what_is_trained_is_what_was_sampled_token_by_token(template: str) -> None:
    rows = 0
    for seed in range(1000 if LONG else 30):
        made, policy = await random_episode(TOKENIZERS[template], seed)
        check_trained(made, policy.said)
        rows += len(made.rows)
    assert rows > 30


@pytest.mark.parametrize("template", TOKENIZERS)
async def test_a_conversation_of_turns_has_the_tokens_that_the_template_gives_the_whole(template: str) -> None:
    tokenizer, answers = TOKENIZERS[template], iter(["one", "two", "three"])
    policy = Policy(tokenizer, 0)

    async def ask(request: Request) -> Completion:
        tokens = np.array([*tokenizer(next(answers))["input_ids"], policy.end], np.int32)
        whole = np.concatenate([tokens[:0] if request.prefix is None else request.prefix.tokens, tokens])
        return Completion("", whole, np.ones(len(whole), np.float32), np.zeros(len(whole), np.int32), "stop")

    policy.ask = ask  # type: ignore[method-assign]
    line = episode(policy, tokenizer)
    for role in ("tool", "user"):
        assert not line.over and (await line.generate()).text in ("one", "two")
        await line.say([{"role": role, "content": "42"}])
    await line.generate()
    [row] = line.made().rows
    text = tokenizer.apply_chat_template(line.messages, tokenize=False)
    assert tokenizer.decode([*row.prompt.tolist(), *row.completion.tokens.tolist()]) == text.rstrip("\n")


async def test_a_template_that_rewrites_gets_a_row_for_the_turn_or_ends_the_run_where_there_is_room_for_one() -> None:
    tokenizer = TOKENIZERS["thinking"]
    for limits in (replace(LIMITS, max_rows=2), LIMITS):
        policy = Policy(tokenizer, 3)
        line = episode(policy, tokenizer, limits=limits)
        while "</think>" not in (await line.generate()).text:
            pass
        if limits.max_rows == 1:
            with pytest.raises(
                ConfigError, match=r"rollout.max_rows must be 2 or more with a chat template that rewrites"
            ):
                await line.say([{"role": "user", "content": "Sure?"}])
            continue
        await line.say([{"role": "user", "content": "Sure?"}])
        await line.generate()
        first, second = line.made().rows
        assert "<think>" in tokenizer.decode(first.completion.tokens.tolist())
        assert "<think>" not in tokenizer.decode(second.prompt.tolist()).split("Sure?")[0]
        check_trained(line.made(), policy.said)


async def test_budgets_end_an_episode_as_cut_off_and_what_nobody_answers_is_not_trained() -> None:
    tokenizer = TOKENIZERS["plain"]
    for limits in (replace(LIMITS, max_turns=1), Limits(8, 4096)):
        policy = Policy(tokenizer, 1)
        line = episode(policy, tokenizer, limits=limits)
        await line.generate()
        await line.say([{"role": "tool", "content": "more than there is room for"}])
        assert line.over and len((await line.generate()).tokens) == 0
        [row] = line.made().rows
        assert row.completion.finish_reason == "length" and len(policy.said) == 1
        check_trained(line.made(), policy.said)


async def test_turns_have_rewards_and_the_sample_their_sum() -> None:
    policy = Policy(TOKENIZERS["plain"], 1)
    line = episode(policy, TOKENIZERS["plain"])
    with pytest.raises(RowError, match="messages must be said behind a reply to messages, got none"):
        await line.say([{"role": "tool", "content": "4"}])
    with pytest.raises(RowError, match="reward must be a finite number behind a turn"):
        line.reward(1.0)
    for value in (0.25, 0.5):
        await line.generate()
        picture = [{"role": "tool", "content": [{"type": "image"}]}]
        with pytest.raises(
            RowError, match="what a further row begins with must be text, got media in a message of role"
        ):
            await line.new_context(picture)
        with pytest.raises(RowError, match="what is said must have each medium in its part"):
            await line.say(picture)
        line.reward(value)
        await line.say([{"role": "tool", "content": "4"}])
    made = line.made()
    sampled = made.last.policy_versions != NO_VERSION
    ends = np.flatnonzero(sampled & ~np.append(sampled[1:], False)).tolist()
    told = turn_rewards(with_score(made, 1.0).rows[0])  # of which the turns say 0.75
    assert told[ends].tolist() == [0.25, 0.75] and np.isfinite(told).sum() == 2
    assert made.reward == 0.75 and [at for at, _ in made.rows[0].rewards] == ends


async def test_a_turn_has_its_reward_where_the_next_one_follows_directly_or_in_another_row() -> None:
    policy = Policy(TOKENIZERS["plain"], 1)
    line = episode(policy, TOKENIZERS["plain"], limits=replace(LIMITS, max_rows=2))
    ends = [len((await line.generate()).tokens) - 1]
    line.reward(0.25)
    ends.append(ends[0] + len((await line.generate()).tokens))
    await line.new_context("another")
    line.reward(0.5)  # of the turn before it
    assert line.made().reward == 0.75
    told = turn_rewards(line.made().rows[0])
    assert told[ends].tolist() == [0.25, 0.5] and np.isfinite(told).sum() == 2


async def test_a_sample_that_nobody_said_anything_of_is_scored_as_no_text_and_has_no_turn_to_reward() -> None:
    made = episode(Policy(TOKENIZERS["plain"], 1), TOKENIZERS["plain"]).made()
    assert with_score(made, 1.0) is made and np.isnan(turn_rewards(made.rows[0])).all()

    class Pool:
        async def score(self, items: Any) -> Any:
            self.items = items
            return [RewardResult(0.0)]

    await scored(pool := Pool(), TOKENIZERS["plain"], ROW, [made], 8)  # type: ignore[arg-type]
    assert [(each.response, each.turns) for each in pool.items] == [("", [{"role": "assistant", "content": ""}])]


async def test_rewards_of_turns_whose_sum_is_too_large_fail_their_sample_alone() -> None:
    found = list[Made]()
    for worths in ((1e38, 1e38), (1e38, -1e38), (1.0, 2.0)):
        line = episode(Policy(TOKENIZERS["plain"], 1), TOKENIZERS["plain"])
        await line.generate()
        for worth in worths:
            line.reward(worth)
        found.append(line.made())
    results = await scored(cast(Any, None), TOKENIZERS["plain"], ROW, found, 8)
    assert [each.score for each in results] == [None, None, 3.0]
    assert (results[0].error or "").startswith(
        "the sum of a sample's rewards must be a number of at most 1.7e+38 in size"
    )


Play = Callable[[Episode], Awaitable[object]]


async def handed_in(play: Play, limits: Limits = LIMITS) -> dict[int, Made]:
    tokenizer = TOKENIZERS["plain"]
    policy = Policy(tokenizer, 1)
    prompt = render_prompt(tokenizer, ROW, DATA, 4096)
    at = Context(ROW, prompt, None, tokenizer, (0, 1), limits, chat=Chat.of(tokenizer, ROW, DATA))
    client = Client(at, lambda number: Request(f"g/{number}", prompt, SamplingParams(99), seed=number), policy.ask)

    async def workflow(row: Row, client: Client, context: Context) -> None:
        await context.each(client, play)

    async with asyncio.timeout(60):
        return {made.number: made async for some in at.samples(workflow, client) for made in some}


async def test_an_episode_that_fails_fails_itself_and_keeps_what_was_sampled() -> None:
    async def play(line: Episode) -> None:
        await line.generate()
        if line.number:
            raise LookupError("planted")

    made = await handed_in(play)
    assert made[0].error is None and made[1].error is not None and made[1].error.startswith("LookupError: planted")
    assert all(len(each.last.tokens) and each.last.policy_versions[0] >= 0 for each in made.values())

    async def at_once(line: Episode) -> None:
        raise LookupError("planted")

    assert [each.last.policy_versions.tolist() for each in (await handed_in(at_once)).values()] == [[NO_VERSION]] * 2

    async def gone(line: Episode) -> None:
        raise ExceptionGroup("tools", [Closed("the engine must be open")])

    with pytest.raises(Closed):
        await handed_in(gone)


async def test_an_episode_beyond_its_time_is_handed_in_as_aborted() -> None:
    num_turns = 0

    async def play(line: Episode) -> Turn:
        nonlocal num_turns
        turn = await line.generate()
        num_turns += 1
        if num_turns == 2:
            later(50)
        await asyncio.Event().wait()
        return turn

    made = await handed_in(play, replace(LIMITS, max_s=50))
    assert [(each.last.finish_reason, each.error) for each in made.values()] == [("cancelled", None)] * 2
