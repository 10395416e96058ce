from __future__ import annotations

import numpy as np
import pytest

from benchmarks.replay_stages import PROMPT_TOKENS, Mode, Replay


@pytest.mark.parametrize(
    ("model", "mode", "bound"),
    [
        ("qwen3_4b", "colocate", 225.9),
        ("qwen3_4b", "fully_async", 125.5),
        ("qwen3_omni_30b", "colocate", 267.4),
        ("qwen3_omni_30b", "fully_async", 131.5),
    ],
)
def test_the_bound_is_the_papers_sum_where_devices_are_shared_and_the_slowest_stage_elsewhere(
    model: str, mode: Mode, bound: float
) -> None:
    assert Replay.of(model, mode, time_scale=1).bound_s == pytest.approx(bound)
    assert Replay.of(model, mode, time_scale=20).bound_s == pytest.approx(bound / 20)


def test_every_step_has_the_same_lengths_and_the_longest_takes_the_whole_generation_stage() -> None:
    replay = Replay.of("qwen3_4b", "fully_async", time_scale=10, num_steps=3)
    steps: dict[int, list[int]] = {}
    for step, tokens in replay.draws(0).values():
        steps.setdefault(step, []).append(tokens)
    assert [len(steps[step]) for step in range(3)] == [256, 256, 256]
    assert sorted(steps[0]) == sorted(steps[1]) == sorted(replay.lengths)
    assert steps[0] != steps[1]
    assert replay.sample_s(max(steps[0])) == pytest.approx(11.2)
    assert np.median(steps[0]) == pytest.approx(5200, rel=0.1)
    assert max(steps[0]) == 20480


def test_the_rounds_of_a_step_take_its_stage_together() -> None:
    replay = Replay.of("qwen3_omni_30b", "fully_async", time_scale=20)
    tokens = [int(length) + PROMPT_TOKENS for length in replay.lengths]
    assert sum(replay.stage_s("train", one) for one in tokens) == pytest.approx(131.5 / 20)


def test_weights_are_a_devices_share_and_scaled_like_time_and_media_are_whole() -> None:
    replay = Replay.of("qwen3_omni_30b", "colocate", time_scale=20)
    assert replay.weights_bytes == 6e10 / 20 / 16
    assert sum(array.nbytes for array in replay.media_arrays().values()) == pytest.approx(6.9e6, rel=0.001)
