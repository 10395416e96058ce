"""The announcer: in order, over the coordinator's own restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rondo.runtime.actors.actor import Actor, endpoint, serve
from rondo.runtime.actors.ref import ActorRef
from rondo.runtime.supervision.announcer import Announcer

TOKEN = "t"


class Coordinator(Actor):
    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.heard = asyncio.Event()

    @endpoint
    async def member_dead(self, group: str, incarnation: int) -> None:
        self.told.append((group, incarnation))
        self.heard.set()


async def test_messages_wait_for_a_coordinator_that_is_not_there_and_arrive_in_order(tmp_path: Path) -> None:
    address, failures = f"unix:{tmp_path}/c.sock", []
    with ActorRef(address, token=TOKEN, peer="coordinator") as ref:
        announcer = Announcer(ref, lambda method, error: failures.append((method, str(error))))
        delivering = asyncio.create_task(announcer.run())
        for number in range(3):
            announcer.tell("member_dead", "actor-0", number)
        announcer.tell("no_such", 1)
        announcer.tell("member_dead", "actor-0", 3)
        coordinator = Coordinator()
        async with await serve(coordinator, address, token=TOKEN, name="coordinator"):
            while len(coordinator.told) < 4:
                coordinator.heard.clear()
                await asyncio.wait_for(coordinator.heard.wait(), 60)
        delivering.cancel()
    assert coordinator.told == [("actor-0", number) for number in range(4)]
    assert failures == [("no_such", "endpoint of coordinator must be one of member_dead, got 'no_such'")]


async def test_what_an_attempt_did_not_deliver_is_forgotten_with_it(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/c.sock"
    with ActorRef(address, token=TOKEN, peer="coordinator") as ref:
        announcer = Announcer(ref, lambda method, error: None)
        delivering = asyncio.create_task(announcer.run())
        for number in range(3):
            announcer.tell("member_dead", "old", number)
        await asyncio.sleep(0)  # the first is on its way
        announcer.clear()
        announcer.tell("member_dead", "new", 0)
        coordinator = Coordinator()
        async with await serve(coordinator, address, token=TOKEN, name="coordinator"):
            await asyncio.wait_for(coordinator.heard.wait(), 60)
        delivering.cancel()
    assert coordinator.told == [("new", 0)]
