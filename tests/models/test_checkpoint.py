"""Checkpoints and exports of one process, and savers that are killed. Two processes: test_fsdp.py."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rondo.comm.weights.snapshot import HotSnapshot, snapshot_bytes
from rondo.models import checkpoint, hf_folder
from rondo.models.load import load_model
from rondo.models.optimizer import make_optimizer
from rondo.models.state import training_state
from rondo.runtime import formats
from rondo.runtime.checkpoints import NoRoom, has, newest_complete, verify
from rondo.runtime.errors import ConfigError, CorruptData
from tests.comm.memory import MemorySegment
from tests.models.builders import LR, folder_of, tiny, train_step

ROOT = Path(__file__).parents[2]


def trained(num_steps: int) -> tuple[Any, torch.optim.Optimizer]:
    model = tiny("gpt2")  # has dropout
    optimizer = make_optimizer(model, lr=LR)
    for step in range(num_steps):
        train_step(model, optimizer, step)
    return model, optimizer


def test_a_run_goes_on_bit_by_bit_from_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    extra = {"version": 1, "index": {"cursor": [3, 4], "name": "naïve"}}
    checkpoint.save(tmp_path / "step_000001", model, optimizer, extra)
    assert json.loads((tmp_path / "step_000001" / "index.json").read_bytes()) == extra
    told = [train_step(model, optimizer, step) for step in (1, 2)]

    torch.manual_seed(7)
    other, fresh = trained(0)
    assert checkpoint.load(tmp_path / "step_000001", other, fresh) == extra
    assert [train_step(other, fresh, step) for step in (1, 2)] == told
    ours, theirs = training_state(other, fresh)[0], training_state(model, optimizer)[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("in_a_snapshot", [False, True])
def test_what_was_staged_is_written_as_it_was_while_training_goes_on(tmp_path: Path, in_a_snapshot: bool) -> None:
    model, optimizer = trained(1)
    held = None
    if in_a_snapshot:
        tensors, state = training_state(model, optimizer)
        hot = HotSnapshot(MemorySegment(snapshot_bytes(sum(t.nbytes for t in tensors.values()), len(tensors))))
        hot.write(1, tensors, state)
        held = hot.views(1)
    staged = checkpoint.stage(model, optimizer, held)
    if held is not None:  # nothing is copied
        assert {t.data_ptr() for t in staged.tensors.values()} == {t.data_ptr() for t in held[0].values()}
    told = [train_step(model, optimizer, step) for step in (1, 2)]
    checkpoint.write(tmp_path / "step_000001", staged, {"version": 1})

    torch.manual_seed(7)
    other, fresh = trained(0)
    assert checkpoint.load(tmp_path / "step_000001", other, fresh) == {"version": 1}
    assert [train_step(other, fresh, step) for step in (1, 2)] == told


def test_what_a_killed_saver_left_aside_goes_with_the_next_saving(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    for name in (".step_000003.partial", ".step_000007.partial"):
        (tmp_path / name / "shards").mkdir(parents=True)
    checkpoint.save(tmp_path / "step_000007", model, optimizer, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000007"]


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """What is written beyond that fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_is_full_says_so_and_keeps_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    (tmp_path / ".step_000001.partial").mkdir()
    staged = checkpoint.stage(model, optimizer)
    samples: dict[str, np.ndarray] = {"tokens": np.zeros(1 << 20, np.uint8)}
    for most, beside in ((9000, None), (1 << 16, lambda folder: save_numpy(samples, folder / "samples.safetensors"))):
        with (
            files_of_at_most(most),
            pytest.raises(NoRoom, match=rf"^{tmp_path} must have room for \d+ bytes, got \d+ free\."),
        ):
            checkpoint.write(tmp_path / "step_000002", staged, {"version": 2}, beside)
        assert list(tmp_path.iterdir()) == []
    checkpoint.write(tmp_path / "step_000002", staged, {"version": 2})
    assert newest_complete(tmp_path) == tmp_path / "step_000002"
    assert checkpoint.load(tmp_path / "step_000002", model, optimizer) == {"version": 2}


def test_an_export_that_a_disk_cannot_take_leaves_what_was_there(tmp_path: Path) -> None:
    path, model, out = str(folder_of(tmp_path / "model", "llama")), tiny("llama"), tmp_path / "out" / "hf"
    out.parent.mkdir()
    checkpoint.export_hf(out, model, path)
    before = sorted(out.iterdir())
    with files_of_at_most(9000), pytest.raises(NoRoom):
        checkpoint.export_hf(out, model, path)
    assert (list(out.parent.iterdir()), sorted(out.iterdir())) == ([out], before)


