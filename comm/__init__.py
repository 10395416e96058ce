"""What moves between roles.

ring           rows in shared memory
bus            the data bus of a run: coordinator, index, journal; every sample from admission to commit
weights        policy versions: slab and snapshot on this node, and exact deltas, behind one proof
groups         process groups across separately started jobs
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "Bus": "rondo.comm.bus.bus",
    "Column": "rondo.comm.ring.records",
    "GroupSpec": "rondo.comm.groups.epochs",
    "Index": "rondo.comm.bus.index",
    "Journal": "rondo.comm.bus.journal",
    "ProcessGroups": "rondo.comm.groups.groups",
    "RingWriter": "rondo.comm.ring.ring",
    "RingView": "rondo.comm.ring.ring",
    "WeightSlab": "rondo.comm.weights.slab",
    "HotSnapshot": "rondo.comm.weights.snapshot",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
