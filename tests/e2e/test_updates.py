"""Runs whose steps make several updates: every group trains once a pass, in every mode, also when its trainer is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.comm.bus.journal import files, read
from rondo.launch.report.diff import first_difference
from rondo.launch.report.records import step_records
from rondo.launch.report.timeline import read_run
from tests.e2e.runs import ROOT, Ended, command, left_behind
from tests.e2e.shell import Rondo, to_the_end
from tests.strength import LONG

NUM_STEPS = 4
ON_POLICY = (
    "deterministic=True", "max_staleness=0", "rollout.spare_groups=0", "algorithm.normalize_batch=samples",
    "algorithm.tis_mode=truncate", "algorithm.tis_low=0", "algorithm.tis_level=sequence",
)  # fmt: skip


def train(rondo: Rondo, folder: Path, mode: str, *arguments: str) -> Ended:
    folder.mkdir(exist_ok=True)
    text = (ROOT / "tests" / "e2e" / "updates.py").read_text()
    module = folder / "updates.py"
    module.write_text(text.replace('**MODES["fully_async"]', f'**MODES["{mode}"]'))
    line = [*command(folder)[:4], str(module), "--set", f"run_dir={folder}", *arguments]
    return to_the_end(rondo, line, folder / "updates")


def whole(ended: Ended, *, beyond: str, restarts: dict[str, int]) -> Ended:
    """The run, which has come to its end; `beyond`: what becomes of weights out of their bounds."""
    assert ended.code == 0, ended.output
    summary, steps = ended.summary, step_records(ended.run_dir / "metrics.jsonl")
    assert len(steps) == summary["steps"] == NUM_STEPS
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == NUM_STEPS * 6 * 4
    assert summary["restarts"] == restarts
    for record in steps:
        assert (record["num_updates"], record["samples"], record["skipped"]) == (4, 24, 0)
        assert record["ratio_max"] > 1  # later passes meet other weights
        # Engine and trainer have the same weights, or those of one small step before: their ratios are near 1, within all bounds.
        assert record[f"tis_{beyond}_fraction"] == 0 and abs(record["tis_weight_mean"] - 1) < 0.05
        assert "advantage_std" in record
    once_a_pass(ended.run_dir)
    return ended


def once_a_pass(run: Path) -> None:
    updates: dict[int, dict[int, set[int]]] = {}
    for event in (event for file in files(run / "journal") for event in read(file)):
        if event["event"] == "rounds" and event["rounds"][0]["stream"] == "actor":
            for made in event["rounds"]:
                chosen = {group for rank in made["spans"] for group, *_ in rank}
                updates.setdefault(made["step"], {}).setdefault(made["update"], set()).update(chosen)
    assert len(updates) == NUM_STEPS
    for of_step in updates.values():
        assert [len(of_step[update]) for update in range(4)] == [3] * 4
        assert of_step[0] == of_step[2] and of_step[1] == of_step[3] and max(of_step[0]) < min(of_step[1])


@pytest.mark.skipif(not LONG, reason="one more run, in the third mode: RONDO_TEST_LONG=1")
def test_each_group_trains_once_a_pass_and_each_step_makes_all_its_updates(tmp_path: Path, rondo: Rondo) -> None:
    ended = whole(train(rondo, tmp_path, "fully_async", "--kill", "actor@2"), beyond="mask", restarts={"actor": 1})
    assert max(map(int, ended.summary["staleness_histogram"])) <= 1
    assert left_behind(tmp_path) == []


def test_two_ranks_that_generate_too_and_two_that_are_killed_make_the_same_updates_to_the_same_bits(
    tmp_path: Path, rondo: Rondo
) -> None:
    chosen = [part for text in ON_POLICY for part in ("--set", text)]
    runs = [
        whole(train(rondo, tmp_path / mode, mode, *chosen, *kills), beyond="clip", restarts=restarts)
        for mode, kills, restarts in (("colocate", (), {}), ("hybrid", ("--kill", "actor@2"), {"actor": 1}))
    ]
    assert first_difference(runs[0].run_dir, runs[1].run_dir) is None
    steps = step_records(runs[0].run_dir / "metrics.jsonl")
    assert all(record["teacher_divergence"] > 0 for record in steps)  # of each row's own teacher, on both ranks
    scored = {
        span.process for span in read_run(runs[0].run_dir)[0] if span.lane == "teacher" and span.name == "forward"
    }
    assert scored == {"actor-0.0", "actor-0.1"}
    assert all(set(ended.summary["staleness_histogram"]) == {"0"} for ended in runs)
    leased = [event for file in files(runs[0].run_dir / "journal") for event in read(file) if event["event"] == "grant"]
    assert {event["rank"] for event in leased} == {0, 1}  # both generated
    slept = {span.process for span in read_run(runs[0].run_dir)[0] if span.name == "sleep"}
    assert slept == {"actor-0.0", "actor-0.1"}  # and gave their memory to the training
    assert left_behind(tmp_path) == []
