"""Decoding: whole media within the bounds become pictures and sound, everything else an error that names it."""

from __future__ import annotations

import io
import struct
import sys
import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from rondo.models.media import decode
from rondo.models.media.config import MediaConfig
from rondo.models.media.errors import MediaError
from rondo.runtime.errors import ConfigError
from tests.models.media.builders import SOUND_RATE, bomb_bytes, image_bytes, picture, sound_bytes, tone, video_bytes

CONFIG = MediaConfig()


def _saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "GIF", "JPEG", "TIFF"])
def test_ordinary_formats_become_rgb(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    found = decode.image(image_bytes(50, 40, kind, **options), CONFIG, "image a")
    assert (found.mode, found.size) == ("RGB", (50, 40))
    if kind not in ("JPEG", "GIF"):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(picture(50, 40)))


def test_a_picture_is_turned_as_its_camera_says() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter to the right
    found = decode.image(image_bytes(50, 40, exif=turned), CONFIG, "image a")
    np.testing.assert_array_equal(np.asarray(found), np.rot90(np.asarray(picture(50, 40)), -1))


def test_transparent_parts_are_white_and_dark_16_bit_pictures_stay_dark() -> None:
    clear = np.zeros((4, 4, 4), np.uint8)
    clear[0, 0] = (10, 20, 30, 255)
    found = np.asarray(decode.image(_saved(Image.fromarray(clear)), CONFIG, "image a"))
    assert found[0, 0].tolist() == [10, 20, 30]
    assert (found.reshape(-1, 3)[1:] == 255).all()
    grey = Image.fromarray(np.array([[0, 256 * 7], [256 * 100, 65535]], np.uint16))
    assert np.asarray(decode.image(_saved(grey), CONFIG, "image a"))[..., 0].tolist() == [[0, 7], [100, 255]]


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_a_picture_whose_black_and_white_nobody_knows_is_refused(kind: type) -> None:
    data = _saved(Image.fromarray(np.array([[0, 1], [1, 0]], kind)), "TIFF")
    with pytest.raises(MediaError, match="image a must have 8 or 16 bits a channel, got 32"):
        decode.image(data, CONFIG, "image a")


def test_of_an_animation_the_first_frame_is_the_picture() -> None:
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (40, 200)]
    data = _saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.asarray(decode.image(data, CONFIG, "image a")).max() == 40


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"plain text, not a picture", "no image format that is read"),
        (image_bytes()[:-60], "truncated"),
        (image_bytes()[:20], "Truncated"),
        (image_bytes(kind="JPEG")[:-40], "truncated"),
        (image_bytes()[:60] + b"\xff" + image_bytes()[61:], "broken"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "no image format that is read"),
    ],
)
def test_a_broken_image_is_refused_by_name(data: bytes, problem: str) -> None:
    with pytest.raises(MediaError, match=rf"^image cats/7\.png must be an image that can be read, got .*{problem}"):
        decode.image(data, CONFIG, "image cats/7.png")


def test_a_decompression_bomb_is_refused_before_it_is_decoded() -> None:
    before = Image.MAX_IMAGE_PIXELS
    with pytest.raises(MediaError, match=r"max_source_pixels = 100000000 pixels, got 60000 x 60000"):
        decode.image(bomb_bytes(), CONFIG, "image a")
    with pytest.raises(MediaError, match=r"max_source_pixels = 1999 pixels, got 50 x 40"):
        decode.image(image_bytes(50, 40), MediaConfig(max_source_pixels=1999), "image a")
    assert decode.image(image_bytes(50, 40), MediaConfig(max_source_pixels=2000), "image a").size == (50, 40)
    assert before == Image.MAX_IMAGE_PIXELS


@pytest.mark.parametrize(("rate", "channels"), [(16_000, 1), (44_100, 2), (8_000, 1), (22_050, 2)])
def test_sound_becomes_mono_at_the_rate_of_the_model(rate: int, channels: int) -> None:
    found = decode.audio(sound_bytes(1.0, rate, channels), CONFIG, "audio a")
    assert found.dtype == np.float32
    assert found.ndim == 1
    assert abs(len(found) - SOUND_RATE) <= 16
    middle = slice(2000, 14_000)
    assert np.corrcoef(found[middle], tone(1.0)[middle])[0, 1] > 0.99
    spectrum = np.abs(np.fft.rfft(found[:SOUND_RATE]))
    assert abs(int(spectrum.argmax()) * SOUND_RATE / len(found) - 440) < 2


@pytest.mark.parametrize(
    ("channels", "share"), [([1, 1], 1.0), ([1, 0], 0.5), ([1, -1], 0.0), ([1, 1, 1, 1, 1, 1], 1.0)]
)
def test_channels_are_averaged(channels: list[float], share: float) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(len(channels))
        writer.setsampwidth(2)
        writer.setframerate(SOUND_RATE)
        writer.writeframes((tone(0.1)[:, None] * channels * 32767).astype("<i2").tobytes())
    np.testing.assert_allclose(decode.audio(file.getvalue(), CONFIG, "audio a"), tone(0.1) * share, atol=1e-3)


