"""FSDP2 on two real processes that see different modalities, against one process that sees all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rondo.models import checkpoint, parallel
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.optimizer import make_optimizer
from rondo.models.packing import Packing
from rondo.models.parts import freeze
from tests.models.builders import full_tensors
from tests.models.multimodal import CASES, LR, Case, folder_of, long_prompt, tiny, train_step, whole_gradients

ROOT = Path(__file__).parents[2]


class Run:
    """What two ranks did."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        self.folders = {family: folder_of(folder, family) for family in dict.fromkeys(case.family for case in CASES)}
        worker = str(Path(__file__).with_name("fsdp_media_worker.py"))
        command = [sys.executable, worker, str(self.out), str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=560, check=False)
        assert done.returncode == 0, done.stderr[-20_000:]
        self.facts: dict[str, Any] = json.loads((self.out / "facts.json").read_text())

    def alone(self, case: Case) -> tuple[Any, Packing, torch.optim.Optimizer]:
        """The same in one process."""
        model = load_model(str(self.folders[case.family]))
        freeze(model, case.freeze)
        packing = Packing.of(model)
        parallel.compute_in(model, dtype=case.dtype)
        return model, packing, make_optimizer(model, lr=LR, eps=1e-4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("fsdp"))


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_unequal_modalities_train_as_one_process_does(run: Run, case: Case) -> None:
    facts = run.facts[case.name]
    model, packing, optimizer = run.alone(case)
    told = [train_step(model, packing, optimizer, 0, take=False)]
    ours, theirs = whole_gradients(model), load_file(run.out / f"{case.name}.gradients.safetensors")
    told[0].append(parallel.clip_grad_norm(model, 0.5))
    optimizer.step()
    parallel.discard_gradients(model)
    told.append(train_step(model, packing, optimizer, 1))
    weights = dict(full_tensors(model))
    losses = [abs(a - b) / abs(a) for (a, _), (b, _) in zip(told, facts["told"], strict=True)]
    norms = [abs(a - b) / a for (_, a), (_, b) in zip(told, facts["told"], strict=True)]
    largest = difference(ours, theirs)
    after = difference(weights, load_file(run.out / f"{case.name}.weights.safetensors"))
    print(f"{case.name}: loss {max(losses):.1e}, norm {max(norms):.1e}, gradient {largest:.1e}, weights {after:.1e}")
    exact = case.dtype == "float32"
    assert max(losses) < (1e-6 if exact else 1e-4)
    assert max(norms) < (1e-5 if exact else 2**-8)  # a unit of bfloat16
    assert largest < (1e-5 if exact else 1e-3) < max(gradient.abs().max().item() for gradient in theirs.values())
    assert after < (1e-5 if exact else 2 * LR)
    trained = {name for name, parameter in tiny(case.family).named_parameters()}
    assert (theirs.keys() == trained) == (not case.freeze)
    if "vision" in case.freeze:
        assert not any(name.startswith("model.visual.blocks") for name in theirs)
    assert facts["equal"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_encoders_are_whole_on_every_rank_or_cut_like_the_rest(run: Run, case: Case) -> None:
    held = run.facts[case.name]["held"]
    assert held["rest"] == pytest.approx(0.5, abs=0.02)
    assert held["encoders"] == (1 if case.encoders == "replicate" else pytest.approx(0.5, abs=0.02))


@pytest.mark.parametrize("case", [c for c in CASES if c.saved], ids=lambda case: case.name)
def test_snapshots_and_checkpoints_go_on_bit_by_bit_and_on_one_process(run: Run, case: Case) -> None:
    facts = run.facts[case.name]
    assert facts["snapshot"]
    assert facts["checkpoint"]
    model, packing, optimizer = run.alone(case)
    assert checkpoint.load(run.out / case.name / "step_000002", model, optimizer) == {"version": 2}
    assert train_step(model, packing, optimizer, 2) == pytest.approx(facts["next"], rel=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == "bfloat16"], ids=lambda case: case.name)
def test_two_ranks_in_bfloat16_score_as_a_model_in_bfloat16_also_at_far_positions(run: Run, case: Case) -> None:
    model = load_model(str(run.folders[case.family]), dtype="bfloat16")
    with torch.no_grad():
        scores = response_log_probs(model, Packing.of(model).pack(long_prompt(model)))[0]
    assert scores.tolist() == run.facts[case.name]["scores"]
