from __future__ import annotations

from dataclasses import replace

from rondo.roles.engines.engine import EngineStats
from rondo.roles.engines.rates import Rates


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
