"""`rondo bench`: run one of the benchmarks of a checkout.

Owns where they are found. They are programs of their own in `benchmarks/`, which an installed package does not carry: they time
the machine they run on beside its peers, and are read as often as they are run.

    rondo bench bus --repetitions 3        is       python -m benchmarks.bus --repetitions 3       in the checkout
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rondo.runtime.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def run(name: str | None, options: Sequence[str], root: Path = ROOT) -> int:
    """Runs `name` and returns its exit code; without a name, lists all. ConfigError where there is no such benchmark."""
    known = benchmarks(root)
    if not known:
        raise ConfigError(
            f"benchmarks must lie beside the package, got none in {root / 'benchmarks'}. Run it in a checkout of rondo"
        )
    if name is None:
        for found, line in known.items():
            print(f"{found:12} {line}")
        return 0
    if name not in known:
        raise ConfigError(f"NAME must be one of {', '.join(known)}, got {name!r}. `rondo bench` says what they measure")
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode


def benchmarks(root: Path) -> dict[str, str]:
    """Name -> the first line of what it says of itself, of every benchmark that is a program."""
    found = {}
    for path in sorted((root / "benchmarks").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "argparse" in text and "__main__" in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found
