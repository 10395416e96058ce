"""Rows with media: every way of writing them gives the same messages and references; what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from rondo.models.media.refs import MediaRef
from rondo.roles.config import DataConfig
from rondo.roles.data.media_rows import with_media
from rondo.roles.data.sources import RowError

TEXT = {"type": "text", "text": "What?"}
PNG = b"\x89PNG and so on"


def config(**columns: str) -> DataConfig:
    sound = columns.pop("sound", None)
    return DataConfig(path="unused", media_columns=columns, apply_chat_template=True, use_audio_in_video=sound)


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def refs_of(*parts: Any, **values: Any) -> tuple[MediaRef, ...]:
    prompt, refs = with_media("row", user(*parts), values, config(**{name: name for name in values}))
    assert [part["type"] for part in prompt[0]["content"] if part["type"] != "text"] == [ref.kind for ref in refs]
    return refs


@pytest.mark.parametrize(
    ("part", "ref"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://h/a.png", "detail": "high"}},
            MediaRef("image", "https://h/a.png"),
        ),
        ({"type": "image_url", "image_url": "a.png"}, MediaRef("image", "a.png")),
        ({"type": "video_url", "video_url": {"url": "file:///a.mp4"}}, MediaRef("video", "file:///a.mp4")),
        ({"type": "audio_url", "audio_url": {"url": "a.wav"}}, MediaRef("audio", "a.wav")),
        (
            {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
            MediaRef("audio", "data:audio;base64,UklG"),
        ),
        ({"type": "image", "image": "a.png"}, MediaRef("image", "a.png")),
        ({"type": "image", "url": "https://h/a.png"}, MediaRef("image", "https://h/a.png")),
        ({"type": "image", "base64": "iVBO"}, MediaRef("image", "data:image;base64,iVBO")),
        ({"type": "image", "image": {"bytes": PNG, "path": "a.png"}}, MediaRef("image", PNG)),
        ({"type": "audio", "path": "a.wav", "audio": None, "text": None}, MediaRef("audio", "a.wav")),
        ({"type": "audio", "audio": {"bytes": None, "path": "a.wav"}}, MediaRef("audio", "a.wav")),
        ({"type": "video", "video": "a.mp4", "use_audio_in_video": True}, MediaRef("video", "a.mp4", True)),
        ({"type": "video", "video": [PNG, {"bytes": PNG, "path": None}]}, MediaRef("video", [PNG, PNG])),
        ({"type": "video", "video": ["1.png", "2.png"]}, MediaRef("video", ["1.png", "2.png"])),  # type: ignore[list-item]
    ],
)
def test_a_part_in_any_form_is_one_reference(part: dict[str, Any], ref: MediaRef) -> None:
    assert refs_of(part, TEXT) == (ref,)


def test_messages_lose_their_payload_and_keep_all_else() -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "image", "image": PNG}, TEXT], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]},
    ]
    prompt, refs = with_media("row", messages, {}, config())
    assert prompt == [
        messages[0],
        {"role": "user", "content": [{"type": "image"}, TEXT], "name": "ann"},
        messages[2],
        {"role": "user", "content": [{"type": "audio"}]},
    ]
    assert refs == (MediaRef("image", PNG), MediaRef("audio", "a.wav"))


@pytest.mark.parametrize("prompt", ["plain <image> text", [{"role": "user", "content": "an <image> tag"}]])
def test_a_prompt_of_text_stays_as_it_is(prompt: Any) -> None:
    assert with_media("row", prompt, {}, config()) == (prompt, ())
    assert with_media("row", prompt, {"wav": None}, config(audio="wav")) == (prompt, ())


def test_tags_say_where_the_media_of_columns_belong() -> None:
    values = {"pictures": ["1.png", PNG], "speech": "a.wav"}
    prompt, refs = with_media(
        "row", "<image>\nHear <audio>, see <image>.", values, config(image="pictures", audio="speech")
    )
    assert prompt == user(
        {"type": "image"}, {"type": "text", "text": "\nHear "}, {"type": "audio"}, {"type": "text", "text": ", see "},
        {"type": "image"}, {"type": "text", "text": "."},
    )  # fmt: skip
    assert refs == (MediaRef("image", "1.png"), MediaRef("audio", "a.wav"), MediaRef("image", PNG))


def test_without_a_place_the_media_come_first_in_the_first_turn_of_a_user() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "user", "content": "two"},
    ]
    values = {"a": ["1.wav", "2.wav"], "v": "b.mp4"}
    prompt, refs = with_media("row", messages, values, config(audio="a", video="v"))
    assert prompt[1]["content"] == [
        {"type": "audio"},
        {"type": "audio"},
        {"type": "video"},
        {"type": "text", "text": "one"},
    ]
    assert (prompt[0], prompt[2]) == (messages[0], messages[2])
    assert refs == (MediaRef("audio", "1.wav"), MediaRef("audio", "2.wav"), MediaRef("video", "b.mp4"))


def test_parts_without_a_value_and_tags_take_from_columns_beside_parts_that_have_their_own() -> None:
    own = {"type": "image", "image": "own.png"}
    refs = refs_of({"type": "image"}, own, {"type": "text", "text": "and <image>"}, image=["1.png", "2.png"])
    assert refs == (MediaRef("image", "1.png"), MediaRef("image", "own.png"), MediaRef("image", "2.png"))


@pytest.mark.parametrize(
    ("value", "sources"),
    [
        ("a.mp4", ["a.mp4"]),
        (["a.mp4", "b.mp4"], ["a.mp4", "b.mp4"]),
        ([PNG, PNG], [[PNG, PNG]]),
        ([{"bytes": None, "path": "1.jpg"}, {"bytes": None, "path": "2.jpg"}], [["1.jpg", "2.jpg"]]),
        ([[PNG], [PNG, PNG]], [[PNG], [PNG, PNG]]),
        ([{"bytes": b"\0\0\0\x18ftypmp42", "path": None}], [b"\0\0\0\x18ftypmp42"]),
        ([b"RIFF\0\0\0\0AVI ", b"RIFF\0\0\0\0AVI "], [b"RIFF\0\0\0\0AVI ", b"RIFF\0\0\0\0AVI "]),
        ([b"RIFF\0\0\0\0WEBP"], [[b"RIFF\0\0\0\0WEBP"]]),
    ],
)
def test_a_list_of_images_in_a_video_column_is_one_video(value: Any, sources: list[Any]) -> None:
    assert refs_of(TEXT, video=value) == tuple(MediaRef("video", source) for source in sources)


@pytest.mark.parametrize("sound", [True, False, None])
def test_a_row_says_for_its_videos_whether_their_sound_comes_along(sound: bool | None) -> None:
    values = {"v": ["a.mp4", "b.mp4"], "i": "a.png", "s": sound}
    _, refs = with_media("row", "x", values, config(video="v", image="i", sound="s"))
    assert [ref.use_audio for ref in refs] == [sound, sound, None]
    own = user({"type": "video", "video": "a.mp4", "use_audio_in_video": False})
    _, refs = with_media("row", own, {"s": True}, config(sound="s"))
    assert refs == (MediaRef("video", "a.mp4", False),)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (
            "<image> <image>",
            "prompt must have a place for each image that data.media_columns brings, got 2 places for 1",
        ),
        ("<video>", "a place for each image that data.media_columns brings, got 0 places for 1"),
        (user({"type": "audio"}), "a place for each image that data.media_columns brings, got 0 places for 1"),
        ([{"role": "system", "content": "s"}], "prompt must have a message of a user to hold the media"),
        (
            user({"type": "thinking", "thinking": "x"}),
            "a part of a message must be of type text, image, .*, got 'thinking'",
        ),
        (user({"image": "a.png"}), "must be of type text, image, .*, got an object with image"),
        (user("text"), "must be of type text, image, .*, got str"),
        (
            user({"type": "image", "image": "a", "url": "b"}),
            "the image of a message must have one value, got image, url",
        ),
        (user({"type": "image", "image": "a", "max_pixels": 9}), "no settings of its own, got 'max_pixels'"),
        (
            user({"type": "image_url", "image_url": {"href": "a"}}),
            "'image_url' of a message must have url, got an object with href",
        ),
        (
            user({"type": "input_audio", "input_audio": {"data": 3}}),
            "must have data and format, got an object with data",
        ),
        (user({"type": "audio", "audio": {"array": [0.1], "sampling_rate": 1}}), "an object with array, sampling_rate"),
        (user({"type": "image", "image": ["a.png"]}), "the image of a message must be a path, .*, got list"),
        (user({"type": "video", "video": ["a.png", 3]}), "a frame of the video of a message must be a path, .*, got 3"),
        (user({"type": "video", "video": []}), "or a list of frames, got list"),
        (user({"type": "image", "image": ""}), "the image of a message must be a path, .*, got ''"),
        (user({"type": "image", "image": {"bytes": None, "path": None}}), "got an object with bytes, path"),
        ([{"role": "user", "content": 3}], "the content of a message must be text or a list of parts, got 3"),
    ],
)
def test_a_row_that_breaks_a_rule_is_named_with_the_rule_and_the_value(prompt: Any, text: str) -> None:
    values = {"pictures": "1.png", "speech": None, "films": None}
    with pytest.raises(RowError, match=rf"^a.jsonl:7: .*{text}"):
        with_media("a.jsonl:7", prompt, values, config(image="pictures", audio="speech", video="films"))


def test_a_place_that_no_column_fills_is_refused() -> None:
    with pytest.raises(RowError, match=r"row: prompt must have a place for each image .*, got 1 places for 0"):
        with_media("row", user({"type": "image"}), {}, config())
    with pytest.raises(RowError, match=r"row: 'pictures' must be a path, .*, got None"):
        with_media("row", "<image>", {"pictures": [None]}, config(image="pictures"))


def test_errors_never_show_contents() -> None:
    with pytest.raises(RowError) as raised:
        with_media("row", "x", {"i": {"secret": "a" * 1000, "bytes": PNG}}, config(image="i"))
    assert "aaa" not in str(raised.value) and "PNG" not in str(raised.value)


def test_a_word_on_sound_must_be_true_or_false() -> None:
    with pytest.raises(RowError, match=r"row: 's' must be true, false or null, got 1. .*data.use_audio_in_video"):
        with_media("row", "x", {"s": 1}, config(sound="s"))
