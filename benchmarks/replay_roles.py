"""The roles of a replay: the real ones, with an engine, a scorer and a trainer that wait where others compute.

Owns the waiting alone. Leases, prompts, rewards, media, rows, rounds, commits, snapshots, and weights through the slab are the
roles' own; so is every byte that a stage reads or writes. Copies that belong to a stage (weights into the engine, inputs to the
device) are made within its seconds.

    RolloutRole  -> ReplayEngine     a sample waits as long as its drawn length takes beside the longest of its step
    ReferenceRole, ActorForwardRole  -> ReplayScorer     so many seconds a token
    ActorRole    -> ReplayTrainer    the real one, whose forward and backward wait; its weights, moments and snapshots are real

In `colocate` all stages take turns on the process's compute thread, as they would on the devices that they share: the engine
holds it from waking up to falling asleep.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, cast

import numpy as np
import torch

from benchmarks.replay_stages import Replay
from rondo.comm.bus.bus import Bus, Round
from rondo.comm.ring.records import Column
from rondo.comm.ring.spans import Span
from rondo.models.attention import Choice
from rondo.models.media.inputs import MediaInputs
from rondo.roles.actor import ActorRole, Read, Taken
from rondo.roles.advantages import AdvantagesRole
from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import Row
from rondo.roles.engines.engine import Completion, EngineStats, Request
from rondo.roles.engines.replica import Replica
from rondo.roles.forward import ActorForwardRole, ReferenceRole, Scored
from rondo.roles.job import Job
from rondo.roles.rollout import RolloutRole
from rondo.roles.sampling.groups import PromptGroups, Sample
from rondo.roles.training.backend import Backend
from rondo.roles.training.objective import PolicyObjective, TrainRow, open_policy
from rondo.runtime.worker.context import WorkerContext

__all__ = ["AdvantagesRole", "ReplayActor", "ReplayActorForward", "ReplayReference", "ReplayRollout"]

_Sampling = tuple[float, float, "asyncio.Future[None]"]
"""When it arrived, the seconds it takes, and who waits."""

_publishing: dict[int, float] = {}
"""Version -> when this process began to publish it."""

VOCABULARY = 256
_POLL_S = 0.25


class Device:
    """Takes so many seconds of its caller's thread. What a sleep overshoots is taken off the next one: it is the machine's fault
    and not a cost of what is measured. What the work within takes beyond its seconds is a cost, and stays."""

    def __init__(self) -> None:
        self._over = 0.0

    def work(self, seconds: float, within: Callable[[], object] | None = None) -> None:
        """`within` is done at the beginning of these seconds and is part of them."""
        began = time.monotonic()
        if within is not None:
            within()
        rest = seconds - (time.monotonic() - began)
        slept = max(0.0, rest - self._over)
        self._over -= max(0.0, rest) - slept
        if slept:
            began = time.monotonic()
            time.sleep(slept)
            self._over = max(0.0, time.monotonic() - began - slept)


class ReplayEngine:
    """An `Engine` that answers after the time that its drawn length takes.

    All samples of a step run side by side, as in one continuous batch; a step begins when its first request comes and the one
    before is done, so the rollout devices never do more than the stage says.
    """

    def __init__(self, replay: Replay, run_seed: int, ctx: WorkerContext) -> None:
        self._replay, self._ctx = replay, ctx
        self._draws = replay.draws(run_seed)
        self._tokens = np.random.default_rng(0).integers(0, VOCABULARY, replay.max_tokens).astype(np.int32)
        self._versions: list[tuple[float, int]] = []
        self._began: dict[int, float] = {}
        self._free_at = 0.0
        self._device = Device()
        self._weights: dict[str, torch.Tensor] = {}
        self._turn = _Turn(replay, self._device) if replay.colocated else None
        self._running: set[str] = set()
        self._num_completed = self._tokens_generated = 0

    @property
    def version(self) -> int:
        return self._versions[-1][1] if self._versions else -1

    async def generate(self, request: Request) -> Completion:
        step, tokens = self._draws[request.seed]
        seconds = self._replay.sample_s(tokens)
        began = time.monotonic()
        self._running.add(request.id)
        try:
            if self._turn is not None:
                await self._take_turn(self._turn, step, seconds)
            else:
                began = max(began, self._begin(step, began))
                await asyncio.sleep(began + seconds - time.monotonic())
        finally:
            self._running.discard(request.id)
        self._num_completed += 1
        self._tokens_generated += tokens
        return Completion(
            request.id, self._tokens[:tokens], np.full(tokens, -1.0, np.float32),
            self._sampled_under(began, tokens), "length" if tokens == self._replay.max_tokens else "stop",
        )  # fmt: skip

    def _begin(self, step: int, now: float) -> float:
        if step not in self._began:
            self._began[step] = max(now, self._free_at)
            self._free_at = self._began[step] + self._replay.generate_s
        return self._began[step]

    async def _take_turn(self, turn: _Turn, step: int, seconds: float) -> None:
        done = asyncio.get_running_loop().create_future()
        if turn.add(step, seconds, done):
            self._held = asyncio.create_task(self._ctx.compute(turn.run, asyncio.get_running_loop()))
        await done

    def _sampled_under(self, began: float, tokens: int) -> np.ndarray:
        """int32 [R]: the version that was the newest when each token was sampled."""
        at = np.linspace(began, time.monotonic(), tokens)
        since = np.array([moment for moment, _ in self._versions])
        numbers = np.array([version for _, version in self._versions], np.int32)
        return numbers[np.maximum(np.searchsorted(since, at, side="right") - 1, 0)]

    def cancel(self, request_id: str) -> None:
        """Nobody ends a replayed request early."""

    async def update_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        def copy() -> None:
            for name, tensor in tensors.items():
                self._weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

        seconds = self._replay.stages_s["publish"]
        if self._replay.colocated:  # the stage began with the actor's copying, in this process
            gone = time.monotonic() - _publishing.get(version, time.monotonic())
            await self._ctx.compute(self._device.work, max(0.0, seconds - gone), copy)
        else:  # beside the decoding, which goes on
            await asyncio.to_thread(Device().work, seconds, copy)
        self._versions.append((time.monotonic(), version))

    def progress(self) -> dict[str, int]:
        return dict.fromkeys(self._running, self._tokens_generated)

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self.version, num_slots=self._replay.prompts * self._replay.samples, num_running=len(self._running),
            num_waiting=0, num_completed=self._num_completed, num_cancelled=0, tokens_generated=self._tokens_generated,
            decode_steps=0, prefill_tokens=0, shared_prompt_tokens=0,
        )  # fmt: skip

    async def close(self) -> None:
        if self._turn is not None:
            self._turn.close()


class _Turn:
    """Generation where the devices are shared: one step at a time, on the compute thread, from waking up to falling asleep."""

    def __init__(self, replay: Replay, device: Device) -> None:
        self._replay, self._device = replay, device
        self._changed = threading.Condition()
        self._arrived: list[_Sampling] = []
        self._step, self._closed = -1, False

    def add(self, step: int, seconds: float, done: asyncio.Future[None]) -> bool:
        """True when this is the first of its step: the caller gives the turn a thread."""
        with self._changed:
            first, self._step = step != self._step, step
            self._arrived.append((time.monotonic(), seconds, done))
            self._changed.notify()
        return first

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        switch_s = self._replay.stages_s["switch"] / 2
        self._device.work(switch_s)
        awake_at = time.monotonic()
        running: list[tuple[float, int, asyncio.Future[None]]] = []
        left = self._replay.prompts * self._replay.samples
        while left and not self._closed:
            with self._changed:
                for arrived, seconds, done in self._arrived:
                    heapq.heappush(running, (max(arrived, awake_at) + seconds, id(done), done))
                self._arrived.clear()
                rest = running[0][0] - time.monotonic() if running else _POLL_S
                if rest > 0:
                    self._changed.wait(rest)
                    continue
            loop.call_soon_threadsafe(_finish, heapq.heappop(running)[2])
            left -= 1
        self._device.work(switch_s)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class ReplayReplica(Replica):
    async def _open_engine(self, ends: AsyncExitStack) -> ReplayEngine:
        return ReplayEngine(Replay.read(self._ctx.run_dir), self._job.config.seed, self._ctx)


@dataclasses.dataclass
class ReplayGroups(PromptGroups):
    """Prompts of the replay's length, its media, and a column with routed experts."""

    def __post_init__(self) -> None:
        self._replay = Replay.read(self.ctx.run_dir)
        self._arrays = self._replay.media_arrays()
        self._experts = np.ones((self._replay.max_tokens, self._replay.routed_bytes), np.uint8)

    async def prepare(
        self, row: Row, data: DataConfig, keep: tuple[int, int] | None = None
    ) -> tuple[np.ndarray, MediaInputs | None]:
        prompt, _ = await super().prepare(row, data)
        return prompt, MediaInputs(row.name, self._arrays) if self._arrays else None

    async def _taught(self, row: Row, samples: Sequence[Sample]) -> list[Column]:
        columns = await super()._taught(row, samples)
        if self._replay.routed_bytes:
            experts = [self._experts[: len(each.made.last.tokens)] for each in samples]
            columns.append(Column("routed_experts", "uint8", experts))
        return columns


