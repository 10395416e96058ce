"""The process of partitions: `python -m rondo.comm.partitions.serve`, started where a config or `rondo bus` asks for partitions.

Owns the choice of the state to begin with: the journal of this attempt where there is one, else nothing. A restart of the whole
run forgets partitions: their memory went with the attempt, and the files of those that had spilled go here.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from rondo.comm.bus.journal import Journal, files, read
from rondo.comm.partitions.coordinator import PartitionCoordinator
from rondo.comm.partitions.fold import Fold
from rondo.comm.partitions.memory import unlink
from rondo.runtime.errors import CorruptData
from rondo.runtime.worker.membership import Membership
from rondo.runtime.worker.service import answer, main

FOLDER = "partitions"
"""In the run directory: the journal of each attempt."""


def open_journal(folder: Path, attempt: int) -> Journal:
    """The journal of this attempt; those before it are gone, with the files that their partitions had spilled to."""
    for old in [path for path in folder.glob("*") if path.name != str(attempt)]:
        fold = Fold()
        with contextlib.suppress(CorruptData):  # a power failure: its files stay
            for path in files(old)[-1:]:
                for event in read(path):
                    fold.apply(event)
        for name in fold.files():
            unlink(name)
        shutil.rmtree(old)
    return Journal(folder / str(attempt))


async def run(me: Membership) -> None:
    with open_journal(me.run_dir / FOLDER, me.attempt) as journal:
        coordinator = PartitionCoordinator(journal, me.segments, me.supervisor)
        await coordinator.start()
        await answer(me, coordinator, coordinator.ticking())
        coordinator.close()


if __name__ == "__main__":
    main(run)
