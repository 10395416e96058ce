"""Which of rondo's packages this Python has not, and of which it has another version than setup.cfg names. Standard library only:
`make gpu` asks where it could not install them, and goes on where none is missing.

    python benchmarks/gpu_parts/packages.py
"""

from __future__ import annotations

import configparser
import importlib.metadata
import re
import sys
from pathlib import Path

SETUP = Path(__file__).resolve().parents[2] / "setup.cfg"


def lacking(setup: Path = SETUP) -> tuple[list[str], list[str]]:
    """(those that are not there, those that are, with their versions): as setup.cfg names them."""
    config = configparser.ConfigParser()
    config.read(setup)
    missing, there = [], []
    for wanted in config["options"]["install_requires"].split():
        name = re.split(r"[<>=!~\[]", wanted)[0]
        try:
            there.append(f"{wanted} ({importlib.metadata.version(name)})")
        except importlib.metadata.PackageNotFoundError:
            missing.append(wanted)
    return missing, there


if __name__ == "__main__":
    absent, present = lacking()
    print(f"{sys.executable} has, for what is wanted: {', '.join(present) or 'nothing'}")
    if absent:
        print(
            f"MISSING: {', '.join(absent)}. Bring them as wheels: pip install --no-index --find-links FOLDER NAME ..."
        )
    sys.exit(bool(absent))
