"""delta: from one version to the next by what changed, exactly, in about a hundredth of the bytes at RL learning rates.

Owns how changes are coded, checked and applied to a `Held` in place. Does not own how they travel.

Both versions are read as 16-bit words, which bfloat16 elements are. A step of 1e-6 moves few of them at all, and most of
those by one unit in the last place. So a bucket becomes, whichever is smallest:

    nothing   no word changed
    gaps      per changed word one byte: words skipped since the last one (255: 255 and go on), and one byte: its step
    bitmap    one bit a word, and steps, where that is smaller
    whole     its bytes

A step is the difference of the bits modulo 2**16, zigzag (0, -1, +1, ... = 0, 1, 2, ...); 255 says that it lies in a list of
whole 16 bits. Gaps and steps are deflated (Huffman only): to about 6 and 1.5 bits a changed word.

Message: magic | sum of the rest | bytes of the rest | header, JSON | manifest of the new version | codes of the buckets

Invariant: a message is applied only when it is whole (its own sum), its base is exactly what is held (attempt, version,
checksum), and the result counts only when every bucket has the sum of the new manifest. Until then nothing is served, and
a refusal before the first byte leaves what was held.

    message = encode(base, new)               # None where the layouts differ: send the whole version
    apply(held, message)                      # Refused: another base; CorruptData: damaged. Both: send the whole version
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np
import orjson

from rondo.comm.weights.held import Held, Published, VersionId
from rondo.comm.weights.manifest import Manifest
from rondo.comm.weights.sums import bucket_sum, in_threads
from rondo.runtime.errors import CorruptData, Refused

_FRAME = struct.Struct("<8sQQ")  # magic, sum of what follows, its bytes
_MAGIC = b"rondo-d1"
_LARGE = 255
_PIECE_WORDS = 1 << 18
"""Half a megabyte is compared at a time: what comes of it stays in the cache."""
_NOTHING, _GAPS, _BITMAP, _WHOLE = "nothing", "gaps", "bitmap", "whole"


class _Code(NamedTuple):
    """One bucket: bytes of its places, of its steps and of its long steps, one behind the other.

    Gaps and steps are deflated where they take fewer bytes than they are (`num_gaps`, `num_changed`).
    """

    kind: str
    num_changed: int
    num_gaps: int
    places_bytes: int
    steps_bytes: int
    long_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.places_bytes + self.steps_bytes + self.long_bytes


# ---- to code --------------------------------------------------------------------------------------------------------


def encode(base: Published, new: Published, *, num_threads: int = 1) -> bytes | None:
    """The message that makes `new` of `base`, or None where their layouts differ or it would be larger than `new`."""
    if not base.manifest.same_layout(new.manifest):
        return None
    indices = range(new.manifest.num_buckets)
    buckets = in_threads(_encode_bucket, ((base.bucket(i), new.bucket(i)) for i in indices), num_threads)
    header = orjson.dumps(
        {
            "base": list(base.id),
            "id": list(new.id),
            "manifest_bytes": len(new.manifest.raw),
            "buckets": [list(code) for code, _ in buckets],
        }
    )
    parts = [len(header).to_bytes(8, "little"), header, new.manifest.raw]
    for _, pieces in buckets:
        parts += pieces
    rest = b"".join(parts)
    message = _FRAME.pack(_MAGIC, bucket_sum(memoryview(rest)), len(rest)) + rest
    return message if len(message) < new.manifest.num_bytes else None


def _encode_bucket(old: np.ndarray, new: np.ndarray) -> tuple[_Code, list[bytes]]:
    at = changed_words(old, new)
    if not at.size and old[-1] == new[-1]:
        return _Code(_NOTHING, 0, 0, 0, 0, 0), []
    num_words = new.size // 2
    whole = _Code(_WHOLE, 0, 0, 0, 0, new.size), [new.tobytes()]
    if new.size % 2:
        return whole
    step = (new.view("<u2")[at] - old.view("<u2")[at]).view("<i2")
    zigzag = ((step << 1) ^ (step >> 15)).view("<u2")
    long = zigzag[zigzag >= _LARGE]
    steps = _deflated(np.minimum(zigzag, _LARGE).astype(np.uint8))
    gaps = _gaps(at)
    kind, places = _GAPS, _deflated(gaps)
    if len(places) > -(-num_words // 8):
        mask = np.zeros(num_words, np.bool_)
        mask[at] = True
        kind, places = _BITMAP, np.packbits(mask).tobytes()
    code = _Code(kind, at.size, gaps.size, len(places), len(steps), long.nbytes)
    return (code, [places, steps, long.tobytes()]) if code.num_bytes < new.size else whole


def changed_words(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Where 16-bit words differ, int64, ascending. `old` and `new` [n] uint8; a last odd byte is not looked at."""
    end = new.size // 2 * 2
    a, b = old[:end].view("<u2"), new[:end].view("<u2")
    found = []
    for start in range(0, a.size, _PIECE_WORDS):
        at = np.flatnonzero(a[start : start + _PIECE_WORDS] != b[start : start + _PIECE_WORDS])
        at += start
        found.append(at)
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _gaps(at: np.ndarray) -> np.ndarray:
    skipped = np.diff(at, prepend=-1) - 1
    if not at.size or skipped.max() < _LARGE:
        return skipped.astype(np.uint8)
    times, rest = np.divmod(skipped, _LARGE)
    ends = np.cumsum(times + 1) - 1
    gaps = np.full(int(ends[-1]) + 1, _LARGE, np.uint8)
    gaps[ends] = rest
    return gaps


