"""The page of all metrics, as `docs/metrics.md` holds it and `rondo show --metrics` prints it."""

from __future__ import annotations

from rondo.launch.metrics.descriptions import sections
from rondo.launch.metrics.exposition import name_of


def page() -> str:
    """Markdown: a table for each section."""
    parts = []
    for title, entries in sections().items():
        rows = [(f"`{each.name}`", each.unit, f"`{name_of(each)}`", each.text.replace("|", "\\|")) for each in entries]
        lines = [("in `metrics.jsonl`", "unit", "in `/metrics`", "what it is"), ("---",) * 4, *rows]
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts) + "\n"
