"""What the C library keeps of host memory that tensors have left.

glibc takes large blocks from the system one by one, and gives each back when it is freed. But whenever one is freed it raises the
size from which blocks are large, up to 32 MiB: then gathered parameters, gradients and activations share one heap, of which only
the end is given back. A rank that trained on a CPU held half as much again as its tensors, and a fifth more where activations of
a thousand tokens were in the heap.

    give_back_freed()        # in a process that trains, before it has large tensors
"""

from __future__ import annotations

import ctypes

_LARGE_BYTES = 1 << 20
"""The activations of few tokens stay in the heap, where a block costs no page fault. From here on a step takes no more processor
time for what it gives back."""
_TRIM_BYTES = 64 << 20
"""Of the end of the heap, what is kept: as much as glibc arrives at by itself."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def give_back_freed() -> None:
    """From now on blocks of 1 MiB and more go back to the system when they are freed. Nothing where the C library is another."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
