"""The dashboard for Grafana is whole, and asks for nothing that a run does not give."""

from __future__ import annotations

import json
import re
from typing import Any

from rondo.launch.cli import main
from rondo.launch.metrics.descriptions import sections
from rondo.launch.metrics.exposition import name_of
from rondo.launch.metrics.grafana import dashboard

FAMILY = re.compile(r"rondo_\w+")


def asked() -> set[str]:
    """Families that the panels and variables ask for."""
    return set(FAMILY.findall(json.dumps(dashboard())))


def test_the_command_prints_it_and_every_query_is_of_a_metric_that_is_described(capsys: Any) -> None:
    assert main(["show", "--grafana"]) == 0
    assert json.loads(capsys.readouterr().out) == dashboard()
    assert asked() <= {name_of(each) for section in sections().values() for each in section}


def test_labels_in_legends_are_those_of_the_metric_and_panels_have_places_of_their_own() -> None:
    labels: dict[str, set[str]] = {}
    for each in (each for section in sections().values() for each in section):
        found = {*re.findall(r"{(\w+)}", each.name), *(["process"] if each.of_process else [])}
        labels.setdefault(name_of(each), set()).update(found)
    taken = set[tuple[int, int]]()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 20
    for panel in panels:
        for target in panel.get("targets", ()):
            (family,) = FAMILY.findall(target["expr"])
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels[family], target
            assert 'instance="$run"' in target["expr"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken
        taken |= cells
