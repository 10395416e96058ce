"""A folder's public face, loaded name by name: importing `rondo.comm` imports no torch.

__getattr__ = lazy(__name__, {"Bus": "rondo.comm.bus.bus"})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The package's `__getattr__`: a name of `names` comes from the module beside it."""

    def getattribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(names[name]), name)

    return getattribute
