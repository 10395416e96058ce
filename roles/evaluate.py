"""evaluate: the evaluation sets of a job under the weights that a folder has: the rollout role of a run without a step.

Owns that those weights are version 0, which nobody trains or publishes. All else is the rollout role's: engine, workflow,
rewards, parts over replicas, and what becomes of a replica that dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rondo.comm.bus.versions import engine_reader
from rondo.roles.engines.replica import Replica
from rondo.roles.rollout import RolloutRole

_TRAINED = "actor"


class OwnWeights(Replica):
    """Engines with the weights of the model's folder."""

    @asynccontextmanager
    async def newest_weights(self) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        yield 0, await asyncio.to_thread(_tensors, Path(self._job.model_path))

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[asyncio.Event]:
        ctx, bus = self._ctx, self._job.bus
        if self._job.config.rollout.sglang is not None:  # servers say which version they have, and prove it
            async with self.newest_weights() as (version, tensors):
                await self._install(version, tensors)
        await bus.call("commit", ctx.attempt, 0, 0, [], _TRAINED)
        await bus.call("proved", engine_reader(ctx.rank), 0)
        first = asyncio.Event()
        first.set()
        yield first


class EvaluateRole(RolloutRole):
    open_replica = OwnWeights
    keeps_all = True


def _tensors(folder: Path) -> dict[str, Any]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
