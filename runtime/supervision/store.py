"""Store: the run's one TCPStore, in a process of its own that the nursery forks, with FD as its argument.

Owns nothing but the process: the socket was bound by the supervisor (to loopback or the private interface) and comes in
as descriptor FD, so the port never changes. Here torchrun meets, and process groups find each other. Stores have no
authentication: whoever reaches the socket can write, which is why it listens on a private interface only.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import sys

from torch.distributed import TCPStore

from rondo.runtime.processes.guard import die_with_parent
from rondo.runtime.waits import set_waiter
from rondo.runtime.worker.membership import Membership


async def run(fd: int) -> None:
    """Serves until the supervisor asks it to leave."""
    me = Membership.join(rank=0)
    set_waiter(me.group)
    ended = asyncio.Event()

    def look() -> None:
        if me.heartbeat.asked_to_leave:
            ended.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, look)
    look()
    # The server looks up the name of whoever connects, on its one thread: for seconds where no name server answers.
    getattr(ctypes.CDLL(None), "__nss_configure_lookup", lambda *_: 0)(b"hosts", b"files")
    host, port = me.store
    # Clients that came before this moment wait in the socket's backlog.
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    assert store.port == port
    async with me.beating():
        with me.ref("supervisor") as supervisor:
            await supervisor.call("ready", me.group, me.incarnation, me.rank, deadline_s=30, retry=True)
            await ended.wait()
    me.heartbeat.leave()
    os._exit(0)  # nothing is left to write, and torch takes half a second to take itself down


def main() -> None:
    die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    asyncio.run(run(int(sys.argv[1])))
