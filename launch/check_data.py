"""The data of a run, opened in a process of its own as each of its processes opens them: rows and their fingerprints.

Reads a resolved config as JSON on stdin, writes {"rows": rows to train on, "fingerprints": {...}} on stdout, or {"error": text}.
What user code prints goes to stderr. Imports neither torch nor a model.

    python -m rondo.launch.check_data < runs/latest/config.resolved.json
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import orjson

from rondo.launch.config import RunConfig, resolve, unresolve
from rondo.roles.datasets import demonstrations, open_splits
from rondo.roles.fingerprints import Fingerprints
from rondo.runtime.errors import ConfigError, RondoError


def main() -> int:
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    config = unresolve(orjson.loads(sys.stdin.buffer.read()))
    try:
        answer.write(orjson.dumps(look(config)))
    except RondoError as error:
        answer.write(orjson.dumps({"error": str(error)}))
    answer.close()
    return 0


def look(config: RunConfig) -> dict[str, Any]:
    """Opens all data of a run in this process."""
    fingerprints = Fingerprints()
    train, _ = open_splits(config, fingerprints)
    if config.sft is not None and config.sft.demonstrate is None:
        demonstrations(config, fingerprints)
    return {"rows": len(train), "fingerprints": fingerprints.found}


def is_made(config: RunConfig) -> bool:
    """Whether functions of the user's make rows: what they give may differ from process to process."""
    return any(data.rows is not None or data.transform is not None for data in config.data_sections()) or (
        config.sft is not None and config.sft.rows is not None
    )


class Elsewhere:
    """The same look in another process, beside this one."""

    def __init__(self, config: RunConfig) -> None:
        command = [sys.executable, "-m", "rondo.launch.check_data"]
        with tempfile.TemporaryFile() as told:
            told.write(orjson.dumps(resolve(config)))
            told.seek(0)
            self._process = subprocess.Popen(command, stdin=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Its answer. ConfigError for what it could not open, or when it ended otherwise or took longer."""
        try:
            out, err = self._process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise ConfigError(f"data must be opened within {limit_s:g} s, got no end. See what they wait for") from None
        if self._process.returncode != 0:
            last = " | ".join(err.decode(errors="replace").strip().splitlines()[-5:])
            raise ConfigError(
                f"data must be opened without errors, got exit code {self._process.returncode}: {last or 'no output'}. "
                "Run the functions that the settings name by themselves"
            )
        found: dict[str, Any] = orjson.loads(out)
        if "error" in found:
            raise ConfigError(found["error"])
        return found


if __name__ == "__main__":
    sys.exit(main())
