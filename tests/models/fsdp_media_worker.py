"""What test_fsdp_media.py starts with OUT FOLDERS: two ranks see different modalities; writes what they saw."""

from __future__ import annotations

import functools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from rondo.models import checkpoint, parallel
from rondo.models.config import MeshConfig
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.mesh import Mesh
from rondo.models.optimizer import make_optimizer
from rondo.models.packing import Packing
from rondo.models.parts import freeze
from rondo.models.state import load_training_state, training_state
from tests.models.builders import full_tensors
from tests.models.multimodal import CASES, LR, Case, long_prompt, train_step, whole_gradients
from tests.models.ranks import fork

warnings.filterwarnings("error", message=".*returned a view tensor")  # an in-place op on it would lose FSDP2's hook
OUT, FOLDERS = Path(sys.argv[1]), Path(sys.argv[2])


def everywhere(fact: bool) -> bool:
    """Whether it holds on every rank."""
    held = torch.tensor(int(fact))
    dist.all_reduce(held, dist.ReduceOp.MIN)
    return bool(held)


@functools.cache
def mesh(ep: int) -> Mesh:
    return Mesh.open(MeshConfig(ep=ep), 2)


def sharded(case: Case) -> tuple[Any, Packing, torch.optim.Optimizer]:
    cut = functools.partial(parallel.shard, mesh=mesh(case.ep), encoders=case.encoders, param_dtype=case.dtype)
    model = load_model(str(FOLDERS / case.family), cut=cut)
    packing = Packing.of(model)
    freeze(model, case.freeze)
    parallel.compute_in(model, case.dtype, activation_checkpointing=case.recomputed)
    return model, packing, make_optimizer(model, lr=LR, eps=1e-4)


def equal_on_ranks(model: Any) -> bool:
    """Whether what is not cut is the same on both ranks."""
    same = True
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            mine = parameter.detach().clone()
            dist.broadcast(mine, 0)
            same = same and torch.equal(mine, parameter)
    return everywhere(same)


def part_held(model: Any) -> dict[str, float]:
    """Of the encoders and of the rest, the part of all elements that this rank holds."""
    sums = {"encoders": [0, 0], "rest": [0, 0]}
    for name, parameter in model.named_parameters():
        where = sums["encoders" if "visual" in name or "audio_tower" in name else "rest"]
        where[0] += (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
        where[1] += parameter.numel()
    return {name: held / whole for name, (held, whole) in sums.items()}


def trained(case: Case) -> dict[str, Any]:
    rank = dist.get_rank()
    model, packing, optimizer = sharded(case)
    held = part_held(model)
    told = [train_step(model, packing, optimizer, 0, rank=rank, world_size=2, take=False)]
    gradients = whole_gradients(model)
    told[0].append(parallel.clip_grad_norm(model, 0.5))
    optimizer.step()
    parallel.discard_gradients(model)
    told.append(train_step(model, packing, optimizer, 1, rank=rank, world_size=2))
    weights = {name: tensor.clone() for name, tensor in full_tensors(model)}
    if rank == 0:
        save_file(gradients, OUT / f"{case.name}.gradients.safetensors")
        save_file(weights, OUT / f"{case.name}.weights.safetensors")
    facts: dict[str, Any] = {"told": told, "equal": equal_on_ranks(model), "held": held}
    if case.saved:
        facts |= kept(case, model, packing, optimizer)
    if case.dtype == "bfloat16":
        model, packing, _ = sharded(case)
        packed = packing.pack(long_prompt(model))
        with torch.no_grad():
            facts["scores"] = response_log_probs(model.eval(), packed)[0].tolist()
    return facts


def kept(case: Case, model: Any, packing: Packing, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A snapshot and a checkpoint after step 1, and step 2 from each of them."""
    tensors, state = training_state(model, optimizer)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    checkpoint.save(OUT / case.name / "step_000002", model, optimizer, {"version": 2})

    def step() -> tuple[list[float], dict[str, torch.Tensor]]:
        told = train_step(model, packing, optimizer, 2, rank=dist.get_rank(), world_size=2)
        after, _ = training_state(model, optimizer)
        return told, {name: tensor.clone() for name, tensor in after.items()}

    first = step()
    load_training_state(model, optimizer, tensors, state)
    second = step()
    model, packing, optimizer = sharded(case)
    checkpoint.load(OUT / case.name / "step_000002", model, optimizer)
    third = step()

    def same(other: tuple[list[float], dict[str, torch.Tensor]]) -> bool:
        return other[0] == first[0] and all(torch.equal(other[1][name], first[1][name]) for name in first[1])

    return {"snapshot": everywhere(same(second)), "checkpoint": everywhere(same(third)), "next": first[0]}


def on_two() -> None:
    facts = {case.name: trained(case) for case in CASES}
    if dist.get_rank() == 0:
        (OUT / "facts.json").write_text(json.dumps(facts))


fork(2, on_two, OUT)
