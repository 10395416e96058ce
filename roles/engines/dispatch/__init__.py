"""Several engines behind one: where a request goes, and what happens when an engine dies under it.

dispatcher     the `Engine` over engines: one outcome for every request
places         the wait for an engine; queue is its order, fair by class, placement the choice: least loaded, or the one that has
               the prefix or session; suspicion says which requests are kept apart
fleet          which engines there are and which may be given work; breaker says when one rests
rolling        new weights, engine by engine; installing gives them to one
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "DispatchLimits": "rondo.roles.engines.dispatch.fleet",
    "Dispatcher": "rondo.roles.engines.dispatch.dispatcher",
    "NoEngine": "rondo.roles.engines.dispatch.fleet",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
