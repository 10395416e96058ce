"""The tests that need a GPU, over NCCL those that need two: marked `cuda`, and skipped by everybody else's runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import Options
from rondo.launch.bench import ROOT


def measure(options: Options, tell: Callable[[dict[str, Any]], None]) -> None:
    found = run(marked(ROOT / "tests"))
    tell(found)
    if found["failed"]:
        raise RuntimeError(f"every test must pass, got failures of {', '.join(found['failed'])}")


def marked(folder: Path) -> list[Path]:
    """The files with such tests: no other is imported."""
    return sorted(path for path in folder.rglob("test_*.py") if "mark.cuda" in path.read_text())


def run(files: Sequence[Path]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rondo-gpu-") as aside:
        told = Path(aside) / "told.xml"
        command = [sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", f"--junitxml={told}"]
        code = subprocess.run([*command, *map(str, files)], cwd=ROOT, check=False).returncode
        if not told.exists():
            raise RuntimeError(f"pytest must tell of its tests, got exit code {code} and nothing")
        cases = list(ElementTree.parse(told).iter("testcase"))
    kinds = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("skipped", "failure", "error")}
    bad = [*kinds["failure"], *kinds["error"]]
    return {
        "passed": len(cases) - len(bad) - len(kinds["skipped"]),
        "skipped": len(kinds["skipped"]),
        "failed": sorted(f"{case.get('classname')}::{case.get('name')}" for case in bad),
    }
