"""Samples that another run has kept, in the place of generated ones: what `debug.train_only` trains.

Owns which of them a prompt group gets. Does not own the files (`training/trained_samples.py`), nor what the other roles make of
the samples: log-probs, values and advantages are computed again. Invariant: step k gets the samples that step k of that run
trained, in the order of their groups, each put when the versions that it was sampled under are there.
"""

from __future__ import annotations

import asyncio
from itertools import groupby
from pathlib import Path

from rondo.comm.bus.bus import Bus
from rondo.comm.bus.group import FINISHES, NO_VERSION
from rondo.comm.ring.records import Column
from rondo.roles.config import JobConfig
from rondo.roles.resumed import KeptRow, put_kept
from rondo.roles.sampling.columns import NOTHING
from rondo.roles.streams import BASE_COLUMNS, ROUTED, WORDS, base_columns
from rondo.roles.training.trained_samples import TrainedRow, rows_of_step
from rondo.runtime.errors import Fatal

_OF_ROW = {"tokens": "tokens", "loss_mask": "mask", "rollout_log_probs": "rollout_log_probs",
           "policy_versions": "policy_versions", ROUTED: "routed_experts"}  # fmt: skip
NAMES = (*BASE_COLUMNS, ROUTED, WORDS)
"""All that the samples of a run may have so that they can be given again."""


class Given:
    def __init__(self, run: Path, config: JobConfig) -> None:
        self._run, self._config = run, config
        self._step, self._groups = -1, list[list[TrainedRow]]()
        self._reading = asyncio.Lock()

    async def put(self, bus: Bus, ring: str, group: int, epoch: int, step: int, *, has_media: bool) -> None:
        """The samples of a leased group; of a replay, a group that was left out of its step is left out again. Fatal where that
        run has none for it."""
        rows = await self._of(step, group)
        if rows is None:
            await bus.call("settle", group, epoch, "filtered", f"{self._run} did not train it in step {step}")
            return
        newest = max((int(row.columns["policy_versions"].max(initial=NO_VERSION)) for row in rows), default=NO_VERSION)
        if newest > 0:
            await bus.call("await_version", newest)
        media = rows[0].media
        if media is not None and not has_media:
            columns = [Column(name, array.dtype.name, [array]) for name, array in media.arrays.items()]
            bus.put_media(ring, group, epoch, columns, media.encoder_positions)
        put_kept(bus, ring, group, epoch, [self._kept(group, row) for row in rows])

    async def _of(self, step: int, group: int) -> list[TrainedRow] | None:
        num = self._config.rollout.prompts_per_step
        async with self._reading:
            if step != self._step:
                rows = await asyncio.to_thread(rows_of_step, self._run, step)
                rows.sort(key=lambda row: (row.group, row.part, row.sample))
                self._step, self._groups = step, [list(own) for _, own in groupby(rows, key=lambda row: row.group)]
            found, at = self._groups, group - step * num
            if self._config.debug.steps is not None and len(found) == num:  # the same prompts, by their numbers
                return next((rows for rows in found if rows[0].group == group), None)
            if len(found) != num or not 0 <= at < num:
                raise Fatal(
                    f"debug.train_only must name a run that has kept {num} whole prompt groups of step {step}, got {len(found)} "
                    f"in {self._run}, and group {group}. Train fewer steps, or name another run"
                )
            return found[at]

    def _kept(self, group: int, row: TrainedRow) -> KeptRow:
        versions = row.columns["policy_versions"]
        sampled = versions[versions != NO_VERSION]
        span = (int(sampled.min()), int(sampled.max())) if len(sampled) else (NO_VERSION, NO_VERSION)
        length, response = len(row.columns["tokens"]), len(versions)
        columns = {name: row.columns.get(_OF_ROW.get(name, name), NOTHING) for name in base_columns(self._config)}
        info = (length, response, row.reward, *span, FINISHES.index(row.finish), row.reward)
        return KeptRow(group, 0, row.sample, row.part, info, columns)
