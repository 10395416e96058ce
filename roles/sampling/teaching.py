"""What the bus has of a sample for its teacher: which one it is, and what that sees in the place of the prompt.

Owns these two columns, and how the user's function makes a teacher's prompt. Does not own where that function runs
(`roles/rewards/function.py`), nor who scores (`roles/teacher.py`).

    def context(sample, siblings):      # distillation.context; a prompt as data sets have it, or None for the sample's own
        right = next((each["response"] for each in siblings if each["reward"] == 1), None)
        return None if right is None else f"{sample['prompt']} A right answer is {right}. Solve it in your own words."

A sample is a dict with `prompt`, `label`, `metadata`, `response`, `reward` (None: it failed) and the reward's `details`; its
siblings are the other samples of its prompt group that were made with it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rondo.comm.ring.records import Column
from rondo.roles.config import JobConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.data.prompts import render_prompt
from rondo.roles.engines.engine import Completion
from rondo.roles.rewards.function import UserFunction
from rondo.roles.rewards.pool import RewardResult
from rondo.roles.rewards.worker import Opened
from rondo.roles.sampling.episode import text_of
from rondo.roles.streams import CONTEXT, TEACHER
from rondo.runtime.errors import RondoError
from rondo.runtime.reference import load_reference
from rondo.runtime.values import Encoded, encode

_SETTING = "distillation.context"


class ContextError(RondoError, ValueError):
    """A function returned what is no prompt."""


def open_context(function: str) -> Opened:
    """The user's function, as it is called and what it must return: a prompt, or nothing, for each sample of a group."""
    context = load_reference(function, _SETTING)
    if inspect.iscoroutinefunction(context):
        raise ContextError(f"{_SETTING} must be a plain function, got {function}. Write `def`")

    def of_all(samples: list[dict[str, Any]]) -> list[Any]:
        return [context(each, samples[:at] + samples[at + 1 :]) for at, each in enumerate(samples)]

    def prompts(found: Any) -> Encoded:
        for each in found:
            if each is not None and not isinstance(each, str | list):
                raise ContextError(f"{_SETTING} must return text, messages or None, got {each!r:.80}. Correct it")
        return encode(found)

    return Opened(of_all, prompts, False)


@dataclass(frozen=True, slots=True)
class Teaching:
    """Of one run; `contexts` is the user's function, opened."""

    config: JobConfig
    tokenizer: Any
    contexts: UserFunction | None = None

    def whose(self, row: Row) -> int | None:
        """Which of several teachers a row has; None where there are none to choose from. RowError for a row that names none."""
        config = self.config.distillation
        if config is None or not config.teachers:
            return None
        names, told = list(config.teachers), row.metadata.get(config.source)
        if told not in names:
            raise RowError(
                f"{row.name}: the metadata must have one of distillation.teachers, {', '.join(names)}, under {config.source!r}, "
                f"got {told!r}. Correct it, or name another key in distillation.source"
            )
        return names.index(told)

    @property
    def sees_siblings(self) -> bool:
        """Whether samples are to be put together, since what a teacher sees of one may come from others."""
        return self.contexts is not None

    async def columns(self, row: Row, done: Sequence[Completion], results: Sequence[RewardResult]) -> list[Column]:
        """Those of some samples of a row. RowError for a row without a teacher, and for a context that cannot be used."""
        found = []
        if (teacher := self.whose(row)) is not None:
            found.append(Column(TEACHER, "uint8", [np.array([teacher], np.uint8)] * len(done)))
        if self.contexts is not None:
            contexts = await self._contexts(self.contexts, row, done, results)
            found.append(Column(CONTEXT, "int32", contexts))
        return found

    async def _contexts(
        self, contexts: UserFunction, row: Row, done: Sequence[Completion], results: Sequence[RewardResult]
    ) -> list[np.ndarray]:
        """int32 [T] for each sample; of no token where its teacher sees its own prompt."""
        samples = [
            {
                "prompt": row.prompt, "label": row.label, "metadata": row.metadata, "reward": result.score,
                "response": text_of(self.tokenizer, each.tokens.tolist()), "details": result.details,
            }
            for each, result in zip(done, results, strict=True)
        ]  # fmt: skip
        [outcome] = await contexts.run([encode(samples)])
        if outcome.error:
            raise RowError(f"{row.name}: {_SETTING} must make a prompt for each sample, got: {outcome.error}")
        return await asyncio.to_thread(lambda: [self._rendered(row, each) for each in outcome.value])

    def _rendered(self, row: Row, prompt: Any) -> np.ndarray:
        config = self.config.distillation
        if prompt is None:
            return np.zeros(0, np.int32)
        assert config is not None and config.max_context_tokens is not None
        seen = replace(row, prompt=prompt)
        return render_prompt(
            self.tokenizer, seen, self.config.data, config.max_context_tokens, setting="distillation.max_context_tokens"
        )
