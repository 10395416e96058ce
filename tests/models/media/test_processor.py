"""The processor: prompts with media become tokens and arrays that fit each other and the model, or errors that name them."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models.load import load_model, load_tokenizer
from rondo.models.media.config import MediaConfig
from rondo.models.media.errors import MediaError
from rondo.models.media.processor import Prepared, Processor
from rondo.models.media.refs import MediaRef
from rondo.models.tiny import qwen3, qwen3_5, qwen3_omni, qwen3_vl
from rondo.runtime.errors import ConfigError
from tests.models.media.builders import image_bytes, sound_bytes, video_bytes

FAMILIES = {"qwen3_vl": qwen3_vl, "qwen3_5": qwen3_5, "qwen3_omni": qwen3_omni}
SMALL = {"video_min_tokens": 1, "video_max_tokens": 12, "image_max_tokens": 64}
PLACEHOLDERS = {"image": "<|image_pad|>", "audio": "<|audio_pad|>", "video": "<|video_pad|>"}

Maker = Callable[..., Processor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, family in FAMILIES.items():
        made[name] = tmp_path_factory.mktemp(name)
        family.build(made[name])
    return made


@pytest.fixture
def load(folders: dict[str, Path]) -> Maker:
    def load_one(name: str, **limits: Any) -> Processor:
        return Processor.load(str(folders[name]), MediaConfig(**{**SMALL, **limits}))

    return load_one


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MediaRef]:
    folder = tmp_path_factory.mktemp("media")
    loud = video_bytes(folder, 40, sound=True)
    return {
        "image": MediaRef("image", image_bytes()),
        "wide": MediaRef("image", image_bytes(120, 40)),
        "audio": MediaRef("audio", sound_bytes(0.7)),
        "video": MediaRef("video", video_bytes(folder, 20)),
        "frames": MediaRef("video", [image_bytes(64, 48)] * 3),
        "loud": MediaRef("video", loud, use_audio=True),
    }


def asked(refs: Sequence[MediaRef], text: str = "What?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*({"type": ref.kind} for ref in refs), {"type": "text", "text": text}]}]


def num_placeholders(folder: Path, prepared: Prepared, kind: str) -> int:
    token = load_tokenizer(str(folder)).convert_tokens_to_ids(PLACEHOLDERS[kind])
    return int((prepared.tokens == token).sum())


CASES = [
    ("qwen3_vl", ("image",)),
    ("qwen3_vl", ("image", "video", "wide")),
    ("qwen3_vl", ("frames",)),
    ("qwen3_5", ("video", "image")),
    ("qwen3_omni", ("image", "wide")),
    ("qwen3_omni", ("audio",)),
    ("qwen3_omni", ("audio", "video", "image", "audio")),
    ("qwen3_omni", ("image", "loud", "audio")),
]


@pytest.mark.parametrize(("family", "names"), CASES)
def test_the_model_reads_what_was_prepared_as_if_it_had_found_the_positions_itself(
    folders: dict[str, Path], load: Maker, media: dict[str, MediaRef], family: str, names: tuple[str, ...]
) -> None:
    refs = [media[name] for name in names]
    prepared = load(family).prepare(asked(refs), refs)
    assert prepared.tokens.dtype == np.int32
    assert prepared.media is not None
    arrays = {name: torch.from_numpy(array.copy()) for name, array in prepared.media.arrays.items()}
    positions = arrays.pop("positions")[:, None]
    assert positions.dtype == torch.float32
    assert positions.shape == (3, 1, len(prepared.tokens))
    model = load_model(str(folders[family]))
    tokens = torch.from_numpy(prepared.tokens.astype(np.int64))[None]
    own: dict[str, Any] = {}
    if family == "qwen3_omni":
        videos = [name for name in names if name in ("video", "loud")]
        if videos:  # 20 frames at 10 a second give 4, 40 give 8
            spacing = {"video": 1.9 / 3, "loud": 3.9 / 7}
            own["video_second_per_grid"] = torch.tensor([round(2048 * spacing[name]) / 1024 for name in videos])
        own["use_audio_in_video"] = "loud" in names
        own["attention_mask"] = torch.ones_like(tokens)
    else:
        kinds = {model.config.image_token_id: 1, model.config.video_token_id: 2}
        own["mm_token_type_ids"] = torch.tensor([[kinds.get(token, 0) for token in prepared.tokens.tolist()]])
    with torch.no_grad():
        given = model(input_ids=tokens, position_ids=positions, **arrays).logits
        found = model(input_ids=tokens, **arrays, **own).logits
    assert torch.isfinite(given).all()
    torch.testing.assert_close(given, found, atol=1e-5, rtol=0)


def test_a_prompt_of_text_alone_is_what_the_tokenizer_makes_of_it(folders: dict[str, Path], load: Maker) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
    for family, folder in folders.items():
        prepared = load(family).prepare(messages)
        tokenizer = load_tokenizer(str(folder))
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert prepared.media is None
        assert prepared.tokens.tolist() == expected
        ended = load(family).prepare(messages, add_generation_prompt=False)
        assert ended.tokens.tolist() == expected[: len(ended.tokens)]
        assert len(ended.tokens) < len(expected)


def test_equal_prompts_have_equal_keys_and_others_do_not(load: Maker, media: dict[str, MediaRef]) -> None:
    def key(*names: str) -> str:
        refs = [media[name] for name in names]
        prepared = load("qwen3_omni").prepare(asked(refs), refs)
        assert prepared.media is not None
        return prepared.media.key

    assert key("image", "audio") == key("image", "audio")
    assert len({key("image"), key("wide"), key("image", "audio"), key("audio", "image")}) == 4


@pytest.mark.parametrize(("low", "high"), [(1, 3), (4, 8), (4, 64), (30, 40)])
def test_an_image_takes_as_many_tokens_as_the_limits_say(
    folders: dict[str, Path], load: Maker, low: int, high: int
) -> None:
    processor = load("qwen3_vl", image_min_tokens=low, image_max_tokens=high)
    for width, height in ((90, 70), (16, 16), (300, 280), (8, 8)):
        ref = MediaRef("image", image_bytes(width, height))
        prepared = processor.prepare(asked([ref]), [ref])
        assert low <= num_placeholders(folders["qwen3_vl"], prepared, "image") <= high


@pytest.mark.parametrize(("family", "low", "high"), [("qwen3_vl", 1, 6), ("qwen3_omni", 8, 12)])
def test_a_frame_of_a_video_takes_as_many_tokens_as_the_limits_say(
    folders: dict[str, Path], load: Maker, media: dict[str, MediaRef], family: str, low: int, high: int
) -> None:
    processor = load(family, video_min_tokens=low, video_max_tokens=high)
    for name, pairs in (("video", 2), ("frames", 2)):
        prepared = processor.prepare(asked([media[name]]), [media[name]])
        assert low * pairs <= num_placeholders(folders[family], prepared, "video") <= high * pairs


def test_sound_and_silence_mix_in_one_prompt(folders: dict[str, Path], load: Maker, media: dict[str, MediaRef]) -> None:
    """Each video keeps the positions that it has alone, moved to where the one before it ended."""
    processor = load("qwen3_omni")
    config = load_model(str(folders["qwen3_omni"])).config

    def blocks(*names: str) -> tuple[list[np.ndarray], Prepared]:
        refs = [media[name] for name in names]
        prepared = processor.prepare(asked(refs), refs)
        assert prepared.media is not None
        starts = np.flatnonzero(prepared.tokens == config.vision_start_token_id)
        ends = np.flatnonzero(prepared.tokens == config.vision_end_token_id)
        return [prepared.media.positions[:, start : end + 1] for start, end in zip(starts, ends, strict=True)], prepared

    both, prepared = blocks("loud", "video", "image")
    assert num_placeholders(folders["qwen3_omni"], prepared, "audio") > 0
    for found, name in zip(both, ("loud", "video", "image"), strict=True):
        (alone,), _ = blocks(name)
        np.testing.assert_allclose(found - found[:, :1], alone - alone[:, :1], atol=1e-4)
    for before, after in itertools.pairwise(both):
        np.testing.assert_allclose(after[:, 0], before[:, -1] + 1, atol=1e-4)
    assert prepared.media is not None
    assert prepared.media.positions[0, -1] == prepared.media.positions[2, -1]


def test_a_row_decides_about_the_sound_of_its_video(
    folders: dict[str, Path], load: Maker, media: dict[str, MediaRef]
) -> None:
    source = media["loud"].source
    for setting, row, expected in ((True, None, True), (True, False, False), (False, True, True), (False, None, False)):
        ref = MediaRef("video", source, use_audio=row)
        prepared = load("qwen3_omni", use_audio_in_video=setting).prepare(asked([ref]), [ref])
        assert (num_placeholders(folders["qwen3_omni"], prepared, "audio") > 0) is expected
    silent = MediaRef("video", media["video"].source, use_audio=True)
    prepared = load("qwen3_omni").prepare(asked([silent]), [silent])
    assert num_placeholders(folders["qwen3_omni"], prepared, "audio") == 0


def test_a_sound_shorter_than_the_window_of_the_tower_is_padded_with_silence(
    folders: dict[str, Path], load: Maker
) -> None:
    for seconds, frames, tokens in ((0.1, 100, 13), (1.0, 100, 13), (1.5, 150, 20)):
        ref = MediaRef("audio", sound_bytes(seconds))
        prepared = load("qwen3_omni").prepare(asked([ref]), [ref])
        assert prepared.media is not None
        assert prepared.media.arrays["feature_attention_mask"].sum() == frames
        assert num_placeholders(folders["qwen3_omni"], prepared, "audio") == tokens


def test_files_of_a_folder_are_read_by_name(load: Maker, tmp_path: Path, media: dict[str, MediaRef]) -> None:
    (tmp_path / "cat.png").write_bytes(image_bytes())
    processor = load("qwen3_vl", root=tmp_path)
    named = MediaRef("image", "cat.png")
    found, expected = (
        processor.prepare(asked([named]), [named]).media,
        processor.prepare(asked([media["image"]]), [media["image"]]).media,
    )
    assert found is not None
    assert expected is not None
    assert found.key == expected.key
    (tmp_path / "cat.png").write_bytes(b"not a picture")
    with pytest.raises(MediaError, match=r"^image cat\.png must be an image that can be read"):
        processor.prepare(asked([named]), [named])


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>"])
def test_a_text_that_contains_a_media_token_is_refused(load: Maker, media: dict[str, MediaRef], token: str) -> None:
    processor, ref = load("qwen3_vl"), media["image"]
    with pytest.raises(MediaError, match=r"must not contain .*, a token that stands for media"):
        processor.prepare([{"role": "user", "content": f"Say {token}!"}])
    with pytest.raises(MediaError, match=r"must not contain .*, a token that stands for media"):
        processor.prepare(asked([ref], text=f"Say {token}!"), [ref])


def test_messages_that_do_not_fit_their_media_are_refused(load: Maker, media: dict[str, MediaRef]) -> None:
    vision, omni, image = load("qwen3_vl"), load("qwen3_omni"), media["image"]
    with pytest.raises(MediaError, match=r"must name its media in order, got parts \['image'\] and media \[\]"):
        vision.prepare(asked([image]))
    with pytest.raises(MediaError, match=r"got parts \['image', 'audio'\] and media \['audio', 'image'\]"):
        omni.prepare(asked([image, media["audio"]]), [media["audio"], image])
    with pytest.raises(MediaError, match=r"must be of a kind that the model takes \(image, video\), got audio"):
        vision.prepare(asked([media["audio"]]), [media["audio"]])
    with pytest.raises(MediaError, match="must go without its sound for a model without audio"):
        vision.prepare(asked([media["loud"]]), [media["loud"]])


def test_media_that_cannot_be_processed_are_refused(load: Maker, media: dict[str, MediaRef]) -> None:
    for ref, problem in (
        (MediaRef("image", image_bytes(900, 4)), "long side must be at most 200 times the short one"),
        (MediaRef("video", [image_bytes(900, 4)] * 2), "long side must be at most 200 times the short one"),
        (MediaRef("audio", sound_bytes(0.01)), "must have at least 400 samples at 16000 Hz, got 160"),
    ):
        with pytest.raises(MediaError, match=problem) as error:
            load("qwen3_omni").prepare(asked([ref]), [ref])
        assert str(ref) in str(error.value)


def test_a_prompt_that_takes_too_much_room_is_refused_before_all_of_it_is_decoded(
    load: Maker, media: dict[str, MediaRef]
) -> None:
    """Patches are float32 of 3 channels; a picture counts as two frames."""
    picture = media["image"]
    one = load("qwen3_vl").prepare(asked([picture]), [picture]).media
    assert one is not None
    pixels = one.arrays["pixel_values"].nbytes
    assert load("qwen3_vl", max_group_bytes=one.num_bytes).prepare(asked([picture]), [picture]).media is not None
    broken = MediaRef("image", b"never reached")
    for limit, refs, needed in (
        (one.num_bytes - 1, [picture], one.num_bytes),
        (pixels - 1, [picture, broken], pixels),
        (2 * pixels - 1, [picture, picture, broken], 2 * pixels),
    ):
        with pytest.raises(
            MediaError, match=rf"media\.max_group_bytes = {limit} bytes once processed, got {needed} or more"
        ):
            load("qwen3_vl", max_group_bytes=limit).prepare(asked(refs), refs)
    with pytest.raises(MediaError, match=r"^video of .* must take at most media\.max_group_bytes = 1024"):
        load("qwen3_vl", max_group_bytes=1024).prepare(asked([media["video"]]), [media["video"]])


def _changed(folder: Path, target: Path, file: str, **values: Any) -> str:
    shutil.copytree(folder, target)
    path = target / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return str(target)


def test_one_file_of_settings_for_pictures_sound_and_frames_is_enough(
    folders: dict[str, Path], load: Maker, tmp_path: Path, media: dict[str, MediaRef]
) -> None:
    """As Qwen3-Omni is published: pixel limits instead of a size, and nothing about videos."""
    folder = tmp_path / "published"
    shutil.copytree(folders["qwen3_omni"], folder)
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text()) | {"min_pixels": 3136, "max_pixels": 12_845_056, "nb_max_frames": 30_000}
    del settings["size"]
    settings["image_processor_type"] = "Qwen2VLImageProcessor"
    file.write_text(json.dumps(settings))
    (folder / "video_preprocessor_config.json").unlink()
    refs = [media["image"], media["audio"], media["loud"]]
    found = Processor.load(str(folder), MediaConfig(**SMALL)).prepare(asked(refs), refs).media
    expected = load("qwen3_omni").prepare(asked(refs), refs).media
    assert found is not None
    assert expected is not None
    assert found.key == expected.key


def test_a_processor_that_does_not_fit_its_model_is_found_at_the_first_prompt(
    folders: dict[str, Path], tmp_path: Path, media: dict[str, MediaRef]
) -> None:
    path = _changed(folders["qwen3_vl"], tmp_path / "merged", "preprocessor_config.json", merge_size=1)
    with pytest.raises(MediaError, match=r"must have one image placeholder for each feature, got \d+ and \d+"):
        Processor.load(path, MediaConfig()).prepare(asked([media["image"]]), [media["image"]])
    broken = tmp_path / "template"
    shutil.copytree(folders["qwen3_vl"], broken)
    (broken / "chat_template.jinja").write_text(
        "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    with pytest.raises(MediaError, match=r"must write '<\|image_pad\|>' once for each image, got 0 for 1"):
        Processor.load(str(broken), MediaConfig()).prepare(asked([media["image"]]), [media["image"]])


def test_folders_and_limits_that_cannot_work_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    qwen3.build(tmp_path / "text", hidden_size=32, num_heads=2, num_layers=1)
    with pytest.raises(ConfigError, match=r"must name a model of images, audio or video .* model type 'qwen3'"):
        Processor.load(str(tmp_path / "text"), MediaConfig())
    with pytest.raises(ConfigError, match=r"media\.use_audio_in_video must be False for a model without audio"):
        Processor.load(str(folders["qwen3_vl"]), MediaConfig(use_audio_in_video=True))
    with pytest.raises(ConfigError, match=r"media\.audio_sample_rate must be .* 16000, got 8000"):
        Processor.load(str(folders["qwen3_omni"]), MediaConfig(audio_sample_rate=8000))
    bare = tmp_path / "bare"
    shutil.copytree(folders["qwen3_vl"], bare)
    for file in ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"):
        (bare / file).unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"Copy preprocessor_config\.json"):
        Processor.load(str(bare), MediaConfig())
    other = _changed(folders["qwen3_vl"], tmp_path / "other", "preprocessor_config.json", processor_class="NoProcessor")
    with pytest.raises(ConfigError, match="got 'NoProcessor'"):
        Processor.load(other, MediaConfig())


_WITH_BROKEN_TORCHVISION = """
import sys
from rondo.models.media import errors, fetch, library, processor, refs
from rondo.models.media.config import MediaConfig
assert not {"torch", "transformers", "av", "PIL"} & set(sys.modules)
assert not library.has_torchvision() and not library.has_torchvision()
from tests.models.media.builders import image_bytes
ref = refs.MediaRef("image", image_bytes())
prompt = [{"role": "user", "content": [{"type": "image"}]}]
prepared = processor.Processor.load(sys.argv[1], MediaConfig(image_max_tokens=64)).prepare(prompt, [ref])
print(prepared.media.key)
"""


def test_a_torchvision_that_is_installed_but_broken_is_done_without(
    folders: dict[str, Path], load: Maker, tmp_path: Path, media: dict[str, MediaRef]
) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    done = subprocess.run(
        [sys.executable, "-c", _WITH_BROKEN_TORCHVISION, str(folders["qwen3_vl"])],
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = load("qwen3_vl").prepare([{"role": "user", "content": [{"type": "image"}]}], [media["image"]]).media
    assert expected is not None
    assert done.stdout.split()[-1] == expected.key
