"""Rows of reasoning-gym: any of its data sets by name, made row by row and never held.

Owns what `data.path="gym:NAME"` and `data.args` make, and what the package says of an answer. Does not own mixtures
(`data.sources`), the order of rows (`cursor.py`), or where a response has its answer (`rewards/hub/gym.py`).

    rows = GymRows("leg_counting", {"size": 100, "level": 1})
    rows[3]  ->  {"prompt": "... how many legs ...", "label": "142", "metadata": {"reasoning_gym": {"name": "leg_counting", ...}}}

Invariant: a row is a function of (name, args, index) and of the package's version: no time, no earlier row and no other process
changes it. What data sets draw from Python's own generator is seeded by the row.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import in_one_line
from rondo.runtime.section import nearest

try:
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum
except ModuleNotFoundError as error:
    if error.name != "reasoning_gym":
        raise
    raise ConfigError(
        "reasoning-gym must be installed for data.path 'gym:NAME' and the reward reasoning_gym, got no such package. Run: "
        "pip install 'rondo-rl[reasoning-gym]'"
    ) from error

KEY = "reasoning_gym"
"""In a row's metadata, what its entry is made of."""
_DEFAULTS: dict[str, Any] = {"size": 10_000, "seed": 0}
_drawing = threading.Lock()


class GymRows(Sequence[dict[str, Any]]):
    """Those of one data set. `args`: of its configuration in the package, `size` and `seed` among them; and `level`, of its
    curriculum: a number for all of what makes it difficult, a level by name of some of it, or a list of these, each for as many
    rows, in that order. ConfigError for what the package does not have."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        self._name, self._args = name, {**_DEFAULTS, **args}
        self._length = sum(len(part) for part in _parts(name, _text(self._args)))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        entry = entry_of(self._name, self._args, index)
        made_of = {"name": self._name, "args": self._args, "index": index}
        return {"prompt": entry["question"], "label": entry["answer"], "metadata": {KEY: made_of}}


def entry_of(name: str, args: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The package's own entry of a row."""
    data, at = _located(name, _text(args), index)
    with _drawing:
        state = random.getstate()
        random.seed(f"{name}/{args['seed']}/{index}")
        try:
            return dict(data[at])
        finally:
            random.setstate(state)


def score(answer: str | None, name: str, args: Mapping[str, Any], index: int, label: Any) -> float:
    """What the package says of an answer to a row. ConfigError where it makes another entry of the row than that with `label`."""
    entry = _entry(name, _text(args), index)
    if entry["answer"] != label:
        raise ConfigError(
            f"reasoning-gym's {name} must make the row that was asked, with the answer {label!r:.80}, got "
            f"{entry['answer']!r:.80}. Use one version of the package in all processes"
        )
    data, _ = _located(name, _text(args), index)
    return float(data.score_answer(answer, entry))


@functools.lru_cache(maxsize=64)
def _entry(name: str, args: bytes, index: int) -> dict[str, Any]:
    """Samples of a prompt group are scored one after another."""
    return entry_of(name, orjson.loads(args), index)


def _located(name: str, args: bytes, index: int) -> tuple[Any, int]:
    for part in _parts(name, args):
        if index < len(part):
            return part, index
        index -= len(part)
    raise IndexError(f"index must be below the rows of {name}, got {index} beyond them")


@functools.lru_cache(maxsize=256)
def _parts(name: str, args: bytes) -> tuple[Any, ...]:
    """The package's data sets, one a level."""
    given = orjson.loads(args)
    if name not in DATASETS or name == "composite":
        instead = "Mix data sets in data.sources" if name == "composite" else nearest(name, sorted(DATASETS))
        raise ConfigError(f"data.path must name a data set of reasoning-gym behind 'gym:', got {name!r}. {instead}")
    level = given.pop("level", None)
    levels = level if isinstance(level, list) else [level]
    try:
        size, seed = given["size"] // len(levels), given["seed"]
        return tuple(
            _data_set(name, each, given | {"size": size, "seed": seed + number * size})
            for number, each in enumerate(levels)
        )
    except Exception as error:  # the package's own, of what it is told
        raise ConfigError(
            f"data.args must be what reasoning-gym's {name} takes, got {given} with level {level} ({in_one_line(error)}). "
            f"It has {', '.join(field.name for field in dataclasses.fields(DATASETS[name][1]))}"
            + (f"; levels of {', '.join(_levels(name))}" if name in CURRICULA else "; no levels")
        ) from error


def _data_set(name: str, level: int | Mapping[str, int] | None, args: Mapping[str, Any]) -> Any:
    made, config_of = DATASETS[name]
    if level is None:
        config = config_of(**args)
    else:
        curriculum, most = create_curriculum(name), _levels(name)
        if isinstance(level, int) and level > max(most.values()):
            raise ValueError(f"level must be at most {max(most.values())}, got {level}")
        each = level if isinstance(level, Mapping) else {attribute: min(level, most[attribute]) for attribute in most}
        for attribute, value in each.items():
            curriculum.set_attr_level(attribute, value)
        config = dataclasses.replace(curriculum.generate_configuration(dict(_DEFAULTS)), **args)
    if hasattr(config, "validate"):
        config.validate()
    return made(config=config)


def _levels(name: str) -> dict[str, int]:
    """What a curriculum makes difficult -> the last level of it."""
    return {attribute: len(each.levels) - 1 for attribute, each in create_curriculum(name).attributes.items()}


def _text(args: Mapping[str, Any]) -> bytes:
    return orjson.dumps(args, option=orjson.OPT_SORT_KEYS)
