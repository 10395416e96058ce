"""Snapshots: every bit comes back, and training goes on as it would have."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models.optimizer import make_optimizer
from rondo.models.state import load_training_state, training_state
from rondo.runtime.errors import CorruptData
from tests.models.builders import LR, tiny, train_step


def made() -> tuple[Any, torch.optim.Optimizer]:
    model = tiny("gpt2")  # has dropout, so torch's random state decides the numbers
    return model, make_optimizer(model, lr=LR)


def taken(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, state = training_state(model, optimizer)
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(state))


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_training_goes_on_bit_by_bit_from_a_snapshot_in_another_process_of_the_same_settings() -> None:
    model, optimizer = made()
    train_step(model, optimizer, 0)
    kept, state = taken(model, optimizer)
    told = [train_step(model, optimizer, step) for step in (1, 2)]
    after, _ = taken(model, optimizer)

    torch.manual_seed(77)
    other, fresh = made()
    load_training_state(other, fresh, kept, state)
    assert equal(taken(other, fresh)[0], kept)
    assert [group["lr"] for group in fresh.param_groups] == state["lr"] == [LR / 2] * 2
    assert [train_step(other, fresh, step) for step in (1, 2)] == told
    assert equal(taken(other, fresh)[0], after)


def test_the_random_state_is_part_of_it() -> None:
    model, optimizer = made()
    kept, state = taken(model, optimizer)
    first = train_step(model, optimizer, 0)
    load_training_state(model, optimizer, kept, state)
    torch.manual_seed(1)
    assert train_step(model, optimizer, 0) != first
    load_training_state(model, optimizer, kept, state)
    assert train_step(model, optimizer, 0) == first


def test_numpy_s_and_python_s_random_states_come_back_with_the_half_of_a_pair_that_they_keep() -> None:
    model, optimizer = made()
    random.gauss(0, 1)  # both make normal numbers in pairs, and keep one
    np.random.standard_normal()
    kept, state = taken(model, optimizer)

    def drawn() -> list[float]:
        return [f() for _ in range(3) for f in (random.random, lambda: random.gauss(0, 1), np.random.standard_normal)]

    first = drawn()
    assert drawn() != first
    load_training_state(model, optimizer, kept, state)
    assert drawn() == first


def test_a_snapshot_has_the_same_tensors_before_and_after_a_step_and_shares_their_memory() -> None:
    model, optimizer = made()
    before, _ = training_state(model, optimizer)
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in before.items()}
    train_step(model, optimizer, 0)
    after, _ = training_state(model, optimizer)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in after.items()} == shapes
    name = "transformer.h.0.attn.c_attn.weight"
    assert after[f"model.{name}"].data_ptr() == model.get_parameter(name).data_ptr()
    assert {f"optimizer.{name}.{part}" for part in ("step", "exp_avg", "exp_avg_sq")} < shapes.keys()


def test_a_snapshot_of_something_else_is_refused_and_nothing_changes() -> None:
    model, optimizer = made()
    kept, state = taken(model, optimizer)
    wrong = {name: tensor + 1 for name, tensor in kept.items() if name != "model.transformer.ln_f.bias"}
    with pytest.raises(CorruptData, match=r"got format 1 and 1 that differ \(model.transformer.ln_f.bias\)\. Restore"):
        load_training_state(model, optimizer, wrong, state)
    with pytest.raises(CorruptData, match=r"must have format 1 .*, got format 9 and 0 that differ"):
        load_training_state(model, optimizer, kept, state | {"format": 9})
    assert equal(taken(model, optimizer)[0], kept)
