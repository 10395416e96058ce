"""`rondo bench`: run one of the benchmarks of a checkout.

Owns where they are found, and what is kept of a run: the last line that a benchmark prints is its figures as one JSON object,
which go into `benchmarks/results/` with the command, the machine, its load and the versions. They are programs of their own in
`benchmarks/`, which an installed package does not carry: they time the machine they run on beside its peers.

    rondo bench bus --repetitions 3        is       python -m benchmarks.bus --repetitions 3       in the checkout
    rondo bench trl --as trl_long ...      keeps its figures beside those of other options, in results/trl_long.json
"""

from __future__ import annotations

import ast
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from rondo.launch.machine import fields_of
from rondo.runtime.errors import ConfigError
from rondo.runtime.formats import version_of
from rondo.runtime.processes.guard import module_command

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
    options, label = list(options), name
    if "--as" in options[:-1]:
        at = options.index("--as")
        label = options[at + 1]
        del options[at : at + 2]
        if not label.isidentifier():
            raise ConfigError(f"--as must be a name of letters, digits and _, got {label!r}")
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    command = module_command(f"benchmarks.{name}", *options)
    about, last = machine(), ""
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if line.strip() else last
    if process.returncode == 0 and last.startswith("{"):
        about |= {"command": shown(name, options, label), "load_after": os.getloadavg()}
        to = root / "benchmarks" / "results" / f"{label}.json"
        to.parent.mkdir(exist_ok=True)
        to.write_bytes(orjson.dumps(about | {"figures": orjson.loads(last)}, option=orjson.OPT_INDENT_2) + b"\n")
    return process.returncode


def machine() -> dict[str, Any]:
    """What a figure depends on beside the code: processor, cores, load, and the versions of what computes. `load_*`: processes
    that ran or waited, over the last 1, 5 and 15 minutes."""
    known = fields_of(Path("/proc/cpuinfo"))
    flags = known.get("flags", known.get("Features", "")).split()
    found = {name: version_of(name) for name in ("torch", "transformers", "numpy", "uvloop", "aiohttp", "orjson")}
    versions = {"python": platform.python_version()} | {name: version for name, version in found.items() if version}
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": known.get("model name", platform.machine()), "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in flags if flag.startswith(("avx", "amx", "fma", "asimd", "sve"))],
        "load_before": os.getloadavg(), "versions": versions,
    }  # fmt: skip


def shown(name: str, options: Sequence[str], label: str) -> str:
    """The command without folders of this machine: an interpreter of peers is `PEERS_VENV/bin/python` everywhere."""
    peers = [f"PEERS_VENV/bin/{Path(word).name}" if "/bin/" in word else word for word in options]
    kept_as = ("--as", label) if label != name else ()
    return shlex.join(
        ("rondo", "bench", name, *kept_as, *(Path(word).name if word.startswith("/") else word for word in peers))
    )


def benchmarks(root: Path) -> dict[str, str]:
    """Name -> the first line of what it says of itself, of every benchmark that is a program."""
    found = {}
    for path in sorted((root / "benchmarks").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "argparse" in text and "__main__" in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found
