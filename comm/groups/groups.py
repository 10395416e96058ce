"""Process groups across separately started jobs: named, numbered by epoch, with deadlines, and never a hang.

    trainer's torchrun                  the run's TCPStore                  rollout's torchrun
    actor-0/0  ----.                  groups/weights/4/...               .----  rollout-0/0
    actor-0/1  ----+---- meet ----> the meeting announces epoch 4 <------+----  rollout-0/1
                                   (name, number, members and lives)

Owns a member's way from epoch to epoch. Does not own who is a member (`epochs.py`, `meeting.py`), one epoch's calls
(`communicators.py`), the libraries (`carriers.py`), or torch's default group, which stays as it is.

    groups = ProcessGroups(store, "rollout-0/1", incarnation, meeting)
    weights = await groups.join(GroupSpec("weights", members), deadline_s=60)    # meets, forms; GroupBroken names who is missing
    await ctx.compute(weights.broadcast, tensor, 0)                              # or the like, on the compute thread
    # GroupBroken: a member died, was stopped or left. What was received is of no use; join again for the next epoch.

Invariants: every call ends by its deadline, with its result or with `GroupBroken`; after the first failure the epoch is over for
this member, its sockets close as soon as the library lets go of them, and the others fail by that; members of an old epoch are
refused at the store; an epoch's keys are never read by another one.

What makes it so, each seen with torch 2.13:

    seen                                                           therefore
    gloo's `abort` does nothing: a call that waits goes on to      every call runs on a thread of the communicator; whoever waits
    its own time-out                                               for it is woken by the deadline or by `abort`, and goes on
    a member that stops while the mesh is made holds the others    the same: that thread is abandoned, and ends by itself later;
    for 30 s, whatever the group's time-out; a store that takes    it has its own connection to the store
    a connection and is silent holds its client for ever
    taking a group down waits for its calls: 110 s with lazy       it is taken down on that thread, by nobody who matters;
    connections to a stopped member                                connections are made eagerly
    a stopped process keeps its sockets: nothing fails before      its supervisor kills it first (heartbeats), sockets close,
    the deadline                                                   and the meeting wakes every survivor at once
    torchrun's own restart keeps its store: the next workers       each incarnation is a torchrun of its own with a prefix of its
    read addresses of the dead and fail until restarts run out     own, and a group's keys carry its epoch

A tensor of a broken call belongs to it until `close` says that nothing is left: the library may still write there.
"""

from __future__ import annotations

import asyncio
import time

from rondo.comm.groups.carriers import check_backend
from rondo.comm.groups.communicators import Communicator, CommunicatorStats
from rondo.comm.groups.epochs import Epoch, GroupSpec, lives_of
from rondo.comm.groups.meeting import fields_of
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.errors import GroupBroken, RondoError

_ANSWER_S = 5.0
"""The meeting keeps to a member's patience; so much longer its answer may take, which names who is missing."""


class ProcessGroups:
    """The groups that one member is in, from epoch to epoch. Lives on the event loop; `meeting` refers to a `Meeting`."""

    def __init__(
        self, store: tuple[str, int], member: str, incarnation: int, meeting: ActorRef, *, device: str = "cpu"
    ) -> None:
        self._store, self._member, self._incarnation, self._device = store, member, incarnation, device
        self._meeting = meeting
        self._open: dict[str, tuple[Communicator, asyncio.Task[None]]] = {}
        self._past: list[Communicator] = []
        self._last: dict[str, int] = {}

    async def join(self, spec: GroupSpec, *, deadline_s: float = 60.0) -> Communicator:
        """The next epoch of a group, when all its members want it. The one that this member was in is over by this.

        Raises GroupBroken when that does not come about by the deadline, and names who is missing; Refused when this life of
        the member is over; ConfigError when the spec is not the others'; DeadlineExceeded, some seconds behind the deadline, when
        the meeting itself is silent.
        """
        check_backend(spec.backend, self._device)
        due = time.monotonic() + deadline_s
        self._leave(spec.name, "this member joins a later epoch")
        after = self._last.get(spec.name, 0)
        patience_s = deadline_s - min(1.0, 0.1 * deadline_s)  # who asks at the last moment leaves some for the forming
        answer = await self._meeting.call(
            "meet_group", fields_of(spec), self._member, self._incarnation, after, patience_s,
            deadline_s=deadline_s + _ANSWER_S, retry=True,
        )  # fmt: skip
        if "missing" in answer:
            raise GroupBroken(spec.name, after + 1, "meet", f"silence for {patience_s:g} s", tuple(answer["missing"]))
        epoch = Epoch(spec.name, answer["epoch"], lives_of(answer["lives"]))
        self._last[spec.name] = epoch.number
        left_s = max(0.001, due - time.monotonic())
        made = Communicator(spec, epoch, self._member, self._store, device=self._device, deadline_s=left_s)
        watch = asyncio.get_running_loop().create_task(self._watch(made), name=f"watch {spec.name}/{epoch.number}")
        self._open[spec.name] = made, watch
        try:
            await asyncio.to_thread(made.wait_formed)
        except BaseException:
            self._leave(spec.name, "it was not formed")
            raise
        return made

    async def close(self, deadline_s: float = 5.0) -> bool:
        """Leaves every group. True when nothing is left of any, False when a library still blocks a thread.

        A process where something is left ends with `os._exit`, as rondo's workers always do.
        """
        for communicator, watch in self._open.values():
            watch.cancel()
            self._past.append(communicator)
        self._open.clear()
        due = time.monotonic() + deadline_s
        ended = [await asyncio.to_thread(past.close, max(0.0, due - time.monotonic())) for past in self._past]
        self._past = [past for past, gone in zip(self._past, ended, strict=True) if not gone]
        return not self._past

    def stats(self) -> tuple[CommunicatorStats, ...]:
        """The groups that are open, and what a library still holds of those that are over."""
        self._past = [past for past in self._past if past.stats().blocked]
        return tuple(made.stats() for made in [*(made for made, _ in self._open.values()), *self._past])

    def _leave(self, name: str, why: str) -> None:
        found = self._open.pop(name, None)
        if found is not None:
            communicator, watch = found
            watch.cancel()
            communicator.abort(why)
            self._past = [past for past in [*self._past, communicator] if past.stats().blocked]

    async def _watch(self, made: Communicator) -> None:
        """Ends the epoch here as soon as the meeting says that it is over."""
        lives = [list(life) for life in made.epoch.lives]
        try:
            over = await self._meeting.call(
                "watch_group", fields_of(made.spec), made.epoch.number, lives, deadline_s=None, retry=True
            )  # no deadline: it lasts as long as the epoch
            made.abort(over["why"], tuple(over["missing"]))
        except RondoError as error:
            made.abort(f"no word from the meeting: {error}")
