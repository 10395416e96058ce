"""No mode, algorithm, staleness or option excludes another: every combination is a run that can be planned."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import orjson
import pytest

from rondo.comm.bus.index import Index
from rondo.comm.bus.transitions import CoordinatorConfig
from rondo.launch.config import RunConfig, override
from rondo.launch.groups import RoleGroup
from rondo.launch.modes import colocate, fully_async, hybrid
from rondo.launch.plan import coordinator_config, group_specs
from rondo.models.config import ModelConfig
from rondo.roles.algorithms.algorithm import ALGORITHMS, FIXED
from rondo.roles.config import AlgorithmConfig, DataConfig, RewardConfig, RolloutConfig, TrainConfig

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kl": {"kl_coef": 0.1},
    "truncated": {"tis_high": 2.0},
    "masked sequences": {"tis_high": 2.0, "tis_low": 0.5, "tis_mode": "mask", "tis_level": "geometric"},
    "whitened": {"normalize_batch": "tokens"},
    "whitened samples": {"normalize_batch": "samples", "old_log_probs": "self"},
    "engine": {"old_log_probs": "rollout"},
}


def modes(reference: bool, actor_fwd: bool, critic: bool) -> dict[str, tuple[RoleGroup, ...]]:
    return {
        "colocate": colocate(processes=2, reference=reference, actor_fwd=actor_fwd, critic=critic),
        "hybrid": hybrid(rollout_replicas=2, processes=2, reference=reference, actor_fwd=actor_fwd, critic=critic),
        "fully_async": fully_async(
            rollout_replicas=2,
            actor_processes=2,
            advantages_replicas=2,
            reference_replicas=2 * reference,
            actor_fwd_replicas=2 * actor_fwd,
            critic_processes=2 * critic,
        ),
    }


def run(
    mode: str, name: str, staleness: int, updates: tuple[int, int], options: dict[str, Any], fwd: bool
) -> RunConfig:
    return RunConfig(
        name="matrix",
        num_steps=4,
        max_staleness=staleness,
        role_groups=modes("kl_coef" in options, fwd, name == "ppo")[mode],
        model=ModelConfig(path="model"),
        data=DataConfig(rows="rows:make"),
        reward=RewardConfig(function="rewards:exact", components={"right": 1.0, "short": 0.5}),
        algorithm=AlgorithmConfig(name=name, **options),
        rollout=RolloutConfig(
            prompts_per_step=6, samples_per_prompt=4, max_prompt_tokens=8, max_new_tokens=8, filter="zero_std",
            spare_groups=2,
        ),
        train=TrainConfig(num_mini_batches=updates[0], passes=updates[1]),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["colocate", "hybrid", "fully_async"])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_every_combination_can_be_planned(mode: str, name: str, staleness: int, tmp_path: Path) -> None:
    every = list(itertools.product(OPTIONS.values(), ((1, 1), (3, 1), (1, 2), (4, 3))))
    # Of each option and each number of updates all with one algorithm; with the others each once.
    for options, updates in every if name == "grpo" else every[::5]:
        if "old_log_probs" in FIXED.get(name, ()) and not {"tis_high", "old_log_probs"}.isdisjoint(options):
            continue  # its ratio is against the policy that sampled: nothing is left to correct
        if AlgorithmConfig(name=name).measures_drift and updates != (1, 1):
            with pytest.raises(
                ValueError, match=r"passes must be 1 with algorithm.policy_loss .* would let later updates go"
            ):
                run(mode, name, staleness, updates, options, fwd=False)
            continue
        config = run(mode, name, staleness, updates, options, fwd=False)
        if config.algorithm.old_log_probs == "auto" and not config.on_policy:
            config = run(mode, name, staleness, updates, options, fwd=True)  # may have the role, and needs not to
        specs = group_specs(config)
        assert {role for spec in specs for role in spec.role_names} >= {"rollout", "actor", "advantages"}
        trains = [not {"actor", "critic"}.isdisjoint(spec.role_names) for spec in specs]
        assert [spec.saves for spec in specs] == trains
        file = tmp_path / "coordinator.json"
        file.write_bytes(orjson.dumps(coordinator_config(config, num_rows=100)))
        rules = CoordinatorConfig.load(file).rules
        trained = {stream.name: stream for stream in rules.streams if stream.kind == "train"}
        assert trained.keys() == {"actor", *(["critic"] if config.critic is not None else [])}
        for stream in trained.values():
            assert (stream.mini_batches, stream.passes) == updates
        actor = trained["actor"]
        assert actor.whole_step == config.algorithm.needs_full_step
        assert (rules.max_staleness, rules.spare_groups) == (staleness, 2)
        assert Index(rules).rounds.lanes["actor"].spec == actor


@pytest.mark.parametrize(
    ("staleness", "updates", "fwd", "source"),
    [
        (0, (1, 1), False, "self"),
        (0, (1, 4), False, "self"),  # later passes keep the log-probs of the first, which are those of version k
        (0, (2, 1), False, "rollout"),  # the second mini-batch meets other weights than those that sampled it
        (0, (2, 1), True, "actor_fwd"),
        (1, (1, 1), True, "actor_fwd"),
        (1, (1, 2), False, "rollout"),
    ],
)
def test_old_log_probs_follow_staleness_and_updates(
    staleness: int, updates: tuple[int, int], fwd: bool, source: str
) -> None:
    config = run("hybrid", "grpo", staleness, updates, {}, fwd)
    assert config.old_log_probs(has_actor_fwd=fwd) == source and config.loss().tis_high is None
    for changed in ("train.dtype=bfloat16", "model.dtype=bfloat16", "rollout.sglang.python=PYTHON"):
        other = override(config, [changed])
        assert other.old_log_probs(has_actor_fwd=fwd) == {"rollout": "self"}.get(source, source)
        assert other.loss().tis_high == 2.0


def test_a_role_that_nobody_needs_is_refused_also_with_several_passes() -> None:
    with pytest.raises(
        ValueError, match="role_groups must not hold the role 'actor_fwd' when max_staleness is 0 and train"
    ):
        run("hybrid", "grpo", 0, (1, 4), {}, fwd=True)
    with pytest.raises(ValueError, match=r"'actor_fwd' when algorithm.old_log_probs is 'self'"):
        run("hybrid", "grpo", 1, (1, 1), {"old_log_probs": "self"}, fwd=True)
