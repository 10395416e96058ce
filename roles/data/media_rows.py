"""The media of a row: from the many ways in which data sets write them to messages with places, and references beside them.

Owns which forms are understood. Reads and decodes nothing: that is the workers' business, once a prompt group is leased.

    parts of messages    {"type": "image_url", "image_url": {"url": ...}}, audio_url, video_url      OpenAI
                         {"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}
                         {"type": "image", "image": ...}, audio, video; "url", "path", "bytes", "base64" name their value, too
    columns              text with <image>, <audio>, <video>, or parts without a value, where the column's media belong

A value is a path, a URL, a data URI, bytes, {"bytes", "path"} as Hugging Face's Image and Audio have it, or for a video a list of
such values, its frames.

    with_media("a.jsonl:1", "What is <image>?", {"picture": "7.png"}, config)
    ->  [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "?"}]}],
        (MediaRef("image", "7.png"),)

Invariant: the media parts of the messages, and the references, are of the same kinds in the same order; no part has a payload.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rondo.models.media.refs import Kind, MediaRef
from rondo.roles.data.sources import RowError

if TYPE_CHECKING:
    from rondo.roles.config import DataConfig

_KINDS: tuple[Kind, ...] = ("image", "audio", "video")
_OPENAI: dict[str, tuple[Kind, set[str]]] = {
    "image_url": ("image", {"url", "detail"}),  # how large an image becomes is for media.image_max_tokens to say
    "audio_url": ("audio", {"url"}),
    "video_url": ("video", {"url"}),
    "input_audio": ("audio", {"data", "format"}),
}
PARTS = ("text", *_KINDS, *_OPENAI)
"""Types of the parts of a message."""
_NAMES_OF_VALUES = ("url", "path", "bytes", "base64")
_IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
_IMAGE_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"II*\0", b"MM\0*")

_Place = tuple[Kind, Any, bool | None]
"""Kind, value, whether a video brings its sound. A value of None is for a column to give."""
_Part = dict[str, Any] | _Place


def with_media(
    name: str, prompt: Any, values: Mapping[str, Any], config: DataConfig
) -> tuple[Any, tuple[MediaRef, ...]]:
    """(prompt whose media parts hold no payload, references in their order). Text without media stays text.

    Raises RowError for a part or value of another form, and when places and media of the columns differ in number. Without any
    place, the columns' media come first in the first message of a user, in the order of `data.media_columns`.
    """
    sound = _use_audio(name, values, config)
    given = {kind: _column(kind, values[column]) for kind, column in config.media_columns.items()}
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    contents = [_parts(name, message.get("content"), list(given)) for message in messages]
    _check_places(name, contents, given)
    if any(given.values()) and not _num_places(contents):
        _place_first(name, messages, contents, given)
    shown, refs = _referred(name, messages, contents, given, sound, config.media_columns)
    return (prompt, ()) if isinstance(prompt, str) and not refs else (shown, refs)


def with_parts(name: str, said: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[MediaRef, ...]]:
    """As `with_media`, of messages that somebody says, whose media are in their parts alone."""
    contents = [_parts(name, message.get("content"), ()) for message in said]
    if _num_places(contents):
        raise RowError(
            f"{name}: what is said must have each medium in its part, got one without. Put its bytes, path or URL there"
        )
    return _referred(name, said, contents, {}, None, {})


def _referred(
    name: str,
    messages: Sequence[Mapping[str, Any]],
    contents: Sequence[list[_Part] | None],
    given: Mapping[Kind, list[Any]],
    sound: bool | None,
    columns: Mapping[Kind, str],
) -> tuple[list[dict[str, Any]], tuple[MediaRef, ...]]:
    refs: list[MediaRef] = []
    left = {kind: iter(found) for kind, found in given.items()}

    def referred(part: _Part) -> dict[str, Any]:
        if isinstance(part, dict):
            return part
        kind, value, own_sound = part
        value = next(left[kind]) if value is None else value
        what = f"{columns[kind]!r}" if part[1] is None else f"the {kind} of a message"
        use_audio = (sound if own_sound is None else own_sound) if kind == "video" else None
        refs.append(MediaRef(kind, _source(name, what, kind, value), use_audio))
        return {"type": kind}

    shown = [
        dict(message) if parts is None else {**message, "content": [referred(part) for part in parts]}
        for message, parts in zip(messages, contents, strict=True)
    ]
    return shown, tuple(refs)


def _check_places(name: str, contents: Sequence[list[_Part] | None], given: Mapping[Kind, list[Any]]) -> None:
    places = {kind: _num_places(contents, kind) for kind in _KINDS}
    if not any(places.values()):
        return
    for kind, num_places in places.items():
        num_media = len(given.get(kind, ()))
        if num_places != num_media:
            raise RowError(
                f"{name}: prompt must have a place for each {kind} that data.media_columns brings, got {num_places} places for "
                f"{num_media}. Correct the row"
            )


def _num_places(contents: Sequence[list[_Part] | None], kind: Kind | None = None) -> int:
    """Parts that a column must fill."""
    parts = (part for content in contents for part in content or () if isinstance(part, tuple))
    return sum(part[1] is None and kind in (None, part[0]) for part in parts)


def _place_first(
    name: str,
    messages: Sequence[Mapping[str, Any]],
    contents: list[list[_Part] | None],
    given: Mapping[Kind, list[Any]],
) -> None:
    at = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if at is None:
        raise RowError(
            f"{name}: prompt must have a message of a user to hold the media of data.media_columns, got none. Correct the row"
        )
    text = messages[at]["content"]
    rest = contents[at] or ([{"type": "text", "text": text}] if text else [])
    contents[at] = [*((kind, None, None) for kind, found in given.items() for _ in found), *rest]


# ---- messages -----------------------------------------------------------------------------------------------------------


def _parts(name: str, content: Any, tagged: Sequence[Kind]) -> list[_Part] | None:
    """The parts of a message; None for one that stays as it is. `tagged` are the kinds whose tags in the text are places."""
    if isinstance(content, list):
        return [part for item in content for part in _split_part(_part(name, item), tagged)]
    if not isinstance(content, str):
        if content is None:
            return None
        raise RowError(
            f"{name}: the content of a message must be text or a list of parts, got {_shown(content)}. Correct the row"
        )
    split = _split(content, tagged)
    return split if any(isinstance(part, tuple) for part in split) else None


def _part(name: str, part: Any) -> _Part:
    # In columns of a data set, parts of all types have the same fields, null where they have nothing to say.
    fields = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    kind = fields.pop("type", None)
    if kind == "text" and isinstance(fields.get("text"), str):
        return {"type": "text", **fields}
    if kind in _OPENAI:
        return _openai_part(name, kind, fields)
    if kind not in _KINDS:
        raise RowError(
            f"{name}: a part of a message must be of type {', '.join(PARTS[:-1])} or {PARTS[-1]}, got "
            f"{repr(kind)[:40] if kind is not None else _shown(part)}. Correct the row"
        )
    sound = fields.pop("use_audio_in_video", None) if kind == "video" else None
    if unknown := sorted(set(fields) - {kind, *_NAMES_OF_VALUES}):
        raise RowError(
            f"{name}: the {kind} of a message must have one value and no settings of its own, got {unknown[0]!r}. "
            "Remove it; the media section limits all media"
        )
    if len(fields) > 1 or not isinstance(sound, bool | None):
        raise RowError(
            f"{name}: the {kind} of a message must have one value, got {', '.join(sorted(fields))}. Correct the row"
        )
    name_of_value, value = next(iter(fields.items()), (kind, None))
    if name_of_value == "base64" and isinstance(value, str):
        value = f"data:{kind};base64,{value}"
    return kind, value, sound


def _openai_part(name: str, kind: str, fields: Mapping[str, Any]) -> _Place:
    medium, known = _OPENAI[kind]
    value = fields.get(kind)
    if isinstance(value, Mapping):
        inner = {key: item for key, item in value.items() if item is not None}
        value = inner.get("data" if kind == "input_audio" else "url") if inner.keys() <= known else None
    if set(fields) != {kind} or not isinstance(value, str):
        raise RowError(
            f"{name}: {kind!r} of a message must have {' and '.join(sorted(known - {'detail'}))}, got "
            f"{_shown(fields.get(kind))}. Correct the row"
        )
    if kind == "input_audio" and not value.startswith("data:"):
        value = f"data:audio;base64,{value}"
    return medium, value, None


def _split_part(part: _Part, tagged: Sequence[Kind]) -> list[_Part]:
    if isinstance(part, tuple):
        return [part]
    split = _split(part["text"], tagged)
    return split if any(isinstance(piece, tuple) for piece in split) else [part]


def _split(text: str, tagged: Sequence[Kind]) -> list[_Part]:
    """The text as parts, its tags as places."""
    if not tagged:
        return [{"type": "text", "text": text}]
    pieces = re.split(rf"<({'|'.join(tagged)})>", text)  # text, kind, text, kind, ..., text
    parts: list[_Part] = []
    for number, piece in enumerate(pieces):
        if number % 2:
            parts.append((next(kind for kind in tagged if kind == piece), None, None))
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


# ---- values -------------------------------------------------------------------------------------------------------------


def _column(kind: Kind, value: Any) -> list[Any]:
    """The media of one column: none, one or several. A list in a video column that begins with an image is one video's frames."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        return [value]
    return [value] if kind == "video" and value and _is_image(value[0]) else list(value)


