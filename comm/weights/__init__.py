"""How policy versions reach those who serve them, beside the slab (`comm/weights/slab.py`).

one version    held (a receiver's copy, and when it counts), sums (a bucket's checksum)
ways           delta (what changed since the version before), broadcast (other nodes and jobs; with parcel and topology),
               disk (Hugging Face folders), ipc (the same device)
when           publisher (copies and sums between two steps; what follows runs beside the next one), copying
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "Held": "rondo.comm.weights.held",
    "Published": "rondo.comm.weights.held",
    "VersionId": "rondo.comm.weights.held",
    "Publisher": "rondo.comm.weights.publisher",
    "send_version": "rondo.comm.weights.broadcast",
    "receive_version": "rondo.comm.weights.broadcast",
    "write_version": "rondo.comm.weights.disk",
    "read_version": "rondo.comm.weights.disk",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
