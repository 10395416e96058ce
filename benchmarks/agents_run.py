"""The run of `rondo bench agents`: real roles, templates, bus and journal, and an engine that waits where others compute.

Owns the waiting, and what it counts. Two rollout replicas generate episodes with tools; nothing is trained
(`debug.rollout_only`). A turn takes a slot for 0.5 to 1.5 s, and is a call of `search`, which answers after 0.1 to 30 s
(log-normal, in the rollout's loop), of `add`, which a worker of the pool answers, or the end of the episode: drawn from its seed
and its length alone. Twice a second each replica appends what it counts to `agents.GROUP.INCARNATION.jsonl` in the run directory.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil

from rondo.launch.config import RunConfig
from rondo.launch.modes import fully_async
from rondo.models.config import ModelConfig
from rondo.models.tiny.tokenizer import END_OF_TURN, build_tokenizer
from rondo.roles.config import DataConfig, DebugConfig, EnvironmentConfig, RolloutConfig, SamplesConfig
from rondo.roles.engines.engine import Completion, EngineStats, Request, SamplingParams
from rondo.roles.engines.replica import Replica
from rondo.roles.rollout import RolloutRole
from rondo.runtime.worker.context import WorkerContext

TURN_S, TOOL_S = (0.5, 1.5), (0.1, 30.0)
ENDS, ADDS = 0.25, 0.15
"""Shares of turns that end their episode, and that call `add`."""
SAYS_S = 0.5
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}Call with <tool_call>.<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3's, in short."""
TURNS = {
    "search": '<tool_call>\n{"name": "search", "arguments": {"query": "what is near"}}\n</tool_call>',
    "add": '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>',
    "end": "It is 42.",
}


class Episode:
    """An environment of tools alone. `open`: how many there are, and `most` were, in this process."""

    open = most = 0
    tool_s = 0.0

    async def reset(self) -> None:
        self.reward = float(random.random() < 0.5)
        Episode.open += 1
        Episode.most = max(Episode.most, Episode.open)

    async def search(self, query: str) -> str:
        """Looks something up.

        Args:
            query: for what
        """
        seconds = min(max(random.lognormvariate(math.log(2.0), 1.0), TOOL_S[0]), TOOL_S[1])
        Episode.tool_s += seconds
        await asyncio.sleep(seconds)
        return f"found {query}"

    async def snapshot(self) -> float:
        return self.reward

    async def restore(self, state: float) -> None:
        self.reward = state
        Episode.open += 1
        Episode.most = max(Episode.most, Episode.open)

    async def close(self) -> None:
        Episode.open -= 1


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def questions() -> list[dict[str, str]]:
    return [{"prompt": f"{number:05d}: what is 17 and 25?"} for number in range(4096)]


def build(folder: Path) -> None:
    """A model that nobody computes, with a chat template that shows tools."""
    from rondo.models.tiny.qwen3 import build as tiny

    tiny(folder, hidden_size=32, num_layers=1, max_positions=4096)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


