"""scorer: a reward model's own process: sequence classification with one label, whose number for a whole answer is its score.

Owns how an answer becomes the tokens that are scored, what goes through the model at once, and the ranks that have a shard of it
each. Does not own when it is there (`genrm.py`), who asks it (`rewards/scorer.py`), or the forward (`training/reward_model.py`).

    POST /scores -> its own chat template and tokenizer -> waits for room -> a forward of all that wait -> a number each

Invariant: each answer has its number, or an error that says why not, whatever is asked beside it; an answer's number is that of
transformers' model for sequence classification, which scores the last token that is no padding.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import torch
import torch.distributed as dist
from aiohttp import web
from pydantic import BaseModel, Field

from rondo.models.config import MeshConfig
from rondo.models.load import empty_model, load_config, load_tokenizer, tensors_of
from rondo.models.media.errors import MediaError
from rondo.models.media.inputs import MediaInputs
from rondo.models.media.processor import Processor
from rondo.models.media.refs import MediaRef
from rondo.models.mesh import Mesh
from rondo.models.names import SCORE
from rondo.models.packing import Sequence as Packable
from rondo.models.parallel import compute_in
from rondo.models.value_head import ENDS, check_scores, give_value_head
from rondo.roles.config import JobConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.prompts import as_shown, messages_of, render_prompt, template_args
from rondo.roles.data.turns import encode_answer
from rondo.roles.forward import REPORT_S
from rondo.roles.genrm import Watching, there
from rondo.roles.job import Job, open_job
from rondo.roles.rewards.scorer import SCORES
from rondo.roles.serve.app import DRAIN_S
from rondo.roles.serve.endpoint import announced
from rondo.roles.serve.service import Failed, failed
from rondo.roles.training.backend import open_model
from rondo.roles.training.reward_model import rewards_of
from rondo.runtime.admin.guard import Guard
from rondo.runtime.admin.openapi import BODY, Operation
from rondo.runtime.admin.server import HttpServer, Limits, bind, json_answer
from rondo.runtime.errors import ConfigError
from rondo.runtime.section import Section, settings_at
from rondo.runtime.values import as_json, decode
from rondo.runtime.waits import happens, totals
from rondo.runtime.worker.context import WorkerContext

_MAX_BODY_BYTES = 1 << 28
_STOPS = -1
_NO_LIMIT = 1 << 40


class ScorerRole:
    role = "scorer"

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        job = await open_job(self._ctx)
        await there(self._ctx, job, self.role, scoring(self._ctx, job))


class Answer(Section):
    """A prompt as the data has it, what was answered, and the tools of the row."""

    prompt: str | list[dict[str, Any]]
    response: str
    tools: list[dict[str, Any]] = Field(default_factory=list)


class Answers(Section):
    answers: list[Answer]
    media: list[Any] = Field(default_factory=list)
    """Of the prompt of all, as `runtime/values.py` writes [kind, source, use_audio] of each."""


class Scores(BaseModel):
    """Of each answer its number, or why there is none; how many tokens all were."""

    scores: list[float | None]
    errors: list[str | None]
    num_tokens: int


def check_reward_model(path: str) -> Any:
    """The model at `path` without memory, with its head. ConfigError for one that does not give a whole answer one number, as far
    as its files are here."""
    config, names = load_config(path), tensors_of(path)
    heads = sorted(name for name in names if name.startswith("score.")) if names else [SCORE]
    [kind, *_] = config.architectures or ["none"]
    if not kind.endswith("ForSequenceClassification") or heads != [SCORE] or config.num_labels != 1:
        raise ConfigError(
            f"scorer.model must be one for sequence classification with one label and {SCORE}, got {path!r}: {kind} with "
            f"{config.num_labels} labels and {', '.join(heads) or 'no head'}. Name a reward model, such as the folder that job "
            "'reward_model' writes"
        )
    model = empty_model(path)
    give_value_head(model)
    check_scores(model)
    return model


class Encoder:
    """Answers as the reward model at `path` takes them, with its own tokenizer and template."""

    def __init__(self, config: JobConfig, path: str) -> None:
        judge, data = config.scorer, config.data
        assert judge is not None
        self._tokenizer = load_tokenizer(path, needs_chat_template=data.apply_chat_template)
        shown = {name: value for name, value in data.chat_template_args.items() if name == "tools"}
        own = {"chat_template_args": shown | judge.chat_template_args, "too_long": "drop"}
        self._source, self._most, self._cuts = (
            data.model_copy(update=own),
            judge.max_prompt_tokens,
            judge.too_long == "cut",
        )
        try:
            self._processor = None if config.media is None else Processor.load(path, config.media)
        except ConfigError as error:
            raise ConfigError(settings_at("scorer.model", str(error), "model")) from error
        found = load_config(path)
        self._ends, self._pad = getattr(found, ENDS, False), found.get_text_config().pad_token_id

    def scored(
        self,
        prompt: Any,
        response: str,
        tools: Sequence[Any] = (),
        refs: Sequence[MediaRef] = (),
        *,
        limits: bool = True,
    ) -> Packable:
        """2 tokens or more, with the media of the prompt. RowError for an answer that is too long, where `limits` is not False,
        that the template does not take, or whose media are not.

        The whole chat as the template writes it, with the tools that the policy was shown. Of a model that job "reward_model" has
        trained, and of plain text, the prompt as for the policy, the answer and the end of sequence."""
        row, tokenizer = Row("an answer to score", prompt, None, {}, tools=tools), self._tokenizer
        media: MediaInputs | None = None
        if self._ends or not self._source.apply_chat_template:
            if refs:
                begin, media = self._seen(row, messages_of(row, self._source), refs, template_args(row, self._source))
            else:
                begin = render_prompt(tokenizer, row, self._source, _NO_LIMIT)
            turns = encode_answer(tokenizer, row, response, self._source, may_be_empty=True)
            found = np.concatenate([turns.prompt(begin), turns.tokens])
        else:
            begins = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            messages, args = as_shown(row, [*begins, {"role": "assistant", "content": response}], self._source)
            if refs:
                found, media = self._seen(row, messages, refs, args)
            else:
                found = self._written(row, messages, args)
        if self._pad is not None and len(seen := np.flatnonzero(found != self._pad)):
            found = found[: seen[-1] + 1]
            if media is not None:
                media = replace(media, arrays={**media.arrays, "positions": media.positions[:, : len(found)]})
        if len(found) < 2 or (limits and len(found) > self._most and (refs or not self._cuts)):
            raise RowError(
                f"{row.name}: prompt and response must have 2 to {self._most} tokens of the reward model's, got {len(found)}. "
                "Raise scorer.max_prompt_tokens, or set scorer.too_long to 'cut'"
            )
        return Packable(found[-self._most :] if limits else found, 1, media)

    def _written(self, row: Row, messages: list[dict[str, Any]], args: dict[str, Any]) -> np.ndarray:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, **args)
        except Exception as error:  # a template raises whatever its code and the row's values lead to
            raise RowError(
                f"{row.name}: it must suit the chat template, got {type(error).__name__}: {error}"
            ) from error
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def _seen(
        self, row: Row, messages: list[dict[str, Any]], refs: Sequence[MediaRef], args: dict[str, Any]
    ) -> tuple[np.ndarray, MediaInputs | None]:
        assert self._processor is not None
        try:
            made = self._processor.prepare(messages, refs, **args)
        except MediaError as error:
            raise RowError(f"{row.name}: {error}") from error
        return made.tokens, made.media


class RewardModel:
    """Its weights, cut over `mesh` (collective). Runs on the compute thread."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        judge, path = job.config.scorer, job.judge_paths[ScorerRole.role]
        assert judge is not None
        train = job.config.train.model_copy(update={"dtype": judge.model.dtype, "encoders": "replicate"})
        config = job.config.model_copy(update={"model": judge.model, "train": train})
        self._model, self._packing = open_model(
            config, path, mesh, device=job.device, dtype=judge.model.dtype, values=True
        )
        check_reward_model(path)  # all its files are here by now
        compute_in(self._model, judge.model.dtype)
        self._mesh, self._device = mesh, job.device

    def score(self, rows: Sequence[Packable] | None = ()) -> list[float] | None:
        """A number for each of rank 0's rows, of which each rank computes its part; the other ranks give none (collective). None:
        this was the last."""
        told = self._told(rows)
        if not told:
            return None if told is None else []
        mine = range(self._mesh.rank, len(told), self._mesh.size)
        found = torch.zeros(len(told), device=self._device)
        with torch.no_grad():  # who has none of them goes through the same modules
            answers = [told[at] for at in mine] or [Packable(np.zeros(2, np.int32), 1)]
            rewards = rewards_of(self._model, self._packing, answers, self._device)
        found[list(mine)] = rewards[: len(mine)]
        if self._mesh.size > 1:
            dist.all_reduce(found)
        return [float(each) for each in found.tolist()]

    def _told(self, rows: Sequence[Packable] | None) -> Sequence[Packable] | None:
        if self._mesh.size == 1:
            return rows
        told = [[row.tokens, row.media and [row.media.key, dict(row.media.arrays)]] for row in rows or ()]
        written = bytearray(orjson.dumps(as_json(told))) if rows else bytearray()
        size = torch.tensor([_STOPS if rows is None else len(written)], device=self._device)
        dist.broadcast(size, 0)
        if size <= 0:
            return None if size == _STOPS else []
        flat = torch.frombuffer(written or bytearray(int(size)), dtype=torch.uint8).to(self._device)
        dist.broadcast(flat, 0)
        found = decode(orjson.loads(flat.cpu().numpy().tobytes()))
        return [Packable(tokens, 1, media and MediaInputs(*media)) for tokens, media in found]