def test_another_rate_can_be_asked_for() -> None:
    assert len(decode.audio(sound_bytes(0.5), MediaConfig(audio_sample_rate=8000), "audio a")) == 4000


def _floats_with_nan() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="wav") as container:
        stream = container.add_stream("pcm_f32le", rate=SOUND_RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.full((1, 1600), np.nan, np.float32), format="flt", layout="mono")
        frame.sample_rate = SOUND_RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"plain text, not a sound", "must be sound or video that can be read"),
        (image_bytes(), "must be sound or video that can be read"),
        (sound_bytes(1.0)[:8000], "must hold the 32044 bytes of its header, got 8000"),
        (sound_bytes(0.0), "must last longer than 0 s, got no samples"),
        (sound_bytes(announced_rate=0), "must be sound or video that can be read"),
        (sound_bytes(announced_rate=500), "must have a sample rate of 1000 to 384000 Hz, got 500"),
        (sound_bytes(announced_rate=400_000), "must have a sample rate of 1000 to 384000 Hz, got 400000"),
        (_floats_with_nan(), "must hold finite samples"),
        (
            b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n",
            "must be sound or video that can be read",
        ),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "must be sound or video that can be read"),
    ],
)
def test_broken_sound_is_refused_by_name(data: bytes, problem: str) -> None:
    with pytest.raises(MediaError, match=rf"^audio a\.wav {problem}"):
        decode.audio(data, CONFIG, "audio a.wav")


def test_sound_and_videos_end_before_the_limit(tmp_path: Path) -> None:
    short = MediaConfig(max_source_s=1.0)
    assert len(decode.audio(sound_bytes(1.0), short, "audio a")) == SOUND_RATE
    with pytest.raises(MediaError, match=r"max_source_s = 1 s, got 1\.5 s"):
        decode.audio(sound_bytes(1.5), short, "audio a")
    with pytest.raises(MediaError, match=r"max_source_s = 1 s, got 1\.9 s"):
        decode.video(video_bytes(tmp_path), short, "video a")
    with pytest.raises(MediaError, match=r"max_source_s = 1 s, got 1\.5 s"):
        decode.video([image_bytes()] * 3, short, "video a")


def test_frames_are_taken_evenly_at_the_rate_that_is_asked_for(tmp_path: Path) -> None:
    data = video_bytes(tmp_path, num_frames=21, fps=10)
    found = decode.video(data, MediaConfig(fps=5.0, min_frames=2), "video a")
    assert found.frames.shape == (10, 64, 96, 3)
    assert found.frames.dtype == np.uint8
    shown = found.frames.mean(axis=(1, 2, 3)) / 10
    np.testing.assert_allclose(np.round(shown), np.linspace(0, 20, 10).round(), atol=0)
    np.testing.assert_allclose(found.times_s, np.linspace(0, 2, 10), atol=1e-6)
    assert abs(found.frame_s - 2 / 9) < 1e-3


@pytest.mark.parametrize(
    ("matrix", "quarters"), [((1, 0, 0, 1), 0), ((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)]
)
def test_frames_are_turned_as_the_file_says(tmp_path: Path, matrix: tuple[int, int, int, int], quarters: int) -> None:
    data = bytearray(video_bytes(tmp_path, 2, noise=True))
    plain = decode.video(bytes(data), CONFIG, "video a").frames
    a, b, c, d = (value << 16 for value in matrix)
    place = data.index(b"tkhd") + 44
    data[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    np.testing.assert_array_equal(
        decode.video(bytes(data), CONFIG, "video a").frames, np.rot90(plain, quarters, axes=(1, 2))
    )


def test_all_frames_are_there_where_all_are_taken_whatever_their_times(tmp_path: Path) -> None:
    path, times = tmp_path / "a.mp4", [0, 1, 2, 3, 4, 5, 6, 7, 8, 40]
    with av.open(str(path), "w") as container:
        pictures = container.add_stream("mpeg4", rate=10)
        pictures.width, pictures.height, pictures.pix_fmt = 96, 64, "yuv420p"
        pictures.codec_context.time_base = Fraction(1, 10)
        for index, at in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((64, 96, 3), 20 * index, np.uint8), "rgb24")
            frame.pts, frame.time_base = at, Fraction(1, 10)
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode())
    found = decode.video(path.read_bytes(), MediaConfig(min_frames=10), "video a")
    assert np.round(found.frames.mean(axis=(1, 2, 3)) / 20).tolist() == list(range(10))
    np.testing.assert_allclose(found.times_s, np.array(times) / 10, atol=1e-6)


