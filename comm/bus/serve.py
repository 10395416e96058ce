"""The coordinator's process: `python -m rondo.comm.bus.serve`, started by the supervisor, restarted when it dies.

Owns the choice of the state to begin with: the journal of this attempt where there is one; else, in a new attempt, the index
that the newest whole checkpoint carries; else nothing. Then serves `Coordinator` until it is told to end.
"""

from __future__ import annotations

from pathlib import Path

import orjson

from rondo.comm.bus import unfinished
from rondo.comm.bus.audit import Ledger
from rondo.comm.bus.coordinator import Coordinator
from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Journal
from rondo.comm.bus.transitions import CoordinatorConfig
from rondo.runtime.checkpoints import newest_complete, verify
from rondo.runtime.records.telling import tell_every
from rondo.runtime.worker.membership import Membership
from rondo.runtime.worker.service import answer, main

CONFIG = "coordinator.json"
TICK_S, SWEEP_S = 0.5, 30.0


def open_index(config: CoordinatorConfig, journal: Journal, run_dir: Path, attempt: int) -> tuple[Index, Ledger]:
    """The state this process begins with; in a new attempt the journal goes on in a file that begins with it.

    A journal that cannot be read, after a power failure, say, does not stand before a whole checkpoint: it is told of, and kept
    under another name. CorruptData where there is none.
    """
    rules = config.rules
    index = Index(rules)
    ledger = Ledger(rules.samples_per_group, rules.groups_per_step, rules.max_data_failures, rules.max_infra_failures)
    checkpoint = newest_complete(run_dir / "checkpoints")
    if journal.broken is not None:
        if checkpoint is None:
            raise journal.broken
        print(f"{journal.broken} It goes on from {checkpoint}.", flush=True)
    else:
        for event in journal.replay():
            index.apply(event)
            ledger.apply(event)
        index.freed()  # effects of a past life: tails are set anew from the state
        index.news()
        if not journal.empty and index.attempt == attempt:
            return index, ledger
    if checkpoint is not None:
        verify(checkpoint, ("index.json",))
    kept = orjson.loads((checkpoint / "index.json").read_bytes()) if checkpoint is not None else {}
    state = kept.get("index") or Index(rules).dump()  # one of a job without samples has none
    index = Index.load(rules, state, checkpoint)
    ledger.roll_back(state)
    unfinished.cut(run_dir, -1 if index.version is None else index.version, index.groups)
    state = {**index.dump(), "audit": ledger.dump()}  # in today's form, as everything behind it
    if journal.empty:
        journal.append([{"event": "snapshot", "state": state}])
    else:
        journal.rotate({"event": "snapshot", "state": state})
    begin = {"event": "attempt", "attempt": attempt}
    journal.append([begin])
    index.apply(begin)
    ledger.apply(begin)
    return index, ledger


async def run(me: Membership) -> None:
    config = CoordinatorConfig.load(me.run_dir / CONFIG)
    with Journal(me.run_dir / "journal") as journal:
        index, ledger = open_index(config, journal, me.run_dir, me.attempt)
        coordinator = Coordinator(config, journal, index, ledger, me.segments, me.supervisor)
        await coordinator.start()

        async def sweep() -> None:
            unfinished.sweep(me.run_dir, coordinator.index.groups)

        sweeping = tell_every("unfinished episodes", SWEEP_S, sweep)
        await answer(me, coordinator, coordinator.reporting(), coordinator.ticking(TICK_S), sweeping)
        coordinator.close()


if __name__ == "__main__":
    main(run)
