"""`rondo sglang install`: builds the environment in which SGLang's servers run.

Owns what is in it. It is an environment of its own, since SGLang pins another torch and another transformers than rondo's; rondo
knows it by its interpreter alone (`rollout.sglang.python`). Starts no server.

    rondo sglang install .venv-sglang            a machine with GPUs: SGLang with the torch and the kernels that it asks for
    rondo sglang install .venv-sglang --cpu      a machine without: the same version, with what can be installed there

Invariant: SGLang itself comes last, so an environment that has it is whole; a second call finds it, and does nothing.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from rondo.runtime.errors import ConfigError, RondoError
from rondo.runtime.processes.guard import module_command

VERSION = "0.5.23"
"""The newest that the tests have met."""
_ASK_S = 60.0
_HERE = Path(__file__).parent
_TORCH_CPU = "torch==2.13.0"


def install(path: Path, *, cpu: bool) -> int:
    """Builds it, unless it is there; prints how to use it. RondoError where a step fails, which has told why."""
    python = path.absolute() / "bin" / "python"
    if python.exists() and has_sglang(str(python)) == VERSION:
        print(f"{path} has SGLang {VERSION} already")
        return 0
    if path.exists() and not (path / "pyvenv.cfg").exists() and any(path.iterdir()):
        raise ConfigError(f"PATH must be a new folder or a virtual environment, got {path}. Choose another")
    for command in commands(path, cpu=cpu):
        print("  ", " ".join(command), flush=True)
        if subprocess.run(command, check=False).returncode != 0:
            raise RondoError(f"every step must succeed, got a failure of `{' '.join(command)}`. Correct it, and repeat")
    print(f"SGLang {VERSION} is in {path}: set rollout.sglang=SGLangConfig(python={str(python)!r})")
    return 0


def has_sglang(python: str) -> str | None:
    """The version of SGLang that this interpreter has, None without one. ConfigError for an interpreter that does not run."""
    ask = "import importlib.metadata; print(importlib.metadata.version('sglang'))"
    try:
        told = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"{python} must be an interpreter that answers, got {error}. Build an environment anew"
        ) from error
    return told.stdout.strip() if told.returncode == 0 else None


def commands(path: Path, *, cpu: bool) -> list[Sequence[str]]:
    """The steps, each of them a command."""
    pip = module_command("pip", "install", "--quiet", python=str(path / "bin" / "python"))
    made: list[Sequence[str]] = [module_command("venv", str(path))]
    if not cpu:
        return [*made, [*pip, f"sglang=={VERSION}"]]
    # torch comes first and by itself, so that nothing replaces the build that this machine's index offers.
    return [
        *made,
        [*pip, _TORCH_CPU],
        [*pip, _TORCH_CPU, "--requirement", str(_HERE / "sglang-cpu.txt")],
        [*pip, "--no-deps", "--requirement", str(_HERE / "sglang-cpu-only.txt")],
    ]
