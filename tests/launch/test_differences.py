"""Differences: what a run would not go on with unnoticed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from rondo.comm.bus.serve import CONFIG as COORDINATOR_CONFIG
from rondo.launch.check.data import Opened
from rondo.launch.code import FOLDER, as_kept, belonging_to, take
from rondo.launch.config import RunConfig, load, resolve
from rondo.launch.differences import accept, differences, refuse
from rondo.launch.rundir import RunDir, write_json
from rondo.roles.data.fingerprints import FILE as FINGERPRINTS
from rondo.runtime.errors import ConfigError
from tests.launch import configs


def begun(tmp_path: Path) -> tuple[Path, RunConfig]:
    """A run's directory and settings, as `rondo train` leaves them; its rows are those of a file."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{i}+1=", "label": "{i + 1}"}}\n' for i in range(40)))
    file = configs.write(tmp_path)
    settings = load(file, ["data.rows=null", f"data.path={rows}", "data.num_passes=2", f"run_dir={tmp_path}/runs"])
    taken = take(settings, file, tmp_path / "taken" / FOLDER)
    kept = as_kept(taken, tmp_path / "taken")
    with RunDir.create(tmp_path / "runs", "demo", resolve(kept), tmp_path / "taken" / FOLDER) as run:
        config = belonging_to(kept, run.path)
        found = Opened.of(config).fingerprints.found
        write_json(run.path / FINGERPRINTS, {name: asdict(each) for name, each in found.items()})
        write_json(run.path / COORDINATOR_CONFIG, {"rules": {"num_positions": 64}})
        return run.path, config


def test_a_run_around_which_nothing_changed_goes_on_also_when_its_users_file_was_edited(tmp_path: Path) -> None:
    run, config = begun(tmp_path)
    found = differences(run, config)
    assert found.changes == found.notes == ()
    (tmp_path / "demo_config.py").write_text("edited = True\n")
    found = differences(run, config)
    refuse(found)
    assert found.notes == (f"{tmp_path}/demo_config.py was changed; the run goes on with its copy",)


def test_other_data_packages_and_code_are_refused_a_line_each_until_they_are_accepted(tmp_path: Path) -> None:
    run, config = begun(tmp_path)
    environment = json.loads((run / "environment.json").read_text())
    (tmp_path / "local.py").write_text("")
    environment["packages"] |= {"torch": "1.0", "gone-since": "3.1"}
    environment["local_modules"] = {str(tmp_path / "local.py"): "0", str(tmp_path / "removed.py"): "0"}
    version, environment["python"] = environment["python"], "3.0"
    write_json(run / "environment.json", environment)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "7+7=", "label": "14"}\n')
    with (run / FOLDER / "demo_config.py").open("a") as file:
        file.write("EDITED = True\n")
    with pytest.raises(ConfigError) as caught:
        refuse(differences(run, config))
    first, *lines, last = str(caught.value).splitlines()
    assert first == "a run must go on with what it began with, got 7 changed:"
    assert last == "Change it back, or go on with it: `rondo resume --accept-changes`"
    starts = [
        f"python was 3.0, and is {version}", "torch was 1.0, and is ", "gone-since was 3.1, and is gone",
        f"{run}/code/demo_config.py, a copy that the run made, was changed",
        f"{tmp_path}/local.py, which the run's code imports, was changed",
        f"{tmp_path}/removed.py, which the run's code imports, is gone",
        "data had 40 rows with digest ",
    ]  # fmt: skip
    assert len(lines) == 7 and all(line.startswith(f"  {start}") for line, start in zip(lines, starts, strict=True)), (
        lines
    )
    assert ", and has 41 rows with digest " in lines[-1]
    accept(run, config, found := differences(run, config))
    assert differences(run, config).changes == ()
    environment = json.loads((run / "environment.json").read_text())
    assert environment["accepted"][0]["changes"] == list(found.changes) and "gone-since" not in environment["packages"]
    assert json.loads((run / COORDINATOR_CONFIG).read_text())["rules"]["num_positions"] == 2 * (41 - 8)
    assert (run / "environment.json").stat().st_mode & 0o777 == 0o600
