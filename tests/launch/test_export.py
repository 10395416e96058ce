"""`rondo export`: which checkpoint is meant, and a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from rondo.launch.cli import EXIT_DONE, EXIT_USAGE, main
from rondo.models import checkpoint
from rondo.models.load import load_model
from rondo.models.optimizer import make_optimizer
from rondo.models.tiny import qwen3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory as it is when a run ended with two checkpoints."""
    run = tmp_path / "runs" / "quickstart"
    qwen3.build(run / "model", hidden_size=32, num_heads=2, num_kv_heads=1, num_layers=1)
    (run / "config.resolved.json").write_bytes(b"{}")
    (run / "prepared.json").write_bytes(orjson.dumps({"model_path": "model"}))
    model = load_model(str(run / "model"))
    for version in (1, 2):
        with torch.no_grad():
            model.model.norm.weight.fill_(version)
        folder = run / "checkpoints" / f"step_{version:06d}"
        checkpoint.save(folder, model, make_optimizer(model, lr=1e-3), {"version": version})
    return run


def test_the_newest_checkpoint_of_a_run_or_the_one_that_is_named_becomes_a_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "newest"), "--dtype", "bfloat16"]) == EXIT_DONE
    assert capsys.readouterr().out == f"{tmp_path}/newest: step_000002 of quickstart in bfloat16\n"
    assert main(["export", str(run / "checkpoints" / "step_000001"), str(tmp_path / "first")]) == EXIT_DONE
    for name, version, dtype in (("newest", 2.0, torch.bfloat16), ("first", 1.0, torch.float32)):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert loaded.dtype == dtype and set(loaded.model.norm.weight.tolist()) == {version}


def test_what_is_no_checkpoint_and_a_folder_that_is_there_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(run)]) == EXIT_USAGE
    assert (
        capsys.readouterr().err
        == f"OUT must be a folder that is not there yet, got {run}. Remove it, or name another\n"
    )
    for each in run.glob("checkpoints/*/COMPLETE"):
        each.unlink()
    assert main(["export", str(run), str(tmp_path / "out")]) == EXIT_USAGE
    assert "RUN must have a whole checkpoint, got " in capsys.readouterr().err
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == EXIT_USAGE
    assert "RUN must be a run directory, got " in capsys.readouterr().err
