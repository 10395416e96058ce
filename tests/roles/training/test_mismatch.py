"""The gap is over the right tokens, the same however rows are cut, and nothing that staleness makes."""

from __future__ import annotations

import numpy as np
import pytest

from rondo.roles.training.mismatch import Gap, refuse_gap
from rondo.runtime.errors import Fatal
from tests.roles.training.test_adapters import LORA, job


def rows(seed: int, count: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        mine = -draw.random(5, np.float32)
        found.append((mine, mine + draw.normal(0, 1e-3, 5).astype(np.float32), draw.random(5) < 0.7))
    return found


def test_the_figures_are_those_computed_by_hand_over_the_chosen_tokens_alone():
    gap = Gap()
    gap.add(np.float32([-1.0, -2.0, 9.0]), np.float32([-1.5, -2.0, -9.0]), np.array([True, True, False]), ("image",))
    found = gap.metrics()
    assert found["log_prob_gap"] == found["log_prob_gap_image"] == pytest.approx(0.25)
    assert found["log_prob_gap_max"] == pytest.approx(0.5) and found["log_prob_gap_tokens"] == 2
    assert found["log_prob_gap_k3"] == pytest.approx((np.exp(0.5) - 1 - 0.5) / 2)
    assert "log_prob_gap_text" not in found


def test_a_row_of_several_modalities_counts_for_each_and_once_for_all():
    gap = Gap()
    for mine, sampled, chosen in rows(0, 3):
        gap.add(mine, sampled, chosen, ("image", "audio"))
    for mine, sampled, chosen in rows(1, 2):
        gap.add(mine, sampled, chosen, ())
    found = gap.metrics()
    chosen = np.concatenate([row[2] for row in rows(0, 3) + rows(1, 2)])
    assert found["log_prob_gap_tokens"] == chosen.sum()
    assert found["log_prob_gap_image"] == found["log_prob_gap_audio"] == found["log_prob_gap_mixed"]
    assert found["log_prob_gap_text"] != found["log_prob_gap_image"]


def test_without_a_token_to_compare_there_is_no_figure():
    gap = Gap()
    gap.add(np.zeros(3, np.float32), np.ones(3, np.float32), np.zeros(3, bool), ())
    assert gap.metrics() == {}


def test_an_engine_that_keeps_an_older_adapter_ends_the_run_where_both_compute_alike():
    told, config = {"log_prob_gap": 0.002, "step": 3}, job("a folder")
    refuse_gap(told | {"log_prob_gap": 1e-6}, config)
    with pytest.raises(Fatal, match=r"the adapter whose version it names, got log-probs 0\.002 nats .* in step 3"):
        refuse_gap(told, config)
    refuse_gap(told, job("a folder", max_log_prob_gap=0.01))
    refuse_gap(told, job("a folder", dtype="bfloat16"))
    refuse_gap(told, job("a folder", lora=LORA.model_copy(update={"publish": "merged"})))
