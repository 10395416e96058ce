"""Records of algorithms: what an option changes, and what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from rondo.roles.algorithms.advantages import ADVANTAGES
from rondo.roles.algorithms.algorithm import ALGORITHMS, FIXED, old_log_probs_source
from rondo.roles.algorithms.drift import DRIFTS
from rondo.roles.algorithms.policy_losses import POLICY_LOSSES
from rondo.roles.config import AlgorithmConfig

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def test_every_record_names_functions_that_exist() -> None:
    for algorithm in (AlgorithmConfig(name=name) for name in ALGORITHMS):
        assert algorithm.needs_critic or algorithm.advantage in ADVANTAGES
        assert algorithm.policy_loss in POLICY_LOSSES
        assert {*FIXED.get(algorithm.name, ()), *ALGORITHMS[algorithm.name]} <= set(AlgorithmConfig.model_fields)
        assert algorithm.measures_drift == (algorithm.policy_loss in DRIFTS) <= algorithm.needs_full_step


def needs(made: AlgorithmConfig) -> str:
    asked = {
        f"{made.min_group_size} sample{'s' * (made.min_group_size > 1)} a prompt": True,
        '`rollout.filter="zero_std"`': made.needs_dynamic_sampling,
        "the whole step before its first gradient": made.needs_full_step,
        "off-policy a forward more": made.measures_drift,
        "`reward.components`": made.advantage == "decoupled",
        "a critic": made.needs_critic,
        "rewards of 0 or more": made.advantage == "group_mean_ratio",
    }
    return ", ".join(what for what, there in asked.items() if there)


def test_the_page_says_of_every_record_what_it_stands_for() -> None:
    records, losses = (
        {
            row[0].strip("`"): row
            for row in (line.strip("| ").split(" | ") for line in part.splitlines())
            if row[0][:1] == "`" and len(row) > 1
        }
        for part in PAGE.read_text().split("## Losses")
    )
    assert list(records) == list(ALGORITHMS), "a row of docs/algorithms.md for each record, in their order"
    for made in (AlgorithmConfig(name=name) for name in ALGORITHMS):
        whitened = f", whitened over `{made.normalize_batch}`" if made.normalize_batch else ""
        name, paper, *rest = records[made.name]
        assert name == f"`{made.name}`" and "](https://arxiv.org/abs/" in paper
        assert rest == [
            f"`{made.advantage}`{whitened}",
            f"`{made.policy_loss}`",
            f"`{made.loss_aggregation}`",
            needs(made),
        ]
    assert {loss for names in losses for loss in names.split("`, `")} >= set(POLICY_LOSSES)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_options_that_are_not_set_or_none_are_what_the_name_stands_for(name: str) -> None:
    made = AlgorithmConfig(name=name)
    assert made.model_dump().items() >= ALGORITHMS[name].items()
    none = dict.fromkeys(set(AlgorithmConfig.model_fields) - {"normalize_batch"})
    assert AlgorithmConfig.model_validate(none | {"name": name}) == made
    # What was resolved is no contradiction, and means the same.
    std = {"normalize_std": made.advantage == "group_mean_std"} if made.advantage.startswith("group_mean") else {}
    for options in ({}, std if made.advantage != "group_mean_ratio" else {}, {"normalize_batch": "tokens"}):
        made = AlgorithmConfig.model_validate({"name": name, **options})
        assert AlgorithmConfig.model_validate_json(made.model_dump_json()) == made


def test_an_algorithm_of_the_users_own_is_what_its_fields_say() -> None:
    own = AlgorithmConfig(name="mine", own=True, advantage="own.py:gae", min_group_size=1, needs_full_step=True)
    assert (own.min_group_size, own.needs_full_step, own.loss_aggregation) == (1, True, "sample")
    assert AlgorithmConfig.model_validate_json(own.model_dump_json()) == own


def test_grpo_is_symmetric_and_normalised_and_samples_count_alike() -> None:
    grpo = AlgorithmConfig()
    assert (grpo.clip_low, grpo.clip_high, grpo.advantage, grpo.loss_aggregation) == (
        0.2,
        0.2,
        "group_mean_std",
        "sample",
    )
    assert not grpo.needs_reference and grpo.dual_clip == 3.0


def test_dr_grpo_drops_both_biases() -> None:
    dr_grpo = AlgorithmConfig(name="dr_grpo")
    assert (dr_grpo.advantage, dr_grpo.loss_aggregation) == ("group_mean", "constant")


def test_dapo_clips_higher_and_counts_tokens() -> None:
    dapo = AlgorithmConfig(name="dapo")
    assert (dapo.clip_low, dapo.clip_high, dapo.loss_aggregation, dapo.needs_dynamic_sampling) == (
        0.2,
        0.28,
        "token",
        True,
    )


def test_ppo_has_a_critic_and_whitens_and_what_belongs_to_values_is_refused_without() -> None:
    ppo = AlgorithmConfig(name="ppo", gae_lambda=0.95)
    assert (ppo.needs_critic, ppo.loss_aggregation, ppo.normalize_batch, ppo.min_group_size) == (
        True,
        "token",
        "tokens",
        1,
    )
    assert not AlgorithmConfig().needs_critic
    with pytest.raises(ValidationError, match=r"algorithm\.gamma must be left out without algorithm\.advantage 'gae'"):
        AlgorithmConfig(gamma=0.9)


def test_options_change_the_record() -> None:
    changed = AlgorithmConfig(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3,
        kl_coef=0.02,
        kl="k2",
        normalize_std=False,
        loss_aggregation="token",
        tis_high=2,
    )
    assert (changed.clip_low, changed.clip_high, changed.dual_clip) == (0.1, 0.3, 3)
    assert (changed.kl_coef, changed.kl, changed.needs_reference) == (0.02, "k2", True)
    assert (changed.advantage, changed.loss_aggregation) == ("group_mean", "token")
    assert (changed.tis_low, changed.tis_high) == (0.0, 2)


def test_a_symmetric_clip_stays_symmetric() -> None:
    assert AlgorithmConfig(clip_low=0.1).clip_high == 0.1
    assert AlgorithmConfig(name="dapo", clip_low=0.1).clip_high == 0.28


@pytest.mark.parametrize("name", [name for name, of in ALGORITHMS.items() if "normalize_batch" in of])
def test_none_leaves_the_advantages_of_a_step_as_they_are_where_the_name_would_whiten_them(name: str) -> None:
    made = AlgorithmConfig(name=name, normalize_batch=None)
    assert made.normalize_batch is None and AlgorithmConfig(name=name).normalize_batch is not None
    assert AlgorithmConfig.model_validate(made.model_dump()) == made


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "dr_grpo", "normalize_std": True},
            "algorithm.normalize_std must be left out with algorithm.name 'dr_grpo'",
        ),
        ({"name": "dr_grpo", "loss_aggregation": "token"}, "algorithm.loss_aggregation must be left out"),
        ({"name": "dapo", "loss_aggregation": "sample"}, "algorithm.loss_aggregation must be left out"),
        ({"name": "grop"}, "algorithm.name must name an algorithm"),
        ({"name": "dr-grpo"}, "Did you mean 'dr_grpo'"),
        ({"name": "grpo", "own": True}, "algorithm.name must be none of ours with algorithm.own, got 'grpo'"),
        ({"min_group_size": 4}, r"algorithm.min_group_size must be left out .* Remove it, or set algorithm.own=True"),
        ({"needs_full_step": True}, "algorithm.needs_full_step must be left out"),
        ({"tis_low": 0.5}, "algorithm.tis_high must be set with algorithm.tis_low"),
        ({"tis_low": 2.0, "tis_high": 1.0}, "algorithm.tis_high must be greater than algorithm.tis_low"),
        ({"tis_mode": "mask"}, "algorithm.tis_high must be set with algorithm.tis_mode"),
        ({"tis_level": "sequence"}, "algorithm.tis_high must be set with algorithm.tis_level"),
        ({"normalize_batch": "groups"}, "normalize_batch"),
        ({"tis_high": 2.0, "old_log_probs": "rollout"}, "algorithm.old_log_probs must not be 'rollout'"),
        (
            {"tis_high": 2.0, "correction": "own.py:weights"},
            "algorithm.tis_high must be left out with algorithm.correction",
        ),
        (
            {"normalize_std": True, "advantage": "own.py:gae"},
            "algorithm.normalize_std must be left out with algorithm.advantage",
        ),
        (
            {"name": "dr_grpo", "advantage": "own.py:gae"},
            "algorithm.advantage must be left out with algorithm.name 'dr_grpo'",
        ),
        ({"policy_loss": "ppo"}, "'module:function' or 'file.py:function'"),
        ({"clip_low": 1.1}, "less than or equal to 1"),
        ({"name": "sapo", "clip_low": 0.1}, "algorithm.clip_low must be left out with algorithm.policy_loss 'sapo'"),
        (
            {"name": "rloo", "dual_clip": 2.0},
            "algorithm.dual_clip must be left out with algorithm.policy_loss 'reinforce'",
        ),
        ({"m2_budget": 0.1}, "algorithm.m2_budget must be left out with algorithm.policy_loss 'ppo_clip'"),
        (
            {"name": "m2po", "old_log_probs": "self"},
            "algorithm.old_log_probs must be left out with algorithm.name 'm2po'",
        ),
        ({"name": "p3o", "tis_high": 2.0}, "algorithm.old_log_probs must not be 'rollout' with algorithm.tis_high"),
        (
            {"name": "rloo", "advantage": "group_mean"},
            "algorithm.advantage must be left out with algorithm.name 'rloo'",
        ),
        ({"name": "gspo", "policy_loss": "sapo"}, "algorithm.policy_loss must be left out"),
        ({"kl_in": "reward", "kl": "unbiased"}, "algorithm.kl must not be 'unbiased' with algorithm.kl_in 'reward'"),
        (
            {"name": "maxrl", "kl_in": "reward", "kl_coef": 0.1},
            "algorithm.kl_in must be 'loss' .* which takes rewards for chances of success",
        ),
        ({"name": "gdpo", "kl_in": "reward", "kl_coef": 0.1}, "algorithm.kl_in must be 'loss' .* each component"),
        ({"dual_clip": 1.0}, "greater than 1"),
    ],
)
def test_contradictions_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig.model_validate(options)


@pytest.mark.parametrize(
    ("asked", "on_policy", "has_actor_fwd", "alike", "source", "bound"),
    [
        ("auto", True, True, True, "self", None),
        ("auto", True, False, False, "self", 2.0),
        ("auto", False, True, True, "actor_fwd", None),
        ("auto", False, True, False, "actor_fwd", 2.0),
        ("auto", False, False, True, "rollout", None),
        ("auto", False, False, False, "self", 2.0),
        # What is named is taken, and nothing besides.
        ("rollout", True, True, False, "rollout", None),
        ("actor_fwd", True, True, False, "actor_fwd", None),
        ("self", False, False, False, "self", None),
    ],
)
def test_old_log_probs_come_from(
    asked: str, on_policy: bool, has_actor_fwd: bool, alike: bool, source: str, bound: float | None
) -> None:
    config = AlgorithmConfig.model_validate({"old_log_probs": asked})
    assert old_log_probs_source(config, on_policy=on_policy, has_actor_fwd=has_actor_fwd, alike=alike) == source
    assert config.for_numerics(alike=alike).tis_high == bound


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize(
    ("on_policy", "has_fwd", "source"), [(True, True, "self"), (False, True, "actor_fwd"), (False, False, "self")]
)
def test_with_a_correction_old_log_probs_are_never_the_engines(
    on_policy: bool, has_fwd: bool, source: str, alike: bool
) -> None:
    config = AlgorithmConfig(tis_high=3.0)
    assert old_log_probs_source(config, on_policy=on_policy, has_actor_fwd=has_fwd, alike=alike) == source
    assert config.for_numerics(alike=alike).tis_high == 3.0


def test_whitening_needs_the_whole_step() -> None:
    assert not AlgorithmConfig().needs_full_step
    made = AlgorithmConfig(name="dr_grpo", normalize_batch="samples")
    assert made.needs_full_step and made.normalize_batch == "samples" and made.advantage == "group_mean"


def test_old_log_probs_of_a_role_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm.old_log_probs must name a role of the run"):
        old_log_probs_source(AlgorithmConfig(old_log_probs="actor_fwd"), on_policy=False, has_actor_fwd=False)
