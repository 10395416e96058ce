"""The model's files of a run, ready before any role starts: a child process (`python -m rondo.launch.prepare`).

Owns making `runs/<name>/model/` for a model that is built rather than loaded; for others it answers where the files are. It
runs in a process of its own because building needs torch and transformers, and the supervisor imports neither.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson

from rondo.launch.config import RunConfig, unresolve
from rondo.launch.rundir import write_json
from rondo.runtime.errors import ConfigError

PREPARED = "prepared.json"
_LIMIT_S = 600.0


def prepare(config: RunConfig, run_dir: Path) -> int:
    """Write `prepared.json` ({"model_path", "devices", "num_rows"}) unless it is there. The number of rows to train on."""
    path = run_dir / PREPARED
    if not path.exists():
        command = [sys.executable, "-m", "rondo.launch.prepare", str(run_dir)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"the model must be prepared within {_LIMIT_S:g} s, got no end. See what loads it"
            ) from error
        if done.returncode != 0:
            last = " | ".join(done.stderr.strip().splitlines()[-5:])
            raise ConfigError(
                f"the model must be prepared without errors, got {last or 'no output'}. Run `rondo check`"
            )
    num_rows: int = orjson.loads(path.read_bytes())["num_rows"]
    return num_rows


def main() -> None:
    from rondo.roles.datasets import open_splits

    run_dir = Path(sys.argv[1])
    config = unresolve(orjson.loads((run_dir / "config.resolved.json").read_bytes()))
    model_path = config.model.materialize(run_dir / "model")
    train, _ = open_splits(config)
    devices = {group.name: group.devices for group in config.groups}
    write_json(run_dir / PREPARED, {"model_path": str(model_path), "devices": devices, "num_rows": len(train)})


if __name__ == "__main__":
    main()
