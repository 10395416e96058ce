"""`rondo export`: which checkpoint is meant, and a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rondo.launch.cli import EXIT_DONE, EXIT_USAGE, main
from rondo.models import checkpoint
from rondo.models.config import LoraConfig
from rondo.models.load import load_model
from rondo.models.lora import adapt, published_adapter
from rondo.models.optimizer import make_optimizer
from rondo.models.tiny import qwen3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory as it is when a run ended with two checkpoints."""
    run = tmp_path / "runs" / "quickstart"
    qwen3.build(run / "model", hidden_size=32, num_heads=2, num_kv_heads=1, num_layers=1)
    (run / "config.resolved.json").write_bytes(orjson.dumps({"train": {}}))
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


def test_weights_that_are_not_what_was_written_are_never_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest, older = (run / "checkpoints" / f"step_00000{version}" for version in (2, 1))
    flip(newest / "shards" / "__0_0.distcp")
    assert main(["check", str(run)]) == EXIT_USAGE
    said = capsys.readouterr().out
    assert "ok     step_000001 is whole\n" in said and "__0_0.distcp with other bytes" in said
    assert main(["export", str(newest), str(tmp_path / "out")]) == EXIT_USAGE
    assert main(["export", str(run), str(tmp_path / "out"), "--checkpoint", "2"]) == EXIT_USAGE
    capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "out")]) == EXIT_DONE
    told = capsys.readouterr()
    assert told.out == f"{tmp_path}/out: step_000001 of quickstart in float32\n"
    assert told.err.startswith(
        f"passed over: {newest} must be a checkpoint as it was written, got shards/__0_0.distcp with"
    )
    assert newest.is_dir()  # the run may be alive
    flip(older / "shards" / ".metadata")
    assert main(["export", str(run), str(tmp_path / "again")]) == EXIT_USAGE and not (tmp_path / "again").exists()
    assert capsys.readouterr().err.count("\npassed over: ") == 2


def flip(file: Path) -> None:
    """One bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_of_a_run_of_adapters_these_become_a_folder_or_the_whole_model_does(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--merged"]) == EXIT_USAGE
    assert "--merged must be given for a run that trains adapters" in capsys.readouterr().err
    lora = LoraConfig(rank=2, alpha=3, targets=("q_proj", "up_proj"))
    (run / "config.resolved.json").write_bytes(orjson.dumps({"train": {"lora": lora.model_dump(mode="json")}}))
    model = load_model(str(run / "model"))
    adapt(model, lora, dtype=torch.float32)
    with torch.no_grad():
        for tensor in published_adapter(model).values():
            tensor.normal_()
    folder = run / "checkpoints" / "step_000003"
    checkpoint.save(folder, model, make_optimizer(model, lr=1e-3), {"version": 3}, tokenizer_path=str(run / "model"))
    assert not (folder / "hf").exists() and (folder / "adapter" / "adapter_config.json").exists()

    assert main(["export", str(run), str(tmp_path / "adapter")]) == EXIT_DONE
    assert capsys.readouterr().out == f"{tmp_path}/adapter: adapter of step_000003 of quickstart in float32\n"
    wanted, found = published_adapter(model), load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
    told = [(each / "adapter_config.json").read_bytes() for each in (folder / "adapter", tmp_path / "adapter")]
    assert told[0] == told[1] and orjson.loads(told[0])["target_modules"] == ["q_proj", "up_proj"]

    assert main(["export", str(run), str(tmp_path / "merged"), "--merged"]) == EXIT_DONE
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), torch.arange(1, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


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
