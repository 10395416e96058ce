"""What test_fsdp.py starts with OUT and the folders of a dense model and of three with experts: trains and saves on two ranks,
and on four in several meshes, and writes what it saw as JSON. Ranks are forked off this process once it has loaded torch and
transformers, which takes seconds."""

from __future__ import annotations

import functools
import json
import resource
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from rondo.models import checkpoint, filling, parallel, random_weights
from rondo.models.config import MeshConfig
from rondo.models.load import empty_model, load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.mesh import Mesh
from rondo.models.names import adapter_tensors, local_part
from rondo.models.optimizer import make_optimizer
from rondo.models.packing import Packing, pack
from rondo.models.parallel.experts import experts_of, spread
from rondo.models.published import own_weights
from rondo.models.routing import enable_replay
from rondo.models.state import load_training_state, training_state
from rondo.runtime.checkpoints import NoRoom
from tests.models.builders import (
    EPS,
    LR,
    RAGGED,
    STEPS,
    full_tensors,
    give_adapters,
    new_slab,
    sequences,
    train_step,
    written,
)
from tests.models.ranks import fork
from tests.strength import LONG

warnings.filterwarnings("error", message=".*returned a view tensor")  # an in-place op on it would lose FSDP2's hook
OUT = Path(sys.argv[1])
DENSE, MOE, FUSED, DRAWN = sys.argv[2:6]
SLAB = new_slab(empty_model(MOE))
"""All ranks have it, forked off this process."""
COMPILE = torch.compile
SCORED = pack(sequences(RAGGED, seed=9))
MESHES: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "1x4": (DENSE, {}, {"dp_replicate": 4}),
    "2x2": (DENSE, {"dp_replicate": 2}, {}),
    "4x1": (DENSE, {"dp_replicate": 4}, {"dp_replicate": 2}),
    "ep4": (MOE, {"ep": 4}, {"dp_replicate": 2, "ep": 2}),
    "ep2 x2": (MOE, {"ep": 2}, {}),
    "2x ep2": (MOE, {"dp_replicate": 2, "ep": 2}, {"ep": 4}),
}
"""Name -> model, mesh of four ranks, and another one that its checkpoint goes on in."""
if not LONG:  # on two ranks all that they do over four
    del MESHES["1x4"], MESHES["4x1"], MESHES["ep4"]


def everywhere(fact: bool) -> bool:
    """Whether it holds on every rank."""
    held = torch.tensor(int(fact))
    dist.all_reduce(held, dist.ReduceOp.MIN)
    return bool(held)


