"""What the bus has of samples for their teachers: which one, and a prompt that sees more."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import orjson
import pytest

from rondo.models.config import ModelConfig
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.config import DataConfig, DistillationConfig, JobConfig, RolloutConfig, TeacherConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.engines.engine import Completion
from rondo.roles.rewards.pool import RewardResult
from rondo.roles.sampling.teaching import ContextError, Teaching, open_context
from rondo.runtime.processes.pool import Outcome
from rondo.runtime.values import Encoded, decode

TEACHER = TeacherConfig(model=ModelConfig(path="teacher"))
ROW = Row("row 3", "1+1=", "2", {"source": "code"})


def answered(sample: dict[str, Any], siblings: list[dict[str, Any]]) -> str | None:
    right = [each["response"] for each in siblings if each["reward"] == 1]
    return (
        None if sample["reward"] == 1 else f"{sample['prompt']}{sample['label']}{right}{sample['details'].get('said')}"
    )


def wrong(sample: dict[str, Any], siblings: list[dict[str, Any]]) -> int:
    return 3


def rows() -> list[dict[str, str]]:
    return []


def here(encoded: Encoded) -> Any:
    return decode(orjson.loads(encoded.text), [memoryview(bytes(buffer)) for buffer in encoded.buffers])


class Here:
    """The user's function without a process of its own."""

    def __init__(self, function: str) -> None:
        self._opened = open_context(function)

    async def run(self, items: list[Encoded]) -> list[Outcome]:
        try:
            return [Outcome(here(self._opened.check(self._opened.call(here(item))))) for item in items]
        except ContextError as error:
            return [Outcome(error=str(error))]


def job(**options: Any) -> JobConfig:
    return JobConfig(
        name="taught", num_steps=1, model=ModelConfig(path="model"), data=DataConfig(rows=rows, metadata="extra"),
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=1, max_prompt_tokens=8, max_new_tokens=4),
        distillation=DistillationConfig(task_coef=0.0, **options),
    )  # fmt: skip


def columns(config: JobConfig, function: str | None = None) -> dict[str, list[list[int]]]:
    """Of two samples, "2" with a reward of 1 and "33" with 0."""
    tokenizer = build_tokenizer()
    done = [
        Completion("", np.array(tokenizer(text).input_ids), np.zeros(0), np.zeros(0), "stop")
        for text in ("2", "33")
    ]  # fmt: skip
    results = [RewardResult(1.0), RewardResult(0.0, {"said": "no"})]
    teaching = Teaching(config, tokenizer, None if function is None else Here(function))  # type: ignore[arg-type]
    found = asyncio.run(teaching.columns(ROW, done, results))
    return {column.name: [array.tolist() for array in column.arrays] for column in found}


def test_a_row_names_one_of_several_teachers() -> None:
    config = job(teachers={"math": TEACHER, "code": TEACHER})
    assert columns(config) == {"teacher": [[1], [1]]}
    assert columns(job(teacher=TEACHER)) == {}
    with pytest.raises(RowError, match=r"row 3: the metadata must have one of distillation.teachers, math, art"):
        Teaching(job(teachers={"math": TEACHER, "art": TEACHER}), None).whose(ROW)


def test_a_teacher_sees_what_the_function_makes_of_a_sample_and_its_siblings() -> None:
    config = job(teacher=TeacherConfig(policy="current"), context=answered, max_context_tokens=32)
    found = columns(config, f"{__file__}:answered")
    tokenizer = build_tokenizer()
    assert found == {"teacher_prompt": [[], tokenizer("1+1=2['2']no").input_ids]}


@pytest.mark.parametrize(
    ("function", "most", "said"),
    [
        ("wrong", 32, "row 3: distillation.context must make a prompt for each sample, got: .*must return text"),
        ("answered", 4, "row 3: prompt must have 1 to 4 tokens, got .*Raise distillation.max_context_tokens"),
    ],
)
def test_a_context_that_cannot_be_used_is_its_rows_error(function: str, most: int, said: str) -> None:
    config = job(teacher=TeacherConfig(policy="current"), context=answered, max_context_tokens=most)
    with pytest.raises(RowError, match=said):
        columns(config, f"{__file__}:{function}")
