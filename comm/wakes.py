"""Who waits at the coordinator for what, and which events can give it to them.

Owns the waiting and the rule of who is asked again; not the answers. A waiter names the topics that its answer depends on, an
event the topics that it can help; an event that is not listed here helps everybody, so that forgetting one costs time and not a
lost wake-up.

    put in a replica's ring   -> rounds (a group may be ready), lease/rollout-0 (its reservation came back)
    commit                    -> everybody

Invariant: a waiter registers in the same turn of the loop in which it found no answer, so no event falls in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rondo.comm.journal import Event

ROUNDS, SLOTS, WEIGHTS, EVALUATIONS = "rounds", "slots", "weights", "evaluations"
_EVERYBODY, _ANYTHING = "*", "?"


def lease(member: str) -> str:
    """The topic of work for one replica."""
    return f"lease/{member}"


def helped(event: Event, owner: str | None) -> tuple[str, ...]:
    """The topics that an event can help; `owner`: whose ring a put lies in."""
    match event["event"]:
        case "put":
            return (ROUNDS,) if owner is None else (ROUNDS, lease(owner))
        case "ack" | "rounds":
            return (ROUNDS,)
        case "proved":
            return lease(event["reader"].partition("/")[0]), SLOTS
        case "published":
            return (WEIGHTS,)
        case "admit" | "grant" | "hold" | "publishing":
            return ()
    return (_EVERYBODY,)


class Wakes:
    """The waiters, on the loop that they wait on."""

    def __init__(self) -> None:
        self._by_topic: dict[str, set[asyncio.Future[None]]] = {_ANYTHING: set()}
        self._waiting: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, *topics: str) -> None:
        """Until something helps one of the topics; without any, until anything happens."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        topics = topics or (_ANYTHING,)
        self._waiting.add(waiter)
        for topic in topics:
            self._by_topic.setdefault(topic, set()).add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)
            for topic in topics:
                self._by_topic[topic].discard(waiter)

    def wake(self, topics: Iterable[str]) -> None:
        named = set(topics)
        if not named:
            return
        if _EVERYBODY in named:
            self.wake_all()
            return
        for topic in (*named, _ANYTHING):
            for waiter in self._by_topic.get(topic, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def wake_all(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
