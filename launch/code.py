"""Code: the user's modules, taken into the run directory, so that what a run trains with is what it was started with.

    runs/quickstart/
      config.py -> code/quickstart.py
      code/  rondo_code.json  quickstart.py  rewards.py  my_package/...  elsewhere/1/other.py

Owns which files are taken, and what a run tells about code that is not. Does not own how taken files are imported
(`runtime/reference.py`) or what becomes of differences (`differences.py`).

Taken are the config module, the files that its settings name, and every module beside them that one of these imports: by an
import statement anywhere in them, also inside a function, or while they were loaded. Of a package beside them all modules are
taken. What is installed is named with its version; a module that is neither is named with a digest of its files.

Invariant: in the settings that `take` returns every function of a taken file is named by its copy.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel

from rondo.runtime.errors import ConfigError
from rondo.runtime.reference import TAKEN, file_of, is_installed, relative_to
from rondo.runtime.section import references, with_references

FOLDER = "code"
_Config = TypeVar("_Config", bound=BaseModel)


@dataclass
class _Found:
    """Files to take, by where they will lie; names to import them by; and what their code imports from elsewhere."""

    base: Path
    files: dict[str, Path] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    folders: list[Path] = field(default_factory=list)

    def place(self, file: Path) -> str:
        """Where a file lies in the copy."""
        for number, folder in enumerate([self.base, *self.folders]):
            if file.is_relative_to(folder):
                return f"{f'elsewhere/{number}/' if number else ''}{file.relative_to(folder)}"
        self.folders.append(file.parent)
        return self.place(file)

    def add(self, file: Path) -> None:
        """A file, and what it imports."""
        place = self.place(file)
        if place in self.files:
            return
        self.files[place] = file
        for name in _imported(file):
            self.add_module(name, file)

    def add_module(self, name: str, importer: Path) -> None:
        """The module or package `name`, where it lies beside its importer or beside the config module."""
        if name == "rondo" or name in sys.stdlib_module_names:
            return
        module, files = _beside(name, dict.fromkeys((importer.parent, self.base)))
        if module is None or _is_another(name, module):
            self.others.add(name)
            return
        if (installed := _installed(name)) is not None:
            raise ConfigError(
                f"a module beside {importer.name} must not have the name of an installed one, got {module} and {installed}. "
                "Rename it: what is imported under that name would depend on the process"
            )
        top = self.place(module)
        if self.modules.setdefault(name, top) != top:
            raise ConfigError(
                f"modules that a run's code imports must have different names, got {name!r} as {self.modules[name]} and {top}. "
                "Rename one of them"
            )
        for file in files:
            self.add(file)


def take(config: _Config, file: Path, folder: Path) -> _Config:
    """Copies the user's code into `folder`, which is made. The same settings, whose functions are those of the copy.

    ConfigError for modules that could not be told apart by their names.
    """
    file = file.resolve()
    found = _Found(file.parent)
    found.add(file)
    places: dict[str, str] = {}
    for path, reference in references(config):
        target, _, name = reference.rpartition(":")
        own = _own_file(target, file)
        if own is None:
            found.add_module(target.partition(".")[0], file)
            own = _own_module(target, found)
        elif not own.is_file():
            raise ConfigError(f"{path} must name a file that exists, got {reference!r}. Check the path")
        else:
            found.add(own)
        if own is not None:
            places[reference] = f"{found.place(own)}:{name}"
    # What was imported while the config module was loaded, however it was.
    for name in sorted({each.stem for each in found.base.iterdir()} & sys.modules.keys()):
        if _is_loaded_from(name, found.base):
            found.add_module(name, file)
    _copy(found, file, folder)
    return with_references(config, lambda _, reference: relative_to(folder, places.get(reference, reference)))


def belonging_to(config: _Config, run: Path) -> _Config:
    """The settings of a run as its processes use them: its code lies in the run directory, wherever that is."""
    return with_references(config, lambda _, reference: relative_to(run, reference))


def as_kept(config: _Config, run: Path) -> _Config:
    """The opposite of `belonging_to`: what is written down does not say where the run directory lies."""
    return with_references(config, lambda _, reference: reference.removeprefix(f"{run}/"))


@dataclass(frozen=True, slots=True)
class Copied:
    """A file of a run's code, where it was taken from, and its digest then."""

    path: Path
    origin: Path
    digest: str


def copied(run: Path) -> list[Copied]:
    """The files of a run's code; none where it has no code of its own."""
    if not (run / FOLDER).is_dir():
        return []
    files = _told(run / FOLDER)["files"].items()
    return [Copied(run / FOLDER / place, Path(each["from"]), each["digest"]) for place, each in files]


def seal(run: Path) -> None:
    """What the copies of a run's code are now is what they should be."""
    if not (run / FOLDER).is_dir():
        return
    told = _told(run / FOLDER)
    for place, each in told["files"].items():
        each["digest"] = digest(run / FOLDER / place)
    (run / FOLDER / TAKEN).write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2))


