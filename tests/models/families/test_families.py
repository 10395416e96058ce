"""Each family's record against its tiny model: towers, positions, placeholders and the shortest prompt."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config

from rondo.models.families import FAMILIES, family_of
from rondo.models.families.family import Family
from tests.models import multimodal
from tests.models.multimodal import AUDIO, AUDIO_START, END, IMAGE, MEL_BINS, START, VIDEO


def record(model: Any) -> Family:
    family = family_of(model)
    assert family is not None
    return family


def run(model: Any, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> torch.Tensor:
    """Logits [T, V] on explicit positions."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    text = torch.arange(ids.shape[1])[None, None]
    positions = torch.cat([text, torch.from_numpy(arrays["positions"]).long()[:, None]])
    media = {name: torch.from_numpy(array) for name, array in arrays.items() if name != "positions"}
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, **media).logits[0]
    return logits


def test_a_family_is_told_from_a_model_and_from_its_config_and_text_has_none() -> None:
    for name in multimodal.FAMILIES:
        model = multimodal.tiny(name)
        assert family_of(model) is family_of(model.config)
        assert record(model).model_types[0].startswith(name)
    assert family_of(GPT2Config()) is None


def test_no_model_type_belongs_to_two_families() -> None:
    types = [name for family in FAMILIES for name in family.model_types]
    assert len(types) == len(set(types))


@pytest.mark.parametrize("name", multimodal.FAMILIES)
def test_the_shortest_prompt_runs_every_tower_once_for_each_modality(name: str) -> None:
    model = multimodal.tiny(name)
    family = record(model)
    tokens, media = family.dummy(model.config)
    calls: Counter[str] = Counter()
    for path in set(family.towers.values()):
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: calls.update([path]))
    assert torch.isfinite(run(model, tokens, dict(media.arrays))).all()
    assert calls == Counter(family.towers[modality] for modality in family.modalities)
    assert media.modalities == family.modalities
    for modality in family.modalities:
        assert (tokens == getattr(model.config, family.placeholders[modality])).sum() == 1


@pytest.mark.parametrize("name", multimodal.FAMILIES)
def test_every_tower_gets_a_gradient_from_the_shortest_prompt(name: str) -> None:
    model = multimodal.tiny(name)
    family = record(model)
    tokens, media = family.dummy(model.config)
    arrays = {key: torch.from_numpy(array) for key, array in media.arrays.items() if key != "positions"}
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    positions = torch.arange(len(tokens)).expand(4, 1, -1)
    model(input_ids=ids, position_ids=positions, use_cache=False, **arrays).logits.float().square().sum().backward()
    for path in set(family.towers.values()):
        without = [key for key, one in model.get_submodule(path).named_parameters() if one.grad is None]
        assert without == []


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_an_image_takes_a_grid_of_positions_and_text_goes_on_after_its_longer_side(name: str) -> None:
    model = multimodal.tiny(name).to("meta")
    tokens = np.array([7, START, *[IMAGE] * 6, END, 9])
    found = record(model).positions(model, tokens, {"image_grid_thw": np.array([[1, 4, 6]])})
    assert found.dtype == np.float32
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_the_frames_of_a_video_follow_each_other_like_images(name: str) -> None:
    model = multimodal.tiny(name).to("meta")
    tokens = np.array([5, START, VIDEO, VIDEO, END, 6, START, VIDEO, VIDEO, END])
    found = record(model).positions(model, tokens, {"video_grid_thw": np.array([[2, 2, 4]])})
    assert found.tolist() == [
        [0, 1, 2, 2, 4, 5, 6, 7, 7, 9],
        [0, 1, 2, 2, 4, 5, 6, 7, 7, 9],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    ]


@pytest.mark.parametrize("name", multimodal.FAMILIES)
def test_a_prompt_of_text_takes_plain_positions(name: str) -> None:
    model = multimodal.tiny(name).to("meta")
    found = record(model).positions(model, np.arange(5), {})
    assert found.tolist() == [[0, 1, 2, 3, 4]] * 3


def test_omni_counts_25_positions_a_second_of_video() -> None:
    model = multimodal.tiny("qwen3_omni").to("meta")
    tokens = np.array([START, VIDEO, VIDEO, END])
    arrays = {"video_grid_thw": np.array([[2, 2, 2]]), "video_second_per_grid": np.array([0.5], np.float32)}
    found = record(model).positions(model, tokens, arrays)
    assert found.tolist() == [[0, 1, 13.5, 14.5], [0, 1, 1, 14.5], [0, 1, 1, 14.5]]


def test_omni_puts_the_sound_of_a_video_between_its_frames_by_time() -> None:
    model = multimodal.tiny("qwen3_omni").to("meta")
    sound = np.ones((1, 100), np.int32)  # a second: 13 tokens
    tokens = np.array([START, AUDIO_START, VIDEO, *[AUDIO] * 13, VIDEO, END, END])
    arrays = {
        "video_grid_thw": np.array([[2, 2, 2]]), "video_second_per_grid": np.array([1.0], np.float32),
        "feature_attention_mask": sound, "use_audio_in_video": True,
    }  # fmt: skip
    time = record(model).positions(model, tokens, arrays)[0]
    video, heard = time[tokens == VIDEO], time[tokens == AUDIO]
    assert video[1] - video[0] == 25
    assert heard.tolist() == [video[0] + step for step in range(13)]


def test_omni_makes_as_many_tokens_of_a_sound_as_its_tower_makes_features() -> None:
    model = multimodal.tiny("qwen3_omni")
    family = record(model)
    assert family.sound_tokens is not None
    lengths = np.array([8, 9, 99, 100, 101, 199, 200, 333])
    made = []
    for length in lengths:
        features = torch.zeros(MEL_BINS, int(length))
        with torch.no_grad():
            made.append(len(model.model.audio_tower(features, feature_lens=torch.tensor([length])).last_hidden_state))
    assert family.sound_tokens(model.config, lengths).tolist() == made
