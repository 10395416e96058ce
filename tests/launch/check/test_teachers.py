"""What the check says of teachers: sizes of those that fit the policy, and why others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from rondo.launch.check.child import look_at_memory
from rondo.launch.check.estimate import teaching
from rondo.launch.check.findings import Report
from rondo.launch.check.shape import shape_of
from rondo.launch.check.teachers import look_at_teachers
from rondo.launch.check.trace import Tracer
from rondo.launch.config import RunConfig, load
from rondo.models.load import empty_model, load_tokenizer
from rondo.models.tiny import qwen3, qwen3_vl
from tests.launch import configs


def config_of(folder: Path, teacher: Path, *sets: str) -> RunConfig:
    groups = "fully_async(teacher_replicas=1), distillation=dict(teachers={'big': dict(model=dict(path='PATH'))})"
    changed = ("role_groups=fully_async()", f"role_groups={groups}".replace("PATH", str(teacher)))
    return load(configs.write(folder, changed, ("held_out=8", "held_out=8, metadata='extra'")), sets)


def seen(config: RunConfig, policy: Path, folder: Path) -> Report:
    report = Report()
    report.facts.model_path = str(policy)
    look_at_teachers(config, folder, report, [load_tokenizer(str(policy))])
    return report


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    qwen3.build(folder, hidden_size=32, num_layers=1)
    return folder


def test_a_larger_teacher_is_counted_and_traced(policy: Path, tmp_path: Path) -> None:
    qwen3.build(tmp_path / "teacher", hidden_size=64, num_layers=2)
    config = config_of(tmp_path, tmp_path / "teacher")
    report = seen(config, policy, tmp_path)
    [found] = report.findings
    assert found.level == "ok" and "the teacher 'big' has" in found.text and "the policy's tokenizer" in found.text
    assert report.facts.teacher_paths == {"big": str(tmp_path / "teacher")}
    mine, own = (
        Tracer(config, str(path)).of(name).parts["parameters"]
        for path, name in ((tmp_path / "teacher", "teacher big"), (policy, "reference"))
    )
    assert mine == pytest.approx(4 * report.facts.teacher_parameters, rel=0.01) and mine > 2 * own


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("tokenizer", "the tokenizer of the teacher 'big' must be the policy's, since it judges the policy's own tokens"),
        ("positions", "must be at most the positions of the teacher 'big', 16, got 24"),
        ("nothing", "got nothing"),
    ],
)  # fmt: skip
def test_a_teacher_that_cannot_judge_the_policys_samples_is_refused_with_the_reason(
    policy: Path, tmp_path: Path, change: str, said: str
) -> None:
    teacher = tmp_path / "teacher"
    if change != "nothing":
        qwen3.build(teacher, hidden_size=32, num_layers=1, max_positions=16 if change == "positions" else 64)
    if change == "tokenizer":
        tree: dict[str, Any] = orjson.loads((teacher / "tokenizer.json").read_bytes())
        words = tree["model"]["vocab"]
        words["a"], words["b"] = words["b"], words["a"]
        (teacher / "tokenizer.json").write_bytes(orjson.dumps(tree))
    [found] = seen(config_of(tmp_path, teacher), policy, tmp_path).findings
    assert found.level == "error" and (said in found.text or change == "nothing")


def test_a_teacher_of_text_does_not_judge_samples_with_media(tmp_path: Path) -> None:
    for name, family in (("policy", qwen3_vl), ("teacher", qwen3)):
        family.build(tmp_path / name)
    config = config_of(tmp_path, tmp_path / "teacher", "media.max_group_bytes=1000000")
    [found] = seen(config, tmp_path / "policy", tmp_path).findings
    assert found.level == "error" and "the teacher 'big' must take media as the policy does" in found.text


def test_a_teacher_that_is_an_average_is_counted_with_it_in_float32(policy: Path, tmp_path: Path) -> None:
    told = '{"big": {"policy": "average", "decay": 0.9}}'
    config, report = config_of(tmp_path, policy, f"distillation.teachers={told}"), Report()
    [group] = [each for each in config.role_groups if "teacher" in each.roles]
    report.facts.model_path, report.facts.shape = str(policy), shape_of(empty_model(str(policy)))
    report.facts.teacher_paths["big"] = str(policy)
    look_at_memory(config.model_copy(update={"role_groups": (group,)}), report)
    parts = report.facts.traced[teaching("big")].parts
    assert parts["average"] == parts["parameters"] > 0
