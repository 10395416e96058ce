"""Bytes to pictures, sound and frames.

Owns decoding, and every bound that holds before or while something is decoded. Does not own where bytes come from (`fetch.py`),
token limits or patches (`processor.py`, `frames.py`). Pillow decodes images; PyAV (FFmpeg) sound and video.

    decode.image(png_bytes, config, "image cats/7.png")    # PIL image, RGB
    decode.audio(wav_bytes, config, "audio a.wav")         # float32 [N], mono, at config.audio_sample_rate
    decode.video(mp4_bytes, config, "video a.mp4")         # frames, their times, sound

Invariant: a medium either arrives whole and within the bounds, or raises MediaError with its name, the rule and the value.
Headers are checked before anything is allocated for what they announce.
"""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rondo.models.media.config import MediaConfig
from rondo.models.media.errors import MediaError, missing_extra, reason

if TYPE_CHECKING:
    from PIL.Image import Image

_IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's other readers start programs (EPS) or are for formats that nobody stores data sets in."""
_BROKEN_IMAGE = (OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, EOFError, struct.error, zlib.error)
"""What Pillow's readers raise for broken files, each its own."""
_CONTAINERS = "wav,w64,mp3,flac,ogg,aac,aiff,au,caf,amr,asf,mov,mp4,matroska,webm,avi,mpeg,mpegts,flv,gif"
"""FFmpeg's playlist formats open further files and URLs, so only these formats are read."""
_SOURCE_RATES = (1_000, 384_000)
_TEMPORAL_PATCH = 2
"""Frames of one video patch: videos have a multiple of them."""
_TICKS = 2048

Fit = Callable[[int, int, int], tuple[int, int]]
"""(frames that are taken, height, width of one) -> (height, width) that they are scaled to; raises MediaError for too much."""


@dataclass(frozen=True, slots=True)
class Video:
    """Frames of one size, sampled evenly; an even number of them."""

    frames: np.ndarray = field(repr=False)
    """uint8 [F, H, W, 3]"""
    times_s: tuple[float, ...]
    """When each frame is shown, from the start of the video."""
    frame_s: float
    """Seconds between two frames."""
    sound: np.ndarray | None = field(repr=False, default=None)
    """float32 [N], mono, at `audio_sample_rate`; None when there is none or it was not asked for."""


def image(data: bytes, config: MediaConfig, name: str, *, fit: Fit | None = None) -> Image:
    """The picture as RGB, scaled by `fit`: turned as its EXIF orientation says, transparent parts white, the first of several.

    Raises MediaError for what is no image, is broken or cut short, has more than `max_source_pixels`, or more than 16 bits a
    channel, of which nobody says where black and white are.
    """
    try:
        from PIL import Image as pillow
        from PIL import ImageOps
    except ImportError as error:
        raise missing_extra("pillow") from error
    pillow.init()
    try:
        with (
            _own_bound_on_pixels(pillow),
            pillow.open(io.BytesIO(data), formats=[kind for kind in _IMAGE_FORMATS if kind in pillow.OPEN]) as picture,
        ):
            _check_pixels(name, *picture.size, config)
            if picture.mode == "F" or (picture.mode == "I" and picture.format == "TIFF"):
                raise MediaError(
                    f"{name} must have 8 or 16 bits a channel, got 32. Convert the row's picture, or remove the row"
                )
            picture.load()
            ImageOps.exif_transpose(picture, in_place=True)  # a copy would be as large as the decoded picture
            return _scaled(_as_rgb(picture), 1, fit)
    except _BROKEN_IMAGE as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(
            f"{name} must be an image that can be read, got {reason(error)}. Correct or remove the row"
        ) from error


def audio(data: bytes, config: MediaConfig, name: str) -> np.ndarray:
    """The sound as float32 [N], mono, resampled to `audio_sample_rate`; its channels are averaged.

    Raises MediaError for a file without sound, of length 0, broken, longer than `max_source_s` or of an impossible rate.
    """
    with _open(data, name) as container:
        if not container.streams.audio:
            raise MediaError(f"{name} must hold sound, got a file without a sound track. Correct or remove the row")
        return _sound(container, config, name)


