"""advantages: rewards of whole prompt groups in, one advantage a response token out. CPU only, no model.

Owns the loop; the formulas are in `algorithms/advantages.py` or the user's own, picked by the algorithm's record.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from rondo.comm.bus.bus import Row
from rondo.roles.algorithms.advantages import ADVANTAGES, AdvantageFunction, of_tokens
from rondo.roles.algorithms.algorithm import function_of
from rondo.roles.job import groups_of, open_job, timed
from rondo.runtime.worker.context import WorkerContext

TOKENS_PER_ROUND = 1 << 20  # no model runs here: as many groups at once as are ready


class AdvantagesRole:
    """Prompt groups arrive whole (the stream is declared `whole_groups`), so statistics need no other round."""

    role = "advantages"

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx

    async def run(self) -> None:
        job = await open_job(self._ctx)
        compute = function_of(job.config.loss().advantage, ADVANTAGES, "algorithm.advantage")
        await self._ctx.ready()
        async for made in timed(self._ctx, job.bus.stream(self.role, tokens=TOKENS_PER_ROUND)):
            with self._ctx.span("advantages", step=made.step, groups=groups_of(made)):
                columns: list[np.ndarray] = []
                for _, rows in groupby(made.rows, key=lambda row: row.group):
                    columns += _advantages(list(rows), compute)
                if columns:
                    job.bus.put_columns(made, {"advantages": columns})
            await job.bus.ack(made)
            self._ctx.progress()
            if self._ctx.stopping.is_set():
                return


def _advantages(rows: list[Row], compute: AdvantageFunction) -> list[np.ndarray]:
    """float32 [R] for each row of one prompt group: among the samples that have a reward, 0 for the others."""
    found = [np.zeros(row.response, np.float32) for row in rows]
    having = [at for at, row in enumerate(rows) if row.reward is not None]
    masks = [rows[at].array("loss_mask") for at in having]
    rewards = [row.reward for row in rows if row.reward is not None]
    for at, advantages in zip(having, of_tokens(compute, rewards, masks) if having else (), strict=True):
        found[at] = advantages
    return found
