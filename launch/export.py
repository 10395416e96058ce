"""`rondo export`: the weights of a checkpoint as a Hugging Face folder, or its adapter as the folder that peft loads, whatever
number of processes wrote it.

Owns where its model's config and tokenizer lie. Does not own which checkpoint is meant (`rundir.py`) or the folder
(`models/checkpoint.py`).
"""

from __future__ import annotations

from pathlib import Path

from rondo.launch.progress import at_work
from rondo.launch.rundir import checkpoint_of, read_json
from rondo.models.config import LoraConfig
from rondo.runtime.errors import ConfigError


def main(source: Path, out: Path, dtype: str, merged: bool = False, checkpoint: str | None = None) -> int:
    """Export a checkpoint of the run `source`, or the one that it is. `merged`: the base with its adapter. ConfigError where
    there is none, or `out` is there."""
    if out.exists():
        raise ConfigError(f"OUT must be a folder that is not there yet, got {out}. Remove it, or name another")
    run, found = checkpoint_of(source, checkpoint)
    told = str(read_json(run / "prepared.json")["model_path"])
    local = run / told  # what was built lies in the run directory, wherever that is by now
    path = str(local) if local.is_dir() else told
    lora = adapters_of(run)
    if lora is None and merged:
        raise ConfigError(
            f"--merged must be given for a run that trains adapters, got {run} without train.lora. Remove it"
        )
    with at_work(f"writes {found.name} of {run.name}"):
        from rondo.models.adapter_export import export_adapter, export_merged  # load torch
        from rondo.models.checkpoint import export

        scores = read_json(run / "config.resolved.json").get("job") == "reward_model"
        if lora is None:
            export(found, out.absolute(), path, dtype=dtype, scores=scores)
        else:
            write = export_merged if merged else export_adapter
            write(found, out.absolute(), path, lora, dtype=dtype, scores=scores)
    what = "" if lora is None else "base and adapter of " if merged else "adapter of "
    print(f"{out}: {what}{found.name} of {run.name} in {dtype}")
    return 0


def adapters_of(run: Path) -> LoraConfig | None:
    """What adapters the run trains; None where it trains its model."""
    lora = read_json(run / "config.resolved.json")["train"].get("lora")
    return None if lora is None else LoraConfig.model_validate(lora)
