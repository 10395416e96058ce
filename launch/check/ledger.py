"""What a computation on fake tensors holds at every moment, by part, and what it sends.

Owns the count: every storage from its first tensor to its last, what it belongs to, the most of each section, and the bytes of
collectives. Does not own what is computed (`trace.py`). A fake tensor has a shape and no memory; what data alone decide (ids,
positions, grids of pictures) is real, so that their values lead the way as in a run. Numbers that are read off a fake one are
those of a step that goes well.

    with first_of(8), Ledger(vocab_size=151_936) as ledger:
        ...; ledger.name("parameters", model.parameters()); ledger.section = "forward"; ...
    ledger.peaks["forward"].parts     ->   {"parameters": 4_022_468_096, "activations": ...}

Invariant: a section's parts add up to the most that lived at one moment of it.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives of fake tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from rondo.launch.check.estimate import STAGING

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
COPIES = "gathered and cast parameters"
ACTIVATIONS, LOGITS, TEMPORARIES = "activations", "logits", "temporaries"
PARTS = (PARAMETERS, GRADIENTS, OPTIMIZER, COPIES, ACTIVATIONS, LOGITS, TEMPORARIES, STAGING)

_aten, _c10d = torch.ops.aten, torch.ops.c10d
_BY_MASK = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
_RANGES = (_aten.arange.default, _aten.arange.start, _aten.arange.start_step)
_MADE = (_aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.scalar_tensor.default)
_WHOLE, _FEW = (torch.int64, torch.int32), 4096
_CASTS = (_aten._to_copy.default,)


@contextmanager
def first_of(num_ranks: int) -> Iterator[None]:
    """While the body runs, this process is the first of `num_ranks`, of which no other is there."""
    if num_ranks == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(slots=True)
class _Held:
    """A storage that lives."""

    size: int
    part: str
    number: int
    alive: weakref.ref[Any]


@dataclass(slots=True)
class Peak:
    """The most that lived at a moment."""

    total: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    number: int = 0
    """Of the last storage before it."""


class Ledger(TorchDispatchMode):
    """staged: gloo carries the collectives, from one copy into another."""

    def __init__(self, vocab_size: int, *, staged: bool = False) -> None:
        super().__init__()
        self.peaks: dict[Any, Peak] = {}
        self.sent: Counter[str] = Counter()
        """Collective -> bytes that a rank sends or receives."""
        self._vocab_size, self._staged = vocab_size, staged
        self._held: dict[int, _Held] = {}
        self._now: dict[str, int] = dict.fromkeys(PARTS, 0)
        self._total = self._number = 0
        self._counts = True
        self._media = WeakTensorKeyDictionary()
        self.section = ""

    @property
    def section(self) -> Hashable:
        """What is computed now."""
        return self._section

    @section.setter
    def section(self, name: Hashable) -> None:
        self._section = name
        self._peak = self.peaks.setdefault(name, Peak())
        self._grown()

    def name(self, part: str, tensors: Iterable[torch.Tensor]) -> None:
        """What these tensors hold is `part` from now on."""
        for tensor in tensors:
            storage = _storage(tensor)
            self._note(storage)
            self._move(self._held[storage._cdata], part)

    def keep(self) -> None:
        """A forward is over: what it has made and is there still, its backward needs."""
        made = [held for held in self._held.values() if held.part == TEMPORARIES]
        for peak in self.peaks.values():
            early = sum(held.size for held in made if held.number <= peak.number)
            peak.parts[ACTIVATIONS] += early
            peak.parts[TEMPORARIES] -= early
        for held in made:
            self._move(held, ACTIVATIONS)

    def __enter__(self) -> Ledger:
        self._fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes.__enter__()
        FakeTensor.numpy = _zeros
        ShardingPropagator._fake_mode_lock = _Aside(self)  # DTensor finds shapes out on tensors of the whole
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._held:  # FSDP2 frees and fills what it gathers so
                self._move(self._held[storage._cdata], COPIES, storage.nbytes())
            return found

        torch.UntypedStorage.resize_ = resized
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)
        del FakeTensor.numpy
        ShardingPropagator._fake_mode_lock = nullcontext()
        self._fakes.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:  # asked for at every turn
            return args[0].fake_device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local parts come by
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        if any(map(_large, tensors)):
            args, kwargs = tree_map(self._taken, (args, kwargs))
            tensors = list(_tensors((*args, *kwargs.values())))
        if func.namespace == "c10d":
            self._count(func, args)
        if (
            all(type(tensor) is torch.Tensor and tensor.device.type == "cpu" for tensor in tensors)
            if tensors
            else _counts(func, args, kwargs)
        ):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        if func in _BY_MASK:
            args = (args[0], _places(args[1]), *args[2:])
        found = _grouped(*args, **kwargs) if func is _aten._grouped_mm.default else func(*args, **kwargs)
        casts = func in _CASTS and self._is(PARAMETERS, args[0])
        for tensor in _tensors((found,)) if self._counts else ():
            if isinstance(tensor, FakeTensor):
                wide = tensor.ndim == 2 and tensor.shape[1] == self._vocab_size
                self._note(tensor.untyped_storage(), COPIES if casts else LOGITS if wide else TEMPORARIES)
        return found

    def _count(self, func: Any, args: Any) -> None:
        if func is _c10d._allgather_base_.default:
            self.sent["all-gather"] += args[0].nbytes - args[1].nbytes
            self._stage(args[0].nbytes)
        elif func is _c10d._reduce_scatter_base_.default:
            self.sent["reduce-scatter"] += args[1].nbytes - args[0].nbytes
            self._stage(args[1].nbytes)
        elif func is _c10d.alltoall_base_.default:
            num_ranks = dist.ProcessGroup.unbox(args[2]).size()
            self.sent["all-to-all"] += args[1].nbytes * (num_ranks - 1) // num_ranks
        elif func is _c10d.allreduce_.default:
            num_ranks = dist.ProcessGroup.unbox(args[1]).size()
            self.sent["all-reduce"] += 2 * (num_ranks - 1) * sum(tensor.nbytes for tensor in args[0]) // num_ranks

    def _taken(self, value: Any) -> Any:
        """Pictures and sounds, which are on the device as long as they are there, and of which no value leads the way."""
        if not (isinstance(value, torch.Tensor) and _large(value)):
            return value
        if value not in self._media:
            self._media[value] = self._fakes.from_tensor(value)
            self._note(self._media[value].untyped_storage())
        return self._media[value]

    def _stage(self, size: int) -> None:
        """While the collective lasts."""
        if self._staged:
            for change in (size, -size):
                self._now[STAGING] += change
                self._total += change
                self._grown()

    def _is(self, part: str, tensor: torch.Tensor) -> bool:
        held = self._held.get(_storage(tensor)._cdata)
        return held is not None and held.part == part

    def _note(self, storage: torch.UntypedStorage, part: str = TEMPORARIES) -> None:
        key = storage._cdata
        if key in self._held:
            return
        self._number += 1
        gone: Callable[[Any], None] = lambda _: self._gone(key)  # noqa: E731
        self._held[key] = held = _Held(0, part, self._number, weakref.ref(storage, gone))
        self._move(held, part, storage.nbytes())

    def _move(self, held: _Held, part: str, size: int | None = None) -> None:
        size = held.size if size is None else size
        self._now[held.part] -= held.size
        self._now[part] += size
        self._total += size - held.size
        held.part, held.size = part, size
        self._grown()

    def _gone(self, key: int) -> None:
        self._move(self._held[key], self._held[key].part, 0)
        del self._held[key]

    def _grown(self) -> None:
        peak = self._peak
        if self._total > peak.total:
            peak.total, peak.parts, peak.number = self._total, dict(self._now), self._number


@dataclass(slots=True)
class _Aside:
    """What is made while it is entered is not counted."""

    ledger: Ledger

    def __enter__(self) -> None:
        self.ledger._counts = False

    def __exit__(self, *error: Any) -> None:
        self.ledger._counts = True


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _large(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.is_floating_point() and tensor.numel() > _FEW


def _counts(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it makes a few whole numbers out of nothing, which lead the way as data do."""
    kind, sizes = kwargs.get("dtype"), args[0] if args and isinstance(args[0], list | tuple) else ()
    if func in _RANGES:
        return kind in (None, *_WHOLE) and all(type(arg) is int and arg <= _FEW for arg in args)
    return func in _MADE and kind in _WHOLE and math.prod(sizes) <= _FEW


def _grouped(
    first: torch.Tensor, second: torch.Tensor, offs: torch.Tensor, bias: None = None, out_dtype: Any = None
) -> torch.Tensor:
    """What a product by groups gives: of rows [N, K] with each group's matrix [G, K, M], or, for the gradient of these, of the
    groups' columns [K, N] with rows [N, M]. torch itself tells its shape for bfloat16 alone."""
    groups = () if second.ndim == 3 else offs.shape
    return first.new_empty((*groups, first.shape[0], second.shape[-1]), dtype=out_dtype)


def _zeros(tensor: FakeTensor) -> Any:
    with unset_fake_temporarily():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _places(indices: Any) -> Any:
    """Masks that are known as the places where they are true: how many these are is known then too."""
    found: list[Any] = []
    for index in indices:
        if type(index) is torch.Tensor and index.dtype == torch.bool:
            with unset_fake_temporarily():
                found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found
