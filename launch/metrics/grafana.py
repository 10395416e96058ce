"""Grafana: a dashboard of a run's /metrics, as JSON that Grafana imports.

Owns where panels are; panels.txt says which. Every query is of a family of `descriptions.py`. Data source and run are variables:
the run is Prometheus' own label `instance`, the address that it asks.

    rondo show --grafana > rondo.json        # in Grafana: Dashboards, New, Import
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_RUN = '{instance="$run"}'
_WIDTH, _HEIGHT = 12, 8
Panel = tuple[str, str, str, list[tuple[str, str]]]
"""Title, unit, words at the axis, (query, legend)."""


def rows() -> dict[str, list[Panel]]:
    """Title -> its panels, of panels.txt. A query that is a name alone is of the run."""
    found: dict[str, list[Panel]] = {}
    for line in Path(__file__).with_name("panels.txt").read_text().splitlines():
        if line.startswith("#"):
            row = found[line.removeprefix("# ")] = []
        elif line:
            title, unit, words, queries = (cell.strip() for cell in line.split(" | "))
            pairs = [
                (query.strip(), legend.strip())
                for query, _, legend in (q.partition("->") for q in queries.split(" ; "))
            ]
            row.append((title, unit, words, [(q if "{" in q else q + _RUN, legend) for q, legend in pairs]))
    return found


def dashboard() -> dict[str, Any]:
    """As Grafana's API and import take it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in rows().items():
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, y, 24, 1)})
        for number, panel in enumerate(row):
            panels.append(_panel(*panel, _place(number % 2 * _WIDTH, y + 1 + number // 2 * _HEIGHT, _WIDTH, _HEIGHT)))
        y += 1 + -(-len(row) // 2) * _HEIGHT
    variables = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "run", "label": "Run", "type": "query", "datasource": _SOURCE, "refresh": 2,
            "query": {"query": "label_values(rondo_step, instance)", "refId": "run"},
        },
    ]  # fmt: skip
    return {
        "uid": "rondo", "title": "rondo", "tags": ["rondo"], "schemaVersion": 39, "editable": True, "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"}, "templating": {"list": variables},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }  # fmt: skip


def _panel(title: str, unit: str, words: str, queries: list[tuple[str, str]], place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + number), "datasource": _SOURCE, "legendFormat": legend,
            "expr": query,
        }
        for number, (query, legend) in enumerate(queries)
    ]  # fmt: skip
    custom = {"axisLabel": words, "showPoints": "never", "spanNulls": True}
    return {
        "type": "timeseries", "title": title, "gridPos": place, "datasource": _SOURCE, "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                    "tooltip": {"mode": "multi", "sort": "desc"}},
    }  # fmt: skip


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}
