"""Code: what a run takes along of its user's modules, and that its processes load nothing else of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rondo.launch.code import FOLDER, as_kept, belonging_to, imported, take
from rondo.launch.config import RunConfig, load
from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import TAKEN, in_users_words, load_file
from tests.launch import configs

IMPORTS = """

def reward(response, label, *, prompt, metadata):
    import json
    import late_helper_of_a_run
    from package_of_a_run.inner import values

    return late_helper_of_a_run.VALUE + values.VALUE + len(json.loads((Path(__file__).parent / "words.json").read_text()))
"""
CALL = """
import sys
from rondo.runtime.reference import load_reference
function = load_reference(sys.argv[1], "x")
value, again = function("", "", prompt="", metadata={}), load_reference(sys.argv[1], "x")
print(value, sys.modules[function.__module__].__file__, again is function)
"""


@pytest.fixture(autouse=True)
def imports_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test makes importable is so for its time."""
    for name in ("path", "meta_path"):
        monkeypatch.setattr(sys, name, list(getattr(sys, name)))


def project(folder: Path) -> Path:
    """A config module with a module and a package beside it that its reward imports when it is called, and a data file."""
    folder.mkdir()
    (folder / "late_helper_of_a_run.py").write_text("VALUE = 3\n")
    inner = folder / "package_of_a_run" / "inner"
    inner.mkdir(parents=True)
    (inner / "__init__.py").touch()
    (inner / "values.py").write_text("from . import other\n\nVALUE = other.VALUE\n")
    (inner / "other.py").write_text("VALUE = 40\n")
    (folder / "unrelated.py").write_text("1 / 0\n")
    (folder / "words.json").write_text("[1, 2]")
    old = "\n\ndef reward(response, label, *, prompt, metadata):\n    return float(response == label)\n"
    return configs.write(folder, (old, f"\nfrom pathlib import Path\n{IMPORTS}"), name="training.py")


def called(reference: str, cwd: Path) -> list[str]:
    """What the function gives in a process of its own, the file that its module names, and whether it is loaded once."""
    command = [sys.executable, "-c", CALL, reference]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def taken(tmp_path: Path, **changes: Any) -> tuple[RunConfig, Path]:
    file = project(tmp_path / "mine")
    return take(load(file), file, tmp_path / "run" / FOLDER), tmp_path / "run"


def test_modules_that_are_imported_anywhere_are_taken_and_used_wherever_the_run_lies_and_whatever_becomes_of_them(
    tmp_path: Path,
) -> None:
    config, run = taken(tmp_path)
    told = json.loads((run / FOLDER / TAKEN).read_text())
    assert set(told["files"]) == {
        "training.py", "late_helper_of_a_run.py", "package_of_a_run/__init__.py", "package_of_a_run/inner/__init__.py",
        "package_of_a_run/inner/other.py", "package_of_a_run/inner/values.py",
    }  # fmt: skip
    kept = as_kept(config, run)
    assert kept.reward.function == "code/training.py:reward" and kept.data.rows == "code/training.py:rows"
    assert kept.model.build == "rondo.models.tiny.qwen3:build"
    # The user goes on working, in the folder that every process of the run was started in.
    for name in ("training", "late_helper_of_a_run", "package_of_a_run/inner/other"):
        (tmp_path / "mine" / f"{name}.py").write_text("VALUE = 10_000\n\ndef reward(*a, **b): return -1\n")
    run = run.rename(tmp_path / "moved")
    for cwd in (tmp_path, tmp_path / "mine"):
        # `__file__` is where the module came from, so that what lies beside it there is found.
        expected = ["45", str(tmp_path / "mine" / "training.py"), "True"]
        assert called(belonging_to(kept, run).reward.function, cwd) == expected


def test_what_a_runs_code_imports_is_installed_is_named_with_its_version_and_what_is_not_with_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "elsewhere"
    local.mkdir()
    (local / "local_rewards_of_a_run.py").write_text("")
    monkeypatch.syspath_prepend(str(local))
    file = project(tmp_path / "mine")
    file.write_text(f"{file.read_text()}\n\ndef other():\n    import local_rewards_of_a_run, orjson\n")
    take(load(file), file, tmp_path / "run" / FOLDER)
    found = imported(tmp_path / "run", {"torch": "2"})
    assert found["packages"].keys() == {"torch", "orjson"}
    assert [Path(path).name for path in found["local_modules"]] == ["local_rewards_of_a_run.py"]