class _Waiting:
    """Answers that wait for the model, in the order in which they came: several go through it at once, of at most so many
    `tokens`, or with `alone` one, whose number then depends on nothing else."""

    def __init__(self, tokens: int, *, alone: bool) -> None:
        self._tokens, self._alone = tokens, alone
        self._rows = deque[tuple[Packable, asyncio.Future[float]]]()
        self._came = asyncio.Event()

    def put(self, row: Packable) -> asyncio.Future[float]:
        future = asyncio.get_running_loop().create_future()
        self._rows.append((row, future))
        self._came.set()
        return future

    async def next(self, patience_s: float) -> list[tuple[Packable, asyncio.Future[float]]]:
        """None of whoever asked has left. Empty where nothing came for so long."""
        await happens(self._came, patience_s)
        batch, room = list[tuple[Packable, asyncio.Future[float]]](), self._tokens
        while self._rows and (not batch or (self._rows[0][0].cost <= room and not self._alone)):
            row, future = self._rows.popleft()
            if not future.done():
                batch.append((row, future))
                room -= row.cost
        if not self._rows:
            self._came.clear()
        return batch


@asynccontextmanager
async def scoring(ctx: WorkerContext, job: Job) -> AsyncIterator[Watching]:
    """Scores while the body lasts; what it yields ends where that ends. Of a group of its own the first process listens, and all
    have a shard; beside other roles each has the whole."""
    role, judge, cuts = ScorerRole.role, job.config.scorer, job.scores_alone and ctx.world_size > 1
    assert judge is not None

    def opened() -> RewardModel:
        if cuts:
            ctx.init_process_group(job.device)
        return RewardModel(job, Mesh.open(MeshConfig(), ctx.world_size, job.device) if cuts else Mesh())

    with ctx.section("load", ctx.load_s):
        model = await ctx.compute(opened)
        encoder = await ctx.compute(Encoder, job.config, job.judge_paths[role])
    if cuts and ctx.rank:

        async def follow() -> None:
            while await ctx.compute(model.score) is not None:
                pass

        following = asyncio.create_task(follow())
        yield lambda: asyncio.shield(following)
        await following  # the first process says when it ends
        return
    waits = _Waiting(judge.max_prompt_tokens, alone=job.config.deterministic)

    async def work() -> None:
        while True:
            batch = await waits.next(REPORT_S)
            if batch:
                found = await ctx.working("judge", model.score, [row for row, _ in batch])
                for (_, future), score in zip(batch, found or (), strict=True):
                    if not future.done():
                        future.set_result(score)
                ctx.progress()
            else:
                await ctx.compute(model.score)  # of several ranks none waits for long
                await ctx.report("metrics", {"waits_s": totals()})

    working = asyncio.create_task(work())
    try:
        async with _listening(encoder, waits, ctx.token) as url:
            record = ctx.run_dir / role / f"{ctx.group}.{ctx.rank}.json"
            async with announced(ctx, record, url, ctx.rt_dir / "token", role):
                yield lambda: asyncio.shield(working)
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    await ctx.compute(model.score, None)


