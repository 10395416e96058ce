"""Two real servers behind a dispatcher, which are killed in mid-generation and during an update: lost 0, twice 0."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch

from rondo.models.load import load_model
from rondo.roles.config import SGLangConfig
from rondo.roles.engines.dispatch import Dispatcher
from rondo.roles.engines.engine import Completion, Request
from rondo.roles.engines.sglang.one_server import Load
from rondo.roles.engines.sglang.open import connect_engine
from rondo.roles.engines.sglang.restarts import KeptEngine, kept
from rondo.roles.engines.sglang.server import SGLangServer
from rondo.runtime.waits import waiting
from tests.models.builders import full_tensors
from tests.roles.engines.engines import request
from tests.sglang.servers import GRACE_S, START_S, launch, moe, python

T = TypeVar("T")
STEP_S = 300.0
NUM_REQUESTS, NUM_TOKENS = 24, 96


@dataclass
class World:
    """A dispatcher over two servers, its loop, and what it was given last."""

    runner: asyncio.Runner
    dispatcher: Dispatcher
    servers: list[SGLangServer]
    tensors: dict[str, torch.Tensor]
    model: Any
    unstarted: asyncio.Future[None]
    """Fails when a server does not start: it would be tried again for ever."""
    left: list[str]
    """Why servers left."""
    version: int = 0
    expected: dict[int, list[int]] = field(default_factory=dict)

    def run(self, scenario: Coroutine[Any, Any, T]) -> T:
        async def unless_hopeless() -> T:
            running = asyncio.ensure_future(scenario)
            await asyncio.wait([running, self.unstarted], return_when=asyncio.FIRST_COMPLETED)
            if self.unstarted.done():
                running.cancel()
                self.unstarted.result()
            return running.result()

        return self.runner.run(unless_hopeless())

    async def update(self) -> None:
        self.version += 1
        await self.dispatcher.update_weights(self.version, self.tensors)

    def freeze(self, index: int) -> float:
        """SIGSTOP of its scheduler, behind the process that speaks HTTP; when."""
        [scheduler] = [each for each in self.below(index) if "sglang::scheduler" in each.cmdline()[0]]
        scheduler.suspend()
        return time.monotonic()

    def below(self, index: int) -> list[psutil.Process]:
        return psutil.Process(self.servers[index].pid).children(recursive=True)

    def kill(self, index: int) -> float:
        """SIGKILL of launcher, scheduler and all; when."""
        pid = self.servers[index].pid
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        return time.monotonic()

    async def both_serve(self) -> float:
        """When both are routable again, with proved weights."""
        fleet = self.dispatcher._fleet
        async with waiting("two servers", peer="sglang", deadline_s=STEP_S):
            while len(fleet.routable) < 2:
                fleet.moved.clear()
                await fleet.moved.wait()
        return time.monotonic()

    async def generating(self) -> int:
        """Until one has requests that are being decoded; which one. Either may be done before the other begins."""
        async with waiting("one generates", peer="sglang", deadline_s=STEP_S):
            while True:
                loads = await asyncio.gather(
                    *[member.engine.load() for member in self.dispatcher._fleet.members],  # type: ignore[attr-defined]
                    return_exceptions=True,
                )
                for index, load in enumerate(loads):
                    if isinstance(load, Load) and load.num_running > 0 and load.num_tokens > 0:
                        return index

    def requests(self, label: str) -> list[Request]:
        """Greedy, so that what must come is known."""
        return [request(f"{label}/{n}", 1 + n % 12, NUM_TOKENS, temperature=0.0) for n in range(NUM_REQUESTS)]

    async def asked(self, label: str, ledger: Counter[str]) -> list[Completion]:
        async def one(each: Request) -> Completion:
            done = await self.dispatcher.generate(each)
            ledger[each.id] += 1
            return done

        return await asyncio.gather(*map(one, self.requests(label)))

    def check(self, label: str, done: list[Completion], ledger: Counter[str], before: int) -> None:
        """Every request once, with the model's own tokens, none of them under weights that nobody proved."""
        asked = self.requests(label)
        assert ledger == Counter(each.id for each in asked)
        for each, got in zip(asked, done, strict=True):
            assert got.request_id == each.id and got.finish_reason == "length"
            assert got.policy_versions.min() >= before
            np.testing.assert_array_equal(got.tokens, self.expects(each.prompt))

    def expects(self, prompt: np.ndarray) -> list[int]:
        if len(prompt) not in self.expected:
            ids = torch.from_numpy(prompt.astype(np.int64))[None]
            made = self.model.generate(
                ids, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            self.expected[len(prompt)] = made[0, ids.shape[1] :].tolist()
        return self.expected[len(prompt)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("dispatch")
    path = moe(folder / "model")
    model = load_model(str(path)).eval()
    tensors = {name: tensor.clone() for name, tensor in full_tensors(model)}
    settings = SGLangConfig(python=python())
    found: list[World] = []

    @contextlib.asynccontextmanager
    async def newest() -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        yield found[0].version, tensors

    async def tell(kind: str, more: Mapping[str, Any]) -> None:
        print(kind, dict(more))
        if kind == "sglang_gone":
            left.append(more["why"])
        if "did not start" in more.get("why", "") and not found[0].unstarted.done():
            found[0].unstarted.set_exception(AssertionError(more["why"]))

    def engine(index: int) -> KeptEngine:
        server = SGLangServer(
            launch(path), log=folder / f"{index}.log", folder=folder, name=f"sglang-{index}", grace_s=GRACE_S
        )
        servers.append(server)
        connect = functools.partial(
            connect_engine, settings=settings, folder=folder / f"weights-{index}", model_path=str(path),
            processed_media=False,
        )  # fmt: skip
        return KeptEngine(server, connect, newest=newest, deadline_s=START_S, silent_s=START_S, tell=tell)

    servers: list[SGLangServer] = []
    left: list[str] = []
    with asyncio.Runner() as runner:
        engines = [engine(0), engine(1)]
        ends = contextlib.AsyncExitStack()

        async def start() -> World:
            await ends.enter_async_context(kept(engines))
            dispatcher = Dispatcher(engines, names=["sglang-0", "sglang-1"], reload=newest)
            ends.push_async_callback(dispatcher.close)
            return World(runner, dispatcher, servers, tensors, model, asyncio.get_running_loop().create_future(), left)

        try:
            found.append(runner.run(start()))
            found[0].run(found[0].update())
            yield found[0]
        finally:
            runner.run(ends.aclose())


def test_servers_killed_in_mid_generation_lose_nothing(world: World) -> None:
    """One of two, and then the other one, as a rule before the first is back."""
    before, lost = world.version, world.dispatcher.dispatch_stats().num_lost_attempts
    ledgers = [Counter[str](), Counter[str]()]

    async def scenario() -> list[list[Completion]]:
        await world.both_serve()
        answers = []
        for number, ledger in enumerate(ledgers):
            asking = asyncio.create_task(world.asked(f"kill {number}", ledger))
            killed = world.kill(await world.generating())
            answers.append(await asking)
            print(f"kill {number}: all answered {time.monotonic() - killed:.1f} s after it")
        print(f"both serve again after {await world.both_serve() - killed:.1f} s")
        return answers

    for number, done in enumerate(world.run(scenario())):
        world.check(f"kill {number}", done, ledgers[number], before)
    assert world.dispatcher.dispatch_stats().num_lost_attempts >= lost + 2


def test_a_server_killed_during_an_update_loses_nothing_and_comes_back_with_the_new_weights(world: World) -> None:
    label, ledger, before = "update", Counter[str](), world.version

    async def scenario() -> list[Completion]:
        await world.both_serve()
        members = world.dispatcher._fleet.members
        asking = asyncio.create_task(world.asked(label, ledger))
        await world.generating()
        updating = asyncio.create_task(world.update())
        async with waiting("an update", peer="sglang", deadline_s=STEP_S):
            while not any(member.updating for member in members):
                world.dispatcher._fleet.moved.clear()
                await world.dispatcher._fleet.moved.wait()
        victim = next(index for index, member in enumerate(members) if member.updating)
        killed = world.kill(victim)
        await updating
        print(f"{label}: the other one has the weights {time.monotonic() - killed:.1f} s after the kill")
        assert world.dispatcher.version == world.version == before + 1
        done = await asking
        print(f"{label}: both serve again after {await world.both_serve() - killed:.1f} s")
        assert [member.proved for member in members] == [world.version] * 2
        return done

    world.check(label, world.run(scenario()), ledger, before)


def test_a_server_whose_scheduler_stands_still_behind_its_http_is_ended_and_loses_nothing(world: World) -> None:
    label, ledger, before = "freeze", Counter[str](), world.version

    async def scenario() -> list[Completion]:
        await world.both_serve()
        asking = asyncio.create_task(world.asked(label, ledger))
        frozen = await world.generating()
        victim = world.servers[frozen].pid
        at = world.freeze(frozen)
        done = await asking
        print(f"{label}: all answered {time.monotonic() - at:.1f} s after it")
        print(f"{label}: both serve again after {await world.both_serve() - at:.1f} s")
        assert world.servers[frozen].pid != victim
        return done

    world.check(label, world.run(scenario()), ledger, before)
    whys = (
        "its scheduler answered nothing for ",
        "a stopped process of it answered nothing for ",
    )  # whichever is seen first
    assert any(why.startswith(whys) for why in world.left)
