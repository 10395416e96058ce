"""The examples of full size fit the machines that their first lines name, and no fewer."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import recipe_rows
from rondo.launch.check.findings import Facts
from rondo.launch.check.target import Target, judge_target
from rondo.launch.config import load
from tests.e2e.shell import Rondo
from tests.launch import full_size
from tests.strength import LONG

EXAMPLES = Path(__file__).parents[3] / "examples" / "full_size"
NUM_ROWS = 256 + 128
"""What the examples hold out, and the largest step."""
Make = Callable[[Path], Path]
MODELS: dict[str, tuple[Make, str, str]] = {
    "qwen3_8b_text": (full_size.qwen3_8b, "text", "8,190,735,360"),
    "qwen3_8b_text_colocate": (full_size.qwen3_8b, "text", "8,190,735,360"),
    "qwen3_8b_lora": (full_size.qwen3_8b, "text", "8,190,735,360"),
    "qwen3_vl_8b": (full_size.qwen3_vl_8b, "image", "8,767,123,696"),
    "qwen3_vl_8b_colocate": (full_size.qwen3_vl_8b, "image", "8,767,123,696"),
    "qwen3_32b": (full_size.qwen3_32b, "text", "32,762,123,264"),
    "qwen3_omni_30b": (full_size.qwen3_omni_30b, "omni", "31,719,205,488"),
    "qwen3_omni_30b_lora": (full_size.qwen3_omni_30b, "omni", "31,719,205,488"),
    "qwen3_30b_a3b": (full_size.qwen3_30b_a3b, "text", "30,532,122,624"),
    "qwen3_30b_a3b_lora": (full_size.qwen3_30b_a3b, "text", "30,532,122,624"),
    "qwen3_vl_30b_a3b": (full_size.qwen3_vl_30b_a3b, "image", "31,070,754,032"),
    "qwen3_vl_30b_a3b_lora": (full_size.qwen3_vl_30b_a3b, "image", "31,070,754,032"),
    "qwen3_235b_a22b": (full_size.qwen3_235b_a22b, "text", "235,093,634,560"),
    "qwen3_235b_a22b_lora": (full_size.qwen3_235b_a22b, "text", "235,093,634,560"),
    "dapo_math_qwen3_4b": (full_size.qwen3_4b, "dapo", "4,022,468,096"),
    "open_r1_qwen3_vl_4b": (full_size.qwen3_vl_4b, "open_r1", "4,437,815,808"),
    "avqa_qwen3_omni_30b": (full_size.qwen3_omni_30b, "avqa", "31,719,205,488"),
    "avqa_qwen3_omni_30b_lora": (full_size.qwen3_omni_30b, "avqa", "31,719,205,488"),
    "nextqa_qwen3_omni_30b": (full_size.qwen3_omni_30b, "nextqa", "31,719,205,488"),
    "nextqa_qwen3_omni_30b_lora": (full_size.qwen3_omni_30b, "nextqa", "31,719,205,488"),
    "deepeyes_qwen3_vl_30b_a3b_lora": (full_size.qwen3_vl_30b_a3b, "deepeyes", "31,070,754,032"),
    "deepeyes_code_qwen3_vl_30b_a3b_lora": (full_size.qwen3_vl_30b_a3b, "open_r1", "31,070,754,032"),
}
"""Name of the example -> (its model, kind of rows, the model's parameters)."""
PLACES = {
    "qwen3_8b_text": ["actor 4, rollout 4, advantages 1, on 8 of 8"],
    "qwen3_8b_text_colocate": ["actor 8, on 8 of 8"],
    "qwen3_8b_lora": ["rollout 1, actor 1, advantages 1, on 2 of 2"],
    "qwen3_vl_8b": ["actor 4, rollout 4, advantages 1, on 8 of 8"],
    "qwen3_vl_8b_colocate": ["actor 8, on 8 of 8"],
    "qwen3_32b": ["rollout 1, advantages 1, on 8 of 8", "actor 8, on 8 of 8"],
    "qwen3_omni_30b": ["rollout 1, advantages 1, on 8 of 8", "actor 8, on 8 of 8"],
    "qwen3_omni_30b_lora": ["rollout 1, actor 4, advantages 1, on 8 of 8"],
    "qwen3_30b_a3b": ["rollout 1, advantages 1, on 8 of 8", "actor 8, on 8 of 8"],
    "qwen3_30b_a3b_lora": ["rollout 1, actor 4, advantages 1, on 8 of 8"],
    "qwen3_vl_30b_a3b": ["rollout 1, advantages 1, on 8 of 8", "actor 8, on 8 of 8"],
    "qwen3_vl_30b_a3b_lora": ["rollout 1, actor 4, advantages 1, on 8 of 8"],
    "qwen3_235b_a22b": ["actor 8, advantages 1, on 8 of 8", *["actor 8, on 8 of 8"] * 7, *["rollout 1, on 8 of 8"] * 8],
    "qwen3_235b_a22b_lora": ["actor 8, advantages 1, on 8 of 8", "actor 8, on 8 of 8", *["rollout 1, on 8 of 8"] * 2],
    "dapo_math_qwen3_4b": ["actor 4, rollout 4, advantages 1, on 8 of 8"],
    "open_r1_qwen3_vl_4b": ["actor 4, rollout 4, advantages 1, on 8 of 8"],
    "avqa_qwen3_omni_30b": ["rollout 1, advantages 1, on 8 of 8", "actor 8, on 8 of 8"],
    "avqa_qwen3_omni_30b_lora": ["rollout 1, actor 4, advantages 1, on 8 of 8"],
    "nextqa_qwen3_omni_30b": ["rollout 1, advantages 1, on 8 of 8", "actor 8, on 8 of 8"],
    "nextqa_qwen3_omni_30b_lora": ["rollout 1, actor 4, advantages 1, on 8 of 8"],
    "deepeyes_qwen3_vl_30b_a3b_lora": ["rollout 1, actor 4, advantages 1, on 8 of 8"],
    "deepeyes_code_qwen3_vl_30b_a3b_lora": ["rollout 1, actor 4, advantages 1, on 8 of 8"],
}
QUICK = {"qwen3_8b_text"}
"""Checked as a whole by every run of the tests, which takes some seconds each; memory of a tower is traced for more."""


def machines(name: str) -> list[str]:
    """The options of `rondo check` as the example itself shows them."""
    told = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text())) or ""
    (line,) = re.findall(r"rondo check examples/full_size/(.+?) --set", " ".join(told.replace("\\", " ").split()))
    file, *options = line.split()
    assert file == f"{name}.py"
    return options


