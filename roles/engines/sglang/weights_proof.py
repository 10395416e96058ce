"""Whether a server holds the weights that were sent: its checksums against ours, tensor by tensor, on every rank.

A server tells a checksum for each tensor that its model has in memory. These are not the tensors on disk: projections are fused,
rows of the vocabulary filled up, each tensor-parallel rank has its part. So each of the server's tensors has a few recipes of
what it may be made of; the one whose checksum is the server's *is* what it holds, up to one chance in 2**64.

    server, rank 1 of 2                             recipe that fits
    model.layers.0.self_attn.qkv_proj.weight        second half of q's rows, of k's, of v's
    model.layers.0.self_attn.o_proj.weight          second half of the columns
    model.embed_tokens.weight                       second half of the rows and the zeros behind them

Recipes are learned from weights that the server is known to hold (the folder that it was started from), and a tensor that fitted
once must fit ever after. Those that never fitted (quantised, or laid out for a kernel) are named as unknown: of them, it is known
only that the server took them, and that it told the same checksums when the first version was sent a second time.

Owns recipes and their comparison. Does not own the checksum (`weights_sums.py`) nor what follows from one that differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rondo.roles.engines.sglang.weights_sums import checksum

Key = tuple[int, str]
"""Tensor-parallel rank, and the server's name of a tensor."""

_WRAPPERS = {"model", "language_model", "thinker"}
"""Parts of names that families put at different places."""
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_RENAMED = {"qkv_proj": "qkv"}
_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_VOCABULARY_ROWS = 64
_FILLED = 32
"""On a CPU, ranks get whole blocks of so many rows or columns, the last ones zeros."""


class Cut(NamedTuple):
    """What a rank has of a tensor: one of equal `parts` along `dim`, of which zeros make a multiple of `block`."""

    dim: int
    block: int
    parts: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one of the server's tensors is made of: the parts of these tensors (None: all of them), behind one another."""

    names: tuple[str, ...]
    cuts: tuple[Cut | None, ...]
    cast: bool = True
    """To the server's dtype; else they are as they were sent: what stays in float32 beside bfloat16 weights."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a version that a server serves: of `num_tensors` (all ranks), `num_equal` hold exactly the bytes that were
    sent; `unknown` names the others. Without checksums, only that every call succeeded: `num_tensors` is 0 then."""

    version: int
    num_tensors: int = 0
    num_equal: int = 0
    unknown: tuple[str, ...] = ()


