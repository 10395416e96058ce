"""advantages: rewards of whole prompt groups in, one advantage a response token out. CPU only, no model.

Owns the loop; the formulas are in `advantage_functions.py`, picked by the algorithm's record.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from rondo.comm.bus.bus import Row
from rondo.roles.algorithms import advantages as advantage_functions
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
        compute = advantage_functions.ADVANTAGES[job.config.algorithm.resolved().advantage]
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


def _advantages(rows: list[Row], compute: advantage_functions.AdvantageFunction) -> list[np.ndarray]:
    """float32 [R] for each row of one prompt group: the advantage of its sample among those that have a reward on the tokens that
    train, 0 elsewhere."""
    rewards = {row.sample: row.reward for row in rows if row.reward is not None}
    values = dict(zip(rewards, compute(np.array(list(rewards.values()), np.float32)), strict=True))
    return [row.array("loss_mask").astype(np.float32) * values.get(row.sample, 0.0) for row in rows]
