"""Process groups between processes that were started apart: whole, dead, stopped, and formed again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rondo.comm.groups.communicators import Communicator, open_group
from rondo.comm.groups.epochs import Epoch, GroupSpec
from rondo.comm.groups.groups import ProcessGroups
from rondo.comm.groups.meeting import Meeting, fields_of
from rondo.runtime import waits
from rondo.runtime.actors.actor import serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import Closed, ConfigError, GroupBroken

HERE = Path(__file__).parent
TOKEN = "a-token-of-the-run"
A, B, C = "actor-0/0", "actor-0/1", "rollout-0/0"
GENEROUS_S = 120.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.comm.groups.group_worker"], cwd=HERE.parents[2], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    yield child
    child.communicate()
    assert child.returncode == 0


@dataclass(frozen=True, slots=True)
class Store:
    host: str
    port: int


@pytest.fixture(scope="module")
def store(nursery: subprocess.Popen[str]) -> Store:
    """The run's store. One for all tests: each uses group names of its own."""
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write("{}\n")
    nursery.stdin.flush()
    return Store("127.0.0.1", int(nursery.stdout.readline()))


class World:
    """A meeting, and members that a test starts, signals and asks."""

    def __init__(self, nursery: subprocess.Popen[str], store: Store, folder: Path, name: str) -> None:
        self.nursery, self.store, self.folder, self.name = nursery, store, folder, name
        self.meeting = Meeting()
        self.refs: dict[str, ActorRef] = {}
        self.pids: dict[str, int] = {}
        self.pidfds: dict[str, int] = {}
        self.num_started = 0
        self.unanswered: list[asyncio.Task[Any]] = []

    def spec(self, *members: str, **more: Any) -> dict[str, Any]:
        return fields_of(GroupSpec(self.name, members, **more))

    def order(self, incarnation: int) -> dict[str, Any]:
        self.num_started += 1
        return {
            "socket": f"unix:{self.folder}/{self.num_started}", "token": TOKEN, "incarnation": incarnation,
            "store": [self.store.host, self.store.port], "meeting": f"unix:{self.folder}/meeting",
        }  # fmt: skip

    def start(self, *members: str, incarnation: int = 1) -> None:
        for member in members:
            order = {**self.order(incarnation), "member": member}
            self.adopt(member, self.fork(order), order["socket"])

    def fork(self, order: dict[str, Any]) -> int:
        """The pid of who follows it."""
        assert self.nursery.stdin is not None and self.nursery.stdout is not None
        self.nursery.stdin.write(json.dumps(order) + "\n")
        self.nursery.stdin.flush()
        return int(self.nursery.stdout.readline())

    def adopt(self, member: str, pid: int, socket: str) -> None:
        self.pids[member], self.pidfds[member] = pid, os.pidfd_open(pid)
        self.refs[member] = ActorRef(socket, token=TOKEN, peer=member)

    async def ask(self, member: str, endpoint: str, *arguments: Any) -> Any:
        return await self.refs[member].call(endpoint, *arguments, deadline_s=GENEROUS_S, retry=True)

    def let(self, member: str, endpoint: str, *arguments: Any) -> None:
        """Asks a member that will not live to answer."""
        task = asyncio.create_task(self.ask(member, endpoint, *arguments))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.unanswered.append(task)

    async def join(self, spec: dict[str, Any], *members: str, limit_s: float = GENEROUS_S / 2) -> list[Any]:
        return await asyncio.gather(*(self.ask(member, "join", spec, limit_s) for member in members))

    async def run(
        self,
        members: tuple[str, ...],
        operation: str,
        values: list[Any],
        extra: Any = 0,
        limit_s: float = GENEROUS_S / 2,
    ) -> list[Any]:
        asked = zip(members, values, strict=True)
        return await asyncio.gather(*(self.ask(member, "run", operation, v, extra, limit_s) for member, v in asked))

    async def all_waiting(self, *members: str, name: str) -> None:
        """Returns when every one of them blocks in a call of this name: its own list of waits says so."""
        async with asyncio.timeout(GENEROUS_S):
            for member in members:
                while [name] not in [pending[:1] for pending in await self.ask(member, "waits")]:
                    pass  # asking lets the loop and the member go on

    def signal(self, member: str, number: int) -> None:
        signal.pidfd_send_signal(self.pidfds[member], number)

    async def stop(self, member: str) -> None:
        self.signal(member, signal.SIGSTOP)
        await asyncio.to_thread(stopped, self.pids[member])

    async def bury(self, member: str) -> None:
        """What a supervisor does: SIGKILL, wait for the proof, tell the meeting."""
        self.signal(member, signal.SIGKILL)
        await self.gone(member)
        self.meeting.member_dead(member.partition("/")[0], 1)

    async def gone(self, member: str) -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self.pidfds[member], ended.set)
        async with asyncio.timeout(GENEROUS_S):
            await ended.wait()
        asyncio.get_running_loop().remove_reader(self.pidfds[member])
        os.close(self.pidfds.pop(member))
        self.refs.pop(member).close()

    async def leave(self, limit_s: float = GENEROUS_S) -> None:
        """Every member lets go of everything and ends by itself. With a limit of 0 a library may still hold a thread of it."""
        members = list(self.refs)
        nothing_left = await asyncio.gather(*(self.ask(member, "leave", limit_s) for member in members))
        for member in members:
            await self.gone(member)
        assert all(nothing_left) or not limit_s, f"of {members} some still had a thread in a library: {nothing_left}"


