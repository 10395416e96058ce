from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rondo.roles.engines import ranges
from rondo.roles.engines.embedded import sampler
from rondo.roles.engines.embedded.sampler import DRAWN, keep_top, uniforms
from rondo.roles.engines.engine import Request, SamplingParams
from rondo.runtime.errors import ConfigError

ALMOST_ONE = np.float32(1.0 - 2.0**-24)


def splitmix(state: int) -> int:
    """SplitMix64's next output, in plain integers."""
    mask = 2**64 - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def draw(
    logits: list[list[float]] | torch.Tensor,
    us: list[float],
    params: list[SamplingParams],
    num_tokens: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    drawn = np.array([(each.temperature, each.top_k, each.top_p) for each in params], DRAWN)
    return sampler.draw(torch.as_tensor(logits), drawn, np.array(us, np.float32), num_tokens)


def plain(**changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **changes)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.9}, {"temperature": 2.0, "top_k": 3, "top_p": 0.5}]
)
def test_rows_of_a_padded_vocabulary_are_never_sampled_and_count_in_log_probs_as_the_trainer_counts_them(
    params: dict[str, Any],
) -> None:
    logits = [[0.0, 1.0, 2.0, 9.0, 8.0]]
    for u in (0.0, 0.5, 0.9, float(ALMOST_ONE)):
        tokens, log_probs = draw(logits, [u], [plain(**params)], num_tokens=3)
        assert tokens[0] < 3
        exact = (torch.tensor(logits[0]) / (params.get("temperature", 1.0) or 1.0)).log_softmax(-1)
        assert log_probs[0] == pytest.approx(float(exact[tokens[0]]), rel=1e-5)
    ids, values = sampler.likeliest(torch.tensor(logits[0]), 1.0, 5, 3)
    assert ids.tolist() == [2, 1, 0] and values[0] == pytest.approx(float(torch.tensor(logits[0]).log_softmax(-1)[2]))


def test_the_reference_is_the_published_splitmix64() -> None:
    assert splitmix(0) == 0xE220A8397B1DCDAF
    assert splitmix(1) == 0x910A2DEC89025CC1


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 1])
def test_uniforms_are_the_splitmix64_stream_of_the_mixed_seed(seed: int) -> None:
    state = splitmix(seed)
    gamma = 0x9E3779B97F4A7C15
    expected = [(splitmix((state + position * gamma) % 2**64) >> 40) / 2**24 for position in range(5, 9)]
    np.testing.assert_array_equal(uniforms(seed, 5, 4), np.array(expected, np.float32))


def test_a_uniform_depends_on_seed_and_position_alone() -> None:
    whole = uniforms(99, 0, 50)
    np.testing.assert_array_equal(whole[20:30], uniforms(99, 20, 10))
    assert not np.isin(whole, uniforms(100, 0, 50)).any()


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    values = np.concatenate([uniforms(seed, 0, 256) for seed in range(256)])
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts, _ = np.histogram(values, 64, (0.0, 1.0))
    assert ((counts - 1024) ** 2 / 1024).sum() < 110  # 63 degrees of freedom, p < 0.001