def test_a_saving_that_gives_way_writes_nothing(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    staged = checkpoint.stage(model, optimizer)
    assert not checkpoint.write(tmp_path / "step_000002", staged, {}, gives_way=True)
    assert list(tmp_path.iterdir()) == []
    assert checkpoint.write(tmp_path / "step_000002", staged, {})


def test_what_is_not_what_was_written_is_not_loaded_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    folder = tmp_path / "step_000001"
    checkpoint.save(folder, model, optimizer, {"version": 1})
    before = {name: tensor.clone() for name, tensor in training_state(model, optimizer)[0].items()}
    for name in ("shards/__0_0.distcp", "shards/.metadata", "trainer.json", "index.json"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CorruptData, match=f"got {name} with other bytes"):
            checkpoint.load(folder, model, optimizer)
        (folder / name).write_bytes(whole)
    after = training_state(model, optimizer)[0]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert checkpoint.load(folder, model, optimizer) == {"version": 1}


def test_a_folder_for_others_that_is_added_later_is_marked_with_it_and_made_again_where_it_was_not(
    tmp_path: Path,
) -> None:
    source, model = str(folder_of(tmp_path / "source", "llama")), tiny("llama")
    folder = tmp_path / "step_000001"
    checkpoint.save(folder, model, make_optimizer(model, lr=LR), {})
    (folder / "hf").mkdir()  # of one who was killed before it was marked
    assert not has(folder, "hf")
    checkpoint.add_result(folder, model, source)
    assert has(folder, "hf") and verify(folder)
    (folder / "hf" / "config.json").write_text("{}")
    with pytest.raises(CorruptData, match=r"hf/config\.json of 2 bytes"):
        verify(folder)


def test_a_checkpoint_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    checkpoint.save(tmp_path / "step_000001", model, optimizer, {})
    marker = tmp_path / "step_000001" / "COMPLETE"
    told = json.loads(marker.read_text()) | {"format": 99, "release": "99.0"}
    marker.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"step_000001 must be of format \d+ or older, got 99, which rondo"):
        checkpoint.load(tmp_path / "step_000001", model, optimizer)
    marker.write_text(json.dumps(told | {"release": formats.release()}))
    with pytest.raises(CorruptData, match="got a damaged COMPLETE marker"):
        checkpoint.load(tmp_path / "step_000001", model, optimizer)
    marker.write_text("1\n")  # as the first releases wrote it
    assert checkpoint.load(tmp_path / "step_000001", model, optimizer) == {}


def test_a_checkpoint_without_its_marker_or_of_another_model_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    checkpoint.save(tmp_path / "step_000001", model, optimizer, {})
    other = tiny("llama")
    with pytest.raises(CorruptData, match=r"must hold exactly the tensors of this model, got \d+ that differ \(model"):
        checkpoint.load(tmp_path / "step_000001", other, make_optimizer(other, lr=LR))
    (tmp_path / "step_000001" / "COMPLETE").unlink()
    with pytest.raises(
        CorruptData, match=r"must carry its COMPLETE marker, got .*step_000001 without\. Choose a whole one"
    ):
        checkpoint.load(tmp_path / "step_000001", model, optimizer)


def test_a_saver_killed_at_any_moment_leaves_only_whole_checkpoints_to_pick(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    folders = [tmp_path / "run", tmp_path / "saved"]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("killed_worker.py")), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout)
    old, new, replaced = ["step_000001", 1.0, True], ["step_000002", 2.0, True], ["step_000002", 3.0, True]
    assert len(facts["new"]) > 10
    # The old one until the very last operations, then the new one.
    first = facts["new"].index(new)
    assert facts["new"] == [old] * first + [new] * (len(facts["new"]) - first)
    assert first >= len(facts["new"]) - 4
    # A version saved again is the first saving, or an older one, or the second saving: never a mixture.
    assert [kind for kind in facts["again"] if kind not in (old, new, replaced)] == []
    assert facts["again"][0] == new and facts["again"][-1] == replaced
    assert facts["left"] == ["step_000001", "step_000002"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_loads_with_equal_logits_whatever_it_replaces(tmp_path: Path, family: str, dtype: str) -> None:
    source = folder_of(tmp_path / "source", family)
    model = load_model(source)
    train_step(model, make_optimizer(model, lr=LR), 0)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model-00001-of-00002.safetensors").write_text("of an earlier export")
    checkpoint.export_hf(tmp_path / "hf", model, source, dtype=dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert loaded.dtype == getattr(torch, dtype)
    if dtype == "bfloat16":
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    else:
        ids = torch.arange(40).reshape(2, 20)
        assert torch.equal(loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "source"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_checkpoint_is_exported_without_its_model_part_by_part(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_READ_BYTES", 50_000)
    source = folder_of(tmp_path / "source", family)
    model = load_model(source)
    optimizer = make_optimizer(model, lr=LR)
    train_step(model, optimizer, 0)
    checkpoint.save(tmp_path / "step_000001", model, optimizer, {})
    checkpoint.export_hf(tmp_path / "hf", model, source, dtype="bfloat16")
    checkpoint.export(tmp_path / "step_000001", tmp_path / "exported", source, dtype="bfloat16")
    files = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert sorted(path.name for path in (tmp_path / "exported").iterdir()) == files
    assert all((tmp_path / "exported" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes() for name in files)
    other = folder_of(tmp_path / "other", "qwen3_moe" if family == "qwen3" else "qwen3")
    with pytest.raises(CorruptData, match=r"must hold exactly the tensors of this model, got \d+ that differ"):
        checkpoint.export(tmp_path / "step_000001", tmp_path / "again", other)
    (tmp_path / "step_000001" / "COMPLETE").unlink()
    with pytest.raises(CorruptData, match="must carry its COMPLETE marker"):
        checkpoint.export(tmp_path / "step_000001", tmp_path / "again", source)
    assert not (tmp_path / "again").exists()


def test_an_export_larger_than_a_file_is_cut_into_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_folder, "MAX_FILE_BYTES", 40_000)
    source = folder_of(tmp_path / "source", "qwen3")
    model = load_model(source)
    checkpoint.export_hf(tmp_path / "hf", model, source)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 3
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert all(sum(t.nbytes for t in load_file(path).values()) <= max(40_000, largest) for path in files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
