"""How a run starts.

cli -> config (with groups, modes) -> check -> train (with plan, provider, view) -> summary, plot
rundir is the folder of a run; status asks a run in another process
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FACE = {
    "RunConfig": "rondo.launch.config",
    "RoleGroup": "rondo.launch.groups",
    "fully_async": "rondo.launch.modes",
    "hybrid": "rondo.launch.modes",
    "colocate": "rondo.launch.modes",
    "load": "rondo.launch.config",
}
__all__ = list(_FACE)


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FACE[name]), name)
