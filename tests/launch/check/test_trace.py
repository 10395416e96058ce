"""A trace: what a process that trains would hold, by part, against what can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from rondo.launch.check.trace import Tracer
from rondo.launch.config import load
from rondo.models.load import empty_model
from rondo.models.tiny import qwen3
from rondo.roles.config import JobConfig
from tests.launch import configs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    qwen3.build(tmp_path / "model", num_layers=6)
    return tmp_path / "model"


def config_of(folder: Path, *sets: str) -> JobConfig:
    return load(configs.write(folder.parent), sets)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_parameters_gradients_and_moments_are_exact(folder: Path, num_ranks: int) -> None:
    found = Tracer(config_of(folder), str(folder)).of("actor", num_ranks)
    shapes = [p.shape for p in empty_model(str(folder)).parameters()]
    shard = sum(4 * -(-shape[0] // num_ranks) * (shape.numel() // shape[0]) for shape in shapes)
    assert found.parts["gradients"] == shard
    assert found.parts["optimizer"] == 2 * shard + 4 * len(shapes)
    assert found.parts["parameters"] == shard + 2 * 4 * 16  # and the frequencies of rotations
    assert found.kept == found.parts["activations"] + found.parts["logits"] > 0


def test_experts_in_float32_are_traced(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    qwen3.build(folder, num_layers=4, num_experts=4)
    found = Tracer(config_of(folder), str(folder)).of("actor")
    assert found.parts["gradients"] == sum(4 * p.numel() for p in empty_model(str(folder)).parameters())
