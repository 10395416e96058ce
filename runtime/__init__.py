"""What everything stands on.

actors         calls between processes
supervision    who starts what, notices its death, and starts it again; worker, the process of one rank
processes      killable processes for rewards and media, and the end of processes with proof
memory         shared segments
records        what a run writes down; admin, what users ask over HTTP
here           errors, waits, closing, section and config (settings), reference (to functions), values (a user's data as bytes),
               checkpoints, formats, pace
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "Actor": "rondo.runtime.actors.actor",
    "ActorRef": "rondo.runtime.actors.ref",
    "endpoint": "rondo.runtime.actors.actor",
    "serve": "rondo.runtime.actors.actor",
    "Supervisor": "rondo.runtime.supervision.supervisor",
    "SupervisorConfig": "rondo.runtime.supervision.spec",
    "WorkerContext": "rondo.runtime.worker.context",
    "waiting": "rondo.runtime.waits",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
