"""The media of a row: from the many ways in which data sets write them to messages with places and references beside them.

Owns which forms are understood. Reads and decodes nothing: that is the workers' business, once a prompt group is leased.

    messages with parts     {"type": "image_url", "image_url": {"url": ...}}, {"type": "input_audio", "input_audio": {"data", "format"}},
                            {"type": "video_url", ...}; {"type": "image", "image" or "url" or "path" or "bytes": ...}, audio, video
    columns                 text with <image>, <audio>, <video> where media belong, and a value or a list of them in each column

A value is a path, a URL, a data URI, bytes, {"bytes", "path"} as Hugging Face's Image and Audio have it, or for a video the list
of its frames. Invariant: the parts of kind image, audio and video in the messages, and the references, are in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rondo.models.media.refs import Kind, MediaRef
from rondo.roles.sources import RowError

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig

_KINDS: tuple[Kind, ...] = ("image", "audio", "video")
_OPENAI: dict[str, Kind] = {"image_url": "image", "input_audio": "audio", "audio_url": "audio", "video_url": "video"}
_TAG = re.compile(r"<(image|audio|video)>")


def with_media(
    name: str, prompt: Any, values: Mapping[str, Any], config: DataConfig
) -> tuple[Any, tuple[MediaRef, ...]]:
    """(prompt whose media parts hold no payload, references in their order). A prompt without media comes back as it is.

    Raises RowError for a part or value of another form, and when places and media differ in number.
    """
    sound = _use_audio(name, values, config)
    found = {kind: _column(name, kind, values[column]) for kind, column in config.media_columns.items()}
    if not any(found.values()):
        if isinstance(prompt, str) or not any(isinstance(message["content"], list) for message in prompt):
            return prompt, ()
        return _parts(name, prompt, sound)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return _placed(name, messages, found, sound)


# ---- messages with parts ------------------------------------------------------------------------------------------------


def _parts(
    name: str, messages: Sequence[Mapping[str, Any]], sound: bool | None
) -> tuple[list[dict[str, Any]], tuple[MediaRef, ...]]:
    refs: list[MediaRef] = []
    shown = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = [_part(name, part, refs, sound) for part in content]
        shown.append({**message, "content": content})
    return shown, tuple(refs)


def _part(name: str, part: Any, refs: list[MediaRef], sound: bool | None) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in _OPENAI:
        found, value = _OPENAI[kind], part.get(kind)
        if isinstance(value, Mapping):
            value = value.get("url", value.get("data"))
            if kind == "input_audio" and isinstance(value, str) and not value.startswith("data:"):
                value = f"data:audio/{part[kind].get('format', 'wav')};base64,{value}"
    elif kind in _KINDS:
        found, value = kind, next((part[key] for key in (kind, "url", "path", "bytes") if part.get(key) is not None), None)
    else:
        raise RowError(
            f"{name}: the parts of a message must be text, image, audio or video, got {_shown(part)}. Correct the row"
        )
    own = part.get("use_audio_in_video")
    refs.append(MediaRef(found, _source(name, found, value), sound if own is None else bool(own)))
    return {"type": found}


# ---- columns ------------------------------------------------------------------------------------------------------------


def _column(name: str, kind: Kind, value: Any) -> list[Any]:
    """The media of one column: none, one or several."""
    if value is None:
        return []
    if kind == "video" and isinstance(value, list) and value and not _is_video(value[0]):
        return [value]  # frames
    return list(value) if isinstance(value, list) else [value]


def _is_video(value: Any) -> bool:
    """Whether an item of a list is a video of its own rather than a frame: a list of frames, or a file's name."""
    return isinstance(value, list | str)


def _placed(
    name: str, messages: Sequence[Mapping[str, Any]], found: Mapping[Kind, list[Any]], sound: bool | None
) -> tuple[list[dict[str, Any]], tuple[MediaRef, ...]]:
    """Tags become parts, in the order of the text; without a tag of any kind, the media come first in the first turn of a user."""
    left = {kind: list(values) for kind, values in found.items()}
    tags = [tag for message in messages for text in _texts(message["content"]) for tag in _TAG.findall(text)]
    counts = {kind: (tags.count(kind), len(left.get(kind, ()))) for kind in _KINDS}
    if tags and any(places != media for places, media in counts.values()):
        shown = ", ".join(f"{places} <{kind}> for {media}" for kind, (places, media) in counts.items() if places != media)
        raise RowError(f"{name}: the prompt must have a place for each of its media, got {shown}. Correct the row")
    refs: list[MediaRef] = []

    def take(kind: Kind) -> dict[str, Any]:
        refs.append(MediaRef(kind, _source(name, kind, left[kind].pop(0)), sound))
        return {"type": kind}

    shown_messages: list[dict[str, Any]] = []
    placed = bool(tags)
    for message in messages:
        content = message["content"]
        if tags:
            parts: Any = [part for text in _texts(content) for part in _split(text, take)]
        elif not placed and message["role"] == "user":
            placed = True
            media = [take(kind) for kind in left for _ in range(len(left[kind]))]
            parts = media + [{"type": "text", "text": text} for text in _texts(content)]
        else:
            parts = content
        shown_messages.append({**message, "content": parts})
    if not placed:
        raise RowError(f"{name}: messages must hold a user's turn for the media, got none. Correct the row")
    return shown_messages, tuple(refs)


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]


def _split(text: str, take: Any) -> list[dict[str, Any]]:
    pieces = _TAG.split(text)  # text, kind, text, kind, ..., text
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(pieces):
        if number % 2:
            parts.append(take(piece))
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


# ---- values -------------------------------------------------------------------------------------------------------------


def _source(name: str, kind: Kind, value: Any) -> str | bytes | list[bytes]:
    if isinstance(value, Mapping):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if kind == "video" and isinstance(value, list) and value:
        frames = [frame.get("bytes") if isinstance(frame, Mapping) else frame for frame in value]
        if all(isinstance(frame, bytes | bytearray | memoryview) for frame in frames):
            return [bytes(frame) for frame in frames]
    raise RowError(
        f"{name}: {kind} must be a path, a URL, a data URI, bytes or {{bytes, path}}"
        f"{', or for a video a list of frames as bytes' if kind == 'video' else ''}, got {_shown(value)}. Correct the row"
    )


def _use_audio(name: str, values: Mapping[str, Any], config: DataConfig) -> bool | None:
    if config.use_audio_in_video is None:
        return None
    value = values[config.use_audio_in_video]
    if value is None or isinstance(value, bool):
        return value
    raise RowError(
        f"{name}: {config.use_audio_in_video!r} must be true, false or null, got {_shown(value)}. Correct the row"
    )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, value)) or 'nothing'}"
    return type(value).__name__ if isinstance(value, list | bytes) else repr(value)[:80]
