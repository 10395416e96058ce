"""References to functions: text that any process of a run can turn back into the same function.

A run's settings travel as JSON, so a function in them travels by name. Two spellings:

    package.module:function        a module that every process can import
    /path/to/file.py:function      a file; while it loads, files of its folder find their neighbours first, as a script does. The
                                   folder stays last on the import path, so that a function may import them when it is called

What is installed sees neither that folder nor the working directory before itself, and Python's own modules come first for
everybody: a file `random.py` there is in nobody's way.

`as_reference` makes the text from a function, `load_reference` makes the function from the text. Neither calls it. A file
is loaded once in a process. Lambdas, closures and objects have no name that another process could find, and are refused; so
is what its own name does not find, such as a wrapper that bears the name of what it wraps.

A folder with `rondo_code.json` in it holds modules that were taken from elsewhere (`launch/code.py`): {"modules": {name: file},
"files": {file: {"from": path, ...}}}. Once a file of it is loaded, these names are imported from the folder in this process,
whatever lies in the working directory; no other name is. `__file__` of such a module is the path that it was taken from, so that
it finds what lies there beside it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from traceback import walk_tb
from types import FrameType, ModuleType
from typing import Any

from rondo.runtime.errors import ConfigError, did_you_mean

TAKEN = "rondo_code.json"
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
_INSTALLED = {"site-packages", "dist-packages"}
_FILE_MODULE = "_rondo_file_"
_loading = threading.RLock()
_named: dict[str, object] = {}
"""Reference -> the object that it was made from, in this process."""


def as_reference(value: object) -> str:
    """The text for a function, or the text itself. ValueError for what another process could not find by name."""
    if isinstance(value, str):
        target, _, name = value.rpartition(":")
        if not target or not name.isidentifier():
            raise ValueError(
                f"must look like 'module:function' or 'file.py:function', got {value!r}. Put the colon before the function's name"
            )
        return value
    name, module_name = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
    if not callable(value) or not isinstance(module_name, str) or not name.isidentifier():
        shown = name or repr(value)
        raise ValueError(
            f"must be a function defined at the top of a module, got {shown}. "
            "Other processes load it by name: give it a `def` of its own"
        )
    module = sys.modules.get(module_name)
    if module is None or getattr(module, name, None) is not value:
        where = (file_of(module) if module is not None else None) or module_name
        raise ValueError(
            f"must be what its name finds, got another object that bears the name {name} of {where} (a wrapper, or "
            "defined more than once). Other processes load it by name: give it a `def` of its own"
        )
    file = file_of(module)
    own = module_name == "__main__" or module_name.startswith(_FILE_MODULE)
    by_file = "." not in module_name and file is not None and (own or not is_installed(file))
    reference = f"{file}:{name}" if by_file else f"{module_name}:{name}"
    _named[reference] = value
    return reference


def confirm(reference: str, what: str) -> None:
    """ConfigError when the name no longer finds the object that the reference was made from; `what` names the setting."""
    value = _named.get(reference)
    module = sys.modules.get(getattr(value, "__module__", ""))
    if (
        value is not None
        and module is not None
        and getattr(module, name := reference.rpartition(":")[2], None) is not value
    ):
        raise ConfigError(
            f"{what} must be what its name finds, got {name}, which is defined anew behind the settings. "
            "Other processes load it by name: rename one of the two"
        )


def file_of(module: ModuleType) -> Path | None:
    """The file that a module was loaded from; None for one without."""
    spec = getattr(module, "__spec__", None)
    found = spec.origin if spec is not None and spec.has_location else getattr(module, "__file__", None)
    return None if found is None else Path(found).resolve()


def is_installed(file: Path) -> bool:
    """Whether a file is Python's own or of an installed package, not a user's."""
    return file.is_relative_to(_STDLIB) or not _INSTALLED.isdisjoint(file.parts)


def relative_to(folder: Path, reference: str) -> str:
    """The same reference, with a relative path of a file taken from `folder`."""
    target = reference.rpartition(":")[0]
    return str(folder / reference) if target.endswith(".py") else reference


def in_users_words(text: str) -> str:
    """The text with the files that this process has taken code from in the place of their copies."""
    for finder in sys.meta_path:
        if isinstance(finder, _Taken):
            text = finder.in_users_words(text)
    return text


def is_ours(frame: FrameType) -> bool:
    """Whether a frame runs rondo's code, or Python's that imports for it."""
    name = frame.f_globals.get("__name__", "")
    return name == "__main__" or name.startswith(("rondo.", "importlib."))


def in_one_line(error: BaseException) -> str:
    """ "KeyError: 'x' (rewards.py:7)": type, text and place of an error; the place is the last step that is the user's, not ours
    and no library's. The type is left out where it is one of rondo's that says what is wrong."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    steps = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__) if not is_ours(frame)]
    own = [f" ({file}:{line})" for file, line in steps if not file.startswith("<") and not is_installed(Path(file))]
    text = " ".join(str(error).split())
    kind = "" if text and type(error).__module__.startswith("rondo.") else type(error).__name__
    return f"{kind}{': ' if kind and text else ''}{text}{own[-1] if own else ''}"


