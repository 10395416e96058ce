"""What moves between roles.

memory         words, records, ring, slab (weights), snapshot (of an actor), tensors
decisions      index (a pure fold), with rounds, space and versions; journal; coordinator is their shell, serve its process
for roles      bus
afterwards     audit
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_FACE = {
    "Bus": "rondo.comm.bus",
    "Column": "rondo.comm.records",
    "Index": "rondo.comm.index",
    "Journal": "rondo.comm.journal",
    "RingWriter": "rondo.comm.ring",
    "RingView": "rondo.comm.ring",
    "WeightSlab": "rondo.comm.slab",
    "HotSnapshot": "rondo.comm.snapshot",
    "audit": "rondo.comm.audit",
}
__all__ = list(_FACE)


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FACE[name]), name)
