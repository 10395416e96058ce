"""`rondo export`: the weights of a checkpoint as a Hugging Face folder, whatever number of processes wrote it.

Owns where its model's config and tokenizer lie. Does not own which checkpoint is meant (`rundir.py`) or the folder
(`models/checkpoint.py`).
"""

from __future__ import annotations

from pathlib import Path

from rondo.launch.rundir import checkpoint_of, read_json
from rondo.runtime.errors import ConfigError


def main(source: Path, out: Path, dtype: str, checkpoint: str | None = None) -> int:
    """Export a checkpoint of the run `source`, or the one that it is. ConfigError where there is none, or `out` is there."""
    if out.exists():
        raise ConfigError(f"OUT must be a folder that is not there yet, got {out}. Remove it, or name another")
    run, found = checkpoint_of(source, checkpoint)
    told = str(read_json(run / "prepared.json")["model_path"])
    local = run / told  # what was built lies in the run directory, wherever that is by now
    from rondo.models.checkpoint import export  # loads torch

    export(found, out.absolute(), str(local) if local.is_dir() else told, dtype=dtype)
    print(f"{out}: {found.name} of {run.name} in {dtype}")
    return 0
