"""Tools that look again at the media of a question: `environment.tools` takes "zoom", "listen", "seek" and "python_with_media".

Owns what a tool is given of them, and these four. Does not own where media may come from and how they are decoded
(`models/media/`), nor how an answer reaches the policy (`tools.py`, `episode.py`). A tool of one's own is the same:

    @with_media
    def mirrored(media: Media, image: int = 0) -> Image:     # with a docstring, as any tool; the policy is told of `image` alone
        return ImageOps.mirror(media.picture(image))

Invariant: they see the media of the question as the row has them, whole and within the limits of the `media` section, in a
process that may be killed. What they cannot be asked for is an error that the policy is told.
"""

from __future__ import annotations

import base64
import functools
import inspect
import io
import wave
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rondo.models.media.config import MediaConfig
from rondo.models.media.refs import Kind, MediaRef
from rondo.roles.sampling import code_tools

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

NAMES = ("zoom", "listen", "seek", "python_with_media")
_ENDINGS = {"image": ".png", "audio": ".wav", "video": ".mp4"}
_SHOWN = "\n<|shown|>"
_RUN = f"""
import base64, os, runpy
before = set(os.listdir())
try:
    runpy.run_path("main.py", run_name="__main__")
finally:
    for name in sorted(set(os.listdir()) - before):
        if name.endswith(".png"):
            print({_SHOWN!r} + base64.b64encode(open(name, "rb").read()).decode(), end="", flush=True)
"""
"""What runs the policy's program, and then prints the pictures that it left."""
_LOUDEST = 32767


class Media:
    """Those of a question, each by its number among its kind, from 0. ValueError for one that there is not; MediaError for one
    that cannot be read."""

    def __init__(self, refs: Sequence[MediaRef], config: MediaConfig) -> None:
        self._refs, self.config = refs, config

    def picture(self, number: int = 0) -> Image:
        """In full size, RGB."""
        from rondo.models.media import decode, fetch

        ref = self._ref("image", number)
        return decode.image(fetch.read(ref, self.config), self.config, str(ref))

    def sound(self, number: int = 0) -> np.ndarray:
        """float32 [N], mono, at `config.audio_sample_rate`."""
        from rondo.models.media import decode, fetch

        ref = self._ref("audio", number)
        return decode.audio(fetch.read(ref, self.config), self.config, str(ref))

    def frame(self, at_s: float, number: int = 0) -> Image:
        """Of a video, the one that is shown then, in full size, RGB."""
        from rondo.models.media import decode, fetch

        ref = self._ref("video", number)
        return decode.frame(fetch.read_video(ref, self.config), at_s, self.config, str(ref))

    def files(self) -> dict[str, bytes]:
        """All, as they came, by names such as image_0.png; the frames of a video as video_0_0.png and so on."""
        from rondo.models.media import fetch

        found, counts = dict[str, bytes](), Counter[str]()
        for ref in self._refs:
            data, name = fetch.read_video(ref, self.config), f"{ref.kind}_{counts[ref.kind]}"
            if isinstance(data, bytes):
                found[name + _ENDINGS[ref.kind]] = data
            else:
                found |= {f"{name}_{at}.png": frame for at, frame in enumerate(data)}
            counts[ref.kind] += 1
        return found

    def _ref(self, kind: Kind, number: int) -> MediaRef:
        found = [ref for ref in self._refs if ref.kind == kind]
        if not 0 <= number < len(found):
            raise ValueError(
                f"{kind} must be from 0 to {len(found) - 1}, got {number}" if found else f"there is no {kind}"
            )
        return found[number]


_asked: ContextVar[Media] = ContextVar("media of the question")


def with_media(tool: Callable[..., Any]) -> Callable[..., Any]:
    """A plain tool whose first parameter is the `Media` of the question; the policy is told of the others."""

    @functools.wraps(tool)
    def asked(**arguments: Any) -> Any:
        return tool(_asked.get(), **arguments)

    signature = inspect.signature(tool)
    first, *others = signature.parameters.values()
    asked.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    asked.__annotations__ = {
        name: hint for name, hint in tool.__annotations__.items() if name not in (first.name, "return")
    }
    asked.takes_media = True  # type: ignore[attr-defined]
    return asked


def takes_media(tool: object) -> bool:
    return getattr(tool, "takes_media", False)


def give(refs: Sequence[Sequence[Any]], limits: dict[str, Any] | None) -> None:
    """The media of the question to the tool that this thread is about to call: fields of each, and of `MediaConfig`."""
    _asked.set(Media([MediaRef(*fields) for fields in refs], MediaConfig(**(limits or {}))))


@with_media
def zoom(media: Media, bbox_2d: list[int], image: int = 0) -> Image:
    """Shows a part of a picture of the question in full size.

    Args:
        bbox_2d: left, top, right and bottom of the part, from 0 to 1000 over the width and the height of the picture
        image: which picture, from 0
    """
    if len(bbox_2d) != 4 or not all(0 <= each <= 1000 for each in bbox_2d):
        raise ValueError(f"bbox_2d must be 4 numbers from 0 to 1000, got {bbox_2d}")
    left, top, right, bottom = bbox_2d
    picture = media.picture(image)
    across, down = picture.width / 1000, picture.height / 1000
    box = round(left * across), round(top * down), round(right * across), round(bottom * down)
    if not (box[0] < box[2] and box[1] < box[3]):
        raise ValueError(f"bbox_2d must hold a pixel, from left to right and from top to bottom, got {bbox_2d}")
    return picture.crop(box)


@with_media
def listen(media: Media, from_s: float, to_s: float, audio: int = 0) -> list[dict[str, Any]]:
    """Plays a part of a sound of the question.

    Args:
        from_s: when it begins, in seconds
        to_s: when it ends
        audio: which sound, from 0
    """
    sound, rate = media.sound(audio), media.config.audio_sample_rate
    length_s = len(sound) / rate
    if not 0 <= from_s < to_s or from_s * rate >= len(sound):
        raise ValueError(f"from_s and to_s must be in order, from 0 to {length_s:.2f}, got {from_s} and {to_s}")
    part = sound[int(from_s * rate) : max(int(to_s * rate), int(from_s * rate) + 1)]
    with wave.open(file := io.BytesIO(), "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes((part.clip(-1, 1) * _LOUDEST).astype("<i2").tobytes())
    return [{"type": "audio", "audio": file.getvalue()}]


@with_media
def seek(media: Media, at_s: float, video: int = 0) -> Image:
    """Shows the frame of a video of the question at a time.

    Args:
        at_s: the time, in seconds from its start
        video: which video, from 0
    """
    return media.frame(at_s, video)


@with_media
def python_with_media(media: Media, code: str) -> str | list[dict[str, Any]]:
    """Runs a Python program and returns what it prints, and shows the pictures that it saves as PNG. The media of the question
    are files beside it: image_0.png, audio_0.wav, video_0.mp4 and so on. Nothing is kept between calls.

    Args:
        code: the program
    """
    from rondo.models.media import decode

    programs = {"run.py": _RUN.encode(), "main.py": code.encode(errors="replace")}
    found = code_tools.ran({**media.files(), **programs}, ["python", "run.py"])
    printed, *shown = found.output.split(_SHOWN)
    text = code_tools.told(replace(found, output=printed))
    pictures = [decode.image(base64.b64decode(each), media.config, "a picture of the program") for each in shown]
    if not pictures:
        return text
    return [
        *([{"type": "text", "text": text}] if text else []),
        *({"type": "image", "image": each} for each in pictures),
    ]