def test_a_draw_inverts_the_cumulative_distribution() -> None:
    logits = torch.tensor([0.1, 0.6, 0.3]).log()
    us = [0.0, 0.09, 0.11, 0.69, 0.71, float(ALMOST_ONE)]
    tokens, log_probs = draw(logits.expand(6, -1), us, [plain()] * 6)
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(log_probs, np.log([0.1, 0.1, 0.6, 0.6, 0.3, 0.3]), atol=2e-7)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = [[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]
    for u, token in ((0.0, 1), (0.4999, 1), (0.5, 3), (float(ALMOST_ONE), 3)):
        assert draw(logits, [u], [plain()])[0].tolist() == [token]


def test_draws_follow_the_distribution() -> None:
    probs = np.array([0.05, 0.5, 0.15, 0.3])
    us = uniforms(3, 0, 20_000)
    tokens, _ = draw(torch.from_numpy(probs).log().expand(us.size, -1), us.tolist(), [plain()] * us.size)
    counts = np.bincount(tokens, minlength=4)
    assert ((counts - us.size * probs) ** 2 / (us.size * probs)).sum() < 16.3  # 3 degrees of freedom, p < 0.001


def test_log_probs_are_taken_after_temperature_and_before_filters() -> None:
    logits = torch.randn(1, 11, generator=torch.Generator().manual_seed(0)) * 3
    tokens, log_probs = draw(logits, [0.7], [plain(temperature=0.7, top_k=3, top_p=0.8)])
    expected = torch.log_softmax(logits / 0.7, -1)[0, tokens[0]]
    np.testing.assert_allclose(log_probs, [expected], atol=3e-7)


def test_temperature_zero_takes_the_likeliest_and_its_plain_log_prob() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    tokens, log_probs = draw(logits, [0.999], [plain(temperature=0.0)])
    assert tokens.tolist() == [1]
    np.testing.assert_allclose(log_probs, torch.log_softmax(logits, -1)[:, 1], atol=2e-7)


def by_hand(probs: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Token by token: what top-k, then top-p over the renormalised rest, keeps."""
    order = sorted(range(probs.size), key=lambda token: (-probs[token], token))
    order = order[:top_k] if top_k > 0 else order
    total, kept, mass = sum(float(probs[token]) for token in order), np.zeros_like(probs), 0.0
    for token in order:
        if top_p < 1.0 and mass >= top_p * total:
            break
        kept[token] = probs[token]
        mass += float(probs[token])
    return kept


def test_filters_keep_what_the_definition_keeps() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(13, 0.5), 200).astype(np.float32)
    top_k = rng.choice([-1, 1, 3, 7, 50], 200)
    top_p = rng.choice(np.array([0.05, 0.3, 0.75, 0.95, 1.0], np.float32), 200)
    kept = keep_top(torch.from_numpy(probs), torch.from_numpy(top_k), torch.from_numpy(top_p))
    expected = np.stack([by_hand(*row) for row in zip(probs, top_k, top_p, strict=True)])
    np.testing.assert_array_equal(kept.numpy(), expected)


def test_the_likeliest_token_stays_however_small_its_share_is_to_be() -> None:
    kept = keep_top(torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([-1]), torch.tensor([0.0]))
    assert kept[0].tolist() == [0.0, 0.5, 0.0]


@pytest.mark.parametrize("temperature", [ranges.TEMPERATURE.least, ranges.TEMPERATURE.most])
@pytest.mark.parametrize("top_p", [ranges.TOP_P.least, ranges.TOP_P.most])
@pytest.mark.parametrize("top_k", [ranges.TOP_K.least, ranges.TOP_K.most])
def test_the_ends_of_the_ranges_draw_a_token_with_a_finite_log_prob(
    temperature: float, top_p: float, top_k: int
) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 200
    params = plain(temperature=temperature, top_p=top_p, top_k=int(top_k))
    tokens, log_probs = draw(logits, [0.0, 0.5, float(ALMOST_ONE)], [params] * 3)
    assert np.isfinite(log_probs).all()
    if top_k == 1 or temperature < 1:
        assert tokens.tolist() == logits.argmax(-1).tolist()


def test_a_top_k_beyond_the_vocabulary_is_no_limit() -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(3)).expand(40, -1)
    us = uniforms(1, 0, 40).tolist()
    one, other = (draw(logits, us, [plain(top_k=top_k)] * 40) for top_k in (-1, 2**31 - 1))
    np.testing.assert_array_equal(one[0], other[0])


def test_equal_probabilities_are_kept_by_token_id() -> None:
    kept = keep_top(torch.full((1, 6), 1 / 6), torch.tensor([2]), torch.tensor([1.0]))
    assert kept[0].nonzero()[:, 0].tolist() == [0, 1]


def test_a_row_draws_the_same_beside_any_others() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)) * 2
    params = [
        plain(),
        plain(temperature=0.0),
        plain(temperature=1.7),
        plain(top_k=4),
        plain(top_p=0.6),
        plain(temperature=0.5, top_k=9, top_p=0.9),
    ]
    us = uniforms(5, 0, 6).tolist()
    tokens, log_probs = draw(logits, us, params)
    for row in range(6):
        token, log_prob = draw(logits[row : row + 1], us[row : row + 1], params[row : row + 1])
        assert (token[0], log_prob[0]) == (tokens[row], log_probs[row])


def test_a_row_with_a_nan_shows_it_in_its_log_prob_alone() -> None:
    tokens, log_probs = draw([[0.0, math.nan, 0.0], [0.0, 0.0, 9.0]], [0.5, 0.5], [plain(), plain()])
    assert np.isnan(log_probs).tolist() == [True, False]
    assert tokens[1] == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be from 1 to 2147483647, got 0"),
        ({"max_new_tokens": 2**31}, "max_new_tokens must be from 1 to 2147483647, got 2147483648"),
        ({"temperature": -0.1}, "temperature must be 0 (greedy) or from 1e-06 to 1e+06, got -0.1"),
        ({"temperature": 1e-50}, "temperature must be 0 (greedy) or from 1e-06 to 1e+06, got 1e-50"),
        ({"temperature": math.inf}, "temperature must be 0 (greedy) or from 1e-06 to 1e+06, got inf"),
        ({"temperature": math.nan}, "temperature must be 0 (greedy) or from 1e-06 to 1e+06, got nan"),
        ({"top_p": 0.0}, "top_p must be from 1e-06 to 1, got 0.0"),
        ({"top_p": 1e-46}, "top_p must be from 1e-06 to 1, got 1e-46"),
        ({"top_p": 1.1}, "top_p must be from 1e-06 to 1, got 1.1"),
        ({"top_k": 0}, "top_k must be -1 (all tokens) or from 1 to 2147483647, got 0"),
        ({"top_k": 2**63}, "top_k must be -1 (all tokens) or from 1 to 2147483647, got 9223372036854775808"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids must be from 0 to 2147483647, got -1"),
        ({"stop_token_ids": (3, 2**63)}, "stop_token_ids must be from 0 to 2147483647, got 9223372036854775808"),
        ({"stop_token_ids": (3,) * 1025}, "the number of stop_token_ids must be from 0 to 1024, got 1025"),
        ({"num_top": 33}, "num_top must be from 0 to 32, got 33"),
    ],
)
def test_parameters_out_of_range_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{"max_new_tokens": 1} | changes)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("prompt", "seed", "text"),
    [
        (np.zeros(0, np.int32), 0, "the prompt of request 'a' must be a non-empty vector of token ids, got int32 [0]"),
        (
            np.zeros((1, 3), np.int32),
            0,
            "the prompt of request 'a' must be a non-empty vector of token ids, got int32 [1, 3]",
        ),
        (np.zeros(3), 0, "the prompt of request 'a' must be a non-empty vector of token ids, got float64 [3]"),
        (np.zeros(3, np.int32), 2**63, "the seed of request 'a' must be from 0 to 9223372036854775807, got 92233720"),
    ],
)
def test_malformed_requests_are_refused(prompt: np.ndarray, seed: int, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Request("a", prompt, plain(), seed)
    assert str(caught.value).startswith(text)
