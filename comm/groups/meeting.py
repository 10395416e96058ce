"""Meeting: where the members of a process group ask for its next epoch and hear that one is over.

Owns the waiting; `epochs.py` decides. Does not know tensors or torch: it lives in the coordinator, or wherever a member reaches
it and deaths are told. Everything is idempotent: a member that lost the connection asks again and gets the same answer, and a
meeting that was restarted learns from its members which epochs there are.

    await ref.call("meet_group", spec, "rollout-0/1", 3, after=4, patience_s=30)   # {"epoch": 5, "lives": [...]}
    await ref.call("watch_group", spec, 5, lives)                                  # returns when epoch 5 is over
    meeting.member_dead("rollout-0", 3)
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from rondo.comm.groups.epochs import Epoch, Epochs, GroupSpec, lives_of
from rondo.runtime.actors.actor import Actor, endpoint

T = TypeVar("T")


class Meeting(Actor):
    """The endpoints that members call; `member_dead` is called by whoever proves deaths."""

    def __init__(self) -> None:
        self._epochs = Epochs()
        self._changed = asyncio.Event()
        self._asking: collections.Counter[tuple[str, str, int]] = collections.Counter()

    @endpoint
    async def meet_group(
        self, spec: dict[str, Any], member: str, incarnation: int, after: int, patience_s: float
    ) -> dict[str, Any]:
        """An epoch above `after`, as soon as every member asked: {"epoch": number, "lives": [[group, rank, incarnation]]}.

        {"missing": [member, ...]} when that takes longer than `patience_s`. Refused when this life is over.
        """
        wanted = spec_of(spec)
        me = wanted.name, member, incarnation
        self._epochs.ask(wanted, member, incarnation, after)
        self._tell()
        self._asking[me] += 1  # twice for a moment when a member asks again over a new connection
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    epoch = await self._until(lambda: self._epochs.answer(wanted.name, member, incarnation, after))
                    return {"epoch": epoch.number, "lives": [list(life) for life in epoch.lives]}
            return {"missing": list(self._epochs.missing(wanted.name))}
        finally:
            self._asking[me] -= 1
            if not self._asking[me]:
                del self._asking[me]
                self._epochs.withdraw(*me)

    @endpoint
    async def watch_group(self, spec: dict[str, Any], number: int, lives: list[list[Any]]) -> dict[str, Any]:
        """Waits until epoch `number` is over: {"why": text, "missing": [member, ...]}."""
        wanted = spec_of(spec)
        self._epochs.restore(wanted, Epoch(wanted.name, number, lives_of(lives)))
        self._tell()  # a member of this epoch may be asking for it, since its answer was lost
        over = await self._until(lambda: self._epochs.over(wanted.name, number))
        return {"why": over.why, "missing": list(over.missing)}

    def member_dead(self, group: str, incarnation: int) -> None:
        """Every process of this life of a role group is proved dead."""
        self._epochs.dead(group, incarnation)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, found: Callable[[], T | None]) -> T:
        """The caller's deadline is over this wait: a call that nobody waits for is cancelled."""
        while (value := found()) is None:
            await self._changed.wait()
        return value


def spec_of(fields: dict[str, Any]) -> GroupSpec:
    """A spec as it came over a wire; ConfigError when it breaks a rule."""
    return GroupSpec(**{**fields, "members": tuple(fields["members"])})


def fields_of(spec: GroupSpec) -> dict[str, Any]:
    return {**asdict(spec), "members": list(spec.members)}
