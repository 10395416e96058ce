"""What moves between roles.

memory         words, records, ring, slab (weights), snapshot (of an actor), tensors
decisions      index (a pure fold), with group, rounds (and balance), space and versions; journal; coordinator is their
               shell, rings what it holds, answers what it tells, wakes who is asked again, serve its process
for roles      bus; partitions: named sets of rows beside the training stream
on its own     host: a bus without a run; joining: how programs come in
versions       weights: deltas, broadcasts and files behind one proof, publishing beside the next step
other places   links: rings mirrored on other nodes; groups: process groups across separately started jobs
               (epochs, meeting, communicators, carriers, nccl_extras)
afterwards     audit
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "Bus": "rondo.comm.bus",
    "Column": "rondo.comm.records",
    "GroupSpec": "rondo.comm.epochs",
    "Index": "rondo.comm.index",
    "Journal": "rondo.comm.journal",
    "ProcessGroups": "rondo.comm.groups",
    "RingWriter": "rondo.comm.ring",
    "RingView": "rondo.comm.ring",
    "WeightSlab": "rondo.comm.slab",
    "HotSnapshot": "rondo.comm.snapshot",
    "Host": "rondo.comm.host",
    "SyncBus": "rondo.comm.joining",
    "join": "rondo.comm.joining",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