class ReplayRollout(RolloutRole):
    """The rollout role with the replay's engine and its prompt groups."""

    open_replica = ReplayReplica
    open_groups = ReplayGroups


class ReplayScorer:
    """Takes a scoring stage's seconds for the tokens that it is given."""

    def __init__(self, replay: Replay, stage: str) -> None:
        self._replay, self._stage = replay, stage
        self._device = Device()
        self._weights: dict[str, torch.Tensor] = {}
        self.version, self.attention = 0, Choice("none", "a replay computes nothing")

    def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        def copy() -> None:
            for name, tensor in tensors.items():
                self._weights.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

        # Colocated, the scorer runs on the trainer's tensors; else its devices receive them, as the engine's do.
        self._device.work(0.0 if self._replay.colocated else self._replay.stages_s["publish"], copy)
        self.version = version

    def score(self, rows: Sequence[Any], *, needs: int, stops: bool) -> Scored:
        if needs > self.version:
            return Scored(self.version, None, stops)

        def to_device() -> None:
            np.concatenate([row.tokens for row in rows])
            _read_media([row.media for row in rows])

        self._device.work(self._replay.stage_s(self._stage, sum(len(row.tokens) for row in rows)), to_device)
        return Scored(self.version, [np.full(row.response, -1.0, np.float32) for row in rows], stops)