def test_files_elsewhere_that_the_settings_name_are_taken_with_their_neighbours(tmp_path: Path) -> None:
    file, other = project(tmp_path / "mine"), tmp_path / "other"
    other.mkdir()
    (other / "rewards.py").write_text(
        "def score(*a, **b):\n    import near_a_reward\n\n    return near_a_reward.VALUE\n"
    )
    (other / "near_a_reward.py").write_text("VALUE = 7\n")
    config = take(load(file, [f"reward.function={other}/rewards.py:score"]), file, tmp_path / "run" / FOLDER)
    assert as_kept(config, tmp_path / "run").reward.function == "code/elsewhere/1/rewards.py:score"
    (other / "near_a_reward.py").unlink()
    assert called(config.reward.function, tmp_path)[0] == "7"


def test_a_function_of_a_package_beside_the_config_is_that_of_the_taken_package(tmp_path: Path) -> None:
    file = project(tmp_path / "mine")
    (file.parent / "package_of_a_run" / "rewards.py").write_text(
        "from .inner import values\n\ndef score(*a, **b):\n    return values.VALUE\n"
    )
    config = take(load(file, ["reward.function=package_of_a_run.rewards:score"]), file, tmp_path / "run" / FOLDER)
    assert config.reward.function == f"{tmp_path}/run/code/package_of_a_run/rewards.py:score"
    assert called(config.reward.function, tmp_path)[0] == "40"


def test_a_run_can_begin_with_the_code_of_another_run(tmp_path: Path) -> None:
    _, run = taken(tmp_path)
    copy = run / FOLDER / "training.py"
    config = take(load(copy), copy, tmp_path / "second" / FOLDER)
    assert config.reward.function == f"{tmp_path}/second/code/training.py:reward"
    assert called(config.reward.function, tmp_path)[:2] == ["45", str(tmp_path / "mine" / "training.py")]


def test_a_neighbour_with_the_name_of_an_installed_module_is_refused_where_the_code_imports_it(tmp_path: Path) -> None:
    file = project(tmp_path / "mine")
    (file.parent / "psutil.py").touch()
    take(load(file), file, tmp_path / "unused" / FOLDER)
    importing = file.with_name("importing_psutil.py")
    importing.write_text(file.read_text() + "\n\ndef other():\n    import psutil\n")
    with pytest.raises(ConfigError) as caught:
        take(load(importing), importing, tmp_path / "taken" / FOLDER)
    assert str(caught.value).startswith(
        f"a module beside {importing.name} must not have the name of an installed one, got {file.parent}/psutil.py and "
    )


def test_a_neighbour_with_the_name_of_a_module_of_pythons_own_is_in_nobodys_way_and_is_named_where_it_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = project(tmp_path / "mine")
    for name in ("sched", "netrc"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        file.with_name(f"{name}.py").write_text("KEY = 1\n1 / 0\n")
    users = file.with_name("using_sched.py")
    users.write_text(file.read_text() + "\n\nimport sched\n\nsched.scheduler\n")
    take(load(users), users, tmp_path / "run" / FOLDER)
    assert not (tmp_path / "run" / FOLDER / "sched.py").exists()
    for line in ("import netrc; netrc.KEY", "from netrc import KEY"):
        meant = file.with_name(f"meant_{len(line)}.py")
        meant.write_text(file.read_text() + f"\n\n{line}\n")
        with pytest.raises(
            ConfigError, match=rf"must not have the name of one of Python's own, got {file.parent}/netrc\.py"
        ):
            load(meant)


def test_what_is_wrong_with_a_copy_is_told_of_the_users_file(tmp_path: Path) -> None:
    _, run = taken(tmp_path)
    load_file(str(run / FOLDER / "training.py"))
    text = f"got {run}/code/training.py:7, {run}/code/package_of_a_run/inner/other.py"
    mine = tmp_path / "mine"
    assert in_users_words(text) == f"got {mine}/training.py:7, {mine}/package_of_a_run/inner/other.py"
