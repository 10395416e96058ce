"""Members of process groups, each a process of its own, driven over its socket. `python group_worker.py SOCKET`: the nursery.

Importing torch takes a second, so a nursery imports it once and forks a member for every line that it reads: a JSON object
{"socket", "token", "store", "meeting", "member", "incarnation"}. It answers with the pid. With "group", "num_ranks" and "done" in
the place of "member" it forks a torchrun, which leaves the file "done". For an empty object it forks a store and answers with the
port. Members share nothing but the run's store and the meeting, as those of separately started jobs do.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import run as torchrun

from rondo.comm.groups import carriers, communicators, groups
from rondo.comm.groups.communicators import Communicator
from rondo.comm.groups.epochs import Epoch, lives_of
from rondo.comm.groups.groups import ProcessGroups
from rondo.comm.groups.meeting import spec_of
from rondo.runtime import waits
from rondo.runtime.actors.actor import Actor, endpoint, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import GroupBroken, Refused
from rondo.runtime.processes.guard import die_with_parent

groups._ANSWER_S = 60.0
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Member(Actor):
    """What a role does with a group, endpoint by endpoint. Calls run on one compute thread, the loop goes on."""

    def __init__(self, order: dict[str, Any], meeting: ActorRef) -> None:
        self._store = order["store"][0], order["store"][1]
        self._name = order["member"]
        self._groups = ProcessGroups(self._store, order["member"], order["incarnation"], meeting)
        self._compute = ThreadPoolExecutor(max_workers=1)
        self._made: Communicator | None = None
        self.ended = asyncio.Event()
        self.nothing_left = True

    @endpoint
    async def join(self, spec: dict[str, Any], limit_s: float) -> dict[str, Any]:
        try:
            self._made = await self._groups.join(spec_of(spec), deadline_s=limit_s)
        except GroupBroken as error:
            return told(error)
        return {"epoch": self._made.epoch.number, "rank": self._made.rank}

    @endpoint
    async def open(self, spec: dict[str, Any], number: int, lives: list[Any], limit_s: float) -> dict[str, Any]:
        """Past the meeting, as a member would that missed everything since."""
        epoch = Epoch(spec["name"], number, lives_of(lives))
        call = self._on_compute(
            lambda: communicators.open_group(spec_of(spec), epoch, self._name, self._store, deadline_s=limit_s)
        )
        try:
            self._made = await call
        except GroupBroken as error:
            return told(error)
        except Refused as error:
            return {"refused": str(error)}
        return {"epoch": number}

    @endpoint
    async def run(self, operation: str, value: Any, extra: Any, limit_s: float, dtype: str = "float32") -> Any:
        """One call; its tensor is made of `value`, what it holds afterwards is the answer."""
        made = self._made
        assert made is not None
        tensor = torch.tensor(value).to(getattr(torch, dtype))
        arguments = (limit_s,) if operation == "barrier" else (tensor, extra, limit_s)
        try:
            await self._on_compute(lambda: getattr(made, operation)(*arguments))
        except GroupBroken as error:
            return told(error)
        return tensor.float().tolist()

    @endpoint
    async def own_world(self, value: float) -> float:
        """A sum in torch's default group, which this process has beside the group under test."""
        tensor = torch.tensor([value])
        await self._on_compute(lambda: dist.all_reduce(tensor))
        return float(tensor)

    @endpoint
    async def waits(self) -> list[list[str]]:
        return [[pending.name, pending.peer] for pending in waits.pending() if pending.name.startswith("group ")]

    @endpoint
    async def fail_while_forming(self, moment: str, how: str) -> None:
        """The next time that this member forms a group, it gets the signal: "first", "present" or "address"."""

        def fail() -> None:
            os.kill(os.getpid(), SIGNALS[how])
            threading.Event().wait()  # the signal may be another thread's to take: this one would run on until it is

        if moment == "first":
            fence = communicators._fence
            communicators._fence = lambda *a: (fail(), fence(*a))[1]  # type: ignore[assignment]
        elif moment == "present":
            communicators.open_carrier = lambda *a: fail()  # type: ignore[assignment]
        else:

            def forming(backend: str, store: Any, *a: Any) -> Any:
                return carriers.open_carrier(backend, _FailsAfterAddress(store, fail), *a)

            carriers._my_address = lambda store: "127.0.0.1"
            communicators.open_carrier = forming

    @endpoint
    async def time_passes(self) -> None:
        """An hour at once, for whoever looks at the clock while it forms a group."""
        communicators.time = SimpleNamespace(  # type: ignore[assignment]
            monotonic=lambda: time.monotonic() + 3600, monotonic_ns=time.monotonic_ns
        )

    @endpoint
    async def abort(self, why: str) -> None:
        assert self._made is not None
        self._made.abort(why)

    @endpoint
    async def leave(self, limit_s: float) -> bool:
        """Closes everything and ends the process; whether nothing was left, so that Python itself can end it."""
        await self._groups.close(limit_s)
        if self._made is not None:
            self._made.close(limit_s)
        self._compute.shutdown()
        self.nothing_left = not any(thread.name.startswith("group ") for thread in threading.enumerate())
        self.ended.set()
        return self.nothing_left

    async def _on_compute(self, work: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)


class _FailsAfterAddress(dist.Store):
    """A store in which this member writes its address and is gone."""

    def __init__(self, store: Any, fail: Any) -> None:
        super().__init__()
        self._store, self._fail = store, fail

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        self._fail()


def told(error: GroupBroken) -> dict[str, Any]:
    return {
        "group": error.group, "epoch": error.epoch, "operation": error.operation, "why": error.why,
        "missing": list(error.missing), "text": str(error),
    }  # fmt: skip


async def live(order: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    waits.set_waiter(order["member"])
    if "world" in order:  # launched by torchrun: the job's own group, on its own store
        dist.init_process_group("gloo")
    with ActorRef(order["meeting"], token=order["token"], peer="meeting") as meeting:
        member = Member(order, meeting)
        async with await serve(member, order["socket"], token=order["token"], name=order["member"]):
            await member.ended.wait()
    if not member.nothing_left:
        os._exit(0)
    if "world" in order:
        dist.destroy_process_group()


def nursery() -> None:
    """Forks a member for every line. The nursery itself never starts a thread or a loop."""
    die_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody is left unburied
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            order = json.loads(line)
            if "num_ranks" in order:
                launch(order)
            elif order:
                asyncio.run(live(order))
            else:
                serve_store()
            return
        if line.strip() != "{}":
            print(pid, flush=True)


def serve_store() -> None:
    """The run's store: prints its port and serves until the nursery ends."""
    # The server looks up the name of whoever connects, on its one thread: for seconds where no name server answers.
    getattr(ctypes.CDLL(None), "__nss_configure_lookup")(b"hosts", b"files")
    made = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(made.port, flush=True)
    while True:
        signal.pause()


def launch(order: dict[str, Any]) -> None:
    """What the command does, in a session of its own."""
    os.setsid()
    os.environ["MEMBER_ORDER"] = json.dumps(order)
    torchrun.main([f"--nproc-per-node={order['num_ranks']}", "--standalone", __file__])
    Path(order["done"]).touch()


def launched() -> None:
    """Under torchrun: its rank completes the order in the environment."""
    die_with_parent()  # torchrun gives its workers sessions of their own
    order = json.loads(os.environ["MEMBER_ORDER"])
    order["member"] = f"{order['group']}/{os.environ['RANK']}"
    order["socket"] = f"{order['socket']}.{os.environ['RANK']}"
    asyncio.run(live({**order, "world": True}))


if __name__ == "__main__":
    nursery() if "RANK" not in os.environ else launched()
