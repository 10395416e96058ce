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
from rondo.launch.config import load
from rondo.launch.report.records import step_records
from rondo.roles.config.data import SourceConfig
from tests.e2e.runs import ROOT, command, finish, start
from tests.strength import LONG

EXAMPLES = ROOT / "examples" / "full_size"
NUM_ROWS = 12
RECIPES: dict[str, tuple[Callable[[Path], dict[str, str]], str, str | None]] = {
    "avqa_qwen3_omni_30b_lora": (lambda to: recipe_rows.avqa(to, NUM_ROWS, 4), "below two?", "mixed"),
    "dapo_math_qwen3_4b": (lambda to: recipe_rows.dapo(to, NUM_ROWS) | recipe_rows.aime(to, 4), "last line", None),
    "open_r1_qwen3_vl_4b": (lambda to: recipe_rows.open_r1(to, NUM_ROWS), "D. 3", "image"),
    "nextqa_qwen3_omni_30b_lora": (lambda to: recipe_rows.nextqa(to, NUM_ROWS), "E. 4", "video"),
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


@pytest.mark.skipif(not LONG, reason="RONDO_TEST_LONG is not set: a run of several modalities takes half a minute")
def test_every_step_of_several_recipes_holds_their_kinds_in_their_shares(tmp_path: Path) -> None:
    for name in ("seen", "shown"):
        (tmp_path / name).mkdir()
    seen, shown = recipe_rows.open_r1(tmp_path / "seen", 2 * NUM_ROWS), recipe_rows.nextqa(tmp_path / "shown", NUM_ROWS)
    table = Path(shown["data.path"]).rename(tmp_path / "shown" / "NExTVideo" / "train.csv")  # its videos beside it
    both = recipe_rows.avqa(tmp_path / "both", NUM_ROWS, 4)
    sources = {
        "seen": source_of("open_r1_qwen3_vl_4b", seen["data.path"], reward="openr1mm"),
        "shown": source_of("nextqa_qwen3_omni_30b_lora", str(table), reward="multiple_choice"),
        "both": source_of("avqa_qwen3_omni_30b_lora", both["data.path"], reward="multiple_choice"),
    }
    name = "avqa_qwen3_omni_30b_lora"
    sets: dict[str, Any] = tiny(EXAMPLES / f"{name}.py") | {"num_steps": 3, "name": "recipe", "run_dir": tmp_path}
    data = {
        "sources": sources,
        "apply_chat_template": True,
        "balance": {"image": 2, "video": 1, "mixed": 1},
        "held_out": 4,
    }
    functions = {"openr1mm": "openr1mm", "multiple_choice": "multiple_choice"}
    sets |= {
        "rollout": json.dumps(json.loads(sets["rollout"]) | {"prompts_per_step": 8, "samples_per_prompt": 2}),
        "data": json.dumps(data), "reward": json.dumps({"function": functions, "by": "reward"}),
        "media.video_min_tokens": 4, "media.video_max_tokens": 4, "evaluation.data.path": both["evaluation.data.path"],
        "evaluation.num_prompts": 4,
    }  # fmt: skip
    chosen = [part for setting, value in sets.items() for part in ("--set", f"{setting}={value}")]
    line = [*command(tmp_path)[:4], str(EXAMPLES / f"{name}.py"), *chosen, "--plain"]
    ended = finish(start(line, tmp_path), tmp_path / "recipe")
    assert ended.code == 0, ended.output
    for step in step_records(ended.run_dir / "metrics.jsonl"):
        # A row of several modalities counts for each of them and as mixed.
        counts = {kind: step[f"num_samples_{kind}"] for kind in ("image", "video", "audio", "mixed")}
        assert counts == {"image": 12, "video": 4, "audio": 4, "mixed": 4}
        for figure in ("reward_mean", "response_tokens", "log_prob_gap", "clip_fraction"):
            assert all(f"{figure}_{kind}" in step for kind in counts)


def source_of(recipe: str, path: str, **own: str) -> dict[str, Any]:
    """A source with what is a recipe's own of its data."""
    told = load(EXAMPLES / f"{recipe}.py").data.model_dump(mode="json", exclude_unset=True)
    return {name: value for name, value in told.items() if name in SourceConfig.OF_ROWS} | {"path": path, **own}