def _deflated(values: np.ndarray) -> bytes:
    """`values`, or where that is shorter, they deflated without looking for repetitions."""
    deflate = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    short = deflate.compress(values.data) + deflate.flush()
    return short if len(short) < values.size else values.tobytes()


# ---- to apply -------------------------------------------------------------------------------------------------------


class Delta(NamedTuple):
    """A message that is whole: from which version to which, and the codes. `body` [n] uint8 is a view of the message."""

    base: VersionId
    id: VersionId
    manifest: Manifest
    codes: list[_Code]
    body: np.ndarray


def parse(message: bytes | memoryview | np.ndarray) -> Delta:
    """Raises CorruptData for a message that is cut off, has a wrong bit, or does not add up."""
    data = np.frombuffer(message, np.uint8)
    if data.size < _FRAME.size:
        raise CorruptData(f"a delta must have at least {_FRAME.size} bytes, got {data.size}. Send the whole version")
    magic, wanted, num_bytes = _FRAME.unpack(data[: _FRAME.size].tobytes())
    rest = data[_FRAME.size :]
    if magic != _MAGIC or rest.size != num_bytes:
        raise CorruptData(
            f"a delta must be {num_bytes} bytes behind its magic, got {rest.size}. Send the whole version"
        )
    found = bucket_sum(rest)
    if found != wanted:
        raise CorruptData(f"a delta must have sum {wanted:08x}, got {found:08x}. Send the whole version")
    header_bytes = int.from_bytes(rest[:8].tobytes(), "little")
    try:
        header = orjson.loads(rest[8 : 8 + header_bytes].tobytes())
        base, new = VersionId.from_json(header["base"]), VersionId.from_json(header["id"])
        codes = [_Code(*fields) for fields in header["buckets"]]
        body_at = 8 + header_bytes + header["manifest_bytes"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise CorruptData(f"a delta's header must name base, version and buckets, got {error!r}.") from error
    manifest = Manifest.parse(rest[8 + header_bytes : body_at].tobytes(), new.checksum)
    body = rest[body_at:]
    if len(codes) != manifest.num_buckets or sum(code.num_bytes for code in codes) != body.size:
        raise CorruptData(
            f"a delta must have codes for {manifest.num_buckets} buckets, got {len(codes)} and {body.size} bytes."
        )
    return Delta(base, new, manifest, codes, body)


def apply(held: Held, message: bytes | memoryview | np.ndarray, *, num_threads: int = 1) -> VersionId:
    """Make the version that is held the next one, in place. Returns its name.

    Raises CorruptData for a damaged message and Refused for one on another base, which leave what is held; CorruptData too
    when the result is not what the manifest names, after which nothing is held until a whole version has come.
    """
    delta = parse(message)
    if held.id != delta.base:
        raise Refused(
            f"a delta to version {delta.id} must find its base {delta.base}, got {held.id or 'none'}. Send the whole version"
        )
    if not held.manifest.same_layout(delta.manifest):
        raise Refused(f"a delta to version {delta.id} must keep the layout of its base. Send the whole version")
    held.begin(delta.id, delta.manifest.raw)
    starts = np.cumsum([0] + [code.num_bytes for code in delta.codes])
    work = (
        (held.bucket(index), code, delta.body[starts[index] : starts[index + 1]])
        for index, code in enumerate(delta.codes)
    )
    in_threads(_apply_bucket, work, num_threads)
    held.prove(num_threads=num_threads)
    return delta.id


def _apply_bucket(bucket: np.ndarray, code: _Code, body: np.ndarray) -> None:
    if code.kind == _NOTHING:
        return
    if code.kind == _WHOLE:
        if body.size != bucket.size:
            raise CorruptData(f"a whole bucket must have {bucket.size} bytes, got {body.size}. Send the whole version")
        bucket[:] = body
        return
    num_words = bucket.size // 2
    places, rest = body[: code.places_bytes], body[code.places_bytes :]
    if code.kind == _GAPS:
        gaps = _inflated(places, code.num_gaps)
        ends = np.flatnonzero(gaps != _LARGE)
        at = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)
    else:
        at = np.flatnonzero(np.unpackbits(places, count=num_words))
    short, long = _inflated(rest[: code.steps_bytes], code.num_changed), rest[code.steps_bytes :].view("<u2")
    large = np.flatnonzero(short == _LARGE)
    if not at.size == short.size == code.num_changed or large.size != long.size or at[-1] >= num_words:
        raise CorruptData(
            f"a delta must name {code.num_changed} words of {num_words}, got others. Send the whole version"
        )
    zigzag = short.astype("<u2")
    zigzag[large] = long
    words = bucket[: num_words * 2].view("<u2")
    words[at] += (zigzag >> 1) ^ (-(zigzag & 1).view("<i2")).view("<u2")


def _inflated(values: np.ndarray, num_values: int) -> np.ndarray:
    if values.size == num_values:
        return values
    try:
        return np.frombuffer(zlib.decompressobj(-15).decompress(values.data, num_values + 1), np.uint8)
    except zlib.error as error:
        raise CorruptData(f"a delta's codes must inflate, got {error}. Send the whole version") from error
