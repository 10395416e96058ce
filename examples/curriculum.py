"""Two CPU cores, no downloads, about two minutes: the quick start's task in a data set of which most rows teach nothing.

    rondo train examples/curriculum.py
    rondo train examples/curriculum.py --set data.curriculum=null            # and without

Of 600 rows a third are to be sorted, a third have an answer that is wrong, so that no sample of them passes, and a third ask for
any four digits, which the warm-up has taught: a filter leaves out those of either without a whole answer, and a curriculum lets
those rest whose samples all pass, or none.
"""

from __future__ import annotations

import random
from typing import Any

from quickstart import config as quick
from quickstart import puzzles

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.roles.config import CurriculumConfig, DataConfig, EvalConfig, RewardConfig

ANY = "????"


def held_out() -> list[dict[str, str]]:
    return puzzles(256, seed=99)


def to_sort(num_rows: int = 200) -> list[dict[str, str]]:
    return puzzles(num_rows, seed=10)


def others(num_rows: int = 400) -> list[dict[str, str]]:
    """By turns with the answer of another row and with any answer; each twentieth has none."""
    rows, draw = puzzles(num_rows, seed=11), random.Random(12)
    wrong = [{**row, "label": "".join(draw.sample("0123456789", 4))} for row in rows]
    for at in range(1, num_rows, 2):
        wrong[at]["label"] = ANY
    return [{**row, "label": ""} if at % 20 == 0 else row for at, row in enumerate(wrong)]


def mixed() -> list[dict[str, str]]:
    return to_sort() + others()


def answered(row: dict[str, Any]) -> bool | str:
    return len(row["label"]) == 4 or "no whole answer"


def exact_or_any(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    """1 for exactly the label, or for any four digits where that says so."""
    return float(response == label or (label == ANY and len(response) == 4 and response.isdigit()))


config = RunConfig(
    **{name: getattr(quick, name) for name in ("algorithm", "model", "rollout", "train", "sft")},
    name="curriculum",
    num_steps=80,
    max_staleness=1,
    role_groups=fully_async(reference_replicas=1, actor_fwd_replicas=1),
    data=DataConfig(rows=mixed, filter=answered, curriculum=CurriculumConfig(rest_steps=40)),
    evaluation=EvalConfig(data=DataConfig(rows=held_out), num_prompts=256),
    reward=RewardConfig(function=exact_or_any),
)