def _is_image(value: Any) -> bool:
    """By its first bytes or the end of its name."""
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, str):
        return value.startswith("data:image/") or value.lower().endswith(_IMAGE_ENDINGS)
    if not isinstance(value, bytes | bytearray):
        return False
    return value.startswith(_IMAGE_STARTS) or (value.startswith(b"RIFF") and value[8:12] == b"WEBP")


def _source(name: str, what: str, kind: Kind, value: Any) -> Any:
    """What a MediaRef holds: text, bytes, or a list of them. `what` names the value in errors."""
    found = value
    if isinstance(found, Mapping) and found.keys() <= {"bytes", "path"}:
        found = found.get("path") if found.get("bytes") is None else found["bytes"]
    if isinstance(found, str) and found:
        return found
    if isinstance(found, bytes | bytearray | memoryview):
        return bytes(found)
    if kind == "video" and isinstance(found, list | tuple) and found:
        return [_source(name, f"a frame of {what}", "image", frame) for frame in found]
    raise RowError(
        f"{name}: {what} must be a path, a URL, a data URI, bytes or an object of bytes and path"
        f"{', or a list of frames' if kind == 'video' else ''}, got {_shown(value)}. Correct the row, or give the bytes of a file"
    )


def _use_audio(name: str, values: Mapping[str, Any], config: DataConfig) -> bool | None:
    column = config.use_audio_in_video
    if column is None or values[column] is None or isinstance(values[column], bool):
        return None if column is None else values[column]
    raise RowError(
        f"{name}: {column!r} must be true, false or null, got {_shown(values[column])}. "
        "Correct the row, or name another column in data.use_audio_in_video"
    )


def _shown(value: Any) -> str:
    """The value's kind; never contents, which can be of any length."""
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, value))[:80] or 'nothing'}"
    if value is None or isinstance(value, bool | int | float) or value == "":
        return repr(value)
    return type(value).__name__
