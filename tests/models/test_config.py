"""The model's settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rondo.models.config import MeshConfig, ModelConfig
from rondo.runtime.errors import ConfigError
from rondo.runtime.section import explain


def told(**fields: object) -> str:
    with pytest.raises(ValidationError) as raised:
        ModelConfig(**fields)
    return str(explain(raised.value, "demo.py", "model"))


def test_the_model_has_exactly_one_source() -> None:
    rule = "model.path and model.build must be set one without the other, got"
    assert (
        told()
        == f"{rule} neither. Set model.path to a Hugging Face folder, or model.build to a function that writes one."
    )
    assert told(path="a", build="m:f").startswith(f"{rule} both. ")
    assert ModelConfig(path="Qwen/Qwen3-0.6B").dtype == "auto"


def test_arguments_without_a_function_to_take_them_are_refused() -> None:
    assert told(path="a", build_args={"seed": 1}) == (
        "model.build_args must be empty without model.build, got {'seed': 1}. Set model.build, or remove model.build_args."
    )


def test_a_build_function_is_kept_as_text() -> None:
    from rondo.models.tiny.qwen3 import build

    assert ModelConfig(build=build).build == "rondo.models.tiny.qwen3:build"


def test_a_mesh_is_of_all_ranks_that_train() -> None:
    assert [MeshConfig(dp_replicate=copies).shape(4) for copies in (1, 2, 4)] == [(1, 4), (2, 2), (4, 1)]
    assert MeshConfig(dp_shard=4).shape(4) == (1, 4)
    for given, shown in ((MeshConfig(dp_replicate=3), "3 x dp_shard 1"), (MeshConfig(dp_shard=2), "1 x dp_shard 2")):
        with pytest.raises(
            ConfigError, match=rf"must be of the 4 processes that train, got dp_replicate {shown}\. Change"
        ):
            given.shape(4)


def test_experts_are_shared_out_within_a_copy() -> None:
    assert MeshConfig(ep=4).shape(4) == (1, 4)
    assert MeshConfig(dp_replicate=2, ep=2).shape(4) == (2, 2)
    for given, shown in (
        (MeshConfig(dp_replicate=2, ep=4), "ep 4 with dp_shard 2"),
        (MeshConfig(ep=3), "ep 3 with dp_shard 4"),
    ):
        with pytest.raises(ConfigError, match=rf"ep must divide the processes that one copy .* got {shown}\. Change"):
            given.shape(4)
    with pytest.raises(ConfigError, match="got ep 2 with dp_shard 1"):
        MeshConfig(ep=2).shape(1)
    assert [MeshConfig(ep=4).of_scorers(processes).ep for processes in (1, 2, 4, 6, 8)] == [1, 2, 4, 2, 4]
    assert MeshConfig(dp_replicate=2, ep=4).of_scorers(8).shape(8) == (1, 8)
