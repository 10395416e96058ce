"""What a service is told of a run is its points and its settings: nothing of the machine, the code beside it, its terminal or its
environment. Needs TRACK_PYTHON, a Python that has the services' packages, which `make test-track` brings."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.track.test_follow import made_run

PYTHON = os.environ.get("TRACK_PYTHON", "")
LINKS = Path(__file__).parents[3] / ".typing"
SECRETS = (
    "edited-not-committed", "in-the-environment", "of-the-servers", "said-on-the-terminal", "of-a-remote", "name-of-the-machine",
    platform.release(), "uvloop==", "-m rondo.launch", "diff --git",
)  # fmt: skip
FOLLOW = """
import platform, runpy, socket, sys
socket.gethostname = socket.getfqdn = platform.node = lambda *_: "name-of-the-machine"
print("said-on-the-terminal", flush=True)
runpy.run_module("rondo.launch.track.follow", run_name="__main__")
"""
pytestmark = pytest.mark.skipif(not PYTHON, reason="TRACK_PYTHON names no Python")


def written(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file below it, those in archives too."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        data = path.read_bytes()
        yield path, data
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(path) as archive:
                yield from ((path / name, archive.read(name)) for name in archive.namelist())


@pytest.mark.parametrize("service", ["clearml", "swanlab", "wandb", "trackio", "mlflow"])
def test_a_service_is_told_nothing_that_is_not_of_the_run(tmp_path: Path, service: str) -> None:
    code, run, kept = tmp_path / "code", tmp_path / "runs" / "demo", tmp_path / "kept"
    made_run(run)
    kept.mkdir()
    tracker = {"name": service, "offline": service in ("clearml", "swanlab", "wandb"), "folder": str(kept)}
    if service == "mlflow":
        tracker = {"name": service, "url": f"sqlite:///{kept}/mlflow.db"}
    settings = json.loads((run / "config.resolved.json").read_text())
    rollout = {"sglang": {"environment": {"KEY": "of-the-servers"}}}
    (run / "config.resolved.json").write_text(json.dumps(settings | {"trackers": [tracker], "rollout": rollout}))
    code.mkdir()
    for command in (
        ("init", "--quiet"), ("remote", "add", "origin", "https://of-a-remote.example/x.git"), ("add", "."),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "."),
    ):  # fmt: skip
        (code / "mine.py").write_text("lr = 1\n")
        subprocess.run(["git", *command], cwd=code, check=True)
    (code / "mine.py").write_text("lr = 'edited-not-committed'\n")
    told = subprocess.run(
        [PYTHON, "-c", FOLLOW, str(run), service], cwd=code, input="", text=True,
        capture_output=True, timeout=240, check=False,
        env=os.environ | {"PYTHONPATH": str(LINKS), "HOME": str(kept), "API_KEY": "in-the-environment"},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr[-3000:]
    files = list(written(kept))
    assert any(b"loss" in data for _, data in files), "it was told nothing at all"
    for secret in SECRETS:
        assert [str(path) for path, data in files if secret.encode() in data] == [], secret