class Recipes:
    """The recipes of one server, which tells checksums of `device`'s kind over tensors of `dtype`."""

    def __init__(self, *, device: str, dtype: torch.dtype, size: int, num_kv_heads: int) -> None:
        self._device, self._dtype, self._size = device, dtype, size
        self._vocabulary = Cut(0, _VOCABULARY_ROWS, size)
        self._rows, self._columns = ((Cut(dim, 1, size), Cut(dim, size * _FILLED, size)) for dim in (0, 1))
        # Fewer heads than ranks: several ranks have the same one.
        self._heads = Cut(0, 1, num_kv_heads) if num_kv_heads < size else None
        self._known: dict[Key, Recipe] = {}
        self._before: Mapping[Key, str] = {}
        self.settled = False
        """Whether every tensor has its recipe, or counts as unknown."""

    def learn(self, told: Mapping[Key, str], tensors: Mapping[str, torch.Tensor]) -> set[Key]:
        """Find the recipes of what the server has told while it held `tensors`. Returns what fits none."""
        names = {_canonical(name): name for name in tensors}
        for key, found in told.items():
            if key not in self._known:
                possible = (
                    replace(each, cast=cast)
                    for each in self._candidates(key, names)
                    if _possible(each, tensors)
                    for cast in (True, False)
                    if cast or any(tensors[name].dtype != self._dtype for name in each.names)
                )
                recipe = next((each for each in possible if self._sum(key, each, tensors) == found), None)
                if recipe is not None:
                    self._known[key] = recipe
        unknown = set(told.keys() - self._known.keys())
        self.settled = not unknown
        return unknown

    def expect(self, tensors: Mapping[str, torch.Tensor]) -> dict[Key, str]:
        """The checksums that a server with `tensors` tells, of those whose recipe is known."""
        return {key: self._sum(key, recipe, tensors) for key, recipe in self._known.items()}

    def wrong(
        self, told: Mapping[Key, str], expected: Mapping[Key, str], tensors: Mapping[str, torch.Tensor]
    ) -> set[Key]:
        """The server's tensors that are not proved to hold `tensors`, which were sent to it just now.

        Before all recipes are known, a tensor without one is wrong once; told alike for a second sending, it is unknown.
        """
        wrong = {key for key, value in expected.items() if told.get(key) != value}
        if not self.settled:
            unknown = self.learn(told, tensors)
            wrong |= {key for key in unknown if self._before.get(key) != told[key]}
            self._before = told
            self.settled = not wrong
        return wrong

    def proof(self, version: int, told: Mapping[Key, str]) -> Proof:
        unknown = sorted({name for _, name in told.keys() - self._known.keys()})
        return Proof(version, len(told), len(told.keys() & self._known.keys()), tuple(unknown))

    def _sum(self, key: Key, recipe: Recipe, tensors: Mapping[str, torch.Tensor]) -> str:
        return checksum(self._parts(key[0], recipe, tensors), self._device)

    def _parts(self, rank: int, recipe: Recipe, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        for name, cut in zip(recipe.names, recipe.cuts, strict=True):
            tensor = tensors[name]
            if recipe.cast and tensor.is_floating_point():
                tensor = tensor.detach().to(self._dtype)
            if cut is not None:
                tensor = _filled(tensor, cut).tensor_split(cut.parts, cut.dim)[rank * cut.parts // self._size]
            yield tensor

    def _candidates(self, key: Key, names: Mapping[str, str]) -> Iterator[Recipe]:
        """Recipes that the tensor's name allows, likeliest first."""
        name = _canonical(key[1])
        path, _, field = name.rpartition(".")
        module, _, last = path.rpartition(".")
        if name in names:
            yield from self._plain(names[name])
        if last in _RENAMED and (renamed := f"{module}.{_RENAMED[last]}.{field}") in names:
            yield from self._plain(names[renamed])
        if last in _FUSED:
            wanted = [f"{module}.{part}.{field}" for part in _FUSED[last]]
            if names.keys() >= set(wanted):
                fused = tuple(names[part] for part in wanted)
                yield from self._alike(fused, self._rows)
                if len(fused) == 3 and self._heads is not None:
                    yield Recipe(fused, (self._rows[0], self._heads, self._heads))
        if field in _EXPERTS:
            experts = _experts(path, _EXPERTS[field], names)
            if experts:
                yield from self._alike(experts, self._rows if field == "w13_weight" else self._columns)

    def _plain(self, name: str) -> Iterator[Recipe]:
        of_ranks = self._rows[0], self._columns[0], self._vocabulary, self._rows[1], self._columns[1]
        for cut in (None, *(of_ranks if self._size > 1 else (self._vocabulary,))):
            yield Recipe((name,), (cut,))

    def _alike(self, names: tuple[str, ...], cuts: Sequence[Cut]) -> Iterator[Recipe]:
        """All of them cut in the same way."""
        yield from (Recipe(names, (cut,) * len(names)) for cut in (cuts if self._size > 1 else (None,)))


def _possible(recipe: Recipe, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the tensors have the dimensions that are cut."""
    of_names = zip(recipe.names, recipe.cuts, strict=True)
    return all(cut is None or tensors[name].dim() > cut.dim for name, cut in of_names)


def _filled(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """With zeros behind it."""
    shape = list(tensor.shape)
    shape[cut.dim] = -shape[cut.dim] % cut.block
    return torch.cat([tensor, tensor.new_zeros(shape)], cut.dim) if shape[cut.dim] else tensor


def told_by(answer: Any) -> dict[Key, str]:
    """What `/weights_checker` told, by rank and name. Draft models, which updates do not reach here, are left out."""
    found: dict[Key, str] = {}
    for rank in answer["ranks"]:
        info = rank["parallelism_info"]
        roles = info if isinstance(info, list) else [info]  # one a model; before 0.5.21 there is one, without a role
        drafts = tuple(f"{role['role']}." for role in roles if role.get("role", "target") != "target")
        for name, value in rank["checksums"].items():
            if not (drafts and name.startswith(drafts)):
                found[roles[0]["tp_rank"], name] = value
    return found


def _canonical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _experts(path: str, parts: tuple[str, ...], names: Mapping[str, str]) -> tuple[str, ...]:
    """The disk tensors of all experts of a layer, in the order of the stacked one."""
    pattern = re.compile(re.escape(path) + r"\.(\d+)\." + parts[0] + r"\.weight")
    numbers = sorted(int(found[1]) for found in map(pattern.fullmatch, names) if found)
    wanted = [f"{path}.{number}.{part}.weight" for number in numbers for part in parts]
    return tuple(names[name] for name in wanted) if all(name in names for name in wanted) else ()
