"""Runs whose steps make several updates: every group trains once a pass, in every mode, also when its trainer is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.comm.journal import files, read
from rondo.launch.records import step_records
from tests.e2e.runs import ROOT, Ended, command, finish, left_behind, start


def train(folder: Path, mode: str, *arguments: str) -> Ended:
    text = (ROOT / "tests" / "e2e" / "updates.py").read_text()
    module = folder / "updates.py"
    module.write_text(text.replace('groups=MODES["fully_async"]', f'groups=MODES["{mode}"]'))
    line = [*command(folder)[:4], str(module), "--set", f"run_dir={folder}", *arguments]
    return finish(start(line, folder), folder / "updates")


TRUNCATED = ("algorithm.tis_mode=truncate", "algorithm.tis_low=0")


def sets(*chosen: str) -> tuple[str, ...]:
    return tuple(part for text in chosen for part in ("--set", text))


@pytest.mark.parametrize(
    ("mode", "arguments"),
    [
        ("fully_async", ("--kill", "actor@2")),
        (
            "hybrid",
            sets("max_staleness=2", "algorithm.normalize_batch=samples", *TRUNCATED, "algorithm.tis_level=token"),
        ),
        (
            "colocate",
            sets("max_staleness=0", "algorithm.normalize_batch=null", *TRUNCATED, "algorithm.tis_level=sequence"),
        ),
    ],
)
def test_each_group_trains_once_a_pass_and_each_step_makes_all_its_updates(
    mode: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    ended = train(tmp_path, mode, *arguments)
    assert ended.code == 0, ended.output
    summary, steps = ended.summary, step_records(ended.run_dir / "metrics.jsonl")
    num_steps = len(steps)
    assert num_steps == summary["steps"] == 4
    assert max(map(int, summary["staleness_histogram"])) <= {"colocate": 0, "fully_async": 1, "hybrid": 2}[mode]
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == num_steps * 6 * 4
    assert summary["restarts"] == ({"actor": 1} if "--kill" in arguments else {})
    for record in steps:
        assert (record["num_updates"], record["samples"], record["skipped"]) == (4, 24, 0)
        beyond = "tis_mask_fraction" if mode == "fully_async" else "tis_clip_fraction"
        assert 0 <= record[beyond] <= 1 and record["ratio_max"] > 1  # later passes meet other weights
        assert 0 < record["tis_weight_mean"] <= 2
        assert ("advantage_std" in record) == (mode != "colocate")
    updates: dict[int, dict[int, set[int]]] = {}
    for event in (event for file in files(ended.run_dir / "journal") for event in read(file)):
        if event["event"] == "rounds" and event["rounds"][0]["stream"] == "actor":
            for made in event["rounds"]:
                chosen = {group for rank in made["spans"] for group, _, _ in rank}
                updates.setdefault(made["step"], {}).setdefault(made["update"], set()).update(chosen)
    assert len(updates) == num_steps
    for of_step in updates.values():
        assert [len(of_step[update]) for update in range(4)] == [3] * 4
        assert of_step[0] == of_step[2] and of_step[1] == of_step[3] and max(of_step[0]) < min(of_step[1])
    assert left_behind(tmp_path) == []
