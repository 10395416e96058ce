from __future__ import annotations

from dataclasses import replace

from rondo.roles.engines.engine import EngineStats
from rondo.roles.engines.rates import Rates
from rondo.roles.rewards.means import RewardMeans


def test_an_engine_is_told_by_what_it_did_since_it_was_last_looked_at() -> None:
    now = [100.0]
    rates, stats = Rates(2, lambda: now[0]), EngineStats(0, 8, 0, 0, 0, 0, 100, 10, 30, 10)
    now[0] += 5
    assert rates.since(stats) == {
        "tokens_per_s": 20.0,
        "tokens_per_s_per_device": 10.0,
        "sequences_per_step": 10.0,
        "prefix_cache_hit_rate": 0.25,
    }
    now[0] += 5
    assert rates.since(replace(stats, tokens_generated=150, shared_prompt_tokens=20)) == {
        "tokens_per_s": 10.0,
        "tokens_per_s_per_device": 5.0,
        "prefix_cache_hit_rate": 1.0,
    }
    now[0] += 5
    assert rates.since(stats) == {"tokens_per_s": 0.0, "tokens_per_s_per_device": 0.0}, "it began anew"
    assert "tokens_per_s_per_device" not in Rates(0).since(stats), "devices of somebody else's"


def test_rewards_are_told_with_the_means_of_their_components_and_begin_anew() -> None:
    means = RewardMeans(("format", "right"))
    assert means.take() == {}
    means.add(1.0, {"format": 1.0, "right": 0.5, "said": 72})
    means.add(0.5, {"format": 0.0})
    parts = {"format": 0.5, "right": 0.5}
    assert means.take() == {"rewards": {"mean": 0.75, "num_samples": 2, "components": parts}}
    means.add(2.0, {"format": "no number"})
    assert means.take() == {"rewards": {"mean": 2.0, "num_samples": 1}} and means.take() == {}
