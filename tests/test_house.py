"""What holds for the whole house: imports run one way, light modules stay light, the package lists every folder."""

from __future__ import annotations

import ast
import configparser
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BELOW = {
    "runtime": set(),
    "models": {"runtime"},
    "comm": {"runtime"},
    "roles": {"models", "comm", "runtime"},
    "launch": {"roles", "models", "comm", "runtime"},
}
LIGHT = (
    "rondo.runtime.supervision.supervisor",
    "rondo.runtime.admin.endpoint",
    "rondo.runtime.processes.pool",
    "rondo.runtime.processes.pool_worker",
    "rondo.comm.bus.serve",
    "rondo.comm.bus.bus",
    "rondo.roles.advantages",
    "rondo.roles.rewards.worker",
    "rondo.launch.cli",
    "rondo.launch.train",
)


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported_folders(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "rondo" else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("rondo.")}
    return found


def test_no_python_that_is_started_looks_for_modules_in_the_working_directory_first() -> None:
    """`-m` stands where `-P` stands before it: in `module_command`, which all use, and in the proxy, which imports nothing."""
    places: list[tuple[str, bool]] = []
    for path in (path for folder in BELOW for path in sources(folder)):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = (
                node.elts if isinstance(node, ast.List | ast.Tuple) else node.args if isinstance(node, ast.Call) else []
            )
            words = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            places += [(path.name, words[:at][-1:] == ["-P"]) for at, word in enumerate(words) if word == "-m"]
    assert sorted(places) == [("guard.py", True), ("proxy.py", True)]


@pytest.mark.parametrize("folder", BELOW)
def test_imports_run_one_way(folder: str) -> None:
    wrong = {
        str(path.relative_to(ROOT)): sorted(upward)
        for path in sources(folder)
        if (upward := imported_folders(path) - BELOW[folder] - {folder})
    }
    assert wrong == {}


def test_the_package_lists_every_folder_with_code() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    present = {
        "rondo." + str(path.parent.relative_to(ROOT)).replace("/", ".") for folder in BELOW for path in sources(folder)
    }
    assert present | {"rondo", "rondo.examples"} == listed


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=280)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


PICKLES = {"pickle", "cloudpickle", "dill", "marshal"}
WRITES_OPCODES = ROOT / "roles" / "engines" / "sglang" / "weights_payload.py"
"""SGLang's own wire asks for a pickle. It is written by hand, with the names of its opcodes, of things that are known."""


def test_nothing_is_pickled() -> None:
    users = {
        path
        for folder in BELOW
        for path in sources(folder)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and PICKLES & {alias.name for alias in node.names}
        | ({node.module} if isinstance(node, ast.ImportFrom) else set()) & PICKLES
    }
    assert users == {WRITES_OPCODES}
    used = {
        node.attr
        for node in ast.walk(ast.parse(WRITES_OPCODES.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle"
    }
    assert {name for name in used if not name.isupper()} == {"encode_long"}


@pytest.mark.parametrize("folder", BELOW)
def test_every_name_of_a_public_face_is_there(folder: str) -> None:
    face = importlib.import_module(f"rondo.{folder}")
    assert face.__all__ and all(getattr(face, name).__name__ == name for name in face.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = face.nothing
