"""What the comparison with TRL rests on: one list of lengths, and how steps and CPU seconds are counted."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import trl, trl_run
from benchmarks import trl_task as task
from rondo.launch.plan import group_specs
from rondo.roles.engines.engine import SamplingParams
from rondo.roles.sampling.groups import Lease


def test_both_lists_have_the_same_mean_and_the_ragged_one_a_long_tail() -> None:
    ragged = [length for at in range(500) for length in task.answer_lengths("ragged", at)]
    equal = [length for at in range(500) for length in task.answer_lengths("equal", at)]
    assert statistics.mean(ragged) == pytest.approx(statistics.mean(equal), rel=0.03)
    assert set(equal) == {64}
    assert max(ragged) == task.NUM_LONGEST and statistics.median(ragged) < 50
    assert task.answer_lengths("ragged", 7) == task.answer_lengths("ragged", 7) != task.answer_lengths("ragged", 8)


def test_the_reward_is_the_part_of_signs_that_are_plus() -> None:
    assert task.score("+257-258a+259") == pytest.approx(2 / 3)
    assert task.score("no sign") == 0.0


def test_the_rollout_asks_for_the_listed_length_and_stops_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trl_run.LOAD, "ragged")
    groups = trl_run.ListedGroups.__new__(trl_run.ListedGroups)
    rollout = SimpleNamespace(on_new_weights="continue", max_interruptions=None)
    groups.job = SimpleNamespace(config=SimpleNamespace(seed=3, rollout=rollout))  # type: ignore[assignment]
    lease = Lease(group=5, epoch=0, step=0, position=9, ring="r", have={})
    params = SamplingParams(max_new_tokens=256, stop_token_ids=(1,))
    asked = [
        groups._request(lease, number, np.arange(1, 4, dtype=np.int32), None, params).params for number in range(8)
    ]
    assert [each.max_new_tokens for each in asked] == task.answer_lengths("ragged", 9)
    assert {each.stop_token_ids for each in asked} == {()}


@pytest.mark.parametrize(("mode", "staleness"), [("colocate", 0), ("hybrid", 1), ("fully_async", 1)])
def test_every_mode_makes_a_run(mode: str, staleness: int) -> None:
    spec: dict[str, Any] = {
        "model": "m", "run_dir": "r", "load": "ragged", "mode": mode, "staleness": staleness, "threads": 2, "steps": 4,
        "dtype": "bfloat16", "lr": 1e-3, "num_slots": 64, "micro_batch_tokens": 1280,
    }  # fmt: skip
    config = trl_run.config_of(spec)
    assert (config.max_staleness, config.train.dtype, config.model.dtype) == (staleness, "bfloat16", "bfloat16")
    assert config.rollout.max_new_tokens == task.NUM_LONGEST
    roles = [role for group in group_specs(config) for role in trl_run.listed(group).roles]
    assert "benchmarks.trl_run:ListedRollout" in roles and len(set(roles)) == 3


def test_cpu_seconds_between_two_moments_are_read_off_straight_lines() -> None:
    watch = trl.Watch([(10.0, {"actor": 1.0}), (20.0, {"actor": 5.0, "rollout": 2.0})])
    assert watch.between(12.5, 17.5) == pytest.approx({"actor": 2.0, "rollout": 1.0})


def test_steps_at_the_edges_of_a_block_do_not_count() -> None:
    records = [{"time": time, "step_s": 1.0} for time in (1.0, 5.0, 7.0, 9.0, 100.0)]
    watch = trl.Watch([(0.0, {"actor": 0.0}), (10.0, {"actor": 20.0})])
    block = trl.block_of(watch, records, lead=2, tail=1)
    assert (block.step_s, block.began) == (2.0, 0.0)
    assert block.step_cpu_s == pytest.approx(4.0)


def test_the_ratio_is_to_the_quickest_of_the_peers() -> None:
    def side(step_s: float) -> list[trl.Block]:
        record = {"time": 1.0, "step_s": 1.0, "reward_mean": 0.5, "tokens": 10}
        return [trl.Block(step_s, 2 * step_s, {}, [record, record], 0.0)]

    options = SimpleNamespace(target=0.9)
    sides = {"theirs": side(9.0), "theirs_weights": side(6.0), "ours": side(3.0)}
    report = trl.report_of(options, sides)  # type: ignore[arg-type]
    assert (report["ratio"], report["ratio_to"]) == (2.0, "theirs_weights")
    assert report["ours"]["s_to_reward"] == [None]


def test_processes_are_told_apart_by_their_names_and_command_lines() -> None:
    forked = ["python", "-P", "/somewhere/runtime/supervision/nursery.py", "5,6"]
    assert trl.kind_of(forked, "actor-0.0") == "actor" and trl.kind_of(forked, "actor_fwd-12.0") == "actor_fwd"
    assert (
        trl.kind_of(forked, "python")
        == trl.kind_of(["python", "runtime/supervision/proxy.py", "m:R"], "python")
        == "torchrun"
    )
    assert trl.kind_of(["sleep"], "sleep") == "other"
