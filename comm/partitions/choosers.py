"""Which chooser a kind of sampler has.

task.chooser = chooser(table, task)       # of the sampler that the task was opened with
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rondo.comm.partitions.own import OwnChooser
from rondo.comm.partitions.samplers import (
    BalancedChooser,
    BudgetChooser,
    Chooser,
    GroupsChooser,
    OrderedChooser,
    SequentialChooser,
    WindowChooser,
)
from rondo.comm.partitions.spec import load_sampler
from rondo.comm.partitions.table import Table
from rondo.comm.partitions.task import Task

_CHOOSERS: Mapping[str, Callable[[Table, Task, Any], Chooser]] = {
    "sequential": SequentialChooser,
    "balanced": BalancedChooser,
    "token_budget": BudgetChooser,
    "version_window": WindowChooser,
    "groups": GroupsChooser,
    "ordered": OrderedChooser,
    "own": OwnChooser,
}


def chooser(table: Table, task: Task) -> Chooser:
    """The chooser of a task's sampler, with every row that is ready now."""
    sampler = load_sampler(task.sampler)
    return _CHOOSERS[sampler.kind](table, task, sampler)
