"""How often a step makes the host wait for a device, counted without one: by the operations that read a value back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rondo.models.config import ModelConfig
from rondo.models.load import prepare
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    JobConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from rondo.roles.training.backend import Backend
from rondo.roles.training.objective import PolicyObjective, TrainRow, open_policy

aten = torch.ops.aten
READS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.unique_dim.default, aten._unique2.default, aten.unique_consecutive.default, aten.bincount.default,
    aten.repeat_interleave.Tensor, aten.is_nonzero.default,
}  # fmt: skip
BY_MASK = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
TO_HOST = {"cpu", "numpy", "tolist"}


class Waits(TorchDispatchMode):
    """Operations whose result, or its size, the host must know."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func in BY_MASK and any(index is not None and index.dtype == torch.bool for index in args[1])
        if by_mask or (func in READS and not (kwargs or {}).get("output_size")):
            self.found[str(func)] += 1
        return func(*args, **kwargs or {})


class Copies(TorchFunctionMode):
    """Copies to the host, which on the CPU are none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.order: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in TO_HOST:
            self.found[name] += 1
        if name in TO_HOST or name == "backward":
            self.order.append(name)
        return func(*args, **kwargs or {})


def rows_of_length(num_rows: int, response: int) -> list[TrainRow]:
    draw = np.random.default_rng(0)
    made = []
    for _ in range(num_rows):
        tokens = draw.integers(0, 200, 6 + response).astype(np.int32)
        floats = [draw.normal(size=response).astype(np.float32) for _ in range(4)]
        made.append(TrainRow(tokens, np.ones(response, np.uint8), *floats, np.zeros(response, np.int32)))
    return made


def opened(folder: Path, num_layers: int, build: dict[str, Any], **train: Any) -> Backend[PolicyObjective]:
    recipe = ModelConfig(
        build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": num_layers, **build}
    )
    config = JobConfig(
        name="waits", num_steps=4, model=ModelConfig(path=prepare(recipe, folder / str(num_layers))),
        data=DataConfig(rows="json:loads", label="answer"), reward=RewardConfig(function="json:loads"),
        algorithm=AlgorithmConfig(kl_coef=0.1), train=TrainConfig(**train),
        rollout=RolloutConfig(prompts_per_step=2, samples_per_prompt=2, max_prompt_tokens=8, max_new_tokens=8),
    )  # fmt: skip
    assert config.model.path is not None
    return open_policy(config, config.model.path, world_size=1, device="cpu")


def waits(backend: Backend[PolicyObjective], rows: list[TrainRow]) -> tuple[Counter[str], Counter[str]]:
    """Of one micro-batch, and of the end of its step."""
    found = []
    for part in (
        lambda: backend.accumulate(0, rows, [(n, 0, 0, 1) for n in range(len(rows))], last=True),
        lambda: backend.finish(0),
    ):
        with Waits() as reads, Copies() as copies:
            part()
        found.append(reads.found + copies.found)
    return found[0], found[1]


@pytest.mark.parametrize("build", [{}, {"num_experts": 4}], ids=["dense", "experts"])
def test_a_step_waits_for_the_device_no_more_often_with_more_layers_rows_or_tokens(
    build: dict[str, Any], tmp_path: Path
) -> None:
    few, many = (opened(tmp_path, number, build, activation_checkpointing=True) for number in (2, 4))
    first = waits(few, rows_of_length(2, 3))
    assert first == waits(few, rows_of_length(2, 3))
    assert first == waits(few, rows_of_length(9, 11))
    assert first == waits(many, rows_of_length(2, 3))
    batch, end = first
    assert batch == {"numpy": 1}  # the log-probs of its tokens
    with Copies() as copies:
        few.accumulate(0, rows_of_length(2, 3), [(n, 0, 0, 1) for n in range(2)], last=True)
    assert copies.order == ["backward", "numpy"]  # which the device is given before the host waits for them
    # The count, the norm, the loss; the figures, and those of the routers.
    assert end == {str(aten._local_scalar_dense.default): 3, "tolist": 1 + bool(build)}