def video(
    source: bytes | list[bytes], config: MediaConfig, name: str, *, use_audio: bool = False, fit: Fit | None = None
) -> Video:
    """Frames at `fps`, between `min_frames` and `max_frames` of them as far as the video has so many, and its sound.

    Frames are turned as the file says that they are to be shown. Their number is even; a shorter video of an odd number
    gets its last frame twice. A list of images is a video of those frames, `fps` of them a second, sampled evenly where it
    has more than `max_frames`. `fit` scales each frame as soon as it is decoded. A video without a sound track has no sound,
    whatever `use_audio` says.

    Raises MediaError for a video of length 0, that breaks off, is longer than `max_source_s`, changes its size, or has
    more than `max_source_pixels` in a frame.
    """
    if isinstance(source, list):
        return _from_frames(source, config, name, fit)
    with _video_track(source, name) as container:
        found = _times(container, config, name)
    with _open(source, name) as container:
        stream = container.streams.video[0]
        # Evenly from the first to the last, as Qwen's own sampling does, or those of all.
        duration_s = found.end_s - found.start_s + found.frame_s
        wanted = min(max(int(duration_s * config.fps), config.min_frames), config.max_frames)
        times = _evenly(found.times_s, wanted)
        frames = _nearest(container, stream, times, found, config, name, fit)
    sound = None
    if use_audio:
        with _open(source, name) as container:
            if container.streams.audio:
                sound = _sound(container, config, name)
    return Video(frames, tuple((times - times[0]).tolist()), _spacing(times, config), sound)


def frame(source: bytes | list[bytes], at_s: float, config: MediaConfig, name: str) -> Image:
    """The frame of a video nearest to `at_s` seconds from its start, RGB, in full size; a list of images shows `fps` of them a
    second. ValueError for a time that it does not have; MediaError as `video`."""
    from PIL import Image as pillow

    def check(length_s: float) -> None:
        if not 0 <= at_s <= length_s:
            raise ValueError(f"at_s must be from 0 to {length_s:.2f}, got {at_s}")

    if isinstance(source, list):
        check(len(source) / config.fps)
        number = min(int(at_s * config.fps), len(source) - 1)
        return image(source[number], config, f"frame {number} of {name}")
    with _video_track(source, name) as container:
        found = _times(container, config, name)
    check(found.end_s - found.start_s + found.frame_s)
    time_s = min(found.start_s + at_s, found.end_s)
    with _video_track(source, name) as container:
        stream = container.streams.video[0]
        container.seek(int(time_s / stream.time_base), stream=stream)  # to the last frame before it that needs no other
        return pillow.fromarray(_nearest(container, stream, np.array([time_s]), found, config, name, None)[0])


@contextmanager
def _own_bound_on_pixels(pillow: Any) -> Iterator[None]:
    """Pillow's bound is a global of its own, with warnings; ours is checked from the header, right after opening."""
    before = pillow.MAX_IMAGE_PIXELS
    pillow.MAX_IMAGE_PIXELS = None
    try:
        yield
    finally:
        pillow.MAX_IMAGE_PIXELS = before


