"""What everything stands on.

actors and calls    actor, transport, waits, errors
a run's processes   supervisor, supervision (its pure core), spec, launcher, nursery, worker, context, segments, store
work that may fail  pool, pool_worker, keeper (killable processes for rewards and media), values (what they are sent)
what users see      admin, record, telling (it never decides), section (settings), checkpoints, formats
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "Actor": "rondo.runtime.actor",
    "ActorRef": "rondo.runtime.ref",
    "GroupRef": "rondo.runtime.ref",
    "endpoint": "rondo.runtime.actor",
    "serve": "rondo.runtime.actor",
    "Supervisor": "rondo.runtime.supervisor",
    "SupervisorConfig": "rondo.runtime.spec",
    "WorkerContext": "rondo.runtime.context",
    "waiting": "rondo.runtime.waits",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
