"""How a run starts.

cli -> config (with groups, modes) -> check/ -> train (with plan, provider) -> report/
rundir is the folder of a run, code the user's modules in it; serve and bench start what is no run
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
