"""Manifest: what a run was made of, in one file of its directory, and what of it is other in another run, or here and now.

Owns the gathering, `manifest.json`, and where two of them differ. Does not own what is gathered: each part is written by who
knows it. Where a resume accepts changes the parts, and the manifest with them, are what the run has from then on.

    runs/quickstart/manifest.json
      settings  digest of config.resolved.json
      rules     digest of coordinator.json
      changes   settings that a resume changed, and from which step on
      code      digest of each file; commit and diff (`git.diff`) of the repository that it was started in
      data      rows and digest of each set
      packages  versions of all that is installed, Python's, rondo's commit
      machine   host, processor, cores, memory, devices, kernel

`rondo compare` (`report/compare.py`) reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rondo.comm.bus.serve import CONFIG as COORDINATOR_CONFIG
from rondo.launch.code import copied, digest
from rondo.launch.rundir import CONFIG, DIFF, PRIVATE, changed_settings, read_json, write_json
from rondo.roles.data.fingerprints import FILE as FINGERPRINTS

FILE = "manifest.json"
_ABSENT = "-"


def gathered(run: Path, told: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the run at `run` was made of, from its files; or of what is `told` in the place of its environment.json."""
    told = read_json(run / "environment.json") if told is None else told
    git = told.get("git") or {}
    return {
        "time": told["time"],
        "command": told["command"],
        "cwd": told["cwd"],
        "settings": digest(run / CONFIG),
        "rules": digest(run / COORDINATOR_CONFIG),
        "changes": changed_settings(told),
        "code": {
            "files": {str(each.path.relative_to(run / "code")): each.digest for each in copied(run)},
            "local_modules": told.get("local_modules", {}),
            "commit": git.get("commit"),
            "changed": git.get("changed"),
            "diff": digest(run / DIFF),
        },
        "data": read_json(run / FINGERPRINTS) if (run / FINGERPRINTS).is_file() else {},
        "packages": {
            "python": told["python"],
            **told.get("installed", {}),
            **told["packages"],
            "rondo (commit)": (told.get("rondo") or {}).get("commit"),
        },
        "machine": {"platform": told["platform"], "num_cores": told["num_cores"], **told.get("machine", {})},
    }


def write(run: Path) -> None:
    """The file, as things are."""
    write_json(run / FILE, gathered(run), PRIVATE)


def parted(first: Mapping[str, Any], second: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, value in the first, value in the second) where two trees differ; "-" where there is none, or None."""
    for name in dict.fromkeys([*first, *second]):
        a, b = (_ABSENT if tree.get(name) is None else tree[name] for tree in (first, second))
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from parted(a, b, f"{place}{name}.")
        elif a != b:
            yield f"{place}{name}", a, b
