"""Named sets of rows that anybody on a bus can create, write and read, beside the training stream, in a process of their own.

words          runs (ranges of row ids), nested (values to columns and back), spec (what is fixed for a partition), reading (how a
               task is read)
decisions      fold (all partitions and members), table (one), entry (one record's rows), task (what one consumer has read),
               shelf (the memory under them); planning, choosers, samplers, own: which rows come next
coordinator    serve (its process), coordinator (questions, waits), room (rings), places (what readers are told), stats (counters
               in shared memory), memory (segments, or files beyond the capacity)
for roles      opened, client, stream, batch; sync (threads), loader (torch), checkpoint (disk)
alone          host (a bus without a run), joining
"""

from __future__ import annotations

from rondo.runtime.face import lazy

_FACE = {
    "Partition": "rondo.comm.partitions.client",
    "SyncPartition": "rondo.comm.partitions.sync",
    "Batch": "rondo.comm.partitions.batch",
    "StreamingLoader": "rondo.comm.partitions.loader",
    "Sequential": "rondo.comm.partitions.spec",
    "Groups": "rondo.comm.partitions.spec",
    "Balanced": "rondo.comm.partitions.spec",
    "TokenBudget": "rondo.comm.partitions.spec",
    "VersionWindow": "rondo.comm.partitions.spec",
    "Ordered": "rondo.comm.partitions.spec",
    "Own": "rondo.comm.partitions.spec",
}
__all__ = list(_FACE)
__getattr__ = lazy(__name__, _FACE)
