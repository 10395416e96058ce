"""Workflows: the one of the docs on a real engine, and every way in which one can end."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from examples import self_play
from rondo.comm.bus.group import NO_VERSION
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.engines.embedded.embedded import EmbeddedEngine, slot_engine
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.engines.stops import Stops, whole_sample
from rondo.roles.rewards.pool import RewardItem, RewardResult
from rondo.roles.sampling.columns import loss_mask
from rondo.roles.sampling.episode import Episode, Limits, Made, SampleRow
from rondo.roles.sampling.evaluation import scored
from rondo.roles.sampling.single_turn import single_turn
from rondo.roles.sampling.workflow import Client, Context, Workflow, open_workflow
from rondo.runtime.errors import Closed, ConfigError
from tests.roles.engines.engines import qwen3

DOCS = Path(__file__).parents[3] / "docs" / "your-own.md"
PROMPT = np.array([5, 6, 7], np.int32)
ROW = Row("row 9", "p", "7", {})
MOST = 16
LIMITS = Limits(MOST, MOST + len(PROMPT))


def sample(*tokens: int) -> Completion:
    size = len(tokens)
    return Completion("", np.array(tokens, np.int32), np.ones(size, np.float32), np.zeros(size, np.int32), "stop")


def made(number: int, *tokens: int, error: str | None = None) -> Made:
    return Made(number, (SampleRow(PROMPT, sample(*tokens or (number,))),), error=error)


def context(*, missing: tuple[int, ...] = (0, 1), tokenizer: Any = None, **options: Any) -> Context:
    return Context(ROW, PROMPT, None, tokenizer, missing, options.pop("limits", LIMITS), **options)


async def nobody(request: Request) -> Completion:
    raise AssertionError("it is not asked")


async def made_by(workflow: Workflow, at: Context, ask: Any = nobody, params: Any = None) -> list[list[Made]]:
    """What is handed in, in the parts in which it comes."""

    def request(number: int) -> Request:
        return Request(f"r/{number}", PROMPT, params or SamplingParams(MOST, temperature=0.0), seed=number)

    async with asyncio.timeout(60), aclosing(at.samples(workflow, Client(at, request, ask))) as made:
        return [some async for some in made]


def workflow_of_the_docs() -> Workflow:
    [code] = [
        each for each in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL) if "async def second" in each
    ]
    names: dict[str, Any] = {}
    exec(code, names)
    return cast(Workflow, names["second_try"])


async def inline(function: Any) -> Any:
    return function()


async def test_the_workflow_of_the_docs_goes_on_behind_what_it_tells_the_policy() -> None:
    tokenizer = build_tokenizer()
    told = tokenizer(" No. Again: ", add_special_tokens=False)["input_ids"]
    vocabulary = len(tokenizer)
    engine = EmbeddedEngine(
        slot_engine(qwen3(vocab_size=vocabulary), num_slots=4, max_length=64, fixed_shapes=True, version=3), inline
    )
    text = "x"

    async def ask(request: Request) -> Completion:
        return await whole_sample(engine, request, Stops((), (text,), tokenizer))

    params = SamplingParams(24)
    once = [each for some in await made_by(single_turn, context(), ask, SamplingParams(4)) for each in some]

    async def short_first(request: Request) -> Completion:
        if request.prefix:
            return await ask(request)
        return replace(await ask(Request(request.id, PROMPT, SamplingParams(4), request.seed)), finish_reason="stop")

    twice = [
        sorted(
            (each for some in await made_by(workflow_of_the_docs(), at, short_first, params) for each in some),
            key=lambda each: each.number,
        )
        for at in (context(tokenizer=tokenizer, limits=Limits(24, 64)) for _ in range(2))
    ]
    for first, one, same in zip(once, *twice, strict=True):
        size, done = len(first.last.tokens), one.last
        assert done.tokens[:size].tolist() == first.last.tokens.tolist()
        assert done.tokens[size : size + len(told)].tolist() == told
        assert done.policy_versions.tolist() == [3] * size + [NO_VERSION] * len(told) + [3] * (
            len(done.tokens) - size - len(told)
        )
        assert loss_mask(done).sum() == len(done.tokens) - len(told) > size
        assert len(done.tokens) == 24 and done.finish_reason == "length"
        assert done.tokens.tolist() == same.last.tokens.tolist(), "seeds are those of sample and place"
    await engine.close()


async def test_a_text_that_ends_samples_ends_none_again_in_what_it_goes_on_from() -> None:
    tokenizer = build_tokenizer()
    ids = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in ("ab.", "told", "cd.ef")]
    asked: list[Request] = []

    class Engine:
        async def generate(self, request: Request) -> Completion:
            asked.append(request)
            before = [] if request.prefix is None else request.prefix.tokens.tolist()
            return sample(*before, *(ids[0] if request.prefix is None else ids[2]))

    async def play(episode: Episode) -> None:
        await episode.generate()
        await episode.say("told")
        await episode.generate()

    async def workflow(row: Row, client: Client, at: Context) -> None:
        await at.each(client, play)

    ask = lambda request: whole_sample(cast(Any, Engine()), request, Stops((), (".",), tokenizer))  # noqa: E731
    [[made]] = await made_by(workflow, context(missing=(0,), tokenizer=tokenizer), ask)
    assert tokenizer.decode(made.last.tokens.tolist()) == "ab.toldcd."
    assert [each.prefix is None for each in asked] == [True, False]


async def test_what_was_handed_in_stays_when_the_workflow_fails_and_the_others_are_cancelled() -> None:
    cancelled = asyncio.Event()
    at, parts = context(missing=(0, 1, 2)), list[list[Made]]()

    async def workflow(row: Row, client: Client, at: Context) -> None:
        async def one(number: int) -> None:
            if number == 2:
                raise LookupError("planted")
            if number == 0:
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.set()
            at.done(made(number))

        async with asyncio.TaskGroup() as tasks:
            for number in at.missing:
                tasks.create_task(one(number))

    with pytest.raises(RowError, match=r"row 9: rollout.workflow must end without errors, got LookupError: planted"):
        async with aclosing(at.samples(workflow, cast(Any, None))) as ready:
            async for some in ready:
                parts.append(some)
    assert [[each.number for each in some] for some in parts] == [[1]] and cancelled.is_set()


async def test_samples_that_end_together_come_together_in_the_order_of_their_numbers() -> None:
    async def workflow(row: Row, client: Client, at: Context) -> None:
        for number in reversed(at.missing):
            at.done(made(number, error="planted" if number else None))

    [ready] = await made_by(workflow, context(missing=(0, 3, 4)))
    assert [(each.number, each.error) for each in ready] == [(0, None), (3, "planted"), (4, "planted")]

    class Rewards:
        async def score(self, items: list[RewardItem]) -> list[RewardResult]:
            return [RewardResult(float(item.response)) for item in items]

    class Letters:
        added_tokens_decoder: Mapping[int, Any] = {}
        all_special_ids: Sequence[int] = ()

        def decode(self, tokens: list[int], **_: Any) -> str:
            return str(tokens[0])

    found = await scored(cast(Any, Rewards()), Letters(), ROW, ready, MOST)
    assert [(each.score, each.error) for each in found] == [(0.0, None), (None, "planted"), (None, "planted")]


@pytest.mark.parametrize(
    ("handed", "error"),
    [
        ([], r"row 9: rollout.workflow must hand in each missing sample once, got none of \[0, 1\]. Correct it"),
        ([made(0), made(0)], r"hand in each missing sample once, of \[0, 1\], got 0"),
        ([made(2)], r"hand in each missing sample once, of \[0, 1\], got 2"),
        (
            [made(0, *range(17))],
            r"make rows of 1 to 16 tokens, each with its log-prob and version, got \[17, 17, 17\] for 0",
        ),
        ([Made(0, made(0).rows * 2)], r"make samples of 1 to 1 rows \(rollout.max_rows\), got 2"),
    ],
)
async def test_each_missing_sample_is_handed_in_once_and_within_its_room(handed: Any, error: str) -> None:
    async def workflow(row: Row, client: Client, at: Context) -> None:
        for each in handed:
            at.done(each)

    with pytest.raises(RowError, match=error):
        await made_by(workflow, context())


async def test_the_end_of_an_engine_is_no_fault_of_the_row() -> None:
    async def ended(request: Request) -> Completion:
        if request.id == "r/1":
            raise Closed("the engine must be open, got a closed one")
        raise RowError("planted")

    with pytest.raises(Closed):
        await made_by(single_turn, context(), ended)


async def test_a_workflow_that_nobody_waits_for_any_more_is_cancelled_at_its_wait() -> None:
    waiting, ended = asyncio.Event(), asyncio.Event()

    async def workflow(row: Row, client: Client, at: Context) -> None:
        waiting.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.create_task(made_by(workflow, context()))
    async with asyncio.timeout(60):
        await waiting.wait()
        task.cancel()
        await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_workflow_that_cancels_itself_fails_its_row() -> None:
    async def workflow(row: Row, client: Client, at: Context) -> None:
        raise asyncio.CancelledError

    with pytest.raises(RowError, match="got a cancellation of its own"):
        await made_by(workflow, context())


def test_only_an_async_function_of_three_is_a_workflow(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def plain(row, client, context): ...\nasync def two(row, client): ...\nasync def fits(*three): ...\n"
    )
    assert open_workflow("rondo.roles.sampling.single_turn:single_turn") is single_turn
    assert open_workflow(f"{file}:fits").__name__ == "fits"  # type: ignore[attr-defined]
    for name in ("plain", "two"):
        with pytest.raises(
            ConfigError, match=r"rollout.workflow must be an async function of \(row, client, context\)"
        ):
            open_workflow(f"{file}:{name}")


async def test_both_players_of_a_game_are_samples_and_who_plays_beside_one_is_read_by_nobody() -> None:
    tokenizer = build_tokenizer()
    prompt = np.array(tokenizer("5:", add_special_tokens=False)["input_ids"], np.int32)
    asked = list[str]()

    async def takes_one(request: Request) -> Completion:
        asked.append(request.id)
        said = np.array(tokenizer("1.", add_special_tokens=False)["input_ids"], np.int32)
        before = request.prefix
        tokens = said if before is None else np.concatenate([before.tokens, said])
        versions = np.zeros(2, np.int32) if before is None else np.append(before.policy_versions, [0, 0])
        return Completion(request.id, tokens, np.zeros(len(tokens), np.float32), versions.astype(np.int32), "stop")

    at = Context(Row("row 9", "5:", None, {}), prompt, None, tokenizer, (0, 1, 3), Limits(MOST, 64))
    client = Client(at, lambda number: Request(f"r/{number}", prompt, SamplingParams(MOST), seed=number), takes_one)
    async with asyncio.timeout(60), aclosing(at.samples(self_play.play, client)) as handed:
        made = sorted([each async for some in handed for each in some], key=lambda each: each.number)
    assert [(each.number, each.reward) for each in made] == [(0, 1.0), (1, 0.0), (3, 0.0)]
    texts = [tokenizer.decode(each.last.tokens.tolist()) for each in made]
    assert texts == ["1.3:1.1:1.", "4:1.2:1.", "4:1.2:1."], "each is told what is left when it is its turn"
    assert tokenizer.decode(made[0].last.tokens[loss_mask(made[0].last) > 0].tolist()) == "1.1.1."
    assert {each for each in asked if each.startswith("r/3")} == {"r/3", "r/3.other"}
