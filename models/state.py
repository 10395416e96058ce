"""Everything that the next step of training depends on, as this rank holds it: for snapshots, without any collective.

Owns the names and the completeness of that state: parameters and buffers, optimizer moments, learning rates, the random states
of torch, numpy and Python. Does not own where it is kept (`comm/weights/snapshot.py` in memory, `checkpoint.py` on disk).
Hyper-parameters are not part of it; they come from the settings.

Invariant: loading what was taken restores every bit, in place, and training goes on bit by bit as it would have.

    tensors, state = training_state(model, optimizer)      # "model.<name>", "optimizer.<name>.exp_avg", "random.cpu"
    load_training_state(model, optimizer, tensors, state)
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rondo.models.names import adapter_tensors, local_part, memory_tensors
from rondo.models.scaling import OF_A_SCALE
from rondo.models.units import drop_copies
from rondo.runtime.errors import CorruptData

FORMAT = 1


def named_tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The live tensors of model and optimizer by name: DTensors where the model is sharded, detached. Of a model with adapters
    these alone, and a value head: nothing else of it changes."""
    drop_copies(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lasting = adapter_tensors(model) or memory_tensors(model)
    found = {f"model.{name}": tensor.detach() for name, tensor in lasting.items()}
    for parameter, moments in optimizer.state.items():
        found |= {f"optimizer.{names[id(parameter)]}.{key}": value.detach() for key, value in moments.items()}
    return found


def training_state(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors of this rank, JSON values). The tensors are the live ones: copy them before training goes on."""
    tensors = {name: local_part(tensor) for name, tensor in named_tensors(model, optimizer).items()}
    return tensors | random_states(model), options(optimizer)


def load_training_state(
    model: Any, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]
) -> None:
    """Put back what `training_state` gave, into a model sharded the same way.

    Raises CorruptData, having changed nothing, unless names, shapes and format are those of `model` and `optimizer`.
    """
    targets, randoms = named_tensors(model, optimizer), random_states(model)
    expected = {name: local_part(tensor) for name, tensor in targets.items()} | randoms
    wrong = sorted(expected.keys() ^ tensors.keys()) + [
        name for name in expected if name in tensors and expected[name].shape != tensors[name].shape
    ]
    if wrong or state.get("format") != FORMAT or len(state["lr"]) != len(optimizer.param_groups):
        raise CorruptData(
            f"a snapshot must have format {FORMAT} and exactly this rank's tensors, got format {state.get('format')} and "
            f"{len(wrong)} that differ ({', '.join(wrong[:3])}). Restore it with the settings and processes that wrote it"
        )
    with torch.no_grad():
        for name, target in targets.items():
            local_part(target).copy_(tensors[name])
    set_options(optimizer, state)
    set_random_states({name: tensors[name] for name in randoms})


def options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What changes in an optimizer beside tensors, as JSON values; with a loss scale, also that (`scaling.py`)."""
    scale = {name: value for name, value in optimizer.param_groups[0].items() if name in OF_A_SCALE}
    return {"format": FORMAT, "lr": [float(group["lr"]) for group in optimizer.param_groups]} | scale


def set_options(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    for group, lr in zip(optimizer.param_groups, state["lr"], strict=True):
        group["lr"] = lr
    first = optimizer.param_groups[0]
    first |= {name: state[name] for name in OF_A_SCALE if name in first and name in state}


def random_states(model: Any) -> dict[str, torch.Tensor]:
    """The states of the process's generators as tensors: torch's on the CPU and, if it is another, on the model's device
    (uint8), numpy's and Python's (int64 [627]: words, place, whether a normal number is kept, its bits)."""
    kept: Any
    _, words, at, has_kept, kept = np.random.get_state()  # the one that user code draws from
    numpys = torch.from_numpy(np.array([*words, at, has_kept, _bits(kept)], np.int64))
    _, words, kept = random.getstate()
    pythons = torch.from_numpy(np.array([*words, kept is not None, _bits(kept or 0.0)], np.int64))
    found = {"random.cpu": torch.get_rng_state(), "random.numpy": numpys, "random.python": pythons}
    device = next(model.parameters()).device
    if device.type == "cuda":
        found["random.cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["random.cpu"].cpu().contiguous())
    *words, at, has_kept, kept = states["random.numpy"].tolist()
    np.random.set_state(("MT19937", np.array(words, np.uint32), at, has_kept, _float(kept)))
    *words, has_kept, kept = states["random.python"].tolist()
    random.setstate((3, tuple(words), _float(kept) if has_kept else None))
    if "random.cuda" in states:
        torch.cuda.set_rng_state(states["random.cuda"].cpu().contiguous())


def _bits(number: float) -> int:
    return int(np.float64(number).view(np.int64))


def _float(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))
