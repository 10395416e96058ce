"""Equal settings, equal bits: in every mode, and through deaths, stops and resumes at random steps."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from rondo.launch.diff import first_difference
from rondo.launch.records import step_records
from rondo.roles.parity import read
from tests.parity.runs import NUM_STEPS, TASK, Run

STEPS = random.Random(1905)
"""Draws the moments of deaths; a failure's message has them, since it has the run's output."""
MODES = ("colocate", "hybrid", "fully_async")


@pytest.fixture(scope="module")
def modes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """An undisturbed run of each mode on policy; all at once, since most of a run is imports."""
    folder = tmp_path_factory.mktemp("modes")
    runs = {mode: Run(folder / mode) for mode in MODES}
    processes = {mode: run.train(mode) for mode, run in runs.items()}
    for mode, run in runs.items():
        run.ended(processes[mode])
    return runs


@pytest.mark.parametrize("mode", MODES[1:])
def test_every_mode_trains_the_same_samples_in_the_same_rounds_to_the_same_bits(
    modes: dict[str, Run], mode: str
) -> None:
    assert first_difference(modes["colocate"].path, modes[mode].path) is None
    (steps,) = read(modes[mode].path).values()
    assert sorted(steps) == list(range(-1, NUM_STEPS))  # -1 made version 0
    assert len({step.checksum for step in steps.values()}) == NUM_STEPS + 1
    ids = [row[:2] for step in range(NUM_STEPS) for rows in steps[step].rounds for row in rows]
    assert ids == [(group, sample) for group in range(4 * NUM_STEPS) for sample in range(3)]
    assert max(len(step.rounds) for step in steps.values()) > 1


def test_a_run_killed_stopped_and_resumed_at_random_steps_ends_in_the_same_bits(
    modes: dict[str, Run], tmp_path: Path
) -> None:
    run = Run(tmp_path / "disturbed")
    kills = [f"{role}@{STEPS.randint(1, 5)}" for role in ("actor", "rollout")]
    run.stop(run.train("hybrid", kills=kills), at_step=STEPS.randint(6, 9))
    run.kill(run.resume(), at_step=STEPS.randint(11, 13))
    ended = run.ended(run.resume())
    assert first_difference(modes["hybrid"].path, run.path) is None
    assert ended.summary["attempt"] == 2
    assert (ended.summary["samples_lost"], ended.summary["samples_trained_twice"]) == (0, 0)
    assert ended.summary["samples_trained"] == NUM_STEPS * 4 * 3
    final = [
        next(each.path.glob(f"checkpoints/step_{NUM_STEPS:06d}/hf/model.safetensors"))
        for each in (run, modes["colocate"])
    ]
    assert final[0].read_bytes() == final[1].read_bytes()


def test_above_staleness_0_a_disturbed_run_consumes_the_same_prompts_in_the_same_order_within_the_bound(
    tmp_path: Path,
) -> None:
    stale = ("max_staleness=2", "num_steps=14")
    still, disturbed = Run(tmp_path / "still"), Run(tmp_path / "disturbed")
    alone = still.train("colocate", sets=stale)
    disturbed.kill(
        disturbed.train("hybrid", sets=stale, kills=[f"rollout@{STEPS.randint(1, 4)}"]), STEPS.randint(7, 10)
    )
    disturbed.ended(disturbed.resume())
    still.ended(alone)
    assert first_difference(still.path, disturbed.path, ids_only=True) is None
    for run in (still, disturbed):
        records = step_records(run.path / "metrics.jsonl")
        assert [record["step"] for record in records] == list(range(14))
        assert max(record["staleness_max"] for record in records) <= 2
    assert max(record["staleness_max"] for record in records) > 0


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        # Row 3 of the data has another prompt: its samples have other tokens wherever it comes first.
        ('"abcdefghij"[n]', '"abcXefghij"[n]', r"step \d+, round \d+, rank 0: group \d+ sample 0 has other tokens; weights"),
        # Row 3 is rewarded in another way: equal tokens, other advantages.
        (" % 7 / 7", ' % (5 if label == "3" else 7) / 7', r"group \d+ sample 0 has equal tokens, but other log-probs, adv"),
    ],
)  # fmt: skip
def test_a_planted_fault_is_found_at_the_first_row_that_it_touches(
    modes: dict[str, Run], tmp_path: Path, old: str, new: str, told: str
) -> None:
    faulty = tmp_path / "task.py"
    assert TASK.read_text().count(old) == 1
    faulty.write_text(TASK.read_text().replace(old, new))
    run = Run(tmp_path / "faulty")
    run.ended(run.train("colocate", task=faulty, sets=("num_steps=3",)))
    found = first_difference(modes["colocate"].path, run.path)
    assert found is not None
    assert re.search(told, found), found
