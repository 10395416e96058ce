"""How a run starts.

cli -> config (with groups, modes) -> check -> train (with plan, provider, view) -> summary, plot
rundir is the folder of a run; status asks a run in another process
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "RunConfig": "rondo.launch.config",
    "RoleGroup": "rondo.launch.groups",
    "fully_async": "rondo.launch.modes",
    "hybrid": "rondo.launch.modes",
    "colocate": "rondo.launch.modes",
    "load": "rondo.launch.config",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
