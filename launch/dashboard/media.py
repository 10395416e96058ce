"""Media: the images, sounds and videos of kept samples, as far as a browser may be given them.

Owns what is let through: what its first bytes say it is, of a list of forms that hold no script; not too large, and no picture
that takes more memory than a page should. Does not own the files (`roles/data/originals.py`).
"""

from __future__ import annotations

import os
import re
import stat
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rondo.roles.data.originals import FOLDER, of_group
from rondo.runtime.errors import ConfigError

MOST_BYTES = 64 << 20
_MOST_PIXELS = 1 << 25
_FORMS = (
    (rb"\x89PNG\r\n\x1a\n", "image/png"), (rb"\xff\xd8\xff", "image/jpeg"), (rb"GIF8[79]a", "image/gif"),
    (rb"RIFF....WEBP", "image/webp"), (rb"....ftypavi[fs]", "image/avif"), (rb"RIFF....WAVE", "audio/wav"),
    (rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]", "audio/mpeg"), (rb"fLaC", "audio/flac"), (rb"OggS", "audio/ogg"),
    (rb"....ftypM4A", "audio/mp4"), (rb"....ftyp", "video/mp4"), (rb"\x1a\x45\xdf\xa3", "video/webm"),
)  # fmt: skip


def of_prompt(run: Path, step: int, group: int) -> list[dict[str, Any]]:
    """`of_group`, each with "why" it is not shown, empty where it is."""
    found = of_group(run, step, group)
    for each in found:
        try:
            _form(run / FOLDER / each["name"])
            each["why"] = ""
        except ConfigError as error:
            each["why"] = str(error)
    return found


def read(run: Path, name: str) -> tuple[bytes, str]:
    """(bytes, type) of a medium that was kept. ConfigError for one that is not shown, and why."""
    form = _form(run / FOLDER / name)
    return (run / FOLDER / name).read_bytes(), form


def _form(path: Path) -> str:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            told, begin = os.fstat(file.fileno()), file.read(16)
    except OSError as error:
        raise ConfigError(
            f"a medium must be there to be shown, got {error.strerror}. samples.media_bytes keeps more"
        ) from error
    if not stat.S_ISREG(told.st_mode) or told.st_size > MOST_BYTES:
        raise ConfigError(
            f"a medium must have at most {MOST_BYTES} bytes to be shown, got {told.st_size}. See {FOLDER / path.name}"
        )
    form = next((form for begins, form in _FORMS if re.match(begins, begin, re.DOTALL)), None)
    if form is None:
        raise ConfigError(
            f"a medium must be of a form that browsers show, got {begin[:8]!r} and so on. See {FOLDER / path.name}"
        )
    if form.startswith("image/") and (pixels := _pixels(path)) > _MOST_PIXELS:
        raise ConfigError(
            f"a picture must have at most {_MOST_PIXELS} pixels to be shown, got {pixels} or more. See {FOLDER / path.name}"
        )
    return form


def _pixels(path: Path) -> int:
    """Of a picture, as its header says; 0 where that cannot be known."""
    if find_spec("PIL") is None:
        return 0
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.width * picture.height
    except Image.DecompressionBombError:
        return _MOST_PIXELS + 1
    except Exception:  # noqa: BLE001  # of a broken one Pillow's readers raise what they like, and the browser shows nothing
        return 0
