"""Evaluation: how well one policy version answers prompts that nobody trains on.

Owns what is asked (every set's prompts, each with its own sampling), the figures of a set, the samples that are kept for people
to read, and the check that one version alone answered. Does not own which version is due (the coordinator) or the engine, which
is handed in.

    part = await evaluator.evaluate(engine, "version_20", 20, num_slots=16, part=0, of=2)      # of two replicas
    result(config.evaluation.named_sets(), 20, [part, other])
      -> {"version": 20, "reward": 0.4, "num_prompts": 64, "num_samples": 256, "num_failed": 0,
          "sets": {"math": {"mean@4": 0.4, "pass@1": 0.4, "pass@4": 0.7, "num_prompts": 64}}}

Invariant: no sample of an evaluation reaches the bus; its seed comes from (run seed, set, prompt, sample), so that the same
weights give the same samples wherever and however often they are asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rondo.comm.bus.group import NO_VERSION
from rondo.models.media.inputs import MediaInputs
from rondo.models.media.refs import MediaRef
from rondo.roles.config import DataConfig, EvalSet, JobConfig
from rondo.roles.data.chat import Chat
from rondo.roles.data.datasets import Row, RowError, Rows
from rondo.roles.data.media import originals_of
from rondo.roles.data.row_filters import Filtered
from rondo.roles.engines.engine import Completion, Engine, Request, SamplingParams, sample_seed
from rondo.roles.engines.stops import Stops, whole_sample
from rondo.roles.rewards.hub.named import ends_in_thought
from rondo.roles.rewards.pool import RewardItem, RewardPool, RewardResult
from rondo.roles.rewards.scores import too_large
from rondo.roles.sampling.columns import finish_of, pieces_of
from rondo.roles.sampling.episode import Limits, Made, text_of
from rondo.roles.sampling.single_turn import single_turn
from rondo.roles.sampling.workflow import Client, Context, Workflow
from rondo.runtime.errors import DeadlineExceeded, RondoError
from rondo.runtime.records.record import JsonLines
from rondo.runtime.values import as_json
from rondo.runtime.waits import PROCESS, waiting

Part = dict[str, Any]
"""What one replica found, as JSON: {"rewards": [[set, number of the prompt, rewards of its samples], ...], "failed": why one has
none}."""
_WORKFLOW = "workflow of an evaluation"
_LAST = -1
"""A priority below that of all others."""
_PROMPT_END = 16
"""Tokens at the end of a prompt, of which the last may open a thought."""
SET = "evaluation set"
"""In the metadata of a row: its set, where that has a reward of its own."""
Prepare = Callable[[Row, DataConfig], Awaitable[tuple[np.ndarray, MediaInputs | None]]]


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The unbiased estimate of the probability that one of k samples solves the prompt, 1 - C(n - c, k) / C(n, k), from n
    samples of which c did (Chen et al., Evaluating Large Language Models Trained on Code, 2021, equation 1)."""
    if num_samples - num_solved < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_solved + 1, num_samples + 1))


def figures(config: EvalSet, rewards: Sequence[Sequence[float | None]]) -> dict[str, float]:
    """Of a set whose prompts' samples got these rewards, None where one failed: `mean@n`, the mean of those that have one, and
    every `pass@k`, over the prompts of which k have. A figure that nothing is known of is left out."""
    scored = [[reward for reward in each if reward is not None] for each in rewards]
    found: dict[str, float] = {}
    if any(scored):
        found[f"mean@{config.samples_per_prompt}"] = float(np.mean([reward for each in scored for reward in each]))
    solved = [(len(each), sum(reward >= config.solved_from for reward in each)) for each in scored]
    for k in config.ks:
        if passes := [pass_at_k(n, c, k) for n, c in solved if n >= k]:
            found[f"pass@{k}"] = float(np.mean(passes))
    return found


