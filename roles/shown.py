"""The media of a sample's later turns as a column of the bus: one array of bytes a row, beside the media that its group shares.

Owns how they lie in it. Does not own what they are (`models/media/inputs.py`).

    | bytes of the text, uint32 | text: [[bytes of each buffer], [[first token, key, arrays by name], ...]] | buffers |

Invariant: what is read is what was written, as views; a row without any has no byte.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import orjson

from rondo.models.media.inputs import MediaInputs
from rondo.runtime.values import decode, encode

_TEXT = struct.Struct("<I")


def written(shown: Sequence[tuple[int, MediaInputs]]) -> np.ndarray:
    """uint8 [bytes], of (first token, media)."""
    if not shown:
        return np.zeros(0, np.uint8)
    text, buffers = encode([[at, media.key, dict(media.arrays)] for at, media in shown])
    text = orjson.dumps([[len(each) for each in buffers], orjson.Fragment(text)])
    return np.frombuffer(b"".join([_TEXT.pack(len(text)), text, *buffers]), np.uint8)


def read(column: np.ndarray) -> list[tuple[int, MediaInputs]]:
    """(first token, media), whose arrays view the column."""
    if not len(column):
        return []
    view = column.data
    (size,) = _TEXT.unpack_from(view)
    sizes, node = orjson.loads(view[_TEXT.size : _TEXT.size + size])
    buffers = [view[begin:end] for begin, end in pairwise(accumulate(sizes, initial=_TEXT.size + size))]
    return [(at, MediaInputs(key, arrays)) for at, key, arrays in decode(node, buffers)]
