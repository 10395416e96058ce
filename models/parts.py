"""Parts of a multimodal model, and which of its parameters are trained.

Owns which part a parameter belongs to (a family's record says so), and freezing by part or by name. Does not own how parts are
spread over processes (`parallel/`).

    freeze(model, ("vision", "audio"), freeze_parameters=(r"\\bgate\\.",))

Invariant: what is frozen has no gradient and no moments, and is published, saved and restored like the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from rondo.models.families import Family, family_of
from rondo.runtime.errors import ConfigError

LANGUAGE = "language"


def part_of(family: Family | None, name: str) -> str:
    """ "vision", "audio", "projector" or "language", by the parameter's name in memory."""
    if family is None:
        return LANGUAGE
    found = [part for part, pattern in family.parts.items() if re.search(pattern, name)]
    return "projector" if "projector" in found else (found[0] if found else LANGUAGE)


def freeze(
    model: Any,
    parts: Sequence[str] = (),
    *,
    freeze_parameters: Iterable[str] = (),
    train_parameters: Iterable[str] = (),
) -> list[str]:
    """Sets `requires_grad` of every parameter; the names of those that are trained. For the whole model, before it is sharded.

    Raises ConfigError for a part that the model does not have, a pattern that no parameter matches, and for nothing left.
    """
    family = family_of(model)
    names = [name for name, _ in model.named_parameters()]
    having = {part_of(family, name) for name in names}
    unknown = [part for part in parts if part not in having]
    if unknown:
        raise ConfigError(
            f"train.freeze must name parts of {type(model).__name__}, {', '.join(sorted(having))}, got {', '.join(unknown)}. "
            "Remove what it does not have"
        )
    frozen = {name for name in names if part_of(family, name) in parts}
    frozen |= _matching(names, freeze_parameters, "train.freeze_parameters")
    only = _matching(names, train_parameters, "train.train_parameters")
    trained = [name for name in names if name not in frozen and (name in only or not only)]
    if not trained:
        raise ConfigError(
            "train.freeze, train.freeze_parameters and train.train_parameters must leave parameters to train, got none left. "
            "Freeze less"
        )
    kept = set(trained)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in kept)
    return trained


def _matching(names: Sequence[str], patterns: Iterable[str], setting: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matching = {name for name in names if re.search(pattern, name)}
        if not matching:
            raise ConfigError(
                f"{setting} must match names of parameters such as {names[0]!r}, got {pattern!r} that matches none. Correct it"
            )
        found |= matching
    return found