def result(sets: Mapping[str, EvalSet], version: int, parts: Sequence[Part]) -> dict[str, Any]:
    """What all parts together say. Samples whose reward failed are counted and told, and in no mean; without any reward the mean
    is None."""
    told = sorted((name, index, rewards) for part in parts for name, index, rewards in part["rewards"])
    found = {}
    for name, config in sets.items():
        rewards = [each for of, _, each in told if of == name]
        found[name] = {**figures(config, rewards), "num_prompts": len(rewards)}
    means = [value for each in found.values() for figure, value in each.items() if figure.startswith("mean@")]
    every = [reward for _, _, rewards in told for reward in rewards]
    num_failed = every.count(None)
    told_of: dict[str, Any] = {
        "version": version, "reward": float(np.mean(means)) if means else None, "num_prompts": len(told),
        "num_samples": len(every), "num_failed": num_failed, "sets": found,
    }  # fmt: skip
    return told_of | ({"first_failed": min(part["failed"] for part in parts if part["failed"])} if num_failed else {})


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Asks the prompts of every set and scores the answers. `prepare` makes a row's tokens and media, or raises RowError;
    `behind` those of later turns (`MediaPool.behind`); `params` are the rollout's sampling, of which each set changes some.
    Into the folder `samples` goes the first answer to each prompt, and every one that failed; with `keeps_all` every one."""

    config: JobConfig
    sets: Mapping[str, Rows]
    tokenizer: Any
    stops: Stops
    rewards: RewardPool
    prepare: Prepare
    params: SamplingParams
    workflow: Workflow = single_turn
    behind: Callable[..., Awaitable[tuple[np.ndarray, MediaInputs | None]]] | None = None
    samples: Path | None = None
    keeps_all: bool = False
    checkers: RewardPool | None = None
    """Of the sets that have a reward of their own, chosen by SET in the metadata."""

    async def evaluate(
        self, engine: Engine, label: str, version: int, *, num_slots: int, part: int = 0, of: int = 1,
        names: Collection[str] = (),
    ) -> Part:  # fmt: skip
        """Every `of`-th prompt under exactly this version, which the engine has and keeps; one wave decodes, one waits. The
        answers go to `samples/LABEL.PART.jsonl`, in the place of those of whoever was at this part before. `names`: of these sets
        alone."""
        assert self.config.evaluation is not None
        every_set = self.config.evaluation.named_sets()
        configs = {name: each for name, each in every_set.items() if not names or name in names}
        room = asyncio.Semaphore(max(1, -(-2 * num_slots // max(c.samples_per_prompt for c in configs.values()))))
        first_failed: list[str] = []
        lines: JsonLines | None = None
        if self.samples is not None:
            path = self.samples / f"{label}.{part}.jsonl"
            path.unlink(missing_ok=True)
            lines = JsonLines(path, what="samples")

        async def one(name: str, index: int) -> list[Any] | None:
            async with room:
                try:
                    rewards, failed, told = await self._prompt(engine, label, version, name, configs[name], index)
                except Filtered:
                    return None
                except RowError as error:
                    rewards, failed = [None] * configs[name].samples_per_prompt, str(error)
                    told = [{"reward": None, "error": failed}] * len(rewards)
            for number, line in enumerate(told):
                if lines is not None and (self.keeps_all or number == 0 or "error" in line):
                    lines.write({"set": name, "number": index, "sample": number, **line})
            if failed:
                first_failed.append(failed)
            return [name, index, rewards]

        every = [(name, index) for name in configs for index in range(len(self.sets[name]))]
        with lines or contextlib.nullcontext():
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(one(*each)) for each in every[part::of]]
        return {
            "rewards": [found for task in asked if (found := task.result())],
            "failed": min(first_failed, default=""),
        }

    async def _prompt(
        self, engine: Engine, label: str, version: int, name: str, config: EvalSet, index: int
    ) -> tuple[list[float | None], str, list[dict[str, Any]]]:
        """The rewards of one prompt's samples, why the first of those failed that did, and a line of each for people to read."""
        row = await asyncio.to_thread(self.sets[name].row, index)
        assert self.config.evaluation is not None
        kind = f"evaluation/{name}" if self.config.evaluation.sets else "evaluation"
        given = {"max_new_tokens": config.max_new_tokens, "top_p": config.top_p, "top_k": config.top_k}
        own: dict[str, Any] = {setting: value for setting, value in given.items() if value is not None}
        params = replace(self.params, temperature=config.temperature, **own)

        def request(prompt: np.ndarray, media: MediaInputs | None, number: int) -> Request:
            seed = sample_seed(self.config.seed, kind, index, number)
            return Request(f"{label}/{name}/{index}/{number}", prompt, params, seed, kind="evaluation", media=media)

        data, every = config.data or self.config.data, range(config.samples_per_prompt)
        if config.reward is not None:
            row = replace(row, metadata={**row.metadata, SET: name})
        made, results = await self._answered(
            engine, row, data, request, every, params.max_new_tokens, None if config.reward is None else self.checkers
        )
        sampled = {int(v) for each in made for row in each.rows for v in np.unique(row.completion.policy_versions)}
        others = sampled - {version, NO_VERSION}
        if others:
            raise RondoError(
                f"the evaluation of version {version} must sample under that version alone, got tokens of {sorted(others)}. "
                "The engine took other weights meanwhile"
            )
        errors = [told_error(row, each, result.error) for each, result in enumerate(results) if result.score is None]
        rewards = [result.score for result in results]
        lines = [shown(self.tokenizer, row, each, one) for each, one in zip(made, results, strict=True)]
        return rewards, errors[0] if errors else "", lines

    async def predict(self, engine: Engine, id: str, row: Row, *, num_samples: int, seed: int) -> list[dict[str, Any]]:
        """What the run makes of a row of somebody's: a line of each sample, as people read it, with its tokens, int32 [R], and
        their log-probs, float32 [R]. Sampled as the run samples, behind what else waits. RowError for one that is of no use."""

        def request(prompt: np.ndarray, media: MediaInputs | None, number: int) -> Request:
            of_sample = sample_seed(seed, "predict", 0, number)
            return Request(
                f"{id}/{number}", prompt, self.params, of_sample, kind="evaluation", media=media, priority=_LAST
            )

        most = self.params.max_new_tokens
        made, results = await self._answered(engine, row, self.config.data, request, range(num_samples), most)
        return [
            shown(self.tokenizer, row, each, one) | {"tokens": each.last.tokens, "log_probs": each.last.log_probs}
            for each, one in zip(made, results, strict=True)
        ]

    async def _answered(
        self,
        engine: Engine,
        row: Row,
        data: DataConfig,
        request: Callable[[np.ndarray, MediaInputs | None, int], Request],
        every: Sequence[int],
        most: int,
        rewards: RewardPool | None = None,
    ) -> tuple[list[Made], list[RewardResult]]:
        """A row through workflow and reward: its samples, in order, and what became of each. `request` makes the request of a
        sample by prompt, media and number."""
        prompt, media = await self.prepare(row, data)
        chat = Chat.of(self.tokenizer, row, data)
        limits = limits_of(self.config, most)
        look = None if self.behind is None else functools.partial(self.behind, data)
        refs = originals_of(row, data, self.config.media)
        context = functools.partial(
            Context, row, prompt, media, self.tokenizer, every, limits, chat=chat, look=look, originals=refs, evaluates=True,
        )  # fmt: skip
        made = await self._made(engine, row, context, functools.partial(request, prompt, media))
        return made, await scored(rewards or self.rewards, self.tokenizer, row, made, most, refs)

    async def _made(
        self,
        engine: Engine,
        row: Row,
        open_context: Callable[..., Context],
        request: Callable[[int], Request],
    ) -> list[Made]:
        """What the workflow makes of a prompt, in order. RowError where it comes no further for as long as a lease may, and has
        nothing at the engine."""
        num_busy, moved_at = 0, PROCESS.clock()

        def further() -> None:
            nonlocal moved_at
            moved_at = PROCESS.clock()

        @contextmanager
        def busy() -> Iterator[None]:
            """At the engine, or elsewhere: each has deadlines of its own."""
            nonlocal num_busy
            num_busy += 1
            try:
                yield
            finally:
                num_busy -= 1
                further()

        async def ask(asked: Request) -> Completion:
            with busy():
                return await whole_sample(engine, asked, self.stops)

        limit_s, made = self.config.rollout.lease_deadline_s, list[Made]()
        context = open_context(progress=further, elsewhere=busy)
        try:
            async with (
                waiting(
                    _WORKFLOW,
                    peer=row.name,
                    deadline_s=limit_s,
                    moved=lambda: PROCESS.clock() if num_busy else moved_at,
                ),
                aclosing(
                    context.samples(self.workflow, Client(context, request, ask, lambda name: engine.cancel(name)))
                ) as ready,
            ):
                async for some in ready:
                    made += some
                    further()
        except DeadlineExceeded as error:
            if error.name != _WORKFLOW:
                raise
            raise RowError(
                f"{row.name}: rollout.workflow must come further within {limit_s:g} s (rollout.lease_deadline_s), got nothing "
                "new. Give what it waits for a deadline, or tell of its steps by context.progress()"
            ) from error
        return sorted(made, key=lambda each: each.number)


