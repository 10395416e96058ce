"""Manifests, and runs that are started again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rondo.launch import cli, rerun
from rondo.launch.config import RunConfig
from rondo.launch.manifest import FILE, gathered, parted, write
from rondo.launch.rundir import DIFF, RunDir, write_json
from rondo.launch.train import TrainOptions
from tests.launch.test_differences import begun


def test_a_manifest_has_settings_code_data_packages_and_machine_in_one_private_file(tmp_path: Path) -> None:
    run, _ = begun(tmp_path)
    write(run)
    assert (run / FILE).stat().st_mode & 0o777 == 0o600
    found = json.loads((run / FILE).read_text())
    assert found == gathered(run)
    assert list(found["code"]["files"]) == ["demo_config.py"]
    assert found["data"]["data"]["num_rows"] == 40
    assert found["packages"].keys() >= {"python", "torch", "pytest"}  # what is installed, whether it is imported or not
    assert found["machine"].keys() >= {"host", "processor", "memory", "num_cores", "platform"}


def test_what_a_repository_has_beyond_its_commit_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    (tmp_path / "mine.py").write_text("LR = 1\n")
    git("init", "--quiet")
    git("add", "mine.py")
    git("commit", "--quiet", "-m", "first")
    (tmp_path / "mine.py").write_text("LR = 2\n")
    monkeypatch.chdir(tmp_path)
    run, _ = begun(tmp_path)
    assert "-LR = 1\n+LR = 2\n" in (run / DIFF).read_text()
    assert (run / DIFF).stat().st_mode & 0o777 == 0o600
    assert gathered(run)["code"]["changed"] is True
    git("checkout", "--quiet", "mine.py")
    with RunDir.create(tmp_path / "runs", "clean", {}) as clean:
        assert not (clean.path / DIFF).exists()


def test_two_trees_part_at_their_leaves() -> None:
    found = list(parted({"a": {"b": 1, "c": [2]}, "d": 3, "f": None}, {"a": {"b": 1, "c": [4]}, "e": {}}))
    assert found == [("a.c", [2], [4]), ("d", 3, "-"), ("e", "-", {})]


def test_a_run_is_started_again_with_its_own_code_and_what_differs_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, config = begun(tmp_path)
    started: list[tuple[RunConfig, TrainOptions]] = []
    monkeypatch.setattr(rerun, "main", lambda config, options, nursery: started.append((config, options)) or 7)
    assert cli.main(["rerun", str(run), "--dry-run"]) == 0
    assert started == []
    assert "nothing differs: the same code, settings, data, packages and machine" in capsys.readouterr().out
    told = json.loads((run / "environment.json").read_text())
    told["packages"]["torch"] = "1.0"
    told["installed"] |= {"left-pad": "1.3"}
    told["num_cores"] = 4096
    write_json(run / "environment.json", told)
    (tmp_path / "demo_config.py").write_text("edited = True\n")
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "7+7=", "label": "14"}\n')
    assert cli.main(["rerun", str(run), "--set", "seed=5", "--plain"]) == 7
    out = capsys.readouterr().out
    for line in (
        "differs: torch was 1.0, and is ",
        "differs: packages: left-pad was 1.3, and is -",
        "differs: machine: num_cores was 4096, and is ",
        "differs: data had 40 rows with digest ",
        "differs: seed=5, as asked",
        f"note: {tmp_path}/demo_config.py was changed; the copy is taken",
    ):
        assert line in out
    assert out.count("torch was 1.0") == 1
    ((again, options),) = started
    assert again == config.model_copy(update={"seed": 5})
    assert options.config_path == run / "config.py"
    assert options.config_path.read_text() != "edited = True\n"
