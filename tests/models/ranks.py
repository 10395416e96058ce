"""Ranks of a group, forked off a process that has loaded torch and transformers, which takes each of them seconds."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def fork(num_ranks: int, work: Callable[[], None], folder: Path) -> None:
    """`work` on every rank of a group, which meets in a file of `folder`."""
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            torch.set_num_threads(1)
            store = dist.FileStore(str(folder / f"store of {num_ranks}"), num_ranks)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
            work()
            sys.stdout.flush()
        except BaseException:  # noqa: BLE001  # told, and this rank is over
            traceback.print_exc()
            os._exit(1)
        # gloo's thread frees the last collective's tensors when it comes to it; in a finalizing interpreter that aborts.
        os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * num_ranks, codes
