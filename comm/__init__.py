"""What moves between roles.

ring           rows in shared memory
bus            the data bus of a run: coordinator, index, journal; every sample from admission to commit
partitions     named sets of rows beside the training stream, and a bus without a run
weights        policy versions: slab and snapshot on this node, broadcasts and deltas behind one proof
links          rings mirrored on other nodes
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
    "Host": "rondo.comm.partitions.host",
    "SyncBus": "rondo.comm.partitions.joining",
    "join": "rondo.comm.partitions.joining",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
