"""Packing: every token once, hardly any padding, and indices that lead back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rondo.models.packing import PackedBatch, Packing, Sequence, pack, why_alone
from rondo.runtime.errors import ConfigError
from tests.models import multimodal
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
    for shares, least, most in ((True, 0.97, 1.0), (False, 0.0, 0.3)):
        packed = pack(batch, share_rows=shares)
        assert least < packed.num_tokens / packed.input_ids.numel() < most


def test_equal_lengths_waste_nothing_and_need_no_positions() -> None:
    packed = pack(sequences([(13, 5)] * 256))
    assert packed.num_tokens == packed.input_ids.numel() and packed.position_ids is None
    assert packed.input_ids.shape == (256, 13)


def test_rows_fill_longest_first() -> None:
    batch = [Sequence(np.full(n, n), 1) for n in (2, 5, 7, 3, 4)]
    packed = pack(batch)
    assert packed.input_ids.tolist() == [[7] * 7, [5] * 5 + [2] * 2, [4] * 4 + [3] * 3]
    assert packed.position_ids is not None
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 0, 1], [0, 1, 2, 3, 0, 1, 2]]
    assert packed.positions.tolist() == [12, 10, 5, 19, 16]
    assert packed.targets.tolist() == [2, 5, 7, 3, 4]


def test_rows_may_hold_one_sequence_each() -> None:
    batch = sequences([(4, 2), (3, 1), (5, 5 - 1)])
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
    assert all(map(why_alone, mixing))
    keeping = tiny("llama").train()
    assert not why_alone(keeping)
    assert keeping.training


# ---- media --------------------------------------------------------------------------------------------------------------


def test_a_response_goes_on_from_the_greatest_position_on_the_axes_of_time_height_and_width() -> None:
    model = multimodal.tiny("qwen3_vl")
    asked = multimodal.prompt(model, 1, image=(1, 3))
    one = multimodal.sample(asked, 2, 3)
    assert one.media is not None
    packed = pack([one], multimodal=True)
    assert packed.position_ids is not None
    text, *axes = packed.position_ids[:, 0].tolist()
    # Three words, the start, the image's 1 x 3 patches at 4 and 4..6 and 4, then the end at 7, two words, the response.
    assert text == list(range(13))
    assert axes[0] == [0, 1, 2, 3, 4, 4, 4, 7, 8, 9, 10, 11, 12]
    assert axes[1] == axes[0]
    assert axes[2] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    square = multimodal.sample(multimodal.prompt(model, 1, image=(3, 3)), 2, 2)
    again = pack([square], multimodal=True).position_ids
    assert again is not None
    assert again[1, 0, -2:].tolist() == [10, 11]
    assert again[0, 0, -2:].tolist() == [16, 17]
    flat = (
        Packing.of(model).pack([square, one]).position_ids
    )  # two prompts, the first token of one answer, two of the other
    assert flat is not None
    rows = again[:, 0, :-1].T.tolist() + packed.position_ids[:, 0, :-1].T.tolist()
    assert sorted(flat[:, 0].T.tolist()) == sorted(rows)


def test_text_has_equal_positions_on_all_axes_that_start_anew_with_each_sequence() -> None:
    packed = pack(sequences([(4, 1), (2, 1), (6, 2)]), multimodal=True)
    assert packed.position_ids is not None
    assert packed.position_ids.dtype == torch.float32
    assert packed.position_ids.tolist() == [[[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1]]] * 4


@pytest.mark.parametrize("family", multimodal.FAMILIES)
def test_media_are_in_the_order_of_their_placeholders_in_the_rows(family: str) -> None:
    model = multimodal.tiny(family)
    batch = multimodal.ragged(model, seed=3)
    packing = Packing.of(model)
    packed = replace(packing, share_prefixes=False).pack(batch, train=True)
    width = packed.input_ids.shape[1]
    flat = packed.input_ids.flatten()
    places = {}
    for number, (one, positions) in enumerate(zip(batch, packed.positions.split(list(packed.responses)), strict=True)):
        start = int(positions[-1]) + 2 - len(one.tokens)
        assert flat[start : start + len(one.tokens)].tolist() == one.tokens.tolist()
        assert start // width == (start + len(one.tokens) - 1) // width
        places[start] = number
    expected = [batch[places[start]].media for start in sorted(places) if batch[places[start]].media is not None]
    dummy = packing.dummy
    assert dummy is not None
    assert [media.key for media in packed.media if media.key != dummy.media.key] == [media.key for media in expected]  # type: ignore[union-attr]
    assert len(packed.media) == len(expected) + 1


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_omni"])
def test_media_are_in_the_order_of_their_prompts_in_a_flat_batch(family: str) -> None:
    model = multimodal.tiny(family)
    batch = multimodal.ragged(model, seed=3)
    packed = Packing.of(model).pack(batch, train=True)
    flat = packed.input_ids[0]
    places = {}
    for one, positions in zip(batch, packed.positions.split(list(packed.responses)), strict=True):
        prompt = one.tokens[: -one.response]
        start = int(positions[0]) + 1 - len(prompt)
        assert flat[start : start + len(prompt)].tolist() == prompt.tolist()
        assert flat[positions[1:]].tolist() == one.tokens[len(prompt) : -1].tolist()
        if one.media is not None:
            places[start] = one.media.key
    in_order = [media.key for media in packed.media if media.key in places.values()]
    assert in_order == [places[start] for start in sorted(places)]
    assert len(packed.media) == len(in_order) + 1


def test_the_dummy_is_in_batches_of_training_and_in_no_result() -> None:
    model = multimodal.tiny("qwen3_omni")
    packing, batch = Packing.of(model), sequences(RAGGED)
    scored, trained = packing.pack(batch), packing.pack(batch, train=True)
    assert scored.media == ()
    assert [media.modalities for media in trained.media] == [("image", "audio", "video")]
    assert trained.responses == scored.responses
    assert torch.equal(trained.targets, scored.targets)
    assert trained.num_tokens == scored.num_tokens + 3
    text = Packing.of(tiny("qwen3"))
    assert text.pack(batch, train=True).num_tokens == scored.num_tokens
    assert text.dummy is None


def test_media_cost_what_their_encoders_take_beside_the_tokens() -> None:
    asked = multimodal.prompt(multimodal.tiny("qwen3_omni"), 1, image=(2, 3), audio=50)
    assert asked.cost == len(asked.tokens) + 24 + 50
    assert sequences([(7, 2)])[0].cost == 7


def test_a_placeholder_that_stands_for_no_feature_is_hidden_and_still_embedded() -> None:
    model = multimodal.tiny("qwen3_vl")
    asked = multimodal.prompt(model, 1, image=(1, 2))
    says_image = replace(asked, tokens=np.append(asked.tokens, [multimodal.IMAGE, 7]).astype(np.int32), response=2)
    packing = Packing.of(model)
    plain = packing.pack([multimodal.sample(asked, 1, 2)])
    assert plain.embedded_ids is None
    packed = packing.pack([says_image])
    assert (packed.input_ids == multimodal.IMAGE).sum() == 2
    assert packed.embedded_ids is not None
    assert packed.embedded_ids[0].tolist() == says_image.tokens[:-1].tolist()
    assert packed.targets.tolist() == [multimodal.IMAGE, 7]


def test_linear_attention_gives_each_sequence_a_row() -> None:
    shares = {family: Packing.of(multimodal.tiny(family)).share_rows for family in multimodal.FAMILIES}
    assert shares == {"qwen3_vl": True, "qwen3_5": False, "qwen3_omni": True}
