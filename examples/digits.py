"""Digits as pictures, speech and video: the data of omni_digits.py, video_digits.py and zoom_digits.py. Not a config.

With the environment variable DIGITS=FOLDER the digits are real: handwritten ones from FOLDER/mnist/mnist.parquet and spoken ones
from FOLDER/fsdd/fsdd.parquet, Hugging Face files with the columns image or audio, and label. Without it they are drawn, and
spoken as a telephone would: two tones a digit. Held-out rows are made of pictures and sounds that no training row has.

Every question is the sum of two digits: "image" shows two pictures, "audio" says one and writes the other, "video" shows one
after the other, "mixed" shows one and says the other. Answers show their work, `3+4=7`; the reward looks at what follows the
equals sign.
"""

from __future__ import annotations

import functools
import io
import os
import random
import wave
from pathlib import Path
from typing import Any

import numpy as np

Medium = tuple[Any, int]  # bytes of a file, or frames; the digit
_HELD_OUT_PART = 8  # one medium in so many
_NUM_DRAWN = 3000
_RATE = 8000


def rows(modality: str, *, held_out: bool, num_rows: int) -> list[dict[str, Any]]:
    """Rows with `prompt`, a chat of one question, and `label`, such as "3+4=7"."""
    draw = random.Random(f"{modality} {held_out}")
    kinds = {"image": ("image", "image"), "audio": ("audio", "text"), "mixed": ("image", "audio")}.get(modality)
    made = []
    for _ in range(num_rows):
        if kinds is None:
            (first, a), (second, b) = (draw.choice(_moving(held_out)) for _ in range(2))
            parts = [{"type": "video", "video": first + second}]
        else:
            drawn = [draw.choice(_written() if kind == "text" else media(kind, held_out)) for kind in kinds]
            parts = [{"type": kind, kind: medium} for kind, (medium, _) in zip(kinds, drawn, strict=True)]
            a, b = (digit for _, digit in drawn)
        prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "sum?"}]}]
        made.append({"prompt": prompt, "label": f"{a}+{b}={a + b}"})
    return made


def demonstrate(prompt: Any, label: str, draw: random.Random) -> str:
    """The worked answer; half of them with one number wrong: enough to learn the task, too little to be sure of it."""
    first, second, total = (int(number) for number in label.replace("=", "+").split("+"))
    wrong = draw.choice(("", "", "", "first", "second", "total"))
    if wrong == "first":
        first = (first + draw.randint(1, 9)) % 10
    elif wrong == "second":
        second = (second + draw.randint(1, 9)) % 10
    elif wrong == "total":
        total = (total + draw.randint(1, 18)) % 19
    return f"{first}+{second}={total}"


def exact(response: str, label: str, *, prompt: Any, metadata: dict[str, object]) -> float:
    """1 for the right sum."""
    return float(response.rpartition("=")[2] == label.rpartition("=")[2])


def _written() -> list[Medium]:
    return [(str(digit), digit) for digit in range(10)]


@functools.cache
def media(kind: str, held_out: bool) -> list[Medium]:
    """Every picture or sound of one part."""
    return [medium for n, medium in enumerate(_all_media(kind)) if (n % _HELD_OUT_PART == 0) == held_out]


@functools.cache
def _all_media(kind: str) -> list[Medium]:
    """Every picture or sound, of both parts: drawing them takes seconds, and is done once."""
    folder = os.environ.get("DIGITS")
    if folder is not None:
        return _read(Path(folder), kind)
    draw = random.Random(kind)
    return [((_drawn if kind == "image" else _dialled)(n % 10, draw), n % 10) for n in range(_NUM_DRAWN)]


def _read(folder: Path, kind: str) -> list[Medium]:
    import pyarrow.parquet

    name = {"image": "mnist/mnist.parquet", "audio": "fsdd/fsdd.parquet"}[kind]
    table = pyarrow.parquet.read_table(folder / name, columns=[kind, "label"]).to_pydict()
    pairs = [(value["bytes"], label) for value, label in zip(table[kind], table["label"], strict=True)]
    random.Random(0).shuffle(pairs)
    return pairs


@functools.cache
def _moving(held_out: bool) -> list[Medium]:
    """Pictures as two frames, the second moved by a few pixels."""
    from PIL import Image, ImageChops

    draw = random.Random("moving")
    made = []
    for picture, digit in media("image", held_out):
        frame = Image.open(io.BytesIO(picture)).convert("L")
        made.append(([picture, _png(ImageChops.offset(frame, draw.randint(-3, 3), draw.randint(-3, 3)))], digit))
    return made


def _drawn(digit: int, draw: random.Random) -> bytes:
    """A digit that fills 28 x 28 pixels, thin or bold, a little off the middle, tilted, with noise. Smaller ones with as much
    room around them are learnt by none of the tiny models in these few steps."""
    from PIL import Image, ImageDraw

    image = Image.new("L", (28, 28))
    place = (14 + draw.uniform(-2, 2), 14 + draw.uniform(-2, 2))
    ImageDraw.Draw(image).text(
        place,
        str(digit),
        fill=draw.randint(200, 255),
        font=_font(),
        anchor="mm",
        stroke_width=draw.choice((0, 1)),
    )
    image = image.rotate(draw.uniform(-15, 15), Image.Resampling.BILINEAR)
    noise = np.random.default_rng(draw.getrandbits(32)).normal(0, 8, (28, 28))
    return _png(Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8)))


@functools.cache
def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size=26)


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _dialled(digit: int, draw: random.Random) -> bytes:
    """Two tones of about 0.4 s, as a telephone's keys have them, with noise."""
    row, column = (3, 1) if digit == 0 else divmod(digit - 1, 3)
    low, high = (697, 770, 852, 941)[row], (1209, 1336, 1477)[column]
    time_s = np.arange(int(_RATE * draw.uniform(0.3, 0.5))) / _RATE
    tones = np.sin(2 * np.pi * low * time_s) + np.sin(2 * np.pi * high * time_s)
    noise = np.random.default_rng(draw.getrandbits(32)).normal(0, 0.3, len(time_s))
    samples = ((tones + noise) * draw.uniform(2000, 9000)).clip(-32768, 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(_RATE)
        writer.writeframes(samples.tobytes())
    return file.getvalue()
