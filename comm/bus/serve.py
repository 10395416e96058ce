"""The coordinator's process: `python -m rondo.comm.bus.serve`, started by the supervisor, restarted when it dies.

Owns the choice of the state to begin with: the journal of this attempt where there is one; else, in a new attempt, the index
that the newest whole checkpoint carries; else nothing. Then serves `Coordinator` until it is told to end.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import orjson
import uvloop

from rondo.comm.bus.audit import Ledger, take_older
from rondo.comm.bus.coordinator import Coordinator, CoordinatorConfig
from rondo.comm.bus.index import Index
from rondo.comm.bus.journal import Journal
from rondo.comm.partitions.memory import unlink
from rondo.runtime.actors.actor import serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.checkpoints import newest_complete
from rondo.runtime.memory.segments import SegmentClient
from rondo.runtime.processes.process import die_with_parent
from rondo.runtime.records import timeline
from rondo.runtime.waits import set_waiter

CONFIG = "coordinator.json"
TICK_S = 0.5


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
        take_older(journal.path, ledger)
        for event in journal.replay():
            index.apply(event)
            ledger.apply(event)
        index.freed()  # effects of a past life: tails are set anew from the state
        index.news()
        if not journal.empty and index.attempt == attempt:
            return index, ledger
    for name in index.partitions.files():
        unlink(name)  # of a past attempt: its segments went with its supervisor, files do not
    kept = orjson.loads((checkpoint / "index.json").read_bytes()) if checkpoint is not None else {}
    state = kept["index"] if kept else Index(rules).dump()
    index = Index.load(rules, state, checkpoint)
    ledger.roll_back(state)
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


async def run() -> None:
    rt_dir, run_dir = Path(os.environ["RONDO_RT_DIR"]), Path(os.environ["RONDO_RUN_DIR"])
    attempt = int(os.environ["RONDO_ATTEMPT"])
    token = (rt_dir / "token").read_text().strip()
    set_waiter("coordinator")
    config = CoordinatorConfig.load(run_dir / CONFIG)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    supervisor = ActorRef(f"unix:{rt_dir}/supervisor.sock", token=token, peer="supervisor")
    with Journal(run_dir / "journal") as journal:
        index, ledger = open_index(config, journal, run_dir, attempt)
        segments = SegmentClient(f"{rt_dir}/handover.sock", token)
        coordinator = Coordinator(config, journal, index, ledger, segments, supervisor)
        await coordinator.start()
        server = await serve(coordinator, f"unix:{rt_dir}/coordinator.sock", token=token, name="coordinator")
        group, incarnation = os.environ["RONDO_GROUP"], int(os.environ["RONDO_INCARNATION"])
        await supervisor.call("ready", group, incarnation, 0, deadline_s=30, retry=True)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(coordinator.reporting()), tasks.create_task(coordinator.ticking(TICK_S))]
            await ended.wait()
            for task in beside:
                task.cancel()
        await server.close()
        coordinator.close()
        segments.close()


def main() -> None:
    die_with_parent()
    variables = os.environ
    incarnation, attempt = int(variables["RONDO_INCARNATION"]), int(variables["RONDO_ATTEMPT"])
    timeline.begin(Path(variables["RONDO_RUN_DIR"]), "coordinator", 0, incarnation, attempt)
    uvloop.run(run())
    timeline.end()


if __name__ == "__main__":
    main()
