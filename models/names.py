"""Between a model's tensors in memory and their names on disk, which are also the names that are published.

Owns the plan of a model: which tensors in memory become which on disk. Most only carry another name or none; a Qwen3-MoE layer
has one tensor for all experts in memory and three for each expert on disk. Names are those of the folder that the model was
loaded from: the thinker of a whole Qwen3-Omni keeps its `thinker.`, which engines that serve that folder expect. The conversions
themselves are transformers' own. Does not own gathering shards (`parallel/`) or files (`checkpoint.py`).

Invariant: the plan covers every parameter once (tied ones under their first name) and every persistent buffer; what is
written by one direction is read back by the other, bit by bit.

    memory  model.layers.0.mlp.experts.gate_up_proj [E, 2I, H]
    disk    model.layers.0.mlp.experts.{e}.gate_proj.weight [I, H], ...up_proj.weight [I, H]
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rondo.models.units import drop_copies
from rondo.runtime.errors import ConfigError

# For this, transformers compiles a thousand patterns when it is first asked: once for all that are forked behind this import.
get_checkpoint_conversion_mapping("")

Conversion = TypeVar("Conversion", WeightRenaming, WeightConverter)


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors in memory (`sources`) that become tensors on disk (name -> shape) together, without any others."""

    sources: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    renamed: bool
    """One tensor under another name, or the same: nothing to convert."""
    by_row: bool
    """One tensor whose rows become tensors of their own, as those of experts do: the first of each row, in order, then the second
    of each, and so on."""


ADAPTER = re.compile(r"\.lora_[AB]\.weight$")
"""What the names of adapters, and no others, match."""
SCORE = "score.weight"
"""A value head, in a folder: as models for sequence classification have it."""
HEAD = "_value_head"
"""Attribute of a model that has one: its name in memory."""
_plans: WeakKeyDictionary[Any, tuple[Group, ...]] = WeakKeyDictionary()


def memory_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter under its first name, and every persistent buffer, but for adapters; whole, or this rank's DTensor."""
    parameters = {name: each for name, each in model.named_parameters() if not ADAPTER.search(name)}
    buffers = dict(model.named_buffers())
    persistent = buffers.keys() & model.state_dict().keys()
    return parameters | {name: tensor for name, tensor in buffers.items() if name in persistent}


def adapter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Every parameter of its adapters (`lora.py`), and of a value head beside them: all that is trained, whole on every rank.
    Empty without adapters."""
    found, head = {n: each for n, each in model.named_parameters() if ADAPTER.search(n)}, getattr(model, HEAD, None)
    return found | {head: model.get_parameter(head)} if found and head is not None else found


def kept_in_float32(model: Any) -> frozenset[str]:
    """Names in memory of what transformers keeps in float32 beside bfloat16 weights: routers, their biases, in some families."""
    plan = model._get_dtype_plan(torch.bfloat16)
    if not plan:
        return frozenset()
    pattern, *_ = build_glob_alternation(list(plan))
    return frozenset(name for name in memory_tensors(model) if pattern.search(name))


def disk_dtypes(model: Any, dtype: str | None) -> dict[str, torch.dtype]:
    """Name in memory -> its dtype on disk in a folder of `dtype`; None: that of memory."""
    memory, kept = memory_tensors(model), kept_in_float32(model)
    cast = getattr(torch, dtype) if dtype is not None else None
    return {
        name: tensor.dtype if cast is None or name in kept or not tensor.is_floating_point() else cast
        for name, tensor in memory.items()
    }


def disk_groups(model: Any) -> tuple[Group, ...]:
    """The plan of `model`, worked out once."""
    if model not in _plans:
        _plans[model] = tuple(_plan(model))
    return _plans[model]


def disk_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Name on disk -> shape."""
    return {name: shape for group in disk_groups(model) for name, shape in group.shapes.items()}