def load_reference(reference: str, what: str) -> Callable[..., Any]:
    """The function that `reference` names; `what` names the setting in errors. ConfigError when it cannot be had."""
    target, _, name = reference.rpartition(":")
    if not target or not name:
        raise ConfigError(
            f"{what} must look like 'module:function' or 'file.py:function', got {reference!r}. "
            "Put the colon before the function's name"
        )
    try:
        with uncollected():
            if target.endswith(".py"):
                module = load_file(str(Path(target).resolve()))
            else:
                with contextlib.nullcontext() if target.startswith("rondo.") else _importable(Path.cwd()):
                    module = importlib.import_module(target)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} must name a function that can be imported, got {reference!r} ({error}). "
            "Install the module, or name its file: 'path/to/file.py:function'"
        ) from error
    except FileNotFoundError as error:
        raise ConfigError(f"{what} must name a file that exists, got {reference!r}. Check the path") from error
    function = getattr(module, name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        advice = did_you_mean(name, public, f"It has {', '.join(sorted(public)) or 'no functions'}")
        raise ConfigError(f"{what} must name a function of {target}, got {name!r}. {advice}")
    return function


def load_file(path: str) -> ModuleType:
    """The module in the file at `path`, loaded once a process, with its neighbours importable from then on."""
    with _loading:  # a cache alone loads it in each of two threads that come at once
        return _load_file(path)


@functools.cache
def _load_file(path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(path)
    root = next((folder for folder in file.parents if (folder / TAKEN).is_file()), None)
    taken = None if root is None else _taken(root)
    if taken is not None and (name := taken.name_of(file)) is not None:
        return importlib.import_module(name)
    # The name is free of dots and cannot collide with an installed module of the file's name.
    module_name = _FILE_MODULE + "".join(c if c.isalnum() else "_" for c in path)
    loader = None if taken is None else _TakenLoader(module_name, path, taken)
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with contextlib.nullcontext() if taken is not None else _importable(file.parent):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        lacking = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
        name = lacking.__name__ if isinstance(lacking, ModuleType) else getattr(error, "name", None)
        if name in sys.stdlib_module_names and (neighbour := file.parent / f"{name}.py").is_file():
            raise ConfigError(
                f"a module beside {file.name} must not have the name of one of Python's own, got {neighbour} where {error}. "
                "Rename it"
            ) from error
        raise
    return module


class _Taken(MetaPathFinder):
    """Imports the modules that lie in a folder of taken code, and no others."""

    def __init__(self, root: Path) -> None:
        found = json.loads((root / TAKEN).read_bytes())
        self.root, self._modules, self._files = root, dict(found["modules"]), dict(found["files"])

    def name_of(self, file: Path) -> str | None:
        """The name under which a file is imported; None for one that nothing imports."""
        parts = file.relative_to(self.root).with_suffix("").parts
        for name, taken in self._modules.items():
            above = Path(taken).with_suffix("").parts
            package = above[:-1] if above[-1] == "__init__" else above
            if parts[: len(package)] == package and (package != above or parts == above):
                return ".".join((name, *(part for part in parts[len(package) :] if part != "__init__")))
        return None

    def in_users_words(self, text: str) -> str:
        for place, file in self._files.items():
            text = text.replace(str(self.root / place), file["from"])
        return text

    def origin(self, path: str) -> str:
        """Where a file of the folder was taken from."""
        return str(self._files.get(str(Path(path).relative_to(self.root)), {}).get("from", path))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is not None:
            inside = [entry for entry in path if Path(entry).is_relative_to(self.root)]
            spec = PathFinder.find_spec(fullname, inside) if inside else None
            if spec is not None and isinstance(spec.loader, SourceFileLoader):
                spec.loader = _TakenLoader(fullname, spec.loader.path, self)
            return spec
        if fullname not in self._modules:
            return None
        file = self.root / self._modules[fullname]
        folder = [str(file.parent)] if file.name == "__init__.py" else None
        loader = _TakenLoader(fullname, str(file), self)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=folder)


class _TakenLoader(SourceFileLoader):
    """Runs a taken module as if it lay where it was taken from."""

    def __init__(self, fullname: str, path: str, taken: _Taken) -> None:
        super().__init__(fullname, path)
        self._taken = taken

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = self._taken.origin(self.path)
        super().exec_module(module)


@functools.cache
def _taken(root: Path) -> _Taken:
    """The finder of a folder of taken code, in front of all others from now on."""
    finder = _Taken(root)
    sys.meta_path.insert(0, finder)
    return finder


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector while the body imports: what is imported stays, and walking it again and again is a tenth
    of the time that torch and transformers take to load."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Neighbours(MetaPathFinder):
    """Finds the modules of a folder, for importers that lie in it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        importer: FrameType | None = sys._getframe(1)
        while importer is not None and importer.f_globals.get("__name__", "").partition(".")[0] == "importlib":
            importer = importer.f_back
        if path is not None or fullname in sys.stdlib_module_names or importer is None:
            return None
        if not importer.f_code.co_filename.startswith(f"{self._folder}/"):
            return None
        return PathFinder.find_spec(fullname, [self._folder])


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Lets files of `folder` find their neighbours first for the body, as Python does for a script, and leaves the folder on the
    import path as the last: what is installed comes before it for everybody else."""
    entry, finder = str(folder), _Neighbours(str(folder))
    if entry not in sys.path:
        sys.path.append(entry)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
