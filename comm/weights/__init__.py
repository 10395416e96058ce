"""How policy versions reach those who serve them, beside the slab (`comm/weights/slab.py`).

one version    manifest (what it is made of), held (a receiver's copy, and when it counts), sums (a bucket's checksum)
ways           delta (what changed since the version before), ipc (the same device)
when           publication (between two steps): copying by one process, together by all ranks that have parts
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "Held": "rondo.comm.weights.held",
    "Published": "rondo.comm.weights.held",
    "VersionId": "rondo.comm.weights.held",
    "publish": "rondo.comm.weights.publication",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
