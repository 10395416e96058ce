"""A trace: what a process that trains would hold, by part, against what can be counted by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from rondo.launch.check.trace import Tracer
from rondo.launch.config import load
from rondo.models.load import empty_model
from rondo.models.media.config import MediaConfig
from rondo.models.tiny import qwen3, qwen3_vl
from rondo.roles.config import JobConfig
from rondo.roles.training.objective import open_policy
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
    assert found.ended["activations"] + found.ended["logits"] > 0


def test_experts_in_float32_are_traced(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    qwen3.build(folder, num_layers=4, num_experts=4)
    found = Tracer(config_of(folder), str(folder)).of("actor")
    assert found.parts["gradients"] == sum(4 * p.numel() for p in empty_model(str(folder)).parameters())


def test_a_step_on_pictures_as_large_as_the_settings_allow_holds_what_was_traced(folder: Path, tmp_path: Path) -> None:
    tower = tmp_path / "tower"
    qwen3_vl.build(tower, num_layers=6, vision_layers=6)
    config = config_of(
        folder, "rollout.max_prompt_tokens=300", "rollout.max_new_tokens=100", "train.micro_batch_tokens=3000"
    )
    columns = config.data.model_copy(update={"media_columns": {"image": "picture"}})
    config = config.model_copy(update={"data": columns, "media": MediaConfig(image_max_tokens=256)})
    tracer = Tracer(config, str(tower))
    rows = tracer._rows.micro_batch()
    pictures = {row.media.key: row.media.arrays["pixel_values"].shape for row in rows if row.media is not None}
    assert pictures == {"0": (1024, 384)}  # one group of samples fits
    found = tracer.of("actor")
    assert found.how.startswith("traced at 3 and 4 of 6 layers and at 3 and 4 of 6 layers of model.visual")

    trainer = open_policy(config, str(tower), world_size=1, device="cpu")
    spans = [[number, 0, 0, 1] for number in range(len(rows))]
    trainer.accumulate(0, rows, spans, last=False)
    with torch.profiler.profile(profile_memory=True) as profile:
        trainer.accumulate(0, rows, spans, last=True)
    held = itertools.accumulate(
        event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    )
    state = sum(found.parts[part] for part in ("parameters", "gradients", "optimizer"))
    assert max(held) == pytest.approx(found.needed - state, rel=0.1)
