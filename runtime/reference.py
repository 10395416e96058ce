"""References to functions: text that any process of a run can turn back into the same function.

A run's settings travel as JSON, so a function in them travels by name. Two spellings:

    package.module:function        a module that every process can import
    /path/to/file.py:function      a file; its folder is importable while it loads, as for a script

`as_reference` makes the text from a function, `load_reference` makes the function from the text. Neither calls it. A file
is loaded once in a process. Lambdas, closures and objects have no name that another process could find, and are refused.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rondo.runtime.errors import ConfigError

_INSTALLED = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib"))


def as_reference(value: object) -> str:
    """The text for a function, or the text itself. ValueError for what another process could not find by name."""
    if isinstance(value, str):
        target, _, name = value.rpartition(":")
        if not target or not name.isidentifier():
            raise ValueError(f"must look like 'module:function' or 'file.py:function', got {value!r}")
        return value
    name = getattr(value, "__qualname__", "")
    if not callable(value) or not isinstance(getattr(value, "__module__", None), str) or not name.isidentifier():
        shown = name or repr(value)
        raise ValueError(
            f"must be a function defined at the top of a module, got {shown}. "
            "Other processes load it by name: give it a `def` of its own"
        )
    file = getattr(sys.modules.get(value.__module__), "__file__", None)
    if file is not None and "." not in value.__module__:
        path = Path(file).resolve()
        if not any(path.is_relative_to(folder) for folder in _INSTALLED):
            return f"{path}:{name}"
    return f"{value.__module__}:{name}"


def load_reference(reference: str, what: str) -> Callable[..., Any]:
    """The function that `reference` names; `what` names the setting in errors. ConfigError when it cannot be had."""
    target, _, name = reference.rpartition(":")
    if not target or not name:
        raise ConfigError(f"{what} must look like 'module:function' or 'file.py:function', got {reference!r}")
    try:
        with uncollected():
            module = (
                load_file(str(Path(target).resolve())) if target.endswith(".py") else importlib.import_module(target)
            )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{what} must name a function that can be imported, got {reference!r} ({error}). "
            "Install the module, or name its file: 'path/to/file.py:function'"
        ) from error
    except FileNotFoundError as error:
        raise ConfigError(f"{what} must name a file that exists, got {reference!r}. Check the path") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{what} must name a function of {target}, got {name!r}. {_nearest(name, module)}")
    return function


@functools.cache
def load_file(path: str) -> ModuleType:
    """The module in the file at `path`, loaded once a process, with its folder importable while it loads."""
    if not Path(path).is_file():
        raise FileNotFoundError(path)
    # The name is free of dots and cannot collide with an installed module of the file's name.
    module_name = "_rondo_file_" + "".join(c if c.isalnum() else "_" for c in path)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with importable(Path(path).parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


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


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Puts `folder` first on the import path for the body, as Python does for a script."""
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def _nearest(name: str, module: ModuleType) -> str:
    import difflib

    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    matches = difflib.get_close_matches(name, public, n=1)
    if matches:
        return f"Did you mean {matches[0]!r}?"
    return f"It has {', '.join(sorted(public)) or 'no functions'}"
