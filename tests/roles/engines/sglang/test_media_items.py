from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from rondo.models.media.inputs import MediaInputs, with_turns
from rondo.models.tiny import qwen3, qwen3_omni
from rondo.roles.engines.sglang.media_items import SCHEME, media_body, positions_of
from rondo.roles.engines.sglang.model_folder import check_served
from rondo.runtime.errors import ConfigError


def inputs(**arrays: np.ndarray) -> MediaInputs:
    positions = np.array([[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2, 3]], np.float32)
    return MediaInputs("key", {"positions": positions, **arrays})


def read(told: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(told["data"]), told["dtype"]).reshape(told["shape"])


def test_an_image_reaches_the_server_as_its_arrays_and_positions() -> None:
    pixels = np.random.default_rng(0).random((4, 6), np.float32)
    grid = np.array([[1, 2, 2]])
    body = media_body(inputs(pixel_values=pixels, image_grid_thw=grid), np.arange(4))
    assert body.keys() == {"image_data"}
    [item] = body["image_data"]
    told = orjson.loads(item.removeprefix(SCHEME))
    assert item.startswith(SCHEME) and told.keys() == {"arrays", "positions", "spans"} and told["spans"] == [[0, 4]]
    np.testing.assert_array_equal(read(told["arrays"]["pixel_values"]), pixels)
    np.testing.assert_array_equal(read(told["arrays"]["image_grid_thw"]), grid)
    assert read(told["positions"]).tolist() == [[0, 1, 1, 2], [0, 1, 1, 2], [0, 1, 2, 3]]


def test_each_modality_has_its_own_item_with_the_positions_of_all() -> None:
    arrays = {"pixel_values": (4, 6), "pixel_values_videos": (8, 6), "input_features": (1, 3, 5)}
    grids = {"image_grid_thw": np.ones((1, 3), int), "video_grid_thw": np.ones((1, 3), int)}
    sound = {"feature_attention_mask": np.ones((1, 5), np.int32)}
    media = inputs(**{name: np.zeros(shape, np.float32) for name, shape in arrays.items()}, **grids, **sound)
    body = media_body(media, np.arange(4))
    assert body.keys() == {"image_data", "audio_data", "video_data"}
    told = {field: orjson.loads(items[0].removeprefix(SCHEME)) for field, items in body.items()}
    assert {field: set(item["arrays"]) for field, item in told.items()} == {
        "image_data": {"pixel_values", "image_grid_thw"},
        "video_data": {"pixel_values_videos", "video_grid_thw"},
        "audio_data": {"input_features", "feature_attention_mask"},
    }
    assert len({orjson.dumps(item["positions"]) for item in told.values()}) == 1


def test_media_of_later_turns_lie_behind_each_other_in_the_same_items_with_the_places_of_all() -> None:
    draw = np.random.default_rng(0)
    pictures = [
        inputs(pixel_values=draw.random((4 * n, 6), np.float32), image_grid_thw=np.array([[1, 2, 2 * n]]))
        for n in (1, 2)
    ]
    sounds = [
        inputs(input_features=np.ones((1, 3, n), np.float32), feature_attention_mask=np.ones((1, n), np.int32))
        for n in (5, 7)
    ]
    media = with_turns(pictures[0], [(6, sounds[0]), (12, pictures[1]), (16, sounds[1])])
    assert media is not None
    body = media_body(media, np.arange(22))
    told = {field: orjson.loads(items[0].removeprefix(SCHEME)) for field, items in body.items()}
    assert told.keys() == {"image_data", "audio_data"}
    for item in told.values():
        assert item["spans"] == [[0, 4], [6, 4], [12, 4], [16, 4]]
        found = read(item["positions"])[0].tolist()
        assert found == [0, 1, 1, 2, 4, 5, 6, 7, 7, 8, 10, 11, 12, 13, 13, 14, 16, 17, 17, 18, 20, 21]
    pixels, sound = told["image_data"]["arrays"], told["audio_data"]["arrays"]
    np.testing.assert_array_equal(
        read(pixels["pixel_values"]), np.concatenate([each.arrays["pixel_values"] for each in pictures])
    )
    assert read(pixels["image_grid_thw"]).tolist() == [[1, 2, 2], [1, 2, 4]]
    assert sound["input_features"]["shape"] == [2, 3, 7] and read(sound["feature_attention_mask"]).sum(1).tolist() == [
        5,
        7,
    ]


def test_a_prefix_goes_on_behind_the_greatest_position_on_all_axes() -> None:
    found = positions_of(inputs(), 7)
    assert found.shape == (3, 7) and found.dtype == np.int64
    assert found[:, 4:].tolist() == [[4, 5, 6]] * 3


def test_fractions_which_a_server_would_cut_are_refused() -> None:
    media = inputs()
    media.arrays["positions"][0, 2] += 0.5
    with pytest.raises(ConfigError, match="must be whole numbers for SGLang, got fractions"):
        positions_of(media, 7)


def test_a_mixture_whose_output_layer_sglang_would_fill_with_random_weights_is_told_before_the_start(
    tmp_path: Path,
) -> None:
    made: dict[str, dict[str, Any]] = {"dense": {}, "untied": {"num_experts": 4, "tie_embeddings": False}}
    for name, sizes in made.items():
        qwen3.build(tmp_path / name, hidden_size=32, **sizes)
        check_served(str(tmp_path / name))
    qwen3.build(tmp_path / "tied", hidden_size=32, num_experts=4)
    with pytest.raises(ConfigError, match="the output layer of tied must have weights of its own for SGLang"):
        check_served(str(tmp_path / "tied"))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({}, "must be a whole Qwen3-Omni for SGLang, which serves no thinker alone"),
        ({"whole": True}, "must name 3 layers for SGLang, which counts on so many, got 1"),
        ({"whole": True, "num_deepstack": 3, "vision_layers": 3}, None),
    ],
)
def test_a_folder_that_sglang_cannot_serve_is_told_before_the_start(
    tmp_path: Path, sizes: dict[str, Any], problem: str | None
) -> None:
    qwen3_omni.build(tmp_path, **sizes)
    if problem is None:
        check_served(str(tmp_path))
    else:
        with pytest.raises(ConfigError, match=problem):
            check_served(str(tmp_path))
