"""Frames: the sizes and the patches are those of the library's own processors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rondo.models.media.frames import FrameProcessor, fitted
from rondo.runtime.errors import ConfigError
from tests.models.media.builders import picture


def test_sizes_are_multiples_of_a_token_within_the_limits() -> None:
    assert fitted(70, 90, unit=32, min_tokens=4, max_tokens=64) == (64, 96)
    assert fitted(700, 900, unit=32, min_tokens=4, max_tokens=64) == (224, 288)
    assert fitted(7, 9, unit=32, min_tokens=4, max_tokens=64) == (64, 96)


def test_a_strip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at most 200 times the short one, got 250 times"):
        fitted(4, 1000, unit=32, min_tokens=1, max_tokens=100)


def _settings(**changes: object) -> dict[str, object]:
    return {
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.2, 0.3, 0.4],
        "video_processor_type": "Qwen3VLVideoProcessor",
        **changes,
    }


def test_a_still_video_has_the_patches_of_the_picture(tmp_path: Path) -> None:
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(_settings()))
    shown = picture(96, 64)
    still = np.repeat(np.asarray(shown)[None], 4, axis=0)
    made = FrameProcessor.load(str(tmp_path))([still, still[:1]])
    library = Qwen2VLImageProcessorPil(**{key: value for key, value in _settings().items() if "type" not in key})
    expected = library([shown], do_resize=False, return_tensors="np")
    assert made["video_grid_thw"].tolist() == [[2, 8, 12], [1, 8, 12]]
    patches = made["pixel_values_videos"].reshape(3, 96, -1)
    for time in range(3):
        np.testing.assert_allclose(patches[time], expected["pixel_values"], atol=1e-6)


def test_every_value_lies_where_its_frame_row_and_column_say(tmp_path: Path) -> None:
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(_settings()))
    video = np.random.default_rng(0).integers(0, 256, (4, 32, 48, 3), dtype=np.uint8)
    patches = FrameProcessor.load(str(tmp_path))([video])["pixel_values_videos"]
    mean, std = np.array([0.4, 0.5, 0.6]), np.array([0.2, 0.3, 0.4])
    row = 0
    for time in range(2):
        for token_y in range(2):
            for token_x in range(3):
                for y in range(2):
                    for x in range(2):
                        top, left = (token_y * 2 + y) * 8, (token_x * 2 + x) * 8
                        cut = video[2 * time : 2 * time + 2, top : top + 8, left : left + 8] / 255
                        expected = ((cut - mean) / std).transpose(3, 0, 1, 2).reshape(-1)
                        np.testing.assert_allclose(patches[row], expected, atol=1e-5)
                        row += 1
    assert row == len(patches)


def test_settings_are_found_where_the_library_looks(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"patch_size": 10, "processor_class": "Qwen3OmniMoeProcessor"})
    )
    only = FrameProcessor.load(str(tmp_path))
    assert (only.patch_size, only.image_mean[0]) == (10, 0.48145466)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(_settings(patch_size=12)))
    assert FrameProcessor.load(str(tmp_path)).patch_size == 12
    nested = {"processor_class": "Qwen3VLProcessor", "video_processor": _settings(patch_size=14)}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert FrameProcessor.load(str(tmp_path)).patch_size == 14


def test_another_kind_of_video_processor_needs_torchvision(tmp_path: Path) -> None:
    settings = _settings(video_processor_type="OtherVideoProcessor")
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"got 'OtherVideoProcessor'\. Install torchvision"):
        FrameProcessor.load(str(tmp_path))


def test_the_defaults_are_those_of_the_library(tmp_path: Path) -> None:
    """The image processor has the same defaults as the older video processor."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"video_processor_type": "Qwen2VLVideoProcessor"}))
    found = FrameProcessor.load(str(tmp_path))
    library = Qwen2VLImageProcessor()
    for name in ("patch_size", "merge_size", "temporal_patch_size", "rescale_factor"):
        assert getattr(found, name) == getattr(library, name)
    assert list(found.image_mean) == list(library.image_mean)
    assert list(found.image_std) == list(library.image_std)