@pytest.mark.parametrize(
    ("num_frames", "limits", "expected"),
    [
        (20, {"min_frames": 8}, 8),
        (20, {"max_frames": 2, "min_frames": 2}, 2),
        (40, {"fps": 10.0, "max_frames": 6}, 6),
        (3, {}, 4),
        (1, {}, 2),
        (5, {"min_frames": 768}, 6),
        (20, {"fps": 3.6, "min_frames": 2}, 6),
    ],
)
def test_the_number_of_frames_is_even_and_within_its_limits(
    tmp_path: Path, num_frames: int, limits: dict[str, float], expected: int
) -> None:
    found = decode.video(video_bytes(tmp_path, num_frames), MediaConfig(**limits), "video a")
    assert len(found.frames) == len(found.times_s) == expected
    assert list(found.times_s) == sorted(found.times_s)


def test_a_video_brings_its_sound_only_when_asked_and_only_if_it_has_some(tmp_path: Path) -> None:
    loud, silent = video_bytes(tmp_path, sound=True), video_bytes(tmp_path)
    heard = decode.video(loud, CONFIG, "video a", use_audio=True).sound
    assert heard is not None
    assert abs(len(heard) - 2 * SOUND_RATE) < 2100  # AAC pads to blocks of 1,024 samples
    assert abs(int(np.abs(np.fft.rfft(heard[:SOUND_RATE])).argmax()) - 440) < 2
    assert decode.video(loud, CONFIG, "video a").sound is None
    assert decode.video(silent, CONFIG, "video a", use_audio=True).sound is None
    with pytest.raises(MediaError, match="must hold sound, got a file without a sound track"):
        decode.audio(silent, CONFIG, "audio a")


def test_a_list_of_images_is_a_video_of_all_of_them() -> None:
    shades = [_saved(Image.fromarray(np.full((64, 64, 3), 50 * index, np.uint8))) for index in range(5)]
    found = decode.video(shades, MediaConfig(fps=4.0), "video a")
    assert found.frames[:, 0, 0, 0].tolist() == [0, 50, 100, 150, 200, 200]
    assert found.times_s == (0.0, 0.25, 0.5, 0.75, 1.0, 1.0)
    assert found.frame_s == 0.25
    few = decode.video(shades, MediaConfig(min_frames=2, max_frames=2), "video a")
    assert few.frames[:, 0, 0, 0].tolist() == [0, 200]


def test_frames_are_scaled_as_they_are_decoded(tmp_path: Path) -> None:
    found = decode.video(
        video_bytes(tmp_path), CONFIG, "video a", fit=lambda frames, height, width: (height // 2, width // frames)
    )
    assert found.frames.shape[1:] == (32, 24, 3)
    assert decode.image(
        image_bytes(90, 70), CONFIG, "image a", fit=lambda frames, height, width: (32 * frames, 64)
    ).size == (64, 32)


def _without_frames() -> bytes:
    """Its header announces a video track, but only sound follows."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4", options={"movflags": "frag_keyframe+empty_moov"}) as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        track = container.add_stream("aac", rate=SOUND_RATE, layout="mono")
        heard = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.int16), format="s16", layout="mono")
        heard.sample_rate = SOUND_RATE
        container.mux(track.encode(heard))
        container.mux(track.encode())
    return file.getvalue()


def test_a_broken_or_empty_video_is_refused_by_name(tmp_path: Path) -> None:
    whole = video_bytes(tmp_path, num_frames=40, noise=True)
    corrupt = bytearray(whole)
    corrupt[len(whole) // 2 : len(whole) // 2 + 3000] = bytes(
        value ^ 0x5A for value in whole[len(whole) // 2 : len(whole) // 2 + 3000]
    )
    for data, problem in (
        (b"plain text, not a video", "must be sound or video that can be read"),
        (b"", "must be sound or video that can be read"),
        (whole[:400], "must be encoded in a way that FFmpeg can read"),
        (whole[: len(whole) * 2 // 3], r"must hold the 40 frames of its header, got \d+"),
        (bytes(corrupt), "must be sound or video that can be read"),
        (video_bytes(tmp_path, num_frames=0, sound=True), "must hold pictures, got a file without a video track"),
        (_without_frames(), "must last longer than 0 s, got no frames"),
        (sound_bytes(), "must hold pictures, got a file without a video track"),
        ([], "must have at least one frame"),
        ([image_bytes(), image_bytes(20, 20)], r"must keep one size, got \(90, 70\) and \(20, 20\)"),
    ):
        with pytest.raises(MediaError, match=rf"^video a\.mp4 ({problem})"):
            decode.video(data, CONFIG, "video a.mp4")
    with pytest.raises(MediaError, match=r"^frame 1 of video a\.mp4 must be an image that can be read"):
        decode.video([image_bytes(), b"broken"], CONFIG, "video a.mp4")
    with pytest.raises(MediaError, match=r"max_source_pixels = 6000 pixels, got 96 x 64"):
        decode.video(whole, MediaConfig(max_source_pixels=6000), "video a.mp4")


@pytest.mark.parametrize(("package", "call"), [("PIL", decode.image), ("av", decode.audio), ("av", decode.video)])
def test_a_machine_without_the_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str, call: object
) -> None:
    data = image_bytes()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"Run: pip install 'rondo-rl\[media\]'"):
        call(data, CONFIG, "image a")  # type: ignore[operator]
