"""Steps that are trained again: from where, with which settings, and what is said of how they came out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rondo.launch import cli, replay
from rondo.launch.config import resolve, unresolve
from rondo.launch.rundir import RunDir
from rondo.roles.training.parity import ParityLog
from rondo.roles.training.trained_samples import FOLDER, encoded
from rondo.runtime.checkpoints import MARKER, goes_on_from, resets
from tests.launch.dashboard.runs import lines, of_step
from tests.launch.report.test_compare import made
from tests.launch.test_differences import begun
from tests.roles.sampling.test_given import trained


def kept(run: Path, *steps: int) -> None:
    for step in steps:
        path = run / FOLDER / f"step_{step:06d}.0-of-1.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded([replace(trained(2 * step + group, 0), step=step) for group in range(2)]))


def checkpoint(run: Path, version: int) -> Path:
    folder = run / "checkpoints" / f"step_{version:06d}"
    (folder / "shards").mkdir(parents=True)
    (folder / "shards" / "x").write_text(str(version))
    (folder / MARKER).write_text("{}\n")
    return folder


def test_a_step_that_cannot_be_had_is_refused_with_those_that_can_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = begun(tmp_path)
    tree = resolve(config)

    def refused(step: int, **changes: Any) -> str:
        (run / "config.resolved.json").write_text(json.dumps(tree | changes))
        assert cli.main(["replay", str(run), "--step", str(step)]) == 2
        return capsys.readouterr().err

    assert "got 0 and (None, None) of demo. Train with --set samples.keep=1" in refused(1)
    assert "got 1 and (None, 0.5) of demo" in refused(1, samples={"keep": 1, "rewards": [None, 0.5]})
    whole = {"samples": {"keep": 1}}
    assert "RUN must have trained, got demo" in refused(1, **whole, debug={"rollout_only": True})
    assert "from its start, got 1. There is none" in refused(1, **whole)
    kept(run, 0, 1, 4, 5, 7, 9)
    for version in (3, 5, 9):
        checkpoint(run, version)
    assert "from its start, got 4. These are steps 0 to 1, 5, 9\n" in refused(4, **whole)
    with RunDir.claim(run):
        assert "RUN must be over, got demo, which goes on" in refused(1, **whole)
    mixed = whole | {"data": tree["data"] | {"path": None, "sources": {"a": {"path": tree["data"]["path"]}}}}
    assert "RUN must be one whose steps can be trained without a rollout, got demo: " in refused(5, **mixed)
    settings = replay.settings_of(unresolve(tree | whole), run, 5, 5)
    assert (settings.debug.train_only, settings.debug.steps, settings.evaluation) == (run, (5, 6), None)
    assert settings.num_steps == config.num_steps  # a schedule of the learning rate is over all of them


def test_a_replay_goes_on_from_links_to_the_checkpoint_and_to_weights_that_never_change(tmp_path: Path) -> None:
    run, to = tmp_path / "run", tmp_path / "to"
    source = checkpoint(run, 4)
    (run / "config.resolved.json").write_text("{}")
    for folder, weights in ((run, "true"), (to, "built again")):
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "w").write_text(weights)
    (run / "reference").mkdir()
    (run / "reference" / "w").write_text("warm")
    goes_on_from(run, 4, reset=True)
    replay._link(run, to, 4)
    assert (to / "checkpoints" / source.name / "shards" / "x").samefile(source / "shards" / "x")
    assert [(to / name / "w").read_text() for name in ("model", "reference")] == ["true", "warm"]
    assert resets(to) == [4]  # the optimizer began there too


def test_what_came_out_is_compared_to_the_bit_and_why_it_may_differ_is_said(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    run, again = made(tmp_path / "run"), made(tmp_path / "again", torch="2.8", loss=-2.5)
    for each in (run, again):
        lines(each / "events.jsonl", [{"kind": "committed", "version": n, "checksums": {"actor": n}} for n in (2, 3)])

    def told(step: int, *, as_json: bool = False) -> tuple[int, str]:
        code = replay.tell(run, again, step, as_json=as_json)
        return code, capsysbinary.readouterr().out.decode()

    code, text = told(1)
    assert code == 0 and text.startswith(
        "step 1 came out equal, to the bit\ncode: equal\npackages: 1 differ\n  torch: 2.9 | 2.8\n"
    )
    assert "settings" not in text and text.endswith("weights of version 2: equal, actor 00000002\n")
    lines(again / "events.jsonl", [{"kind": "committed", "version": 3, "checksums": {"actor": 7}}])
    code, text = told(2)
    assert code == 1 and text.startswith("step 2 came out otherwise. The run was not deterministic: ")
    assert "  loss: -2 | -2.5\n" in text
    assert text.endswith("weights of version 3: actor 00000003 | actor 00000007\n")
    code, text = told(2, as_json=True)
    assert (code, json.loads(text)["equal"], json.loads(text)["checksums"]) == (1, False, [{"actor": 3}, {"actor": 7}])
    for each, checksum in ((run, 3), (again, 7)):
        log = ParityLog(each, 0)
        log.write(2, 2, [])
        log.write(3, checksum, [])
        lines(
            each / "metrics.jsonl",
            [of_step(2, mfu=checksum, tokens_per_s_per_device=checksum, queues={"ready": checksum})],
        )
    assert "to the bit: equal in all steps" in told(1)[1]
    code, text = told(2)
    assert code == 1 and text.startswith("step 2 came out otherwise, and both runs are deterministic\n")
    assert "to the bit: step 2, all rounds equal, rank 0: the weights differ" in text
    assert "metrics: equal in all 1 steps that both have" in text  # figures of time and of what waits are no difference
