"""The model's settings."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rondo.models.config import ModelConfig
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
    assert ModelConfig(path="Qwen/Qwen3-0.6B").dtype == "float32"


def test_arguments_without_a_function_to_take_them_are_refused() -> None:
    assert told(path="a", build_args={"seed": 1}) == (
        "model.build_args must be empty without model.build, got {'seed': 1}. Set model.build, or remove model.build_args."
    )


def test_a_build_function_is_kept_as_text() -> None:
    from rondo.models.tiny.qwen3 import build

    assert ModelConfig(build=build).build == "rondo.models.tiny.qwen3:build"
