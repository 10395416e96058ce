"""Tools that look again at the media of a question."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rondo.models.media import decode
from rondo.models.media.config import MediaConfig
from rondo.models.media.refs import MediaRef
from rondo.roles.config import EnvironmentConfig
from rondo.roles.sampling import media_tools
from rondo.roles.sampling.media_tools import Media, with_media
from rondo.roles.sampling.tools import Answer, open_tools, schemas_of
from tests.models.media.builders import SOUND_RATE, sound_bytes, tone, video_bytes
from tests.roles.sampling.test_environments import call, job, played

HALVES = np.zeros((20, 40, 3), np.uint8)
HALVES[:, 20:] = 200


def picture() -> bytes:
    Image.fromarray(HALVES).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def asked(name: str, arguments: dict[str, Any], *refs: list[Any], limits: dict[str, Any] | None = None) -> Any:
    opened = open_tools({name: f"{media_tools.__name__}:{name}"}, limits)
    found = opened.call([name, arguments, list(refs)])
    assert isinstance(found, Answer)
    return found.content


def shown(name: str, arguments: dict[str, Any], *refs: list[Any]) -> np.ndarray:
    [part] = asked(name, arguments, *refs)
    return np.asarray(Image.open(io.BytesIO(part["image"])))


def test_a_box_of_a_picture_is_shown_in_full_size() -> None:
    one = ["image", picture()]
    found = shown("zoom", {"bbox_2d": [250, 0, 750, 500], "image": 1}, ["image", b"another"], ["audio", b""], one)
    assert (found == HALVES[:10, 10:30]).all()
    for box, told in (([0, 0, 1], "4 numbers"), ([0, 0, 1001, 9], "4 numbers"), ([500, 0, 500, 900], "hold a pixel")):
        assert f"Error: ValueError: bbox_2d must {'be ' if told[0] == '4' else ''}{told}" in asked(
            "zoom", {"bbox_2d": box}, one
        )
    whole = {"bbox_2d": [0, 0, 1000, 1000]}
    assert asked("zoom", {**whole, "image": 1}, one) == "Error: ValueError: image must be from 0 to 0, got 1"
    assert asked("zoom", whole) == "Error: ValueError: there is no image"
    assert "must be an image that can be read" in asked("zoom", whole, ["image", b"no picture"])
    assert "must have 1 to media.max_source_pixels = 9 pixels" in asked(
        "zoom", whole, one, limits={"max_source_pixels": 9}
    )


def test_a_window_of_a_sound_is_played() -> None:
    [part] = asked("listen", {"from_s": 0.75, "to_s": 1.25}, ["audio", sound_bytes(2.0)])
    heard = decode.audio(part["audio"], MediaConfig(), "audio")
    np.testing.assert_allclose(heard, tone(2.0)[SOUND_RATE * 3 // 4 : SOUND_RATE * 5 // 4], atol=1e-3)


def test_a_window_of_no_sound_is_told() -> None:
    for window in ({"from_s": 1.0, "to_s": 2.0}, {"from_s": 0.5, "to_s": 0.5}, {"from_s": -1.0, "to_s": 0.5}):
        assert "must be in order, from 0 to 1.00" in asked("listen", window, ["audio", sound_bytes(1.0)])


def test_the_frame_of_a_video_at_a_time_is_shown(tmp_path: Path) -> None:
    video = ["video", video_bytes(tmp_path, 25, 10)]  # frame i is grey 10 * i
    for at_s, number in ((0.0, 0), (1.22, 12), (2.4, 24), (2.5, 24)):
        assert abs(shown("seek", {"at_s": at_s}, video).mean() - 10 * number) < 3
    assert asked("seek", {"at_s": 2.7}, video) == "Error: ValueError: at_s must be from 0 to 2.50, got 2.7"
    assert "must hold pictures" in asked("seek", {"at_s": 0}, ["video", sound_bytes(0.1)])
    frames = ["video", [b"", picture()]]
    assert (shown("seek", {"at_s": 0.5}, frames) == HALVES).all()  # two a second


def test_a_program_of_the_policy_reads_the_media_and_shows_what_it_draws() -> None:
    one = ["image", picture()]
    crop = "from PIL import Image\nfor n in (2, 3): Image.open('image_0.png').crop((0, 0, n, 1)).save(f'{n}.png')\nprint('two')"
    text, *parts = asked("python_with_media", {"code": crop}, one)
    assert text == {"type": "text", "text": "two"}
    assert [Image.open(io.BytesIO(each["image"])).size for each in parts] == [(2, 1), (3, 1)]
    told = asked(
        "python_with_media", {"code": "import os; print(sorted(os.listdir())); exit(3)"}, one, ["video", [picture()]]
    )
    assert told == "['image_0.png', 'main.py', 'run.py', 'video_0_0.png']\nError: exit code 3"
    assert "must be an image that can be read" in asked("python_with_media", {"code": "open('a.png', 'w').write('x')"})


@with_media
def mean(media: Media, of: str, image: int = 0) -> str:
    """The mean of a picture.

    Args:
        of: what
        image: which
    """
    return f"{of}: {np.asarray(media.picture(image)).mean():.0f}"


def test_tools_with_media_are_named_in_the_settings_and_told_without_them() -> None:
    named = EnvironmentConfig(tools=("zoom", "python"))  # type: ignore[arg-type]
    assert named.tools[0] == f"{media_tools.__name__}:zoom" and named.tools[1].endswith("code_tools:python")
    told = schemas_of([mean, media_tools.zoom, media_tools.listen, media_tools.seek])
    assert [list(each["function"]["parameters"]["properties"]) for each in told] == [
        ["of", "image"], ["bbox_2d", "image"], ["from_s", "to_s", "audio"], ["at_s", "video"],
    ]  # fmt: skip


@pytest.mark.parametrize("source", ["file", "bytes"])
async def test_a_tool_of_ones_own_is_given_the_media_of_the_question(source: str, tmp_path: Path) -> None:
    (file := tmp_path / "picture.png").write_bytes(picture())
    found = await played(
        job(tools=[mean], media={}, num_workers=1), call("mean", '{"of": "all"}'), "100",
        originals=[MediaRef("image", str(file) if source == "file" else picture())],
    )  # fmt: skip
    assert "tool\nall: 100<|im_end|>" in found.prompts[1]
    assert (found.stats["mean"].steps, found.stats["mean"].errors) == (1, 0)