def _as_rgb(picture: Any) -> Any:
    from PIL import Image as pillow

    if picture.mode.startswith("I"):  # 16 bits a pixel: a plain conversion would clip all but the darkest
        picture = pillow.fromarray((np.asarray(picture).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        white = pillow.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = pillow.alpha_composite(white, picture)
    return picture.convert("RGB")


@contextmanager
def _open(data: bytes, name: str) -> Iterator[Any]:
    try:
        import av
    except ImportError as error:
        raise missing_extra("av") from error
    av.logging.set_level(None)
    _check_whole(data, name)
    options = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "", "err_detect": "explode"}
    try:
        with av.open(io.BytesIO(data), mode="r", container_options=options, metadata_errors="replace") as container:
            yield container
    except (av.FFmpegError, ValueError, IndexError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(
            f"{name} must be sound or video that can be read, got {reason(error)}. Correct or remove the row"
        ) from error


@contextmanager
def _video_track(data: bytes, name: str) -> Iterator[Any]:
    with _open(data, name) as container:
        if not container.streams.video:
            raise MediaError(f"{name} must hold pictures, got a file without a video track. Correct or remove the row")
        yield container


def _check_whole(data: bytes, name: str) -> None:
    """FFmpeg takes a WAV or AVI file that was cut short for one that is shorter; its header says how long it was."""
    announced = int.from_bytes(data[4:8], "little") + 8
    if data[:4] == b"RIFF" and len(data) + 8 < announced < 1 << 32:  # writers that cannot seek announce 2^32 - 1
        raise MediaError(
            f"{name} must hold the {announced} bytes of its header, got {len(data)}. Correct or remove the row"
        )


def _sound(container: Any, config: MediaConfig, name: str) -> np.ndarray:
    from av.audio.resampler import AudioResampler

    stream = container.streams.audio[0]
    _check_codec(stream, name)
    low, high = _SOURCE_RATES
    if not low <= stream.sample_rate <= high:
        raise MediaError(
            f"{name} must have a sample rate of {low} to {high} Hz, got {stream.sample_rate}. Correct or remove the row"
        )
    if stream.duration is not None and stream.time_base is not None:
        _check_length(name, float(stream.duration * stream.time_base), config)
    # Not to mono, which FFmpeg mixes by weights of its own that can be louder than each channel.
    resampler = AudioResampler(format="fltp", rate=config.audio_sample_rate)
    pieces: list[np.ndarray] = []
    num_samples = 0
    for frame in itertools.chain(container.decode(stream), [None]):  # None empties the resampler
        for resampled in resampler.resample(frame):
            pieces.append(resampled.to_ndarray().mean(0))
            num_samples += len(pieces[-1])
        _check_length(name, num_samples / config.audio_sample_rate, config)
    if not num_samples:
        raise MediaError(f"{name} must last longer than 0 s, got no samples. Correct or remove the row")
    sound = np.concatenate(pieces)
    if not np.isfinite(sound).all():
        raise MediaError(f"{name} must hold finite samples, got infinite ones or NaN. Correct or remove the row")
    return sound


def _check_codec(stream: Any, name: str) -> None:
    if stream.codec_context is None:
        raise MediaError(
            f"{name} must be encoded in a way that FFmpeg can read, got an unknown codec. Correct or remove the row"
        )


class _Track(NamedTuple):
    """What the packets of a video track say, without decoding them. `times_s`: when each frame begins, ascending, float64 [F]."""

    times_s: np.ndarray
    start_s: float
    end_s: float
    frame_s: float


def _times(container: Any, config: MediaConfig, name: str) -> _Track:
    stream = container.streams.video[0]
    _check_codec(stream, name)
    rate = float(stream.average_rate or stream.guessed_rate or config.fps)
    times: list[float] = []
    for packet in container.demux(stream):
        if packet.size:
            ticks = packet.pts if packet.pts is not None else packet.dts
            times.append(len(times) / rate if ticks is None else float(ticks * packet.time_base))
    if not times:
        raise MediaError(f"{name} must last longer than 0 s, got no frames. Correct or remove the row")
    _check_pixels(name, stream.codec_context.width, stream.codec_context.height, config)
    if stream.frames > len(times):
        raise MediaError(
            f"{name} must hold the {stream.frames} frames of its header, got {len(times)}. Correct or remove the row"
        )
    start_s, end_s = min(times), max(times)
    _check_length(name, end_s - start_s, config)
    return _Track(np.sort(times), start_s, end_s, (end_s - start_s) / max(len(times) - 1, 1))


def _evenly(available: np.ndarray, wanted: int) -> np.ndarray:
    """An even number of points: `wanted` of them, evenly from the first to the last, or all, the last one twice if need be."""
    if wanted < len(available):
        return np.linspace(available[0], available[-1], wanted - wanted % _TEMPORAL_PATCH)
    return np.append(available, available[len(available) - len(available) % _TEMPORAL_PATCH :])


def _spacing(times_s: np.ndarray, config: MediaConfig) -> float:
    """Seconds between frames, in steps of 1/2048: few enough bits that what is computed from them in float32 and in float64,
    by processor and by model, comes to the same order of sound and frames."""
    shown = np.unique(times_s)
    spacing_s = float(shown[-1] - shown[0]) / (len(shown) - 1) if len(shown) > 1 else 1 / config.fps
    return max(round(spacing_s * _TICKS), 1) / _TICKS


def _nearest(
    container: Any, stream: Any, times: np.ndarray, track: _Track, config: MediaConfig, name: str, fit: Fit | None
) -> np.ndarray:
    """The frame nearest to each time, uint8 [F, H, W, 3]. Holds one decoded frame beside those that are taken."""
    stream.thread_type = "NONE"
    taken: list[np.ndarray] = []
    before: tuple[float, Any] | None = None
    size: tuple[int, int] | None = None
    for count, frame in enumerate(container.decode(stream)):
        if size is None:
            size = (frame.height, frame.width)
            _check_pixels(name, frame.width, frame.height, config)
        elif size != (frame.height, frame.width):
            raise MediaError(
                f"{name} must keep one size, got {size[1]} x {size[0]} and {frame.width} x {frame.height}. "
                "Correct or remove the row"
            )
        time = frame.time if frame.time is not None else track.start_s + count * track.frame_s
        while before is not None and len(taken) < len(times) and times[len(taken)] <= (before[0] + time) / 2:
            taken.append(np.asarray(_scaled(_upright(before[1]), len(times), fit)))
        before = (time, frame)
        if len(taken) == len(times):
            break
    if before is None or (len(taken) < len(times) and times[-1] - before[0] > max(track.frame_s, 1e-3)):
        end_s = 0.0 if before is None else before[0] - track.start_s
        raise MediaError(
            f"{name} must last the {track.end_s - track.start_s:g} s of its header, got a video that breaks off at "
            f"{end_s:g} s. Correct or remove the row"
        )
    if len(taken) < len(times):
        last = np.asarray(_scaled(_upright(before[1]), len(times), fit))
        taken += [last] * (len(times) - len(taken))
    return np.stack(taken)


def _upright(frame: Any) -> Any:
    """The frame as it is to be shown: a camera that is held upright writes its turn beside the frames."""
    picture, quarters = frame.to_image(), round(frame.rotation / 90) % 4  # counterclockwise
    if not quarters:
        return picture
    from PIL.Image import Transpose

    return picture.transpose((Transpose.ROTATE_90, Transpose.ROTATE_180, Transpose.ROTATE_270)[quarters - 1])


def _from_frames(source: list[bytes], config: MediaConfig, name: str, fit: Fit | None) -> Video:
    if not source:
        raise MediaError(f"{name} must have at least one frame, got none. Correct or remove the row")
    _check_length(name, len(source) / config.fps, config)
    chosen = _evenly(np.arange(len(source), dtype=float), config.max_frames).round().astype(int)
    frames: list[np.ndarray] = []
    size = None
    for index in chosen:
        picture = image(source[index], config, f"frame {index} of {name}")
        if size not in (None, picture.size):
            raise MediaError(f"{name} must keep one size, got {size} and {picture.size}. Correct or remove the row")
        size = picture.size
        frames.append(np.asarray(_scaled(picture, len(chosen), fit)))
    times_s = chosen / config.fps
    return Video(np.stack(frames), tuple(times_s.tolist()), _spacing(times_s, config))


def _scaled(picture: Any, num_frames: int, fit: Fit | None) -> Any:
    """Bicubic, as the processors of the Qwen families scale."""
    from PIL.Image import Resampling

    if fit is None:
        return picture
    height, width = fit(num_frames, picture.height, picture.width)
    return picture if (width, height) == picture.size else picture.resize((width, height), Resampling.BICUBIC)


def _check_pixels(name: str, width: int, height: int, config: MediaConfig) -> None:
    if not 0 < width * height <= config.max_source_pixels:
        raise MediaError(
            f"{name} must have 1 to media.max_source_pixels = {config.max_source_pixels} pixels, got {width} x {height}. "
            "Raise the limit, or remove the row"
        )


def _check_length(name: str, length_s: float, config: MediaConfig) -> None:
    if length_s > config.max_source_s:
        raise MediaError(
            f"{name} must last at most media.max_source_s = {config.max_source_s:g} s, got {length_s:g} s or more. "
            "Raise the limit, or remove the row"
        )
