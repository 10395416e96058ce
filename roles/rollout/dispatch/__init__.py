"""Several engines behind one: where a request goes, and what happens when an engine dies under it.

dispatcher     the `Engine` over engines: one outcome for every request; queue its waiting ones, fair by class
fleet          which engines there are and which may be given work; breaker says when one is left alone
placement      which of them is given a request: least loaded, and the one that has its prefix or session
rolling        new weights, engine by engine
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "DispatchLimits": "rondo.roles.rollout.dispatch.fleet",
    "Dispatcher": "rondo.roles.rollout.dispatch.dispatcher",
    "NoEngine": "rondo.roles.rollout.dispatch.fleet",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
