"""What the check sees of judges and scorers: that their models take the questions, and what a judge says to a few of them.

Owns what is tried, and which questions are refused. Does not own how they are made and read (`roles/rewards/`), nor what the
judge's processes hold (`estimate.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rondo.launch.check.estimate import JUDGE, judging
from rondo.roles.config.genrm import SCORER, GenrmConfig
from rondo.roles.rewards.genrm import Genrm
from rondo.roles.rewards.pool import RewardItem
from rondo.runtime.errors import ConfigError

if TYPE_CHECKING:
    from rondo.launch.check.findings import Report
    from rondo.launch.config import RunConfig
    from rondo.roles.data.datasets import Row

_ANSWER_S = 60.0
"""A judge at a URL has so long to answer the check."""


def look_at_judge(config: RunConfig, name: str, folder: Path, report: Report) -> None:
    """Its shape without its weights, and whether it takes the longest question and answer. `folder` is for one that is built."""
    import torch

    from rondo.launch.check.shape import shape_of
    from rondo.models.load import check_weights, empty_model, load_tokenizer, prepare
    from rondo.models.names import disk_shapes

    judge = config.judges[name]
    assert judge.model is not None
    path, asked = prepare(judge.model, folder), config.genrm if name == JUDGE else None
    if asked is None:
        from rondo.roles.scorer import check_reward_model
    model = check_reward_model(path) if asked is None else empty_model(path)
    check_weights(path, model)
    load_tokenizer(path, needs_chat_template=asked is not None or config.data.apply_chat_template)
    if asked is not None and asked.sglang is not None:
        from rondo.roles.engines.sglang.model_folder import check_served

        check_served(path)
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    answer = 0 if asked is None else asked.max_new_tokens
    if most is not None and (longest := judge.max_prompt_tokens + answer) > most:
        names = f"{name}.max_prompt_tokens" + (f" + {name}.max_new_tokens" if asked is not None else "")
        raise ConfigError(
            f"{names} must be at most the positions of the judge, {most}, got {judge.max_prompt_tokens} + {answer} = {longest}. "
            "Lower one of them"
        )
    parameters = sum(torch.Size(shape).numel() for shape in disk_shapes(model).values())
    report.facts.judge_paths[name] = path
    report.facts.judge_parameters += parameters
    if asked is not None:
        report.facts.traced[JUDGE] = judging(config, shape_of(model))
    who, takes = (
        ("judge", "answers questions") if asked is not None else ("scorer", "scores responses, with their prompts,")
    )
    report.add("ok", f"the {who} has {parameters:,} parameters, and {takes} of {judge.max_prompt_tokens:,} tokens")


def try_judge(config: RunConfig, report: Report, rows: Sequence[Row]) -> None:
    """Makes the questions of a few rows, with empty answers; a judge at a URL is asked the first."""
    from rondo.models.load import load_tokenizer

    judge, reward = config.genrm, config.reward
    assert judge is not None
    tried = judge.model_copy(update={"retries": 0, "deadline_s": min(_ANSWER_S, judge.deadline_s)})
    number = 1 if judge.per == "response" else 2
    path = report.facts.judge_paths.get(JUDGE)
    tokenizer = None if path is None else load_tokenizer(path)

    async def ask() -> None:
        load_s = config.supervision.load_s
        async with Genrm(tried, lambda: (), config.seed, deadline_s=reward.deadline_s, load_deadline_s=load_s) as asked:
            for at, row in enumerate(rows):
                items = [RewardItem("", row.label, row.prompt, row.metadata, columns=row.columns)] * number
                question = await asked.question(items)
                if question.error is not None:
                    raise ConfigError(f"genrm must make a question of {row.name}, got {question.brief}. Correct it")
                _refuse_media(judge, row, question.value)
                if tokenizer is not None:
                    _refuse_long(config, judge, row, question.value, tokenizer)
                if judge.urls and not at:
                    await _answer(asked, judge, question.value, report)

    asyncio.run(ask())


def try_scorer(config: RunConfig, report: Report, rows: Sequence[Row]) -> None:
    """A reward model's tokens of empty answers, and a policy's token taken for one of its own."""
    from rondo.roles.data.media import located
    from rondo.roles.scorer import Encoder

    judge, path = config.scorer, report.facts.judge_paths.get(SCORER)
    assert judge is not None
    if path is None:  # an error says why
        return
    encoder = Encoder(config, path)
    for row in rows:
        seen = config.media
        refs = () if seen is None else located(row.media, config.data.of(row.source), seen)
        tokens = len(encoder.scored(row.prompt, "", row.tools, refs, limits=False).tokens)
        if judge.too_long == "fail" and tokens + config.rollout.max_new_tokens > judge.max_prompt_tokens:
            raise ConfigError(
                f"scorer.max_prompt_tokens must hold {row.name} with the longest response, {tokens} + "
                f"{config.rollout.max_new_tokens}, got {judge.max_prompt_tokens}. Raise it, lower rollout.max_new_tokens, or set "
                "scorer.too_long to 'cut'"
            )


async def _answer(asked: Genrm, judge: GenrmConfig, question: Any, report: Report) -> None:
    started = time.monotonic()
    text = await asked.answer(question)
    read = await asked.read(text, 2 if judge.per == "group" else 1)
    where = f"the judge at {', '.join(judge.urls)} answers within {time.monotonic() - started:.1f} s"
    if read.error is None:
        scores = ", ".join(f"{score:g}" for score, _ in read.value)
        report.add("ok", f"{where}, and gives an empty response {scores}")
    else:
        report.add("note", f"{where}, and to an empty response it says no verdict: {read.brief}")


def _refuse_media(judge: GenrmConfig, row: Row, messages: Sequence[dict[str, Any]]) -> None:
    contents = [message.get("content") for message in messages]
    parts = [part.get("type") for content in contents if isinstance(content, list) for part in content]
    if (
        judge.model is not None
        and judge.sglang is None
        and (others := sorted({str(part) for part in parts} - {"text"}))
    ):
        raise ConfigError(
            f"genrm.template must ask with text alone where the embedded engine judges, got {others[0]} for {row.name}. Set "
            "genrm.sglang or genrm.urls, whose judges take media"
        )


def _refuse_long(
    config: RunConfig, judge: GenrmConfig, row: Row, messages: Sequence[dict[str, Any]], tokenizer: Any
) -> None:
    """Counted with empty responses, and a policy's token taken for one of the judge's."""
    if any(isinstance(message.get("content"), list) for message in messages):
        return  # what media take is the judge's processor's affair
    question = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)["input_ids"]
    number = {"response": 1, "pair": 2, "group": config.rollout.samples_per_prompt}[judge.per]
    longest = len(question) + number * config.rollout.max_new_tokens
    if longest > judge.max_prompt_tokens:
        raise ConfigError(
            f"genrm.max_prompt_tokens must hold the question of {row.name} with {number} of the longest responses, "
            f"{len(question)} + {number} x {config.rollout.max_new_tokens} = {longest}, got {judge.max_prompt_tokens}. Raise it, "
            "or lower rollout.max_new_tokens"
        )
