"""Kept turns: an episode whose holder dies goes on at the next one from its last whole turn, where its environment can."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.comm.bus.unfinished import FOLDER, cut, sweep
from rondo.roles.data.chat import Chat
from rondo.roles.data.datasets import RowError
from rondo.roles.data.prompts import render_prompt
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.sampling.environments import Environments, Step
from rondo.roles.sampling.episode import Made
from rondo.roles.sampling.evaluation import limits_of
from rondo.roles.sampling.kept_turns import EpisodeCounts, KeptTurns
from rondo.roles.sampling.tools import with_tools
from rondo.roles.sampling.workflow import Client, Context
from rondo.runtime.errors import ConfigError
from tests.roles.sampling.test_environments import END, ROW, TOKENIZER, add, call, job

TURNS = 4
ASKED = Counter[str]()
"""Calls of environments, by what was said."""


class Counts:
    """Says how often it was asked, which a turn must have told it."""

    number = 0

    def reset(self) -> str:
        return " Count."

    def step(self, said: str) -> Step:
        ASKED[said] += 1
        self.number += 1
        return Step(f"{said} was {self.number}", reward=self.number / 4, over=self.number == TURNS)


class Replays(Counts):
    replays = True


class Snapshots(Counts):
    async def snapshot(self) -> Any:
        return {"number": self.number, 1: (b"x",)}

    async def restore(self, state: Any) -> None:
        assert state[1] == (b"x",)
        self.number = state["number"]


class Half(Counts):
    def snapshot(self) -> None: ...


class Unlike(Replays):
    """Says that it replays, and does not."""

    def step(self, said: str) -> Step:
        step = super().step(said)
        return Step(f"{step.say} of {ASKED.total()}", step.reward, step.over)


class Holder:
    """One that holds the lease of group 7, whose engine never says the same twice. It dies when it is asked for turn `dies`."""

    texts, draw = itertools.count(), np.random.default_rng(7)

    def __init__(self, folder: Path, epoch: int, dies: int = 99, **settings: Any) -> None:
        self.config = with_tools(job(**settings))
        self.folder, self.epoch, self.dies = folder, epoch, dies
        self.counts, self.asked, self.made = EpisodeCounts(), list[Completion](), list[Made]()
        self.dead, self.num_answers = asyncio.Event(), 0

    async def play(self) -> None:
        prompt, counted = render_prompt(TOKENIZER, ROW, self.config.data, 2048), 0
        with KeptTurns(self.folder, 7, self.epoch, [0], self.counts) as turns:
            at = Context(
                ROW, prompt, None, TOKENIZER, [0], limits_of(self.config, 2048), turns=turns,
                chat=Chat.of(TOKENIZER, ROW, self.config.data),
            )  # fmt: skip

            keep = turns.add_answer

            def keeping(*answer: Any) -> None:
                self.num_answers += 1
                keep(*answer)

            turns.add_answer = keeping  # type: ignore[method-assign]

            async def ask(request: Request) -> Completion:
                nonlocal counted
                counted += 1
                if (kept := turns.sampled(request)) is not None:
                    return kept
                if counted == self.dies:
                    self.dead.set()
                    await asyncio.Event().wait()
                text = f"turn {next(self.texts)}"
                if self.config.rollout.environment.tools:
                    text = call("add", f'{{"a": {counted}}}') if counted < TURNS else text
                tokens = np.array([*TOKENIZER(text)["input_ids"], END], np.int32)
                versions = np.full(len(tokens), self.epoch, np.int32)
                parts = tokens, self.draw.random(len(tokens), np.float32), versions
                if (before := request.prefix) is not None:
                    had = before.tokens, before.log_probs, before.policy_versions
                    parts = tuple(np.concatenate(pair) for pair in zip(had, parts, strict=True))  # type: ignore[assignment]
                done = Completion(request.id, *parts, "stop")
                self.asked.append(done)
                turns.add(request, done)
                return done

            params = SamplingParams(2048, stop_token_ids=(END,))
            client = Client(at, lambda number: Request(f"7.{self.epoch}/{number}", prompt, params, seed=5), ask)
            async with Environments(self.config, load_deadline_s=100) as opened:
                async for some in at.samples(opened.workflow(TOKENIZER), client):
                    self.made += some

    async def dying(self) -> None:
        playing = asyncio.create_task(self.play())
        await self.dead.wait()
        playing.cancel()
        await asyncio.wait([playing])


def goes_on_from(made: Made, died: Holder) -> bool:
    """Whether the sample has all that was sampled before, to the bit, and the rest once."""
    whole, had = made.last, died.asked[-1]
    size = len(had.tokens)
    same = [
        np.array_equal(getattr(whole, name)[:size], getattr(had, name))
        for name in ("tokens", "log_probs", "policy_versions")
    ]
    return all(same) and set(whole.policy_versions[size:]) <= {-1, died.epoch + 1}


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({"factory": Replays}, 2), ({"factory": Snapshots}, 1), ({"tools": [add]}, 0)],
)
async def test_an_episode_goes_on_from_its_last_whole_turn_at_the_next_holder(
    settings: Any, asked: int, tmp_path: Path
) -> None:
    ASKED.clear()
    died, next_one = Holder(tmp_path, 0, dies=3, **settings), Holder(tmp_path, 1, **settings)
    async with asyncio.timeout(60):
        await died.dying()
        await next_one.play()
    assert (len(died.asked), len(next_one.asked)) == (2, 2), "no turn is sampled twice"
    assert next_one.counts == EpisodeCounts(resumed=1, turns_resumed=2) and died.counts == EpisodeCounts()
    [made] = next_one.made
    assert goes_on_from(made, died) and made.error is None
    if "factory" in settings:
        assert list(ASKED.values()) == [asked, asked, 1, 1]
        assert made.reward == 1 / 4 + 2 / 4 + 3 / 4 + 1 and len(made.rows[-1].rewards) == 4
    else:
        assert "tool\n2<" in str(TOKENIZER.decode(made.last.tokens))
        assert (died.num_answers, next_one.num_answers) == (2, 1), "nothing is kept of an end that asks nobody"
    assert list((tmp_path / FOLDER).iterdir()) == []


async def test_an_environment_that_says_nothing_begins_again_and_one_that_answers_otherwise_is_asked_anew(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(60):
        for factory, resumed, asked in ((Counts, EpisodeCounts(begun_again=1), 4), (Unlike, EpisodeCounts(1, 0, 1), 3)):
            died, next_one = Holder(tmp_path, 0, dies=3, factory=factory), Holder(tmp_path, 1, factory=factory)
            await died.dying()
            await next_one.play()
            assert next_one.counts == resumed and len(next_one.asked) == asked
    with pytest.raises(ConfigError, match="both `snapshot` and `restore`"):
        with_tools(job(factory=Half))


async def test_what_is_torn_or_cannot_be_written_costs_turns_and_never_the_episode(tmp_path: Path) -> None:
    died, next_one = Holder(tmp_path, 0, dies=4, factory=Replays), Holder(tmp_path, 1, dies=99, factory=Replays)
    async with asyncio.timeout(60):
        await died.dying()
        [file] = (tmp_path / FOLDER).iterdir()
        first, second, third = file.read_bytes().split(b"\n\n")
        file.write_bytes(b"%b\n%b\n%b" % (first, second[: len(second) // 2], third))
        (tmp_path / FOLDER / "7.1.jsonl").symlink_to("/dev/full")
        await next_one.play()
    assert next_one.counts == EpisodeCounts(1, 0, 1) and len(next_one.asked) == TURNS - 1 and len(next_one.made) == 1


def test_an_attempt_takes_over_what_its_weights_have_sampled_of_groups_that_are_open(tmp_path: Path) -> None:
    versions, request = [0, 2, 5], Request("7.0/1", np.arange(4, dtype=np.int32), SamplingParams(99), seed=5)
    for group in (7, 8):
        with pytest.raises(asyncio.CancelledError), KeptTurns(tmp_path, group, 0, [1], EpisodeCounts()) as turns:
            turns.keeps = True
            for version in versions:
                at = Request(request.id, request.prompt + version, request.params, seed=5)
                done = np.full(3, version, np.int32)
                turns.add(
                    at, Completion(at.id, done, np.ones(3, np.float32), done, "stop", np.ones((6, 2, 1), np.uint8))
                )
            raise asyncio.CancelledError  # its lease is lost
    sweep(tmp_path, {7, 8})
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    cut(tmp_path, 2, {7})
    counts = EpisodeCounts()
    with pytest.raises(RowError), KeptTurns(tmp_path, 7, 1, [0, 1], counts) as turns:
        found = [turns.sampled(Request("7.1/1", request.prompt + each, request.params, seed=5)) for each in versions]
        assert [None if each is None else each.tokens.tolist() for each in found] == [[0] * 3, [2] * 3, None]
        assert (
            found[0] is not None and found[0].routed_experts is not None and found[0].routed_experts.shape == (6, 2, 1)
        )
        raise RowError("a group that begins anew")
    assert counts == EpisodeCounts(1, 1, 2) and list((tmp_path / FOLDER).iterdir()) == []
