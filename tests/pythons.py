"""What needs no torch, on the other versions of Python that the package names: torch's wheels need not be there for them.

    python tests/pythons.py 3.12 3.13            as `make test-pythons`

For each version that is installed (as `python3.12`, or by pyenv): an environment of its own under `build/`, every file compiled,
and the tests of what imports no torch. A version that is not installed is told, and is no failure.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIGHT = ("aiohttp", "numpy", "orjson", "psutil", "pydantic", "rich", "uvloop")
TOOLS = ("hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
FOLDERS = ("runtime", "comm", "models", "roles", "launch", "examples", "benchmarks", "tests")
TESTS = tuple(
    f"tests/{folder}/test_{name}.py"
    for folder, names in {
        "runtime": "errors section waits",
        "runtime/actors": "actor transport",
        "runtime/admin": "endpoint",
        "runtime/records": "record timeline",
        "runtime/supervision": "heartbeat machine",
        "comm/ring": "records ring spans words",
        "comm/bus": "balance coordinator evaluations index journal schedules space updates versions",
        "launch": "config plan rundir",
        "launch/report": "explain status summary",
        "roles": "config",
        "roles/data": "cursor datasets",
        "roles/training": "compute_turns",
    }.items()
    for name in names.split()
)


def interpreter(version: str) -> str | None:
    """One that runs, not a name that only says where it would be found."""
    known = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for found in filter(None, known):
        asked = subprocess.run(
            [found, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0 and asked.stdout.startswith(f"{version}."):
            return found
    return None


def environment(python: str, folder: Path) -> str:
    """The interpreter of an environment with the light half of what the package and its tests need, in the tested versions."""
    own = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
        asked = [f"{name}=={pinned[name]}" for name in (*LIGHT, *TOOLS)]
        subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
        constraints = str(ROOT / "constraints.txt")
        subprocess.run([own, "-m", "pip", "install", "--quiet", "--constraint", constraints, *asked], check=True)
        (folder / ".ready").touch()
    return str(own)


def main(versions: list[str]) -> int:
    codes = []
    for version in versions:
        python = interpreter(version)
        if python is None:
            print(f"Python {version} is not installed: not tested")
            continue
        own = environment(python, ROOT / "build" / f"python{version}")
        paths = os.pathsep.join((str(ROOT / ".typing"), str(ROOT)))
        variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        for line in (
            [own, "-m", "compileall", "-q", *FOLDERS],
            [own, "-m", "rondo.launch.cli", "--help"],
            [
                own,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-n",
                "2",
                "--dist",
                "loadfile",
                "-W",
                "ignore",
                *TESTS,
            ],
        ):
            codes.append(subprocess.run(line, cwd=ROOT, env=variables, check=False).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