def main_file(folder: Path) -> str:
    """Where the config module lies in a folder of taken code."""
    return str(_told(folder)["config"])


def imported(run: Path, versions: Mapping[str, str]) -> dict[str, Any]:
    """What a run's code imports from elsewhere: {"packages": {distribution: version}, "local_modules": {file: digest}}.
    `versions` are known already."""
    names = _told(run / FOLDER)["imports"] if (run / FOLDER).is_dir() else ()
    by_name = importlib.metadata.packages_distributions() if names else {}
    packages = {each: importlib.metadata.version(each) for name in names for each in by_name.get(name, ())}
    local = {str(file): digest(file) for name in names for file in _local_files(name)}
    return {"packages": {**versions, **packages}, "local_modules": local}


def _told(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads((folder / TAKEN).read_bytes())
    return found


def digest(file: Path) -> str | None:
    """Of a file's contents; None where there is none."""
    try:
        return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return None


def _copy(found: _Found, main: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    # Where another run begins with the code of one, it was taken from where that took it.
    origins = _told(found.base)["files"] if (found.base / TAKEN).is_file() else {}
    files = {}
    for place, file in found.files.items():
        copy = folder / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        files[place] = {"from": origins.get(place, {}).get("from", str(file)), "digest": digest(copy)}
    for place in found.modules.values():
        if place not in files:  # a package without a file of its own
            (folder / place).touch()
            files[place] = {"from": str(found.base / place), "digest": digest(folder / place)}
    told = {"config": found.place(main), "modules": found.modules, "files": files, "imports": sorted(found.others)}
    (folder / TAKEN).write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2))


def _own_file(target: str, config_file: Path) -> Path | None:
    """The file that a reference names; None for a module."""
    if not target.endswith(".py"):
        return None
    file = Path(target).resolve()
    return file if file.is_file() or Path(target).is_absolute() else config_file.parent / target


def _own_module(target: str, found: _Found) -> Path | None:
    """The file of a module that is taken."""
    top, _, rest = target.partition(".")
    if top not in found.modules:
        return None
    below = (found.base / found.modules[top]).parent
    parts = [part for part in rest.split(".") if part]
    if not found.modules[top].endswith("__init__.py"):
        return found.base / found.modules[top]
    module = below.joinpath(*parts).with_suffix(".py") if parts else below / "__init__.py"
    return module if module.is_file() else below.joinpath(*parts, "__init__.py")


def _imported(file: Path) -> Iterator[str]:
    """The first names of all that a file imports, wherever it does; nothing of one that is not Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]


def _beside(name: str, folders: Iterable[Path]) -> tuple[Path | None, list[Path]]:
    """(the file that `import name` runs, all files of that module or package) in one of the folders. The first need not be there
    for a package without a file of its own."""
    for folder in folders:
        if (folder / f"{name}.py").is_file():
            return folder / f"{name}.py", [folder / f"{name}.py"]
        if files := sorted(_modules_of(folder / name)):
            return folder / name / "__init__.py", files
    return None, []


def _is_loaded_from(name: str, folder: Path) -> bool:
    """Whether that module was imported in this process, and lies in the folder."""
    loaded = file_of(sys.modules[name]) if name in sys.modules else None
    return loaded is not None and loaded in (folder / f"{name}.py", folder / name / "__init__.py")


def _is_another(name: str, module: Path) -> bool:
    """Whether Python takes that name for a module elsewhere: it has done so, or it would, rather than a mere folder."""
    if name in sys.modules:
        loaded = file_of(sys.modules[name])
        places = (
            [loaded]
            if loaded is not None
            else [Path(at) / "__init__.py" for at in getattr(sys.modules[name], "__path__", ())]
        )
        return module not in places and (not module.is_file() or not any(map(is_installed, places)))
    if module.is_file():
        return False
    spec = importlib.util.find_spec(name)
    return spec is not None and str(module.parent) not in (spec.submodule_search_locations or ())


def _modules_of(package: Path) -> Iterator[Path]:
    """All modules of a folder that can be imported as a package."""
    if package.is_dir():
        for file in package.rglob("*.py"):
            if all(part.isidentifier() for part in file.relative_to(package).with_suffix("").parts):
                yield file


def _installed(name: str) -> Path | None:
    """The file of the installed module of that name."""
    folders = [entry for entry in sys.path if entry and is_installed(Path(entry).resolve())]
    spec = importlib.machinery.PathFinder.find_spec(name, folders)
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _local_files(name: str) -> list[Path]:
    """The files of a module that is neither installed nor taken."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if (
        spec is None
        or spec.origin is None
        or not spec.has_location
        or is_installed(file := Path(spec.origin).resolve())
    ):
        return []
    return sorted(_modules_of(file.parent)) if spec.submodule_search_locations else [file]
