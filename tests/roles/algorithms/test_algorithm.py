"""Records of algorithms: what an option changes, and what it may not."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rondo.roles.algorithms.advantages import ADVANTAGES
from rondo.roles.algorithms.algorithm import ALGORITHMS, FIXED, old_log_probs_source
from rondo.roles.algorithms.losses import POLICY_LOSSES
from rondo.roles.config import AlgorithmConfig


def test_every_record_names_functions_that_exist() -> None:
    for algorithm in (AlgorithmConfig(name=name) for name in ALGORITHMS):
        assert algorithm.advantage in ADVANTAGES
        assert algorithm.policy_loss in POLICY_LOSSES
        assert {*FIXED.get(algorithm.name, ()), *ALGORITHMS[algorithm.name]} <= set(AlgorithmConfig.model_fields)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_options_that_are_not_set_or_none_are_what_the_name_stands_for(name: str) -> None:
    made = AlgorithmConfig(name=name)
    assert made.model_dump().items() >= ALGORITHMS[name].items()
    assert AlgorithmConfig.model_validate(dict.fromkeys(AlgorithmConfig.model_fields) | {"name": name}) == made
    # What was resolved is no contradiction, and means the same.
    for options in ({}, {"normalize_std": made.advantage == "group_mean_std"}, {"normalize_batch": "tokens"}):
        made = AlgorithmConfig.model_validate({"name": name, **options})
        assert AlgorithmConfig.model_validate_json(made.model_dump_json()) == made


def test_an_algorithm_of_the_users_own_is_what_its_fields_say() -> None:
    own = AlgorithmConfig(name="mine", own=True, advantage="own.py:gae", min_group_size=1, needs_full_step=True)
    assert (own.min_group_size, own.needs_full_step, own.normalizer) == (1, True, "sample")
    assert AlgorithmConfig.model_validate_json(own.model_dump_json()) == own


def test_grpo_is_symmetric_and_normalised_and_samples_count_alike() -> None:
    grpo = AlgorithmConfig()
    assert (grpo.clip_low, grpo.clip_high, grpo.advantage, grpo.normalizer) == (0.2, 0.2, "group_mean_std", "sample")
    assert not grpo.needs_reference and grpo.dual_clip == 3.0


def test_dr_grpo_drops_both_biases() -> None:
    dr_grpo = AlgorithmConfig(name="dr_grpo")
    assert (dr_grpo.advantage, dr_grpo.normalizer) == ("group_mean", "constant")


def test_dapo_clips_higher_and_counts_tokens() -> None:
    dapo = AlgorithmConfig(name="dapo")
    assert (dapo.clip_low, dapo.clip_high, dapo.normalizer, dapo.needs_dynamic_sampling) == (0.2, 0.28, "token", True)


def test_options_change_the_record() -> None:
    changed = AlgorithmConfig(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3,
        kl_coef=0.02,
        kl="k2",
        normalize_std=False,
        normalizer="token",
        tis_high=2,
    )
    assert (changed.clip_low, changed.clip_high, changed.dual_clip) == (0.1, 0.3, 3)
    assert (changed.kl_coef, changed.kl, changed.needs_reference) == (0.02, "k2", True)
    assert (changed.advantage, changed.normalizer) == ("group_mean", "token")
    assert (changed.tis_low, changed.tis_high) == (0.0, 2)


def test_a_symmetric_clip_stays_symmetric() -> None:
    assert AlgorithmConfig(clip_low=0.1).clip_high == 0.1
    assert AlgorithmConfig(name="dapo", clip_low=0.1).clip_high == 0.28


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"name": "dr_grpo", "normalize_std": True},
            "algorithm.normalize_std must be left out with algorithm.name 'dr_grpo'",
        ),
        ({"name": "dr_grpo", "normalizer": "token"}, "algorithm.normalizer must be left out"),
        ({"name": "dapo", "normalizer": "sample"}, "algorithm.normalizer must be left out"),
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
        ({"clip_low": 1.0}, "less than 1"),
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
