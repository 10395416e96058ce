"""`rondo export`: the weights of a checkpoint as a Hugging Face folder, whatever number of processes wrote it.

Owns which checkpoint is meant and where its model's config and tokenizer lie. Does not own the folder (`models/checkpoint.py`).
"""

from __future__ import annotations

from pathlib import Path

from rondo.launch.rundir import existing_run, read_json
from rondo.runtime.checkpoints import MARKER, newest_complete
from rondo.runtime.errors import ConfigError


def main(source: Path, out: Path, dtype: str) -> int:
    """Export the newest checkpoint of the run `source`, or the one that it is. ConfigError where there is none, or `out` is
    there."""
    if out.exists():
        raise ConfigError(f"OUT must be a folder that is not there yet, got {out}. Remove it, or name another")
    if (source / MARKER).is_file():
        checkpoint, run = source, existing_run(source.resolve().parent.parent)
    else:
        run = existing_run(source)
        found = newest_complete(run / "checkpoints")
        if found is None:
            raise ConfigError(f"RUN must have a whole checkpoint, got {run} without one. Wait for it to save")
        checkpoint = found
    told = str(read_json(run / "prepared.json")["model_path"])
    local = run / told  # what was built lies in the run directory, wherever that is by now
    from rondo.models.checkpoint import export  # loads torch

    export(checkpoint, out.absolute(), str(local) if local.is_dir() else told, dtype=dtype)
    print(f"{out}: {checkpoint.name} of {run.name} in {dtype}")
    return 0
