"""The recipes end to end: a tiny model in the place of the big one, on rows of each data set's very form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recipe_rows
from benchmarks.recipes import tiny
from rondo.launch.report.records import step_records
from tests.e2e.runs import ROOT, command, finish, start
from tests.strength import LONG

EXAMPLES = ROOT / "examples" / "full_size"
NUM_ROWS = 12
RECIPES: dict[str, tuple[Callable[[Path], dict[str, str]], str, str | None]] = {
    "avqa_qwen3_omni_30b_lora": (lambda to: recipe_rows.avqa(to, NUM_ROWS, 4), "below five?", "mixed"),
    "dapo_math_qwen3_4b": (lambda to: recipe_rows.dapo(to, NUM_ROWS) | recipe_rows.aime(to, 4), "last line", None),
    "open_r1_qwen3_vl_4b": (lambda to: recipe_rows.open_r1(to, NUM_ROWS), "written here?", "image"),
    "nextqa_qwen3_omni_30b_lora": (lambda to: recipe_rows.nextqa(to, NUM_ROWS), "shown last?", "video"),
}
"""Recipe -> (its rows, what its questions hold, the kind of its rows)."""


@pytest.mark.skipif(
    not LONG, reason="RONDO_TEST_LONG is not set: a run takes half a minute; tests/roles/data has the rest of it"
)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_rows_of_its_form_with_its_columns_prompt_and_reward(name: str, tmp_path: Path) -> None:
    make, question, kind = RECIPES[name]
    (rows := tmp_path / "rows").mkdir()
    sets: dict[str, Any] = tiny(EXAMPLES / f"{name}.py") | make(rows) | {"num_steps": 1, "name": "recipe"}
    sets |= {"rollout": json.dumps(json.loads(sets["rollout"]) | {"prompts_per_step": 4, "samples_per_prompt": 2})}
    sets |= {"data.held_out": 4} if kind in ("image", "video") else {}
    evaluated = "evaluation.sets.aime24" if kind is None else "evaluation"
    sets |= {f"{evaluated}.num_prompts": 4, "run_dir": tmp_path} | (
        {f"{evaluated}.samples_per_prompt": 1} if kind is None else {}
    )
    chosen = [part for setting, value in sets.items() for part in ("--set", f"{setting}={value}")]
    line = [*command(tmp_path)[:4], str(EXAMPLES / f"{name}.py"), *chosen, "--plain"]
    ended = finish(start(line, tmp_path), tmp_path / "recipe")
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_trained"], summary["samples_lost"], summary["quarantined"]) == (8, 0, {})
    assert summary["samples_by_outcome"].get("failed", 0) == 0  # the reward took every response and label
    told = [
        json.loads(text) for file in (ended.run_dir / "samples").iterdir() for text in file.read_text().splitlines()
    ]
    assert any(question in json.dumps(each["prompt"]) for each in told) and all("reward" in each for each in told)
    [step] = step_records(ended.run_dir / "metrics.jsonl")
    assert math.isfinite(step["log_prob_gap"]) and step["log_prob_gap"] < 1e-5
    if kind is not None:
        for figure in ("reward_mean", "response_tokens", "log_prob_gap", "clip_fraction"):
            assert f"{figure}_{kind}" in step