def to_disk(model: Any, group: Group, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole tensors of `group` as they are named on disk; views of `tensors` where the family allows it."""
    if group.renamed:
        return dict(zip(group.shapes, tensors.values(), strict=True))
    return _reverted(model, tensors)


def rows_to_disk(model: Any, group: Group, rows: torch.Tensor, first: int, num_rows: int) -> dict[str, torch.Tensor]:
    """What the rows from `first` on of a tensor of `num_rows` are on disk, of a group that goes by row: without any others."""
    names, own = list(group.shapes), range(first, first + len(rows))
    found = _reverted(model, {group.sources[0]: rows}).values() if len(rows) else ()
    return dict(
        zip((names[start + row] for start in range(0, len(names), num_rows) for row in own), found, strict=True)
    )


def load_disk_tensors(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` (disk names, any dtype and device) into `model`, in place; of a sharded one this rank's part, no collective.

    A tied weight may also come under its other names, which are ignored. Raises ConfigError, having written nothing, unless
    names and shapes are exactly the model's.
    """
    drop_copies(model)
    _check(model, tensors)
    memory, unknown = memory_tensors(model), set[str]()
    conversions = getattr(model, "_weight_conversions", None)  # those that it was loaded with, else its family's
    if conversions is None:
        found = get_model_conversion_mapping(model, add_legacy=False)  # as transformers itself decides it
        conversions = [each for each in found if not isinstance(each, PrefixChange)]
    with torch.no_grad():
        for name, part in parts(model, tensors, conversions, memory, unknown):
            local_part(memory[name]).copy_(part)


def parts(
    model: Any,
    sources: Mapping[str, Any],
    conversions: Iterable[Any],
    places: Mapping[str, torch.Tensor],
    unknown: set[str],
    dtype_of: Callable[[str], torch.dtype | None] = lambda _: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in memory, this rank's part) of all that `sources` (name on disk -> tensor or slice of a file) hold for the `places`
    of a model; what has none goes into `unknown`. `dtype_of` a name in memory: None for the source's own.

    What only carries another name is read as far as it is this rank's, and so are conversions that keep rows apart (`_own_rows`:
    experts). Others are read whole, one conversion at a time. What has another shape than its place is left whole, so that it
    does not fit there.
    """
    reads: dict[str, WeightRenaming | WeightConverter] = {}
    converters = {pattern: each for each in _of(WeightConverter, conversions) for pattern in each.source_patterns}
    for name, target, pattern in _targets(model, sources, conversions, places):
        if target not in places:
            unknown.add(target)
            continue
        if pattern is None:
            reads.setdefault(target, WeightRenaming(name, target))
            own = own_slices(places[target], sources[name])
            read = functools.partial(_read, sources[name], own, dtype_of(target))
        else:
            reads.setdefault(target, deepcopy(converters[pattern]))
            read = functools.partial(_read, sources[name], (), dtype_of(target))
        reads[target].add_tensor(target, name, pattern or name, read)
    for target, reading in reads.items():
        if isinstance(reading, WeightConverter) and (own := _own_rows(reading, places[target])):
            yield target, _converted(reading, target, places[target], own, dtype_of(target), model.config)
            continue
        for name, value in _flat(reading.convert(target, model=model, config=model.config)).items():
            own = own_slices(places[name], value) if isinstance(reading, WeightConverter) else ()
            yield name, value[own].clone() if own else value


def _own_rows(reading: WeightConverter, place: torch.Tensor) -> tuple[slice, ...]:
    """Which part of what the converter makes of its sources is this rank's, where every row of it (along its first dimension) is
    made of one source, or of the same row of each: then only those are read. () where it is not so, or something does not fit.

        experts.{e}.gate_proj.weight [I, H], ...up_proj...  ->  merged, concatenated along 1  ->  gate_up_proj [E, 2I, H]
    """
    first, *others = reading.operations
    merges = isinstance(first, MergeModulelist) and first.dim == 0
    if len(reading.target_patterns) > 1 or not all(map(_keeps_rows, others if merges else reading.operations)):
        return ()
    reads = list(reading.collected_tensors.values())
    whole = [len(each) for each in reads] if merges else [_shape(read.args[0])[0] for each in reads for read in each]
    return own_slices(place, place) if set(whole) == {place.shape[0]} else ()


def _keeps_rows(operation: Any) -> bool:
    match operation:
        case Concatenate() | Interleave():
            return bool(operation.dim > 0)
        case Transpose():
            return bool(min(operation.dim0, operation.dim1) > 0)
    return False


def _converted(
    reading: WeightConverter,
    target: str,
    place: torch.Tensor,
    own: tuple[slice, ...],
    dtype: torch.dtype | None,
    config: Any,
) -> torch.Tensor:
    """What the converter makes of this rank's rows alone."""
    rows, *within = own
    num_rows = rows.stop - rows.start
    if not num_rows:
        return torch.empty([each.stop - each.start for each in own], dtype=dtype or place.dtype)
    merges = isinstance(reading.operations[0], MergeModulelist)
    for pattern, reads in reading.collected_tensors.items():
        mine = reads[rows] if merges else [functools.partial(_read, r.args[0], (rows,), r.args[2]) for r in reads]
        reading.collected_tensors[pattern] = mine
    # Asked for by a conversion that turns what does not have the shape of its place.
    shown = SimpleNamespace(get_parameter=lambda _: SimpleNamespace(shape=torch.Size([num_rows, *place.shape[1:]])))
    (value,) = _flat(reading.convert(target, model=shown, config=config)).values()
    return value[slice(None), *within].contiguous() if value.shape[1:] == place.shape[1:] else value


def _read(source: Any, slices: tuple[slice, ...], dtype: torch.dtype | None) -> torch.Tensor:
    """This part of a tensor, or of a tensor in a file, in memory of its own; () is all of it, which may be the source's."""
    found = source[slices] if slices else source[...]
    return found.to(dtype or found.dtype, copy=bool(slices))


def own_slices(place: torch.Tensor, whole: Any) -> tuple[slice, ...]:
    """Which part of a whole tensor is this rank's, where it lies; () for all of it, and where it has another shape."""
    if not isinstance(place, DTensor) or _shape(whole) != tuple(place.shape):
        return ()
    sizes, starts = compute_local_shape_and_global_offset(place.shape, place.device_mesh, place.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def rows_by_rank(tensor: DTensor) -> list[tuple[int, int]]:
    """(first row, the one after the last) that each rank of a copy holds, in their order, of a tensor that is cut along its first
    dimension alone."""
    placements = [placement for placement in tensor.placements if not placement.is_replicate()]
    if any(placement.dim for placement in placements):
        raise AssertionError(f"a parameter must be cut along its first dimension alone, got {tensor.placements}")
    sizes = tensor.device_mesh.shape[len(tensor.placements) - len(placements) :]  # copies come first
    found = []
    for place in itertools.product(*map(range, sizes)):
        (num_rows, *_), (start, *_) = _compute_local_shape_and_global_offset(tensor.shape, sizes, place, placements)
        found.append((start, start + num_rows))
    return found


def _shape(source: Any) -> tuple[int, ...]:
    """Of a tensor, or of one in a file."""
    return tuple(source.shape if isinstance(source, torch.Tensor) else source.get_shape())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that may be sharded, as it lies in memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local_part(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local`, on any device, as what `tensor` is: this rank's part of one that is sharded as it is, or a whole one."""
    # Not by `from_local`, which would bring it to the device of the mesh.
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


def named_as(model: Any, names: Iterable[str]) -> None:
    """The tensors of `model`, which has not been loaded, are named on disk as these files of a folder name them."""
    conversions = get_model_conversion_mapping(model)
    for _ in _targets(model, names, conversions, model.state_dict()):
        pass  # which are used is remembered by them
    model._weight_conversions = [each for each in conversions if each.was_used()]


def _targets(
    model: Any, names: Iterable[str], conversions: Iterable[Any], places: Mapping[str, Any]
) -> Iterator[tuple[str, str, str | None]]:
    """(name on disk, in memory, pattern of the converter that it goes through) as transformers decides it, in its order."""
    renamings, converters = _of(WeightRenaming, conversions), _of(WeightConverter, conversions)
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, places)
        if target not in places and name in places:
            target, pattern = rename_source_key(name, [], [], model.base_model_prefix, places)
        yield name, target, pattern


def _plan(model: Any) -> list[Group]:
    """Found by trying on empty tensors: each alone, then together those that make parts of the same tensor on disk."""
    empty = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in memory_tensors(model).items()}
    joined: dict[str, list[str]] = {}  # first name on disk -> names in memory
    for name, tensor in empty.items():
        joined.setdefault(min(_reverted(model, {name: tensor})), []).append(name)
    groups = []
    for names in joined.values():
        on_disk = _reverted(model, {name: empty[name] for name in names})
        renamed = len(on_disk) == len(names) == 1 and next(iter(on_disk.values())) is empty[names[0]]
        shapes = {key: tuple(value.shape) for key, value in on_disk.items()}
        groups.append(Group(tuple(names), shapes, renamed, _goes_by_row(model, names, empty[names[0]], shapes)))
    covered = {key: shape for group in groups for key, shape in group.shapes.items()}
    if covered != {key: tuple(value.shape) for key, value in _reverted(model, empty).items()}:
        raise ConfigError(
            f"the tensors of {type(model).__name__} must become those on disk group by group, got some that do not. "
            "Train a model of another family"
        )
    return groups


def _goes_by_row(model: Any, names: list[str], tensor: torch.Tensor, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Tried on the first row alone; in order where the numbers in the names say so."""
    if len(names) > 1 or not tensor.ndim or len(shapes) == 1 or len(shapes) % len(tensor):
        return False
    of_one = _reverted(model, {names[0]: tensor[:1]}).values()
    runs = [list(shapes)[start : start + len(tensor)] for start in range(0, len(shapes), len(tensor))]
    alike = [{shapes[name] for name in run} for run in runs] == [{tuple(one.shape)} for one in of_one]
    return alike and all(run == sorted(run, key=dot_natural_key) for run in runs)


def _reverted(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    head = getattr(model, HEAD, None)
    found = _flat(revert_weight_conversion(model, dict(tensors)))
    return {SCORE if name == head else name: tensor for name, tensor in found.items()}


def _of(kind: type[Conversion], conversions: Iterable[Any]) -> list[Conversion]:
    return [entry for entry in conversions if isinstance(entry, kind)]


def _flat(converted: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _check(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    shapes = disk_shapes(model)
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    wrong = {
        "missing": [name for name in shapes if name not in tensors],
        "unknown": [name for name in tensors if name not in shapes and name not in tied],
        "of another shape": [
            f"{name} {list(tensors[name].shape)} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in tensors and tuple(tensors[name].shape) != shape
        ],
    }
    found = [f"{len(names)} {what} ({', '.join(names[:3])})" for what, names in wrong.items() if names]
    if found:
        raise ConfigError(
            f"tensors must have exactly the names and shapes of {type(model).__name__} on disk, got {'; '.join(found)}. "
            "Take them from a model of the same config"
        )
