"""The cells of `rondo bench algorithms`: each is a run that its settings allow, and what is made of those that were run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.algorithms import MODES, QUICKSTART, settings_of, sorted_digits, steps_to, summary, table
from rondo.launch.config import load
from rondo.roles.algorithms.algorithm import ALGORITHMS


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_cell_is_a_run_that_settings_allow(name: str, tmp_path: Path) -> None:
    for mode in (*MODES, "hybrid:1"):
        config = load(QUICKSTART, settings_of(name, mode, 3, 1e-4, 10, tmp_path))
        assert (config.algorithm.name, config.seed, config.num_steps, config.train.lr) == (name, 3, 10, 1e-4)
        assert config.max_staleness == int(mode[-1]) and not config.algorithm.needs_reference


def test_the_score_is_the_quick_starts_and_components_lie_beside_it() -> None:
    assert sorted_digits("1234", "1234", prompt="", metadata={}) == {"score": 1.0, "right": 1.0, "places": 1.0}
    assert sorted_digits("12", "1334", prompt="", metadata={}) == {"score": 0.0, "right": 0.0, "places": 0.25}


def test_the_goal_is_reached_by_the_mean_of_ten_steps() -> None:
    assert steps_to([0.0] * 10 + [1.0] * 10) == 18
    assert steps_to([0.9] * 9) is None and steps_to([0.79] * 50) is None


def test_cells_that_were_not_run_are_absent_and_the_table_says_so() -> None:
    made = {"steps": "100", "lr": "0.0002", "wall_s": "9"}
    rows = [
        made | {"name": "grpo", "mode": "colocate:0", "seed": "0", "before": "0.3", "after": "0.8", "steps_to": "70"},
        made | {"name": "grpo", "mode": "colocate:0", "seed": "1", "before": "0.4", "after": "0.8", "steps_to": "80"},
        made | {"name": "gspo", "mode": "fully_async:1", "seed": "0", "before": "0.3", "after": "0.5", "steps_to": ""},
        made
        | {
            "name": "gspo",
            "mode": "colocate:0",
            "seed": "0",
            "before": "0",
            "after": "1",
            "steps_to": "",
            "lr": "1e-4",
        },
    ]
    assert summary(rows, 2e-4) == {
        "grpo": {"colocate:0": {"gain": [0.5, 0.4], "steps_to": [70, 80]}},
        "gspo": {"fully_async:1": {"gain": [0.2], "steps_to": [None]}},
    }
    assert table(rows, 2e-4) == [
        "| name | colocate:0 | fully_async:1 |",
        "|---|---|---|",
        "| grpo | 0.35 to 0.80, 75 steps, 2 seeds | - |",
        "| gspo | - | 0.30 to 0.50, not reached |",
    ]
