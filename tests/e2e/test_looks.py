"""A step of the example whose policy looks again at a picture, listens again to a sound, and seeks in a video."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.launch.report.records import read_records, step_records
from tests.e2e.runs import ROOT, command, finish, start
from tests.strength import LONG

SHORT = (
    "num_steps=1", "rollout.prompts_per_step=4", "sft.steps=60", "sft.batch_size=8", "evaluation.num_prompts=8",
    "train.warmup_steps=0", "train.max_log_prob_gap=1e-5", "max_staleness=0",
    "groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages']}]",
)  # fmt: skip


@pytest.mark.skipif(
    not LONG,
    reason="RONDO_TEST_LONG is not set: a run takes half a minute; tests/roles/sampling has the tools themselves",
)
@pytest.mark.parametrize(("tool", "pad"), [("zoom", "image"), ("listen", "audio"), ("seek", "image")])
def test_a_policy_is_shown_what_it_asked_for_and_is_trained_on_it(
    tool: str, pad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOL", tool)
    line = command(tmp_path, config=ROOT / "examples" / "zoom_digits.py")[:5]
    chosen = [part for text in (*SHORT, f"run_dir={tmp_path}") for part in ("--set", text)]
    ended = finish(start([*line, *chosen, "--plain"], tmp_path), tmp_path / f"{tool}_digits")
    assert ended.code == 0, ended.output
    assert (ended.summary["samples_trained"], ended.summary["samples_lost"]) == (32, 0)
    [step] = step_records(ended.run_dir / "metrics.jsonl")
    assert step["log_prob_gap"] < 1e-5
    told = [
        each["environments"][tool] for each in read_records(ended.run_dir / "metrics.jsonl") if each.get("environments")
    ]
    assert told[-1]["steps"] > told[-1]["errors"]
    [kept] = (ended.run_dir / "samples").glob("step_*.jsonl")
    assert f"tool\n<|{'vision' if pad == 'image' else 'audio'}_start|><|{pad}_pad|>" in kept.read_text().replace(
        "\\n", "\n"
    )