class WaitingEngine:
    """An `Engine` with so many slots: a request takes the first that is free, in the order of their coming, for a turn's time."""

    def __init__(self, ctx: WorkerContext, num_slots: int) -> None:
        tokenizer = build_tokenizer()
        self.said = {
            name: np.array(tokenizer(text + END_OF_TURN)["input_ids"], np.int32) for name, text in TURNS.items()
        }
        self._num_slots, self._version, self._running = num_slots, -1, 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ids = set[str]()
        self._turns = self._cancelled = self._tokens = 0
        self._slot_s, self._since = 0.0, time.monotonic()
        self._told = asyncio.create_task(self._tell(ctx.run_dir / f"agents.{ctx.group}.{ctx.incarnation}.jsonl"))

    @property
    def version(self) -> int:
        return self._version

    async def generate(self, request: Request) -> Completion:
        draw = random.Random(f"{request.seed}.{len(request.sequence)}")
        what = draw.choices(list(TURNS), [1 - ADDS - ENDS, ADDS, ENDS])[0]
        self._ids.add(request.id)
        try:
            if self._running >= self._num_slots:
                place = asyncio.get_running_loop().create_future()
                self._waiting.append(place)
                try:
                    await place
                except asyncio.CancelledError:
                    if place.done() and not place.cancelled():
                        self._free()  # it was handed a slot meanwhile
                    raise
            else:
                self._took(1)
            try:
                await asyncio.sleep(draw.uniform(*TURN_S))
            finally:
                self._free()
        finally:
            self._ids.discard(request.id)
        self._turns += 1
        tokens = self.said[what]
        done = Completion(
            request.id, tokens, np.full(len(tokens), -1.0, np.float32), np.full(len(tokens), self._version, np.int32), "stop"
        )  # fmt: skip
        self._tokens += len(tokens)
        if (before := request.prefix) is not None:
            done = Completion(
                request.id,
                np.concatenate((before.tokens, done.tokens)),
                np.concatenate((before.log_probs, done.log_probs)),
                np.concatenate((before.policy_versions, done.policy_versions)),
                "stop",
            )
        return done

    def _took(self, more: int) -> None:
        now = time.monotonic()
        self._slot_s += self._running * (now - self._since)
        self._since, self._running = now, self._running + more

    def _free(self) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                return
        self._took(-1)

    def cancel(self, request_id: str) -> None:
        """Nobody ends a turn early."""

    async def update_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        self._version = version

    def progress(self) -> dict[str, int]:
        return dict.fromkeys(self._ids, self._turns)

    def stats(self) -> EngineStats:
        waiting = sum(not place.done() for place in self._waiting)
        return EngineStats(
            self._version, self._num_slots, self._running, waiting, self._turns, self._cancelled, self._tokens, 0, 0, 0
        )

    async def close(self) -> None:
        self._told.cancel()

    async def _tell(self, path: Path) -> None:
        process = psutil.Process()
        with path.open("a", encoding="utf-8") as file:
            while True:
                self._took(0)
                stats, times = self.stats(), time.process_time()
                line = {
                    "at": time.monotonic(), "slot_s": self._slot_s, "num_slots": self._num_slots, "running": stats.num_running,
                    "waiting": stats.num_waiting, "turns": self._turns, "cpu_s": times,
                    "rss": process.memory_info().rss,
                    "open": Episode.open, "most": Episode.most, "tool_s": Episode.tool_s, "leases": AgentsRollout.leases,
                }  # fmt: skip
                file.write(json.dumps(line) + "\n")
                file.flush()
                await asyncio.sleep(SAYS_S)


async def alone(folder: Path, num_slots: int, num_episodes: int, seconds: float) -> float:
    """Microseconds of processor time a turn of this engine and `search`, for so many episodes in a process of nothing else."""
    engine = WaitingEngine(cast(Any, SimpleNamespace(run_dir=folder, group="alone", incarnation=0)), num_slots)
    prompt, params = np.zeros(200, np.int32), SamplingParams(max_new_tokens=3072)
    requests = [Request(str(seed), prompt, params, seed) for seed in range(8 * num_episodes)]

    async def play(number: int) -> None:
        environment = Episode()
        await environment.reset()
        for request in itertools.cycle(requests[number::num_episodes]):
            done = await engine.generate(request)
            if np.array_equal(done.tokens, engine.said["search"]):
                await environment.search("what is near")

    playing = [asyncio.create_task(play(number)) for number in range(num_episodes)]
    await asyncio.sleep(2 * TURN_S[1])
    turns, cpu_s = engine.stats().num_completed, time.process_time()
    await asyncio.sleep(seconds)
    turns, cpu_s = engine.stats().num_completed - turns, time.process_time() - cpu_s
    for each in playing:
        each.cancel()
    await engine.close()
    return cpu_s / turns * 1e6


class AgentsReplica(Replica):
    async def _open_engine(self, ends: AsyncExitStack) -> WaitingEngine:
        return WaitingEngine(self._ctx, self._job.config.rollout.num_slots)


class AgentsRollout(RolloutRole):
    """The rollout role with an engine that waits; `leases`: prompt groups that it was given."""

    open_replica = AgentsReplica
    leases = 0

    async def _next(self, room: int) -> dict[str, Any]:
        answer = await super()._next(room)
        AgentsRollout.leases += len(answer.get("grants", ()))
        return answer


config = RunConfig(
    name="quickstart",
    num_steps=8,
    max_staleness=4,
    role_groups=fully_async(rollout_replicas=2),
    roles={"rollout": AgentsRollout},
    model=ModelConfig(build=build),
    data=DataConfig(rows=questions, label=None, apply_chat_template=True),
    debug=DebugConfig(rollout_only=True),
    samples=SamplesConfig(keep=1),
    rollout=RolloutConfig(
        prompts_per_step=128,
        samples_per_prompt=8,
        max_prompt_tokens=1024,
        max_new_tokens=3072,
        max_turns=16,
        environment=EnvironmentConfig(factory=Episode, tools=(add,), num_workers=2),
        num_slots=256,
    ),
)