def limits_of(config: JobConfig, max_new_tokens: int) -> Limits:
    """Of a sample with so many tokens behind its prompt."""
    rollout, media = config.rollout, config.media
    whole, shown = rollout.max_prompt_tokens + max_new_tokens, 0 if media is None else media.max_turn_bytes
    return Limits(max_new_tokens, whole, rollout.max_turns, rollout.max_rows, rollout.max_episode_s, shown)


async def scored(
    rewards: RewardPool,
    tokenizer: Any,
    row: Row,
    made: Sequence[Made],
    max_new_tokens: int,
    refs: Sequence[MediaRef] = (),
) -> list[RewardResult]:
    """One result a sample, in order; of one with an error that is the result, and of one whose turns have rewards their sum.
    refs: the media of the row, where they lie."""
    new = [each for each in made if each.reward is None and not each.error]
    items = [_item_of(tokenizer, row, each, max_new_tokens, refs) for each in new]
    results = iter(await rewards.score(items) if items else ())
    return [_own(each) if each.error or each.reward is not None else next(results) for each in made]


def _own(made: Made) -> RewardResult:
    """What a sample with an error, or with a reward of its own, is worth."""
    sizes = sum(abs(worth) for row in made.rows for _, worth in row.rewards)  # which are also summed by themselves
    problem = too_large(max(sizes, abs(made.reward or 0.0)), "the sum of a sample's rewards")
    if made.error or problem is None:
        return RewardResult(made.reward, dict(made.details), made.error)
    return RewardResult(None, dict(made.details), problem, brief=problem)


