"""How a few layers tell of all: which depths of a model are traced, and what a whole one holds after them.

Owns the stacks of equal layers that a model has (its decoder, and each tower), the depths at which it is traced, and the names of
the sections of a step that are the same at every depth. Does not own what is traced (`trace.py`).

    depths = Depths.of(model)
    told = [trace(depths.cut(config, point)) for point in depths.points]
    depths.extend(told)      ->     Traced("traced at 3 and 4 of 36 layers, in the backward of layer 1", {"parameters": ...})

All stacks are traced at a small depth, and each once more at the next one, beside the others at theirs: what a layer more adds to
a section is the same from there on, and the sections of a stack's first and last layers are told apart, so that each has its
greatest moment at the same place at every depth.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rondo.launch.check.estimate import Traced
from rondo.models.families import family_of
from rondo.models.units import decoder_layers, towers_of

Section = str | tuple[str, int, int]
"""Of a step; or the direction ("forward", "backward"), the stack and the layer."""
Parts = Mapping[str, int]
Point = tuple[int, ...]
"""A depth of each stack."""
FORWARD, OUTPUT, HEAD, STEP = (
    "the embeddings",
    "the output layer",
    "the backward of the output layer",
    "the optimizer's step",
)
_NEIGHBOURS = 3
"""Layers of which FSDP2 holds something at once: of one gradients leave, one is in its backward, the next is gathered."""
_DEPTHS = ("num_hidden_layers", "depth", "encoder_layers")


@dataclass(frozen=True, slots=True)
class Told:
    """Of one point."""

    sections: Mapping[Section, Parts]
    sent: Parts


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers that come in turns: `before` others, then again and again `period` kinds."""

    path: str
    """Of the tower; "" for the decoder."""
    config: str
    """Which part of the model's config has its depth; "" for the text's."""
    num_layers: int
    before: int
    period: int
    first: int
    """The depth to begin with; all layers where they are few."""

    @classmethod
    def of(cls, path: str, config: str, layers: Sequence[Any], types: Sequence[str] | None, least: int) -> Stack:
        kinds = [
            (types[index] if types else None, type(layer), [(name, p.shape) for name, p in layer.named_parameters()])
            for index, layer in enumerate(layers)
        ]
        num, found = len(kinds), (len(kinds), 1)
        for period in range(1, num // 2):
            before = max((i - period + 1 for i in range(period, num) if kinds[i] != kinds[i - period]), default=0)
            found = min(found, (before, period), key=sum)
        before, period = found
        first = max(before + max(2 * period, _NEIGHBOURS), least)
        first += (num - first) % period
        return cls(path, config, num, before, period, first if first + period < num else num)

    @property
    def told(self) -> str:
        of = f"{self.num_layers} layers" + (f" of {self.path}" if self.path else "")
        return f"{self.first} and {self.first + self.period} of {of}"

    def named(self, direction: str, layer: int, depth: int) -> str | None:
        """Name a layer by its number in the whole model; None for one between, which holds no more than its neighbours."""
        of = f" of {self.path}" if self.path else ""
        if depth - layer <= self.period:
            return f"the {direction} of layer {self.num_layers + 1 - (depth - layer)}{of}"
        return f"the {direction} of layer {layer + 1}{of}" if layer < self.before + self.period else None


@dataclass(frozen=True, slots=True)
class Depths:
    stacks: tuple[Stack, ...]

    @classmethod
    def of(cls, model: Any) -> Depths:
        """The decoder first."""
        text, towers = model.config.get_text_config(), towers_of(model)
        deepest = max((len(_deepstack(tower.config)) + 1 for tower in towers), default=0)
        stacks = [Stack.of("", "", text_layers(model), getattr(text, "layer_types", None), deepest)]
        family = family_of(model)
        for path in dict.fromkeys(family.towers.values()) if family is not None else ():
            tower = model.get_submodule(path)
            parts = {name: type(getattr(model.config, name)) for name in type(model.config).sub_configs}
            name = next(name for name, kind in parts.items() if kind is type(tower.config))
            stacks.append(Stack.of(path, name, layers_of(tower, model), None, len(_deepstack(tower.config)) + 1))
        return cls(tuple(stacks))

    @property
    def of_text(self) -> Depths:
        """The decoder's, with every tower at its first depth; sections of towers are not among them."""
        return Depths(self.stacks[:1])

    @property
    def points(self) -> list[Point]:
        """All stacks at their first depth, then each in turn at its second."""
        first = tuple(stack.first for stack in self.stacks)
        return [first, *(
            (*first[:at], stack.first + stack.period, *first[at + 1 :])
            for at, stack in enumerate(self.stacks) if stack.first < stack.num_layers
        )]  # fmt: skip

    def cut(self, config: Any, point: Point) -> Any:
        """The same model with the first layers of each stack alone. Features for the decoder come from the first of a tower."""
        config = copy.deepcopy(config)
        for stack, depth in zip(self.stacks, point, strict=True):
            part = getattr(config, stack.config) if stack.config else config.get_text_config()
            if depth == stack.num_layers:
                continue
            setattr(part, next(name for name in _DEPTHS if getattr(part, name, None) == stack.num_layers), depth)
            if types := getattr(part, "layer_types", None):
                part.layer_types = types[:depth]
            if taken := _deepstack(part):
                part.deepstack_visual_indexes = list(range(len(taken)))
        return config

    def extend(self, told: Sequence[Told]) -> Traced:
        """Of the whole model, in the section that holds most."""
        sections = [self._named(each.sections, point) for each, point in zip(told, self.points, strict=True)]
        sizes = {name: self._whole([found[name] for found in sections]) for name in sections[0]}
        at = max(sizes, key=lambda name: sum(sizes[name].values()))
        grown = [stack.told for stack in self.stacks if stack.first < stack.num_layers]
        depths = f" at {' and at '.join(grown)}" if grown else ""
        return Traced(
            f"traced{depths}, in {at}", sizes[at], self._whole([each.sent for each in told]), ended=sizes.get(HEAD, {})
        )

    def _named(self, sections: Mapping[Section, Parts], point: Point) -> dict[str, Parts]:
        found = {}
        for section, parts in sections.items():
            name: str | None = section if isinstance(section, str) else None
            if not isinstance(section, str):
                direction, at, layer = section
                name = self.stacks[at].named(direction, layer, point[at]) if at < len(self.stacks) else None
            if name is not None:
                found[name] = parts
        return found

    def _whole(self, found: Sequence[Parts]) -> dict[str, int]:
        first, more = found[0], iter(found[1:])
        sizes = dict(first)
        for stack in self.stacks:
            if stack.first < stack.num_layers:
                times, second = (stack.num_layers - stack.first) // stack.period, next(more)
                for name, size in first.items():
                    sizes[name] += (second[name] - size) * times
        return sizes


def text_layers(model: Any) -> list[Any]:
    inside = {module for tower in towers_of(model) for module in tower.modules()}
    return [layer for layer in decoder_layers(model) if layer not in inside]


def layers_of(tower: Any, model: Any) -> list[Any]:
    inside = set(tower.modules())
    return [layer for layer in decoder_layers(model) if layer in inside]


def _deepstack(config: Any) -> Sequence[int]:
    """Layers of a tower whose features the first layers of the decoder take."""
    return getattr(config, "deepstack_visual_indexes", None) or ()
