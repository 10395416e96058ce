"""What rondo does on the GPUs of this machine: its CUDA tests, then parts of under ten minutes, each by itself.

    rondo bench gpu [PART ...] [--sglang PATH/bin/python] [--out FILE]

    tests        the tests that need a GPU, over NCCL where there are two
    quick_start  `examples/quickstart.py` on the GPUs: seconds, and what it learns
    training     Qwen3-4B-shaped random weights: tokens/s and share of the chip's peak, packed against padded, by attention
    copies       hot snapshot and publication: GB/s, and how much of them hides behind a step
    sglang       a server: start, sleep, wake, and new weights by each path
    gap          bfloat16 log-probs of the trainer against those of the embedded engine and of SGLang

Every part is a process of its own with a deadline. What it finds, or why it failed, is written into FILE (`gpu.json`) before the
next one begins, so that one that fails stops no other, and a run that is killed keeps what it had; a part that is run again
replaces its own figures alone. `make gpu` installs what is missing and runs all of them; `rondo bench table` writes the docs'
table. `--device cpu --tiny` runs the same code on small sizes anywhere, and says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rondo.launch.bench import ROOT, machine
from rondo.runtime.processes import guard

PARTS = {"tests": 540, "quick_start": 540, "training": 580, "copies": 300, "sglang": 580, "gap": 540}
"""Name -> seconds after which it is ended."""
OUT = ROOT / "benchmarks" / "results" / "gpu.json"
FOUND = "figures: "
_LAST_LINES = 12
"""Of a part that failed, which are kept as why."""


@dataclass(frozen=True, slots=True)
class Options:
    """What every part is told. `sglang`: the interpreter of SGLang's environment, None where there is none. `tiny`: sizes for
    tests. `environment`: variables for a server."""

    device: str = "cuda"
    tiny: bool = False
    sglang: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        """GPUs of this machine; 0 where parts compute on the CPU."""
        import torch

        return torch.cuda.device_count() if self.device == "cuda" else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all of them without one")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes that say nothing, for a look at whether it runs")
    parser.add_argument("--sglang", help="the interpreter of SGLang's environment; .venv-sglang beside the sources")
    parser.add_argument("--environment", nargs="*", default=[], metavar="NAME=VALUE", help="for SGLang's servers")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"PART must be one of {', '.join(PARTS)}, got {', '.join(unknown)}")
    beside = ROOT / ".venv-sglang" / "bin" / "python"
    options = Options(
        given.device, given.tiny, given.sglang or (str(beside) if beside.exists() else None),
        dict(each.split("=", 1) for each in given.environment),
    )  # fmt: skip
    if given.inside:
        return inside(given.parts[0], options)
    return run(given.parts or list(PARTS), options, given.out)


def run(parts: list[str], options: Options, out: Path) -> int:
    """Runs them one after the other; 0 where none failed."""
    about = {"command": "rondo bench gpu", **machine(), "device": device(options)}
    print(json.dumps(about["device"]), flush=True)
    if options.device == "cuda" and not options.num_devices:
        print(f"no GPU: {_why_none()}", file=sys.stderr)
        return 1
    kept = kept_from(out, about)
    for part in parts:
        print(f"\n== {part} (at most {PARTS[part]} s)", flush=True)
        kept["parts"][part] = found = one(command_of(part, options), PARTS[part])
        kept["load_after"] = os.getloadavg()
        write(out, kept)
        print(f"-- {part}: {found.get('error', 'done')}\n-- {found['seconds']:.0f} s; kept in {out}", flush=True)
    failed = [part for part in parts if "error" in kept["parts"][part]]
    print(
        f"\n{len(parts) - len(failed)} of {len(parts)} parts are done"
        + (f", not {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


def command_of(part: str, options: Options) -> list[str]:
    given = [f"--device={options.device}", *(["--tiny"] if options.tiny else [])]
    given += [f"--sglang={options.sglang}"] if options.sglang else []
    given += ["--environment", *(f"{name}={value}" for name, value in options.environment.items())]
    return [sys.executable, "-m", "benchmarks.gpu", part, "--inside", *given]


def one(command: list[str], deadline_s: float) -> dict[str, Any]:
    """{"at", "seconds", "figures", "error"} of a part in a process, and a session, of its own: what it had found last, where it
    found something, and why it ended, where it failed."""
    guarded = [sys.executable, guard.__file__, "--parent", str(os.getpid()), "--", *command]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    began, last, found = time.time(), list[str](), None
    process = subprocess.Popen(
        guarded, cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    end = threading.Timer(deadline_s, os.killpg, (process.pid, signal.SIGKILL))
    end.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(FOUND):
                found = json.loads(line.removeprefix(FOUND))
                continue
            print(line, end="", flush=True)
            last = [*last[1 - _LAST_LINES :], line.rstrip()]
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # until it is waited for, its number is nobody else's
    finally:
        rang = not end.is_alive()
        end.cancel()
        os.killpg(process.pid, signal.SIGKILL)  # what it has left behind
        code = process.wait()
    told: dict[str, Any] = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began))}
    told["seconds"] = round(time.time() - began, 1)
    if found is not None:
        told["figures"] = found
    if code or found is None:
        told["error"] = "\n".join([f"ended after {deadline_s:g} s" if rang else f"exit code {code}", *last])
    return told


def inside(part: str, options: Options) -> int:
    """The part itself, which tells its figures as it finds them."""
    try:
        importlib.import_module(f"benchmarks.gpu_parts.{part}").measure(options, tell)
    except Exception:  # noqa: BLE001  # whatever it is, it is this part's outcome
        traceback.print_exc()
        return 1
    return 0


def tell(figures: dict[str, Any]) -> None:
    """All that the part has found so far."""
    print(FOUND + json.dumps(figures), flush=True)


def device(options: Options) -> dict[str, Any]:
    """What computes: name and number of the GPUs, their memory, driver, CUDA and NCCL of this torch."""
    import torch
    from torch.cuda import nccl

    if not options.num_devices:
        return {"name": "CPU", "count": 0}
    found = torch.cuda.get_device_properties(0)
    version = nccl.version() if torch.distributed.is_nccl_available() else ()
    return {
        "name": found.name, "count": options.num_devices, "memory_gib": round(found.total_memory / 2**30, 1),
        "capability": f"{found.major}.{found.minor}", "driver": driver(), "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, version)),
    }  # fmt: skip


def driver() -> str | None:
    """The version of NVIDIA's driver, as `nvidia-smi` says; None without it."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.split("\n")[0].strip() or None


def _why_none() -> str:
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA. Install the build for your driver "
            f"({driver() or 'nvidia-smi does not answer'}) as https://pytorch.org/get-started/locally/ says: "
            "rm -r .venv; make gpu TORCH_INDEX=https://download.pytorch.org/whl/cu130"
        )
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} sees none with driver {driver()}. An older driver needs a "
        "build for an older CUDA: rm -r .venv; make gpu TORCH_INDEX=https://download.pytorch.org/whl/cu126"
    )


def kept_from(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """What was found before on the same devices by the same versions, under what is known of this run; else nothing."""
    if out.exists():
        before = json.loads(out.read_text())
        if all(before.get(name) == about[name] for name in ("device", "versions")):
            return before | about
    return about | {"parts": {}}


def write(out: Path, kept: dict[str, Any]) -> None:
    """Whole or not at all."""
    aside = out.with_name(f".{out.name}.partial")
    aside.write_text(json.dumps(kept, indent=2) + "\n")
    aside.rename(out)


if __name__ == "__main__":
    sys.exit(main())
