"""Benchmarks of many runs: cells that were made stay made, every cell is a run that its settings allow, and how they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import distill, pretrained, table
from benchmarks.runs import ROOT, Cells, settings
from rondo.launch.config import load


def test_a_cell_is_made_once_and_one_that_a_kill_cut_is_made_again(tmp_path: Path) -> None:
    path, made = tmp_path / "folder" / "cells.jsonl", list[int]()

    def make(seed: int) -> dict[str, Any]:
        made.append(seed)
        return {"reward": seed / 2}

    for _ in range(2):
        cells = Cells(path)
        for seed in (0, 1):
            assert cells.made({"name": "grpo", "seed": seed}, lambda seed=seed: make(seed)) == {"reward": seed / 2}
    assert made == [0, 1]
    path.write_text(path.read_text()[:-9])
    cells = Cells(path)
    assert cells.made({"seed": 0, "name": "grpo"}, lambda: make(7)) == {"reward": 0}
    assert cells.made({"seed": 1, "name": "grpo"}, lambda: make(1)) == {"reward": 0.5}
    assert made == [0, 1, 1] and Cells(path).made({"seed": 1, "name": "grpo"}, dict) == {"reward": 0.5}


@pytest.mark.parametrize("name", pretrained.NAMES)
def test_every_cell_of_a_pretrained_model_is_a_run_that_settings_allow(name: str, tmp_path: Path) -> None:
    words = settings(pretrained.settings_of(name, 3, 20, "model", tmp_path))[1::2]
    config = load(pretrained.CONFIG, words)
    assert (config.algorithm.name, config.seed, config.num_steps) == (name if name != "distillation" else "grpo", 3, 20)
    assert (
        (config.distillation is not None)
        == (name == "distillation")
        == any("teacher" in group.roles for group in config.role_groups)
    )


@pytest.mark.parametrize("name", distill.VARIANTS)
def test_every_cell_of_distillation_is_a_run_that_settings_allow(name: str) -> None:
    example, sets = distill.VARIANTS[name]
    config = load(ROOT / "examples" / f"{example}.py", settings({**sets, "seed": 3, "num_steps": 100})[1::2])
    assert any("teacher" in group.roles for group in config.role_groups) == (
        name != "grpo"
    ) and config.learns_from_rewards == (name in ("grpo", "both"))


def test_steps_to_a_reward_are_those_from_which_five_have_it() -> None:
    assert distill.steps_to([0.0, 1, 0, 1, 1, 1, 1, 1], 0.9) == 3 and distill.steps_to([1.0] * 4, 0.5) is None


def test_each_algorithm_is_told_with_its_reward_before_and_after() -> None:
    rows = dict(table.ROWS)
    cell = {"before": [0.1, 0.3], "after": [0.6, 0.8], "step_s": [17.0, 18.0]}
    of = cell | {"rewards": [[0.0, 0.5, 0.5, 0.5, 0.5, 0.5], [0.0, 0.7, 0.7, 0.7, 0.7, 0.7]]}
    [(what, figure)] = rows["pretrained"]({"grpo": of, "distillation": of, "steps": 6})
    assert "6 steps" in what
    assert figure == "grpo 0.60, 0.20 to 0.70, 17.5 s; distillation 0.60, 0.20 to 0.70, 17.5 s"
    told = {"grpo": cell | {"steps_to": [40, None]}, "reward": 0.8, "steps": 100}
    [(what, figure)] = rows["distill"](told)
    assert "0.8" in what and "100 steps" in what and figure == "grpo 40, not reached (0.10 to 0.60, 0.30 to 0.80)"
