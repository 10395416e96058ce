"""Descriptions: the name, unit and formula of every metric that a run writes, in the one place that says so: metrics.txt.

Owns how `docs/metrics.md`, the HELP and TYPE of `/metrics` and OpenTelemetry find what is said of a metric. Does not own any
number. A name is its path in a record of metrics.jsonl; a part in braces stands for any text, which becomes a label. Invariant:
what a run writes has an entry, but for what functions of the user measure under names of their own.

    describe("engine/num_running")            -> its entry, {}
    describe("log_prob_gap_image_max")        -> that of log_prob_gap_{kind}_max, {"kind": "image"}
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rondo.models.media.inputs import KINDS

_LABEL = re.compile(r"{(\w+)}")
_ONLY = {"kind": "|".join(KINDS), "k": "[0-9]+", "age": "[0-9]+", "q": "p[0-9]+"}
_CRITIC = "critic/"
_NO_FIGURES = ("time", "rank")


@dataclass(frozen=True, slots=True)
class Metric:
    """`counts`: it only grows in the life of a process. `of_process`: each process has its own."""

    name: str
    unit: str
    text: str
    counts: bool
    of_process: bool

    def match(self, path: str) -> re.Match[str] | None:
        """With a group for each label."""
        return re.fullmatch(_pattern(self.name), path)


@functools.cache
def _pattern(name: str) -> str:
    *pairs, end = _LABEL.split(name)
    labels = [f"(?P<{label}>{_ONLY.get(label, '.+')})" for label in pairs[1::2]]
    return "".join(re.escape(text) + label for text, label in zip(pairs[::2], labels, strict=True)) + re.escape(end)


@functools.cache
def sections() -> Mapping[str, list[Metric]]:
    """Title -> entries, in the order of the page."""
    found: dict[str, list[Metric]] = {}
    for line in Path(__file__).with_name("metrics.txt").read_text().splitlines():
        if line.startswith("#"):
            title = line.removeprefix("# ")
            entries = found[title] = []
        elif line:
            name, unit, text = (cell.strip() for cell in line.split("|", 2))
            entries.append(Metric(name, unit.lstrip("+"), text, unit.startswith("+"), "each process" in title))
    return found


@functools.lru_cache(4096)
def describe(path: str) -> tuple[Metric, Mapping[str, str]] | None:
    """The entry of a number by its path in a record, and its labels; None without one."""
    entries = [each for section in sections().values() for each in section]
    for entry in sorted(entries, key=lambda each: "{" in each.name):  # exact names win
        if (match := entry.match(path)) is not None:
            return entry, match.groupdict()
    if path.startswith(_CRITIC) and (found := describe(path.removeprefix(_CRITIC))) is not None:
        entry, labels = found
        return replace(entry, name=_CRITIC + entry.name, text=f"of the critic: {entry.text}"), labels
    return None


def numbers(
    record: Mapping[str, Any], prefix: str = "", but: Collection[str] = _NO_FIGURES, below: Collection[str] = ()
) -> Iterator[tuple[str, float]]:
    """Path and value of every number of a record, without those of the names `but`, and in its parts those `below`."""
    for name, value in record.items():
        if name in but:
            continue
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/", below, below)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, float(value)