def shown(tokenizer: Any, row: Row, made: Made, result: RewardResult) -> dict[str, Any]:
    """A sample as people read it; of several rows the last one, and what came before it."""
    done = made.last
    versions = np.concatenate([each.completion.policy_versions for each in made.rows])
    line = {
        "prompt": as_json(row.prompt), "label": as_json(row.label), "reward": result.score,
        "response": tokenizer.decode(done.tokens.tolist()), "details": as_json(result.details),
        "finish_reason": finish_of(done), "num_tokens": made.num_tokens,
        "versions": sorted(set(versions.tolist()) - {NO_VERSION}),
    }  # fmt: skip
    if len(made.rows) > 1:
        line["rows"] = [
            {
                "prompt": tokenizer.decode(each.prompt.tolist()),
                "response": tokenizer.decode(each.completion.tokens.tolist()),
            }
            for each in made.rows
        ]
    return line if result.error is None else line | {"error": result.error}


def told_error(row: Row, number: int, error: str | None) -> str:
    """Why a sample has no reward."""
    return f"reward of {row.name}, sample {number}: {error}"


def _item_of(tokenizer: Any, row: Row, made: Made, max_new_tokens: int, refs: Sequence[MediaRef]) -> RewardItem:
    """What the reward function is told of one sample. Without its messages these are its tokens as text."""
    done = made.last

    @functools.cache
    def decoded(tokens: bytes) -> str:
        return text_of(tokenizer, np.frombuffer(tokens, done.tokens.dtype).tolist())

    def text(tokens: np.ndarray) -> str:
        return decoded(tokens.tobytes())

    own = pieces_of(done)
    at = max((number for number, (_, sampled) in enumerate(own) if sampled), default=0)
    answer = own[at][0] if own[at][1] else done.tokens[:0]  # none where nobody said its one token
    before = [made.rows[-1].prompt, *(tokens for tokens, _ in own[:at])]
    every = [each for row in made.rows for each in pieces_of(row.completion)]
    turns = [dict(each) for each in made.turns] or [
        {
            "role": "assistant" if sampled or len(every) == 1 else "user",
            "content": text(tokens) if len(answer) else "",
        }
        for tokens, sampled in every
    ]
    return RewardItem(
        text(answer), row.label, row.prompt, row.metadata, finish_of(done), len(done.tokens), max_new_tokens, turns,
        text(done.tokens) if len(answer) else "",
        ends_in_thought(tokenizer.decode(np.concatenate(before)[-_PROMPT_END:].tolist())), row.columns, row.tools, refs,
    )  # fmt: skip