def rows(folder: Path, kind: str) -> dict[str, str]:
    """Writes rows of a kind, or of a recipe's very form; the settings that name them."""
    match kind:
        case "dapo":
            return recipe_rows.dapo(folder, NUM_ROWS) | recipe_rows.aime(folder, 30)
        case "avqa":
            return recipe_rows.avqa(folder, NUM_ROWS, 256)
        case "open_r1" | "nextqa" | "deepeyes":
            found: dict[str, str] = getattr(recipe_rows, kind)(folder, NUM_ROWS)
            return found
    return {"data.path": str(full_size.rows(folder, kind, NUM_ROWS))}


def checked(rondo: Rondo, name: str, folder: Path, settings: dict[str, str], *options: str) -> tuple[int, list[str]]:
    words = ["check", str(EXAMPLES / f"{name}.py"), *options]
    for setting, value in {"model.path": folder, **settings}.items():
        words += ["--set", f"{setting}={value}"]
    code, output = rondo(*words)
    return code, output.splitlines()


def test_every_example_is_looked_at() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == MODELS.keys() == PLACES.keys()


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.skipif(
    not LONG, reason="takes seconds, as those that are checked: RONDO_TEST_LONG=1"
)) for name in MODELS])  # fmt: skip
def test_an_example_fits_the_machines_of_its_first_line(name: str, tmp_path: Path, rondo: Rondo) -> None:
    make, kind, parameters = MODELS[name]
    options = machines(name)
    assert "--device-gib" in options and "--memory-gib" in options
    code, lines = checked(rondo, name, make(tmp_path / "model"), rows(tmp_path, kind), *options)
    assert code == 0, lines
    assert any(line.startswith(f"ok     the model has {parameters} parameters") for line in lines)
    trained, *generates = [line for line in lines if line.startswith("ok     actor takes ")]
    assert "traced at " in trained and len(generates) == name.endswith("colocate") == ("SGLang asleep" in trained)
    if name == "qwen3_8b_text":  # 4, 4 and 8 bytes of each parameter, over 4 ranks
        assert "parameters 7.6 GiB, gradients 7.6 GiB, optimizer 15.3 GiB" in trained
    for node, place in enumerate(PLACES[name]):
        assert f"ok     node {node} takes the processes {place} devices" in lines
    notes = [line for line in lines if line.startswith("note   `rondo train` starts all groups on one machine")]
    assert len(notes) == (len(PLACES[name]) > 1)  # what runs of an example on several machines is this check


@pytest.mark.parametrize("name", MODELS)
def test_an_example_is_refused_on_half_of_its_devices(name: str) -> None:
    config = load(EXAMPLES / f"{name}.py")
    nodes, all_devices = len(PLACES[name]), int(PLACES[name][0].rpartition(" ")[2])
    whole, half = (Target(nodes, devices, 80 << 30, 1 << 40) for devices in (all_devices, all_devices // 2))
    assert [finding.text for finding in judge_target(config, whole, Facts()) if finding.level == "error"] == []
    (refused,) = [finding.text for finding in judge_target(config, half, Facts()) if finding.level == "error"]
    assert (
        refused.startswith(f"role_groups must find their devices on {nodes} node")
        and f"{half.num_devices} devices each" in refused
    )
    assert refused.endswith("Lower processes or replicas, or use more nodes")
