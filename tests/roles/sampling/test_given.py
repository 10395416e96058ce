"""Samples that another run has kept, put in the place of generated ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from rondo.comm.bus.group import REWARD
from rondo.roles.resumed import KeptSamples, copy_samples
from rondo.roles.sampling.given import Given
from rondo.roles.sampling.groups import Lease
from rondo.roles.streams import BASE_COLUMNS
from rondo.roles.training.trained_samples import FOLDER, TrainedRow, encoded
from rondo.runtime.errors import Fatal
from tests.comm.served import served
from tests.roles.test_resumed import Groups, leased


def trained(group: int, sample: int) -> TrainedRow:
    draw, response = np.random.default_rng([group, sample]), 2 + sample
    columns = {
        "tokens": draw.integers(0, 99, 3 + response, np.int32), "mask": np.ones(response, np.uint8),
        "rollout_log_probs": draw.standard_normal(response, np.float32), "policy_versions": np.zeros(response, np.int32),
        "advantages": np.zeros(response, np.float32),
    }  # fmt: skip
    return TrainedRow(0, 0, 0, group, sample, 0, 0.25 * sample, "length", columns)


async def test_a_step_gets_the_samples_that_the_same_step_trained_and_nothing_is_generated(tmp_path: Path) -> None:
    rows = [trained(group, sample) for group in (9, 4) for sample in range(2)]  # some groups of that run were filtered
    path = tmp_path / FOLDER / "step_000000.0-of-1.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(encoded(rows))
    shape: dict[str, Any] = {"base_columns": BASE_COLUMNS, "row_bytes": 4096, "samples_per_group": 2}
    async with asyncio.timeout(60), served(max_staleness=0, **shape) as run:
        bus, grants = await leased(run)
        groups = Groups(bus, KeptSamples(), num_samples=2)
        config = groups.job.config
        config.rollout.prompts_per_step, config.distillation = 2, None  # type: ignore[misc]
        config.debug = SimpleNamespace(steps=None)  # type: ignore[misc,assignment]
        groups.given = Given(tmp_path, config)
        for grant in grants[:2]:
            await groups.fill(Lease(**{**grant, "have": {}}))
        await bus.call("renew", [])
        index = run.coordinator.index
        assert groups.asked == [] and [index.groups[at].info[REWARD] for at in range(2)] == [[0.0, 0.25]] * 2
        found = copy_samples(bus, orjson.dumps(index.dump()))
        assert [each.info[5] for each in found] == [1] * 4
        for each, row in zip(found, [*rows[2:], *rows[:2]], strict=True):
            for name, of in (("tokens", "tokens"), ("loss_mask", "mask"), ("rollout_log_probs", "rollout_log_probs")):
                np.testing.assert_array_equal(each.columns[name], row.columns[of])
        config.debug.steps = (0, 1)  # type: ignore[misc]
        again = Given(tmp_path, config)
        assert [row.sample for row in await again._of(0, 9) or ()] == [0, 1]  # a replay goes by the numbers of groups
        await again.put(bus, "", grants[2]["group"], grants[2]["epoch"], 0, has_media=False)
        assert index.counts["filtered"] == 1
        with pytest.raises(
            Fatal, match=r"debug.train_only must name a run that has kept 2 whole prompt groups of step 7, got 0"
        ):
            await groups.given.put(bus, "", 14, 0, 7, has_media=False)
