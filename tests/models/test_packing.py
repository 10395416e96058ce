"""Packing: every token once, hardly any padding, and indices that lead back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rondo.models.packing import PackedBatch, Sequence, can_share_rows, pack
from rondo.runtime.errors import ConfigError
from tests.models.builders import RAGGED, sequences, tiny


def predicted(packed: PackedBatch, one: Sequence, positions: torch.Tensor) -> bool:
    """Whether `positions` are those before the response tokens of `one`, in a row that holds all of `one` there."""
    width = packed.input_ids.shape[1]
    row, last = divmod(int(positions[-1]) + 1, width)
    start = last + 1 - len(one.tokens)
    inside = packed.input_ids[row, start : last + 1].numpy()
    counted = packed.position_ids is None or packed.position_ids[row, start : last + 1].tolist() == list(
        range(len(inside))
    )
    steps = positions.tolist() == list(range(row * width + last - one.response, row * width + last))
    return bool(np.array_equal(inside, one.tokens)) and counted and steps


@pytest.mark.parametrize("seed", range(20))
def test_every_response_token_is_scored_once_from_its_own_sequence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.maximum(2, rng.lognormal(3, 0.8, rng.integers(1, 80)).astype(int))
    batch = sequences([(int(n), int(rng.integers(1, n))) for n in lengths], seed)
    packed = pack(batch)
    parts = packed.positions.split(list(packed.responses))
    assert all(predicted(packed, one, part) for one, part in zip(batch, parts, strict=True))
    assert packed.targets.tolist() == [int(token) for one in batch for token in one.tokens[-one.response :]]
    assert packed.num_tokens == sum(lengths)
    assert packed.input_ids.shape[1] == max(lengths)
    # First fit, longest first, never takes more than 11/9 of the best plus 6/9 of a row.
    assert packed.input_ids.shape[0] <= 11 / 9 * -(-sum(lengths) // max(lengths)) * 1.5 + 1


def test_long_tails_waste_little() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(40), 0.8, 256), 8, 512).astype(int)
    batch = sequences([(int(n), 1) for n in lengths])
    assert pack(batch).waste < 0.03
    assert pack(batch, share_rows=False).waste > 0.7


def test_equal_lengths_waste_nothing_and_need_no_positions() -> None:
    packed = pack(sequences([(13, 5)] * 256))
    assert packed.waste == 0
    assert packed.position_ids is None
    assert packed.input_ids.shape == (256, 13)


def test_rows_fill_longest_first() -> None:
    batch = [Sequence(np.full(n, n), 1) for n in (2, 5, 7, 3, 4)]
    packed = pack(batch)
    assert packed.input_ids.tolist() == [[7] * 7, [5] * 5 + [2] * 2, [4] * 4 + [3] * 3]
    assert packed.position_ids is not None
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
    assert packed.positions.tolist() == [12, 10, 5, 19, 16]
    assert packed.targets.tolist() == [2, 5, 7, 3, 4]


def test_rows_may_be_longer_or_hold_one_sequence_each() -> None:
    batch = sequences([(4, 2), (3, 1), (5, 5 - 1)])
    assert pack(batch, row_tokens=12).input_ids.shape == (1, 12)
    apart = pack(batch, share_rows=False)
    assert apart.input_ids.shape == (3, 5)
    assert apart.position_ids is None


def test_sequences_without_a_response_are_carried_along() -> None:
    packed = pack(sequences([(4, 0), (4, 2)]))
    assert packed.responses == (0, 2)
    assert len(packed.targets) == 2


def test_equal_sequences_give_equal_batches_on_any_device() -> None:
    first, second = pack(sequences(RAGGED)), pack(sequences(RAGGED)).to("cpu")
    for name in ("input_ids", "position_ids", "positions", "targets"):
        assert torch.equal(getattr(first, name), getattr(second, name))


def test_batches_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must hold at least one sequence, got none\."):
        pack([])
    with pytest.raises(ConfigError, match=r"response of sequence 1 must leave at least one prompt token, got 3 of 3"):
        pack(sequences([(3, 2), (3, 3)]))
    with pytest.raises(ConfigError, match=r"sequence 0 must fit a row of 4 tokens, got 5\."):
        pack(sequences([(5, 1)]), row_tokens=4)


def test_models_that_mix_the_sequences_of_a_row_are_found_out() -> None:
    import transformers as hf

    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    mixing = [
        hf.MambaForCausalLM(hf.MambaConfig(**small)),  # carries a state
        hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)),  # takes no positions
        hf.GptOssForCausalLM(  # its masks ignore positions
            hf.GptOssConfig(**small, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
        ),
    ]
    assert [can_share_rows(model) for model in mixing] == [False] * 3
    keeping = tiny("llama").train()
    assert can_share_rows(keeping)
    assert keeping.training