@pytest.fixture
async def world(
    nursery: subprocess.Popen[str], store: Store, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    made = World(nursery, store, tmp_path, request.node.name)
    async with await serve(made.meeting, f"unix:{tmp_path}/meeting", token=TOKEN, name="meeting"):
        try:
            yield made
        finally:
            for member in list(made.refs):
                made.signal(member, signal.SIGKILL)
                await made.gone(member)


async def test_processes_started_apart_form_a_group_and_every_operation_gives_what_it_should(world: World) -> None:
    members = A, B, C
    world.start(*members)
    assert await world.join(world.spec(*members), *members) == [{"epoch": 1, "rank": rank} for rank in range(3)]
    assert await world.run(members, "broadcast", [[0.0, 0], [5, 6], [0, 0]], 1) == [[5, 6]] * 3
    assert await world.run(members, "barrier", [[0.0]] * 3) == [[0]] * 3
    sent, got = await asyncio.gather(
        world.ask(A, "run", "send", [[1.0, 2], [3, 4]], 2, GENEROUS_S),
        world.ask(C, "run", "recv", [[0.0, 0], [0, 0]], 0, GENEROUS_S),
    )
    assert sent == got == [[1, 2], [3, 4]]
    await world.leave()


async def test_every_dtype_goes_as_its_bytes_scalars_and_empty_tensors_too(world: World) -> None:
    world.start(A, C)
    await world.join(world.spec(A, C), A, C)
    cases: list[tuple[Any, Any, str]] = [
        ([1.5, -2], [0, 0], "bfloat16"), ([3, 4], [0, 0], "int16"), ([True, False], [False, True], "bool"),
        (2.5, 0.0, "float64"), ([], [], "float16"),
    ]  # fmt: skip
    for mine, other, dtype in cases:
        found = await asyncio.gather(
            world.ask(A, "run", "broadcast", mine, 0, GENEROUS_S, dtype),
            world.ask(C, "run", "broadcast", other, 0, GENEROUS_S, dtype),
        )
        assert found == [mine, mine], dtype


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_survivors_of_a_death_get_the_error_and_form_the_next_epoch_with_the_replacement(
    world: World, how: str
) -> None:
    """Stopped members too: their supervisor kills them first. No survivor is restarted."""
    spec = world.spec(A, B, C)
    world.start(A, B, C)
    await world.join(spec, A, B, C)
    if how == "stop":
        world.signal(C, signal.SIGSTOP)
    calls = [asyncio.create_task(world.ask(m, "run", "broadcast", [1.0] * 9, 2, GENEROUS_S)) for m in (A, B)]
    await world.all_waiting(A, B, name="group broadcast")
    await world.bury(C)
    for error in await asyncio.gather(*calls):
        assert (error["group"], error["epoch"], error["operation"]) == (world.name, 1, "broadcast")
    again = [asyncio.create_task(world.ask(m, "join", spec, GENEROUS_S)) for m in (A, B)]
    world.start(C, incarnation=2)
    assert await world.ask(C, "join", spec, GENEROUS_S) == {"epoch": 2, "rank": 2}
    assert await asyncio.gather(*again) == [{"epoch": 2, "rank": 0}, {"epoch": 2, "rank": 1}]
    assert await world.run((A, B, C), "broadcast", [[1.0], [2], [4]], 2) == [[4]] * 3
    await world.leave()


async def test_a_survivor_that_waits_for_nobody_dead_hears_of_the_death_from_the_meeting(world: World) -> None:
    """A waits for B, who lives and is silent; C dies: no socket of the call closes, and still A is woken and told who."""
    world.start(A, B, C)
    await world.join(world.spec(A, B, C), A, B, C)
    call = asyncio.create_task(world.ask(A, "run", "recv", [0.0], 1, GENEROUS_S))
    await world.all_waiting(A, name="group recv")
    await world.stop(B)  # one that heard of it before A did would close its socket
    await world.bury(C)
    error = await call
    assert error["missing"] == [C] and error["why"] == "rollout-0 (incarnation 1) is dead"
    assert error["text"].startswith(f"group {world.name!r} must be whole in epoch 1 for recv, got rollout-0")


@pytest.mark.parametrize("operation", ["broadcast", "barrier", "recv"])
async def test_a_stopped_member_that_nobody_kills_costs_the_deadline_and_no_more(world: World, operation: str) -> None:
    spec = world.spec(A, B, C)
    world.start(A, B, C)
    await world.join(spec, A, B, C)
    world.signal(C, signal.SIGSTOP)
    for error in await world.run((A, B), operation, [[1.0] * 9] * 2, 2, limit_s=0.5):
        assert error["operation"] == operation and error["epoch"] == 1
        assert error["missing"] == ([C] if operation == "recv" else [])
    # It is continued, never having been declared dead: it finds the epoch over, and forms the next one like the others.
    world.signal(C, signal.SIGCONT)
    # One that the others had sent their part of, and gave up, may still be whole here; no later one is.
    if operation == "barrier":
        await world.run((C,), "barrier", [[0.0]])
    assert (await world.run((C,), "barrier", [[0.0]]))[0]["epoch"] == 1
    assert [answer["epoch"] for answer in await world.join(spec, A, B, C)] == [2, 2, 2]
    assert await world.run((A, B, C), "broadcast", [[0.0], [0], [8]], 2) == [[8]] * 3


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("moment", ["first", "present", "address"])
async def test_a_death_in_the_middle_of_forming_breaks_that_epoch_and_the_next_one_stands(
    world: World, moment: str, how: str
) -> None:
    """ "address": the others connect to a process that never accepts, where gloo alone would hold them for 30 s."""
    spec = world.spec(A, B, C)
    world.start(A, B, C)
    await world.ask(C, "fail_while_forming", moment, how)
    forming = [asyncio.create_task(world.ask(member, "join", spec, GENEROUS_S / 2)) for member in (A, B)]
    world.let(C, "join", spec, GENEROUS_S / 2)
    await world.all_waiting(A, B, name="group form")
    if how == "kill":
        await world.gone(C)
        world.meeting.member_dead("rollout-0", 1)
    else:
        await asyncio.to_thread(stopped, world.pids[C])
        await world.bury(C)
    for error in await asyncio.gather(*forming):
        assert (error["epoch"], error["operation"]) == (1, "form")
    world.start(C, incarnation=2)
    assert [answer["epoch"] for answer in await world.join(spec, A, B, C)] == [2, 2, 2]
    assert await world.run((A, B, C), "broadcast", [[1.0], [2], [4]], 2) == [[4]] * 3
    await world.leave(GENEROUS_S if moment == "first" else 0)  # gloo holds a thread of those that it was connecting


def stopped(pid: int) -> None:
    """Returns when the process is stopped by a signal."""
    while (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
        os.sched_yield()


async def test_forming_with_a_stopped_member_ends_by_its_deadline_and_names_who_did_not_come(world: World) -> None:
    world.start(A, B, C)
    await world.ask(C, "fail_while_forming", "first", "stop")
    world.let(C, "join", world.spec(A, B, C), GENEROUS_S)
    joining = asyncio.gather(*(world.ask(member, "join", world.spec(A, B, C), GENEROUS_S) for member in (A, B)))
    store = dist.TCPStore(world.store.host, world.store.port, is_master=False)
    here = dist.PrefixStore(f"groups/{world.name}/1/here", store)
    await seen(lambda: here.check(["0", "1"]))
    for member in (A, B):
        await world.ask(member, "time_passes")
    for error in await joining:
        assert (error["operation"], error["missing"]) == ("form", [C])


async def test_a_meeting_that_does_not_come_about_names_who_did_not_ask(world: World) -> None:
    world.start(A)
    [error] = await world.join(world.spec(A, B, C), A, limit_s=0.5)
    assert (error["operation"], error["missing"]) == ("meet", [B, C])


async def test_a_late_member_of_an_old_epoch_is_refused_at_the_meeting_and_at_the_store(world: World) -> None:
    spec = world.spec(A, C)
    world.start(A, C)
    await world.join(spec, A, C)
    await asyncio.gather(world.ask(A, "join", spec, GENEROUS_S), world.ask(C, "join", spec, GENEROUS_S))
    late = await world.ask(A, "open", spec, 1, [["actor-0", 0, 1], ["rollout-0", 0, 1]], GENEROUS_S)
    assert "must be 2 or later, got 1" in late["refused"]
    twice = await world.ask(A, "open", spec, 2, [["actor-0", 0, 1], ["rollout-0", 0, 1]], GENEROUS_S)
    assert "rank 0 of group" in twice["refused"] and "once, got a second time" in twice["refused"]
    world.meeting.member_dead("rollout-0", 1)
    with pytest.raises(Exception, match="incarnation of rollout-0/0 must be 2 or a later one, got 1"):
        await world.ask(C, "join", spec, GENEROUS_S)


async def test_a_meeting_that_was_restarted_still_tells_its_members_of_a_death(
    nursery: subprocess.Popen[str], store: Store, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    world = World(nursery, store, tmp_path, request.node.name)
    server = await serve(world.meeting, f"unix:{tmp_path}/meeting", token=TOKEN, name="meeting")
    try:
        spec = world.spec(A, B, C)
        world.start(A, B, C)
        await world.join(spec, A, B, C)
        call = asyncio.create_task(world.ask(A, "run", "recv", [0.0], 1, GENEROUS_S))
        await world.all_waiting(A, name="group recv")
        await world.stop(B)  # one that heard of it before A did would close its socket
        await server.close()
        world.meeting = Meeting()
        server = await serve(world.meeting, f"unix:{tmp_path}/meeting", token=TOKEN, name="meeting")
        await world.bury(C)
        assert (await call)["missing"] == [C]
        world.signal(B, signal.SIGCONT)
        world.start(C, incarnation=2)
        assert [answer["epoch"] for answer in await world.join(spec, A, B, C)] == [2, 2, 2]
    finally:
        for member in list(world.refs):
            world.signal(member, signal.SIGKILL)
            await world.gone(member)
        await server.close()


async def test_an_abort_from_the_event_loop_wakes_the_compute_thread(world: World) -> None:
    world.start(A, B)
    await world.join(world.spec(A, B), A, B)
    call = asyncio.create_task(world.ask(A, "run", "broadcast", [1.0], 1, GENEROUS_S))
    await world.all_waiting(A, name="group broadcast")
    await world.ask(A, "abort", "the run stops")
    assert (await call)["why"] == "the run stops"


def test_a_store_that_does_not_answer_costs_the_deadline() -> None:
    with socket.socket() as listening:  # takes connections and says nothing
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        spec = GroupSpec("silent store", (A, C))
        made = Communicator(spec, Epoch(spec.name, 1, ()), A, listening.getsockname(), device="cpu", deadline_s=0.3)
        with pytest.raises(GroupBroken, match="for form, got "):
            made.wait_formed()
    assert made.close(GENEROUS_S)  # torch's client lets go when the connection closes, and not at its time-out


async def seen(what: Callable[[], bool]) -> None:
    """Returns once the loop, going round, has brought about what has no event of its own."""
    async with asyncio.timeout(GENEROUS_S):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_join_that_is_cancelled_leaves_the_meeting_and_no_thread(world: World) -> None:
    spec = GroupSpec(world.name, (A, C))
    address = world.store.host, world.store.port
    with ActorRef(f"unix:{world.folder}/meeting", token=TOKEN, peer="meeting") as meeting:
        mine = ProcessGroups(address, A, 1, meeting)
        asking = asyncio.create_task(mine.join(spec))
        await seen(lambda: len(world.meeting._asking) == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        world.start(C)
        [error] = await world.join(fields_of(spec), C, limit_s=0.5)
        assert error["missing"] == [A] and not world.meeting._asking
        forming = asyncio.create_task(mine.join(spec))
        await world.ask(C, "fail_while_forming", "first", "stop")
        world.let(C, "join", fields_of(spec), GENEROUS_S)
        await seen(lambda: "group form" in [pending.name for pending in waits.pending()])
        forming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forming
        assert "" not in [one.broken for one in mine.stats()]
        assert await mine.close(GENEROUS_S) and mine.stats() == ()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda c: c.broadcast(torch.zeros(4, 4).t(), 0), "must be contiguous and on cpu, got strided on cpu"),
        (lambda c: c.send(torch.zeros(1), 0), "peer of send must be another rank below 2, got 0"),
        (lambda c: c.broadcast(torch.zeros(1), 2), "root of broadcast must be a rank below 2, got 2"),
    ],
)
def test_a_tensor_or_rank_that_does_not_fit_is_refused_and_breaks_nothing(
    store: Store, request: pytest.FixtureRequest, call: Callable[[Communicator], None], text: str
) -> None:
    spec = GroupSpec(request.node.name, (A, C))
    epoch = Epoch(spec.name, 1, ())
    with ThreadPoolExecutor(2) as threads:
        made = list(
            threads.map(lambda m: open_group(spec, epoch, m, (store.host, store.port), deadline_s=GENEROUS_S), (A, C))
        )
        with made[0], made[1]:
            with pytest.raises(ConfigError, match=text):
                call(made[0])
            list(threads.map(lambda one: one.barrier(), made))
        with pytest.raises(Closed):
            made[0].barrier()


async def test_groups_of_different_names_do_not_meet(world: World) -> None:
    """Two groups over the same members: each has its own epochs, and one breaking leaves the other whole."""
    world.start(A, C)
    await world.join(world.spec(A, C), A, C)
    other = fields_of(GroupSpec(f"{world.name} two", (C, A)))
    assert await world.join(other, A, C) == [{"epoch": 1, "rank": 1}, {"epoch": 1, "rank": 0}]
    assert await world.run((A, C), "broadcast", [[3.0], [0]], 1) == [[3]] * 2


async def test_two_torchruns_form_a_group_and_keep_their_own_worlds(world: World, store: Store) -> None:
    """The trainer's own world goes on while the rollout job dies, is started again, and joins the next epoch."""
    members = A, B, C
    spec = world.spec(*members)
    jobs: list[tuple[int, int, Path]] = []  # pid, pidfd, and what is there once it has ended as it should

    def launch(group: str, num_ranks: int, incarnation: int) -> None:
        order, done = world.order(incarnation), world.folder / f"{group}.{incarnation}"
        pid = world.fork({**order, "group": group, "num_ranks": num_ranks, "done": str(done)})
        jobs.append((pid, os.pidfd_open(pid), done))
        for rank in range(num_ranks):
            member = f"{group}/{rank}"
            world.refs[member] = ActorRef(f"{order['socket']}.{rank}", token=TOKEN, peer=member)

    try:
        launch("actor-0", 2, 1)
        launch("rollout-0", 1, 1)
        assert await world.join(spec, *members) == [{"epoch": 1, "rank": rank} for rank in range(3)]
        assert await world.run(members, "broadcast", [[1.0], [2], [4]], 2) == [[4]] * 3
        assert await asyncio.gather(world.ask(A, "own_world", 1.0), world.ask(B, "own_world", 2.0)) == [3.0, 3.0]
        call = asyncio.create_task(world.ask(A, "run", "recv", [0.0], 2, GENEROUS_S))
        os.killpg(jobs[1][0], signal.SIGKILL)
        world.refs.pop(C).close()
        world.meeting.member_dead("rollout-0", 1)
        assert (await call)["epoch"] == 1
        assert await asyncio.gather(world.ask(A, "own_world", 1.0), world.ask(B, "own_world", 2.0)) == [3.0, 3.0]
        launch("rollout-0", 1, 2)
        assert [answer["epoch"] for answer in await world.join(spec, *members)] == [2, 2, 2]
        assert await world.run(members, "broadcast", [[1.0], [2], [4]], 2) == [[4]] * 3
        await asyncio.gather(*(world.ask(member, "leave", GENEROUS_S) for member in members))
        for index in (0, 2):
            _, ended, done = jobs[index]
            assert (await asyncio.to_thread(select.select, [ended], [], [], GENEROUS_S))[0] and done.exists()
    finally:
        for pid, ended, _ in jobs:
            if not select.select([ended], [], [], 0)[0]:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(pid, signal.SIGKILL)
                select.select([ended], [], [])
            os.close(ended)
        for ref in world.refs.values():
            ref.close()
        world.refs.clear()