def _read_media(media: Sequence[MediaInputs | None]) -> None:
    """Every prompt's media once, as a batch that goes to a device."""
    for inputs in {one.key: one for one in media if one is not None}.values():
        for array in inputs.arrays.values():
            array.copy()


class ReplayReference(ReferenceRole):
    def _open_scorer(self, path: str, job: Job) -> ReplayScorer:
        return ReplayScorer(Replay.read(self._ctx.run_dir), "reference")


class ReplayActorForward(ActorForwardRole):
    def _open_scorer(self, path: str, job: Job) -> ReplayScorer:
        return ReplayScorer(Replay.read(self._ctx.run_dir), "actor_fwd")


class ReplayTrainer:
    """The real backend of a real model, as many bytes as the replay publishes; forward, backward and optimizer wait instead."""

    def __init__(self, replay: Replay, backend: Backend[PolicyObjective]) -> None:
        """Makes the optimizer's moments, which snapshots hold too."""
        self.replay, self._backend, self._device = replay, backend, Device()
        self.waited_s, self._num_rounds = 0.0, 0
        self._spans: list[Span] = []
        self.turnover: dict[str, float] = {}
        """Seconds of what follows a step."""
        for parameter in backend.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for group in backend.optimizer.param_groups:
            group["lr"] = 0.0
        backend.optimizer.step()
        backend.discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def accumulate(
        self, step: int, rows: Sequence[TrainRow], spans: Sequence[Span], *, last: bool, update: int = 0
    ) -> None:
        self._num_rounds += 1
        seconds = self.replay.stage_s("train", sum(len(row.tokens) for row in rows))
        self._device.work(seconds, lambda: _to_device(rows))
        self._spans += spans

    def waited(self, seconds: float) -> None:
        self.waited_s += seconds

    def finish(self, step: int) -> tuple[dict[str, float], list[Span]]:
        spans, self._spans = self._spans, []
        figures = {"data_wait_s": self.waited_s, "num_rounds": float(self._num_rounds)}
        figures |= {f"{name}_s": seconds for name, seconds in self.turnover.items()}
        self.waited_s, self._num_rounds = 0.0, 0
        return figures, spans


def _to_device(rows: Sequence[TrainRow]) -> None:
    for name in ("tokens", "mask", "advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs"):
        np.concatenate([getattr(row, name) for row in rows])
    _read_media([row.media for row in rows])


class TimedBus:
    """A bus that says how long rounds are waited for: asking, planning, and making their views."""

    def __init__(self, bus: Bus, waited: Callable[[float], None]) -> None:
        self._bus, self._waited = bus, waited

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncGenerator[Round]:
        async with aclosing(self._bus.stream(*args, **kwargs)) as rounds:
            while True:
                began = time.monotonic()
                made = await anext(rounds, None)
                self._waited(time.monotonic() - began)
                if made is None:
                    return
                yield made


class ReplayActor(ActorRole):
    """The actor with the replay's trainer; says how long each part between two steps took."""

    _trainer: ReplayTrainer  # type: ignore[assignment]

    def _open_trainer(self) -> ReplayTrainer:  # type: ignore[override]
        replay = Replay.read(self._ctx.run_dir)
        job = self._job
        opened = open_policy(job.config, job.model_path, world_size=self._ctx.world_size, device=job.device)
        trainer = ReplayTrainer(replay, opened)
        self._job = dataclasses.replace(job, bus=cast(Bus, TimedBus(job.bus, trainer.waited)))
        return trainer

    async def _rows(self, made: Round) -> Read:
        began = time.monotonic()
        found = await super()._rows(made)
        self._trainer.waited(time.monotonic() - began)
        return found

    def _read(self, made: Round) -> Read:
        if self._trainer.replay.routed_bytes:
            for row in made.rows:
                row.array("routed_experts")
        return super()._read(made)

    async def _save(self, version: int, *, final: bool) -> None:
        """What follows the last step is not measured, and nobody resumes a replay."""
        await self._settled()

    async def _write_snapshot(self, version: int, taken: Taken) -> int:
        began = time.monotonic()
        checksum = await super()._write_snapshot(version, taken)
        self._trainer.turnover["snapshot"] = time.monotonic() - began
        return checksum

    async def _commit(self, version: int, spans: list[Span], taken: Taken) -> None:
        began = time.monotonic()
        await super()._commit(version, spans, taken)
        self._trainer.turnover["commit"] = time.monotonic() - began

    async def _publish(self, version: int, taken: Taken) -> None:
        _publishing[version] = began = time.monotonic()
        await super()._publish(version, taken)
        self._trainer.turnover["publish"] = time.monotonic() - began
