"""A trace: what a process that trains would hold, by part, against what can be counted by hand."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from rondo.launch.check.rows import Rows
from rondo.launch.check.trace import Tracer, _Mesh
from rondo.launch.check.workspace import Heads, flex_attention
from rondo.launch.config import load
from rondo.models.config import LoraConfig, MeshConfig
from rondo.models.load import empty_model
from rondo.models.lora import adapt
from rondo.models.media.config import MediaConfig
from rondo.models.names import adapter_tensors
from rondo.models.packing import Sequence, pack
from rondo.models.parallel.experts import IMBALANCE
from rondo.models.tiny import qwen3, qwen3_vl
from rondo.roles.config import JobConfig
from rondo.roles.training.objective import open_policy
from tests.launch import configs
from tests.strength import LONG


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


@pytest.mark.parametrize("num_ranks", [4, *([1] if LONG else [])])
def test_beside_adapters_the_base_has_half_the_bytes_no_gradients_and_no_moments(folder: Path, num_ranks: int) -> None:
    config, model = config_of(folder, 'train.lora={"rank": 8}', "train.dtype=bfloat16"), empty_model(str(folder))
    found = Tracer(config, str(folder)).of("actor", num_ranks)
    shapes = [p.shape for p in model.parameters()]
    shard = sum(2 * -(-shape[0] // num_ranks) * (shape.numel() // shape[0]) for shape in shapes)
    adapt(model, LoraConfig(rank=8))
    sizes = [4 * tensor.numel() for tensor in adapter_tensors(model).values()]
    assert found.parts["parameters"] == shard + sum(sizes) + 2 * 4 * 16
    assert found.parts["gradients"] == sum(sizes)
    assert found.parts["optimizer"] == 2 * sum(sizes) + 4 * len(sizes)


def test_experts_in_float32_are_traced_on_one_rank(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    qwen3.build(folder, num_layers=4, num_experts=4)
    found = Tracer(config_of(folder), str(folder)).of("actor", 1)
    assert found.parts["gradients"] == sum(4 * p.numel() for p in empty_model(str(folder)).parameters())
    assert "all-to-all" not in found.sent


@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_over_ranks_are_traced_as_shards_and_tokens_travel_as_to_the_fullest_rank(
    tmp_path: Path, checkpointing: bool
) -> None:
    folder, layers, experts = tmp_path / "model", 4, 4
    qwen3.build(folder, num_layers=layers, num_experts=experts)
    sets = [f"train.activation_checkpointing={checkpointing}", "train.micro_batch_tokens=1024"]
    config = config_of(folder, *sets)
    shared = config.model_copy(update={"train": config.train.model_copy(update={"mesh": MeshConfig(ep=2)})})
    found = Tracer(shared, str(folder)).of("actor", 4)
    shapes = [p.shape for p in empty_model(str(folder)).parameters()]
    assert found.parts["gradients"] == sum(4 * -(-shape[0] // 4) * (shape.numel() // shape[0]) for shape in shapes)
    # A token goes to two experts, in 128 numbers of 4 bytes: there, and back with those that came beyond, and both in the
    # backward; half to the other rank.
    rows = [Sequence(row.tokens, len(row.mask)) for row in Rows.of(config, None).micro_batch()]
    positions = pack(rows, share_prefixes=True).num_tokens
    one = int((1 + IMBALANCE) / 2 * 2 * positions) * 128 * 4 // 2
    times = found.num_micro_batches * layers * (6 if checkpointing else 4)
    assert found.sent["all-to-all"] == pytest.approx(times * one, rel=0.01)
    if not checkpointing:
        whole = Tracer(config, str(folder)).of("actor", 4)
        assert "all-to-all" not in whole.sent and found.sent["all-gather"] < whole.sent["all-gather"]


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

    tracer._on_device = True
    sections = tracer._trained(tracer._depths.points[0], _Mesh.open(config.train.mesh, 1), rows, 1).sections
    decoder, vision = (sections["backward", at, 0]["attention's workspace"] for at in range(2))
    of = tracer._model_config
    for got, part, tokens in (
        (decoder, of.get_text_config(), sum(len(r.tokens) for r in rows)),
        (vision, of.vision_config, 1024 + 4),  # the family's dummy lies beside the picture
    ):
        assert got == flex_attention(Heads.of(part), tokens=tokens, rows=1, width=4) > 0

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
