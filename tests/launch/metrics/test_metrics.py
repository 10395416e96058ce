"""Every metric is described once: the page, /metrics and the dashboard of Grafana say the same of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from rondo.launch.cli import main
from rondo.launch.metrics.descriptions import describe, sections
from rondo.launch.metrics.exposition import Newest, families, name_of
from rondo.launch.metrics.page import page
from rondo.runtime.admin.endpoint import Family, prometheus_lines

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def parsed(found: list[Family]) -> dict[str, Any]:
    """Name -> its family, as Prometheus' own parser reads the text."""
    parser = pytest.importorskip("prometheus_client.parser")
    text = "\n".join(prometheus_lines(found)) + "\n"
    read = list(parser.text_string_to_metric_families(text))
    assert len(read) == len(found) == len({each.name for each in read})
    return {sample.name: each for each in read for sample in each.samples}


def test_the_page_is_what_the_command_prints_and_the_docs_hold(capsys: Any) -> None:
    assert main(["show", "--metrics"]) == 0
    printed = capsys.readouterr().out
    assert printed == page() and printed in DOCS.read_text(), "write the output of `rondo show --metrics` into the page"


def test_each_name_is_described_once_with_a_unit_and_a_sentence() -> None:
    entries = [each for section in sections().values() for each in section]
    assert len({each.name for each in entries}) == len(entries) > 150
    assert all(each.unit and each.text and not each.text.endswith(".") for each in entries)
    kinds: dict[str, set[bool]] = {}
    for each in entries:
        kinds.setdefault(name_of(each), set()).add(each.counts)
        assert describe(each.name.format_map(_Labels())) is not None
    assert all(len(found) == 1 for found in kinds.values()), "a family is of one type"


class _Labels(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return {"kind": "image", "k": "4", "age": "2", "q": "p90"}.get(name, "any thing/else")


@pytest.mark.parametrize(
    ("path", "name", "labels"),
    [
        ("reward_mean", "reward_mean", {}),
        ("reward_mean_image", "reward_mean_{kind}", {"kind": "image"}),
        ("reward_mean_gsm8k_hard", "reward_mean_{source}", {"source": "gsm8k_hard"}),
        ("response_tokens_p90", "response_tokens_{q}", {"q": "p90"}),
        ("response_tokens_p9x", "response_tokens_{source}", {"source": "p9x"}),
        ("log_prob_gap_max", "log_prob_gap_max", {}),
        ("log_prob_gap_mixed_k3", "log_prob_gap_{kind}_k3", {"kind": "mixed"}),
        ("critic/ratio_max", "critic/ratio_max", {}),
        ("evaluation/sets/a/b/pass@4", "evaluation/sets/{set}/pass@{k}", {"set": "a/b", "k": "4"}),
        ("memory_bytes/actor-0", "memory_bytes/{group}", {"group": "actor-0"}),
    ],
)
def test_a_path_finds_its_entry_and_labels(path: str, name: str, labels: dict[str, str]) -> None:
    found = describe(path)
    assert found is not None and (found[0].name, found[1]) == (name, labels)


def test_what_nobody_describes_has_no_entry() -> None:
    assert describe("my_own_figure") is None and describe("critic/my_own") is None and describe("") is None


def test_prometheus_reads_help_type_labels_and_values_of_a_run() -> None:
    newest = Newest()
    for record in (
        {"kind": "metrics", "source": "actor-0", "step": 1, "reward_mean": 0.25, "reward_mean_a b": 0.5, "own": 3, "gone": 1},
        {"kind": "metrics", "source": "actor-0", "step": 2, "reward_mean": 0.5, "own": 4, "staleness_tokens": {"0": 7}},
        {"kind": "metrics", "source": "rollout-0", "rank": 1, "engine": {"tokens_generated": 9}, "waits_s": {"call x": 2.5}},
        {"kind": "metrics", "source": "rollout-0", "rank": 1, "genrm": {"answers": 1}},
        {"kind": "metrics", "source": "left-0", "rank": 0, "engine": {"tokens_generated": 5}},
        {"kind": "metrics", "source": "critic-0", "critic": {"step": 2, "loss": 9.0}},
        {"kind": "metrics", "source": "coordinator", "evaluation": {"version": 2, "sets": {"x": {"pass@4": 0.5}}}},
    ):  # fmt: skip
        newest.add(record)
    found = parsed(families(newest.told({"actor-0", "rollout-0"})))
    told = {name: [(each.labels, each.value) for each in family.samples] for name, family in found.items()}
    assert told == {
        "rondo_step": [({}, 2)],
        "rondo_reward_mean": [({}, 0.5)],
        "rondo_own": [({}, 4)],
        "rondo_staleness_tokens": [({"age": "0"}, 7)],
        "rondo_engine_tokens_generated_total": [({"process": "rollout-0.1"}, 9)],
        "rondo_waits_seconds_total": [({"process": "rollout-0.1", "wait": "call x"}, 2.5)],
        "rondo_genrm_answers_total": [({"process": "rollout-0.1"}, 1)],
        "rondo_critic_step": [({}, 2)],
        "rondo_critic_loss": [({}, 9)],
        "rondo_evaluation_version": [({}, 2)],
        "rondo_evaluation_sets_pass": [({"k": "4", "set": "x"}, 0.5)],
    }
    counter, gauge, own = (found[f"rondo_{name}"] for name in ("engine_tokens_generated_total", "reward_mean", "own"))
    assert (counter.type, gauge.type, own.type) == ("counter", "gauge", "unknown")
    assert gauge.documentation == "sum of rewards / samples that have one (reward)."


def test_prometheus_text_escapes_words_and_labels_so_that_its_own_parser_reads_them_back() -> None:
    hostile = 'a"b\n\\c\\n{},= '
    families = [
        Family("x", "gauge", "A \\ and\na line.", {(): float("nan")}),
        Family("n", "untyped", "", {(("a", hostile), ("b", "")): 1.5, (("a", "é"), ("b", "x")): float("-inf")}),
    ]
    read = parsed(families)
    x, n = read["x"], read["n"]
    assert (x.documentation, x.type, math.isnan(x.samples[0].value)) == ("A \\ and a line.", "gauge", True)
    found = [(sample.labels, sample.value) for sample in n.samples]
    assert found == [({"a": hostile, "b": ""}, 1.5), ({"a": "é", "b": "x"}, float("-inf"))]