def summed(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def scored(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return response_log_probs(model, SCORED)[0]


class Counting:
    """A tensor of a file, and how many bytes of such are read."""

    num_bytes = 0

    def __init__(self, part: Any) -> None:
        self._part = part

    def get_shape(self) -> list[int]:
        return list(self._part.get_shape())

    def __getitem__(self, what: Any) -> torch.Tensor:
        found: torch.Tensor = self._part[what]
        Counting.num_bytes += found.nbytes
        return found


@contextmanager
def counted_open(*arguments: Any, **named: Any) -> Iterator[Any]:
    with safe_open(*arguments, **named) as opened:
        yield SimpleNamespace(keys=opened.keys, get_slice=lambda name: Counting(opened.get_slice(name)))


def bytes_read() -> dict[str, Any]:
    """Of each folder's files, the part that each rank reads to hold its part of the model; whether that is the model."""
    filling.safe_open = counted_open  # type: ignore[assignment]
    told: dict[str, Any] = {}
    for name, path, ep in (("dense", DENSE, 1), ("moe", MOE, 1), ("fused", FUSED, 1), ("apart", MOE, 2)):
        Counting.num_bytes, file = 0, Path(path) / "model.safetensors"
        model = load_model(path, cut=functools.partial(parallel.shard, mesh=mesh_of(ep=ep), encoders="shard"))
        every = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(every, torch.tensor([Counting.num_bytes / file.stat().st_size]))
        tensors, wanted = dict(full_tensors(model)), load_file(file)
        whole = tensors.keys() == wanted.keys() and all(torch.equal(tensors[key], wanted[key]) for key in wanted)
        told[name] = {"parts": [float(part) for part in every], "whole": everywhere(whole)}
    filling.safe_open = safe_open
    return told


def drawn_alike() -> bool:
    """Whether random weights are the same in three meshes as in one process, and this rank draws about its part of them."""
    alone = dict(full_tensors(load_model(DRAWN)))
    normal, most = random_weights._normal, 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal most
        found = normal(*arguments)
        most += found.numel()
        return found

    random_weights._normal, same = counted, True
    for dp_replicate, ep in ((1, 1), (2, 1), (1, 2)):
        most, cut = 0, functools.partial(parallel.shard, mesh=mesh_of(dp_replicate, ep))
        tensors = dict(full_tensors(load_model(DRAWN, cut=cut)))
        part = most * 4 / dp_replicate / sum(tensor.numel() for tensor in alone.values())
        same = same and part < 1.05 and all(torch.equal(tensors[key], alone[key]) for key in alone)
    random_weights._normal = normal
    return everywhere(same)


@functools.cache
def mesh_of(dp_replicate: int = 1, ep: int = 1) -> Mesh:
    return Mesh.open(MeshConfig(dp_replicate=dp_replicate, ep=ep), dist.get_world_size())


def sharded(
    path: str, *, replay: bool = False, adapts: bool = False, dp_replicate: int = 1, ep: int = 1, offload: bool = False,
    **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    dtype = options.get("dtype", "float32")
    cut = functools.partial(parallel.shard, mesh=mesh_of(dp_replicate, ep), param_dtype=dtype)
    model = load_model(path, cut=cut)
    if replay:
        enable_replay(model)
    if adapts:
        give_adapters(model)
    return parallel.compute_in(model, **options), make_optimizer(model, lr=LR, eps=EPS, offload=offload)


def steps(model: Any, optimizer: Any, which: range = range(3), **options: Any) -> list[list[float]]:
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    told = [train_step(model, optimizer, step, **ranks, **options) for step in which]
    return [[summed(loss), norm] for loss, norm in told]


def whole(model: Any, name: str) -> None:
    tensors = {key: value.clone() for key, value in full_tensors(model)}
    if dist.get_rank() == 0:
        save_file(tensors, OUT / f"{name}.safetensors")


def compiled(path: str, **shape: int) -> dict[str, Any]:
    """Whether compiled layers, whose graphs run as they are traced, give the gradients of plain ones to the bit; and how many
    graphs there were after each of four micro-batches, whose lengths are others on each rank too."""
    batches = [sequences(RAGGED[number % 3 :], seed=2 * number + dist.get_rank()) for number in range(4)]
    made, found = torch._dynamo.utils.counters["stats"], []
    torch.compile = functools.partial(COMPILE, backend="eager")
    torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 2, True
    for options in ({}, {"compiled": True}):
        model, _ = sharded(path, activation_checkpointing=True, **options, **shape)
        packing, graphs = Packing.of(model), []
        made.clear()
        for batch in batches:
            parallel.set_last(model, batch is batches[-1])
            response_log_probs(model, packing.pack(batch))[0].sum().backward()
            graphs.append(made["unique_graphs"])
        found.append([p.grad.to_local() for p in model.parameters()])
        parallel.discard_gradients(model)
    torch.compile = COMPILE
    return {"equal": everywhere(all(map(torch.equal, *found))), "graphs": graphs}


def trained(name: str, path: str, *, replay: bool = False, **options: Any) -> list[list[float]]:
    model, optimizer = sharded(path, replay=replay, **options)
    told = steps(model, optimizer, replay=replay)
    whole(model, name)
    return told


def local_copies(model: Any, optimizer: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, state = training_state(model, optimizer)
    return {name: tensor.clone() for name, tensor in tensors.items()}, state


def snapshots(model: Any, optimizer: Any) -> dict[str, bool]:
    """Goes back from step 2's end to its beginning, with gathered copies and half a step's gradients in the way."""
    kept, state = local_copies(model, optimizer)
    before = scored(model)
    first = steps(model, optimizer, range(2, 3))
    after, _ = local_copies(model, optimizer)
    parallel.set_last(model, False)
    response_log_probs(model, SCORED)[0].sum().backward()  # held back by FSDP2, and its copies are still gathered
    response_log_probs(model, SCORED)
    parallel.discard_gradients(model)
    load_training_state(model, optimizer, kept, state)
    restored, _ = local_copies(model, optimizer)
    again = scored(model)
    second = steps(model, optimizer, range(2, 3))
    repeated, _ = local_copies(model, optimizer)
    return {
        "restored": everywhere(all(torch.equal(kept[name], restored[name]) for name in kept)),
        "scores_restored": everywhere(torch.equal(before, again)),
        "repeated": everywhere(first == second and all(torch.equal(after[name], repeated[name]) for name in after)),
        "changed": everywhere(not torch.equal(before, scored(model))),
        "is_a_shard": everywhere(
            sum(t.numel() for n, t in kept.items() if n.startswith("model.")) < 0.6 * whole_size(model)
        ),
    }


def after_staged() -> list[list[float]]:
    """Step 2 from a checkpoint that was written on another thread while steps 2 and 3 were trained."""
    group = dist.new_group(backend="gloo")
    model, optimizer = sharded(MOE)
    steps(model, optimizer, range(2))
    staged = checkpoint.stage(model, optimizer, local_copies(model, optimizer))  # as a snapshot holds it
    with ThreadPoolExecutor(1) as beside:
        written = beside.submit(checkpoint.write, OUT / "beside" / "step_000002", staged, {}, group=group)
        steps(model, optimizer, range(2, 3))
        written.result()
    model, optimizer = sharded(MOE)
    checkpoint.load(OUT / "beside" / "step_000002", model, optimizer)
    return steps(model, optimizer, range(2, 3))


def refused_alike(full_rank: int, model: Any, optimizer: Any) -> list[bool]:
    """Whether both ranks are told that there is no room where one of them finds none, and that nothing is left."""
    limits, told = resource.getrlimit(resource.RLIMIT_FSIZE), 0
    if dist.get_rank() == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    folder = OUT / f"full_{full_rank}" / "step_000002"
    try:
        checkpoint.save(folder, model, optimizer, {})
    except NoRoom:
        told += 1
    try:
        checkpoint.export_hf(folder.with_name("hf"), model, MOE)
    except NoRoom:
        told += 1
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return [everywhere(told == (2 if full_rank == 0 else 1)), not (folder.exists() or any(folder.parent.glob(".*")))]


def weights_beside() -> dict[str, bool]:
    """Weights that are written on another thread, some before, most while the next step's micro-batches are trained."""
    group = mesh_of().copy_beside()
    model, optimizer = sharded(MOE)
    steps(model, optimizer, range(1))
    before = {key: value.clone() for key, value in full_tensors(model, "bfloat16")}
    asked = own_weights(model, "bfloat16", beside=group)
    half, trained_once, gave = threading.Event(), threading.Event(), [0]

    def halting() -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(asked):
            if number == 3 and dist.get_rank() == 0:  # the other rank stands in the middle of a gathering meanwhile
                half.set()
                assert trained_once.wait(120)
            gave[0] += not tensor.is_meta and local_part(tensor).numel()
            yield name, tensor

    with ThreadPoolExecutor(1) as beside:
        writing = beside.submit(written, halting(), SLAB, group)
        if dist.get_rank() == 0:
            assert half.wait(120)
        for _ in range(2):
            response_log_probs(model, SCORED)[0].sum().backward()
        parallel.discard_gradients(model)
        trained_once.set()
        checksum = writing.result(120)
    found = SLAB.read(0, attempt=0, version=1, checksum=checksum) if checksum else before
    num_given = torch.tensor(gave[0])
    dist.all_reduce(num_given)
    return {
        "equal": everywhere(all(torch.equal(before[name], found[name]) for name in before)),
        "given once": int(num_given) == sum(tensor.numel() for tensor in before.values()),
        "by both": everywhere(0 < gave[0] < 0.6 * int(num_given)),
    }


def published_together(model: Any, mesh: Mesh) -> int:
    """The checksum of what the ranks of the first copy have written; 0 on all but the first rank."""
    group = mesh.copy_beside()
    tensors = own_weights(model, "bfloat16", beside=group)
    return written(tensors, SLAB, group) if mesh.replica == 0 else 0


def exported(model: Any, path: str, name: str) -> dict[str, Any]:
    """The bytes that each rank receives while a Hugging Face folder is written, and how many tensors at most are on their way."""
    receive, coming, most = dist.irecv, list[Any](), [0, 0]

    def counted(tensor: torch.Tensor, **named: Any) -> Any:
        coming.append(receive(tensor, **named))
        most[0] += tensor.nbytes
        most[1] = max(most[1], sum(not each.is_completed() for each in coming))
        return coming[-1]

    dist.irecv = counted  # type: ignore[assignment]
    checkpoint.export_hf(OUT / f"hf of {name}", model, path)
    dist.irecv = receive
    every = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor(most))
    return {"received": [int(each[0]) for each in every], "at a time": [int(each[1]) for each in every]}


def whole_size(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def in_meshes() -> None:
    """Four ranks in every mesh, and their checkpoints in another one."""
    facts: dict[str, Any] = {}
    for name, (path, shape, another) in MESHES.items():
        model, optimizer = sharded(path, **shape)
        held = sum(local_part(p).numel() for p in model.parameters()) / whole_size(model)
        gradients = whole_gradients(model)
        told = steps(model, optimizer, range(2))
        checkpoint.save(OUT / name / "step_000002", model, optimizer, {})
        published = published_together(model, mesh_of(**shape))
        whole(model, name)
        if name in ("2x2", "2x ep2"):
            facts[f"{name} exported"] = exported(model, path, name)
        if dist.get_rank() == 0:
            save_file(gradients, OUT / f"{name}.gradients.safetensors")
        others, other = sharded(path, **another, offload=True)
        checkpoint.load(OUT / name / "step_000002", others, other)
        if name == "ep2 x2":
            checkpoint.save(OUT / "back" / "step_000002", others, other, {})
            facts["there and back"] = is_back(model, optimizer)
        facts[name] = {
            "held": held, "told": told, "published": published, "next": steps(model, optimizer, range(2, 3)),
            "next of another": steps(others, other, range(2, 3)),
        }  # fmt: skip
    facts["read"], facts["drawn alike"] = bytes_read(), drawn_alike()
    facts["crowded"], facts["adapters"] = crowded(), adapting()
    theirs = by_transformers() if LONG else {}
    if dist.get_rank() == 0:
        save_file(theirs, OUT / "by transformers.safetensors")
        (OUT / "meshes.json").write_text(json.dumps(facts))


def is_back(model: Any, optimizer: Any) -> bool:
    """Whether the mixture and its moments, which went to ranks that have all experts, came back from there to the bit."""
    found, state = sharded(MOE, ep=2)
    checkpoint.load(OUT / "back" / "step_000002", found, state)
    pairs = (local_copies(*each)[0] for each in ((model, optimizer), (found, state)))
    kept, came = ({name: t for name, t in each.items() if not name.startswith("random.")} for each in pairs)
    return everywhere(kept.keys() == came.keys() and all(torch.equal(kept[name], came[name]) for name in kept))


def crowded() -> dict[str, bool]:
    """Whether experts that lie on four ranks give of unequal numbers of tokens what they give in one piece, and the same
    gradients: where tokens go to all of them, and where they go to those of one rank alone."""
    rank, draw = dist.get_rank(), torch.Generator().manual_seed(4)
    spread(model := load_model(MOE), mesh_of(ep=4))
    ours, theirs = (next(iter(experts_of(each).values())) for each in (model, load_model(MOE)))
    ends = np.cumsum([0, 1, 7, 2, 12])
    mine, told = slice(ends[rank], ends[rank + 1]), {}
    hidden, weights = torch.randn(22, 64, generator=draw), torch.rand(22, 2, generator=draw)
    anywhere = torch.rand(22, 4, generator=draw).argsort(1)[:, :2]
    for name, chosen in (("all over", anywhere), ("on one rank", torch.full_like(anywhere, 2))):
        found = []
        for module, rows in ((ours, mine), (theirs, slice(None))):
            leaves = [each[rows].clone().requires_grad_() for each in (hidden, weights)]
            output = module(leaves[0], chosen[rows], leaves[1])
            (output * hidden[rows].cos()).sum().backward()
            grads = [local_part(p.grad) for p in module.parameters()]
            found.append(
                [*(each if rows == mine else each[mine] for each in (output, *(leaf.grad for leaf in leaves))), *grads]
            )
            module.zero_grad()
        found[1][3:] = [grad[rank : rank + 1] for grad in found[1][3:]]
        told[name] = everywhere(all(torch.allclose(*pair, atol=1e-6) for pair in zip(*found, strict=True)))
    return told


def adapting() -> dict[str, Any]:
    """Adapters beside two copies of two shards, whose ranks share the experts out; and their checkpoint in another mesh."""
    model, optimizer = sharded(MOE, adapts=True, dp_replicate=2, ep=2)
    train_step(model, optimizer, 0, take=False, rank=dist.get_rank(), world_size=dist.get_world_size())
    if dist.get_rank() == 0:
        gradients = {name: p.grad for name, p in adapter_tensors(model).items() if p.grad is not None}
        save_file(gradients, OUT / "adapters.gradients.safetensors")
    parallel.discard_gradients(model)
    told = steps(model, optimizer, range(2))
    checkpoint.save(OUT / "adapters" / "step_000002", model, optimizer, {})
    others, other = sharded(MOE, adapts=True, ep=4)
    checkpoint.load(OUT / "adapters" / "step_000002", others, other)
    following = [steps(*each, range(2, 3)) for each in ((model, optimizer), (others, other))]
    return {"told": told, "next": following[0], "next of another": following[1]}


def by_transformers() -> dict[str, torch.Tensor]:
    """The gradients of the first step where transformers itself shares the experts out over two ranks."""
    how = DistributedConfig(fsdp_size=4, ep_size=2)
    model = AutoModelForCausalLM.from_pretrained(MOE, distributed_config=how, dtype=torch.float32)
    rank, num_tokens = dist.get_rank(), sum(one.response for one in STEPS[0])
    for start in (0, 8):
        batch = STEPS[0][start : start + 8][rank::4]
        (-response_log_probs(model, pack(batch), temperature=0.9, chunk_tokens=7)[0].sum()).backward()
    return {name: p.grad.full_tensor() * 4 / num_tokens for name, p in model.named_parameters()}  # means over ranks


def whole_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of the first step, summed over micro-batches whose gradients are shards between them."""
    num_tokens = sum(one.response for one in STEPS[0])
    for start in (0, 8):
        parallel.set_last(model, start > 0)
        batch = STEPS[0][start : start + 8][dist.get_rank() :: dist.get_world_size()]
        (-response_log_probs(model, pack(batch), temperature=0.9, chunk_tokens=7)[0].sum()).backward()
        assert all(
            isinstance(p, DTensor) and (p.grad is None or isinstance(p.grad, DTensor)) for p in model.parameters()
        )
    parallel.scale_gradients(model, 1 / num_tokens)
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    parallel.discard_gradients(model)
    return found


def on_two() -> None:
    facts: dict[str, Any] = {
        "dense": trained("dense", DENSE),
        "recomputed": trained("recomputed", DENSE, activation_checkpointing=True, offload=True),
        "moe": trained("moe", MOE),
        "replayed": trained("replayed", MOE, replay=True, activation_checkpointing=True, ep=2),
        "bfloat16": trained("bfloat16", DENSE, dtype="bfloat16"),
    }
    if LONG:  # seconds a rank, in which torch writes code
        facts["compiled"] = compiled(DENSE)
        facts["compiled experts"] = compiled(MOE, ep=2)
    facts["published"] = published_together(sharded(MOE)[0], mesh_of())
    half, _ = sharded(DENSE, dtype="bfloat16")
    facts["bfloat16_scores"] = everywhere(torch.equal(scored(half), scored(load_model(DENSE, dtype="bfloat16"))))
    facts["float32_scores"] = everywhere(torch.equal(scored(sharded(DENSE)[0]), scored(load_model(DENSE))))

    for dtype, path, ep in (("float32", DENSE, 1), ("bfloat16", MOE, 2)):
        model, optimizer = sharded(path, dtype=dtype, ep=ep)
        steps(model, optimizer, range(2))
        facts[f"{dtype}_snapshots"] = snapshots(model, optimizer)

    model, optimizer = sharded(MOE)
    steps(model, optimizer, range(2))
    facts["without_room"] = [refused_alike(full_rank, model, optimizer) for full_rank in range(2)]
    checkpoint.save(OUT / "step_000002", model, optimizer, {"version": 2}, tokenizer_path=MOE)
    checkpoint.export_hf(OUT / "hf", model, MOE)
    scores = scored(model)
    facts["after_save"] = steps(model, optimizer, range(2, 3))
    torch.manual_seed(99)
    model, optimizer = sharded(MOE)
    facts["extra"] = checkpoint.load(OUT / "step_000002", model, optimizer)
    facts["loaded_scores"] = everywhere(torch.equal(scores, scored(model)))
    facts["after_load"] = steps(model, optimizer, range(2, 3))
    model, optimizer = sharded(MOE)
    checkpoint.load(OUT / "one" / "step_000002", model, optimizer)
    facts["after_one"] = steps(model, optimizer, range(2, 3))
    facts["after_staged"] = after_staged()
    facts["weights_beside"] = weights_beside()
    if dist.get_rank() == 0:
        save_file({"scores": scores}, OUT / "scores.safetensors")
        (OUT / "facts.json").write_text(json.dumps(facts))


assert len(STEPS) == 3
fork(2, on_two, OUT)
fork(4, in_meshes, OUT)
