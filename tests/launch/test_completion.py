"""Shell completion, as the shell asks for it, and the schema of the settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.launch.cli import main
from rondo.launch.completion import paths
from rondo.launch.config import RunConfig
from rondo.launch.schema import descriptions
from rondo.runtime.section import sections


def completed(folder: Path, line: str) -> list[str]:
    """What a shell is told for a half-written line; the process loads no torch."""
    out = folder / "told"
    asked = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(out), "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }  # fmt: skip
    code = "import sys; sys.modules.update(torch=None, transformers=None); from rondo.launch.cli import main; main([])"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, cwd=folder, check=False)
    assert done.returncode == 0
    return out.read_text().split("\n")


def test_verbs_options_and_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "mine.txt").touch()
    assert completed(tmp_path, "rondo sh") == ["show "]
    assert completed(tmp_path, "rondo show --sc") == ["--schema "]
    assert completed(tmp_path, "rondo check mi") == ["mine.py "]


def test_settings_and_their_values_are_completed(tmp_path: Path) -> None:
    assert completed(tmp_path, "rondo check mine.py --set train.num_mini") == ["train.num_mini_batches="]
    found = set(paths(RunConfig))
    assert {"train.schedule=cosine", "role_groups.0.replicas=", "deterministic=True", "critic.lr="} <= found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_given_a_script_that_asks_this_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    told = capsys.readouterr().out
    assert "rondo" in told and "_ARGCOMPLETE" in told


def test_without_argcomplete_the_install_line_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err.endswith("Run: pip install 'rondo-rl[completion]'\n")


def test_every_setting_is_described() -> None:
    bare = {
        f"{path}.{name}".lstrip(".")
        for path, owner in sections(RunConfig)
        for name in owner.model_fields.keys() - descriptions(owner).keys()
    }
    assert bare == set()


def test_the_schema_has_descriptions_bounds_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--schema"]) == 0
    made = json.loads(capsys.readouterr().out)
    train = made["$defs"]["TrainConfig"]["properties"]
    assert train["schedule"]["enum"] == ["constant", "linear", "cosine"]
    assert (train["lr"]["exclusiveMinimum"], train["lr"]["description"]) == (0, "The learning rate, after its warm-up.")
    assert made["properties"]["train"]["description"].startswith("The optimizer of the policy")
    assert main(["show"]) == 2