@asynccontextmanager
async def _listening(encoder: Encoder, waits: _Waiting, token: str) -> AsyncIterator[str]:
    """At the end what is asked has `DRAIN_S` to be answered."""
    asked, encodes = set[asyncio.Future[float]](), asyncio.Lock()

    def encoded(answers: Sequence[Answer], refs: Sequence[MediaRef]) -> list[Packable | str]:
        found = list[Packable | str]()
        for each in answers:
            try:
                found.append(encoder.scored(each.prompt, each.response, each.tools, refs))
            except RowError as error:
                found.append(str(error))
        return found

    async def scores(request: web.Request) -> web.StreamResponse:
        asked_for: Answers = request[BODY]
        refs = [MediaRef(*fields) for fields in decode(asked_for.media)]
        async with encodes:
            rows = await asyncio.to_thread(encoded, asked_for.answers, refs)
        put = [row if isinstance(row, str) else waits.put(row) for row in rows]
        mine = [each for each in put if not isinstance(each, str)]
        asked.update(mine)
        try:
            await asyncio.gather(*mine)
        finally:
            asked.difference_update(mine)
        told = [each if isinstance(each, str) else each.result() for each in put]
        bad = [isinstance(each, str) or not math.isfinite(each) for each in told]
        return json_answer(
            Scores(
                scores=[None if wrong else float(each) for each, wrong in zip(told, bad, strict=True)],
                errors=[
                    f"the reward model says {each}" if wrong else None for each, wrong in zip(told, bad, strict=True)
                ],
                num_tokens=sum(len(row.tokens) for row in rows if not isinstance(row, str)),
            ).model_dump()
        )

    server = HttpServer(
        "rondo: a reward model", Guard([token]), failed, Failed, Limits(_MAX_BODY_BYTES), host="127.0.0.1",
        handler_cancellation=True,
    )  # fmt: skip
    server.route(
        "POST", SCORES, scores, scope="content", operation=Operation("A number for each answer.", Scores, Answers)
    )
    try:
        await server.start(bind("127.0.0.1", 0, "port"))
        yield server.url
        if asked:
            await asyncio.wait(asked, timeout=DRAIN_S)
    finally:
        await server.close()
