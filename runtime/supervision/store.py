"""Store: the run's one TCPStore, in a process of its own that the nursery forks, with FD as its argument.

Owns nothing but the process: the socket was bound by the supervisor (to loopback or the private interface) and comes in
as descriptor FD, so the port never changes. Here torchrun meets, and process groups find each other. Stores have no
authentication: whoever reaches the socket can write, which is why it listens on a private interface only.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys

from torch.distributed import TCPStore

from rondo.runtime.waits import set_waiter
from rondo.runtime.worker.membership import Membership


async def run(me: Membership, fd: int) -> None:
    """Serves until the supervisor asks it to leave."""
    # The server looks up the name of whoever connects, on its one thread: for seconds where no name server answers.
    getattr(ctypes.CDLL(None), "__nss_configure_lookup", lambda *_: 0)(b"hosts", b"files")
    host, port = me.store
    # Clients that came before this moment wait in the socket's backlog.
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
    assert store.port == port
    async with me.living():
        await me.ready()
        await me.stopping.wait()


def main() -> None:
    me = Membership.join()
    set_waiter(me.group)
    asyncio.run(run(me, int(sys.argv[1])))
    me.heartbeat.leave()
    os._exit(0)  # nothing is left to write, and torch takes half a second to take itself down
