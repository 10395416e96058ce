"""Host memory with many large images in flight, and what the media of a prompt group cost on the bus.

    rondo bench media [--images 100] [--workers 2] [--image-max-tokens 1024]

Memory: so many prompts, each with its own JPEG of 12 megapixels, are handed to `MediaPool.prepare` at once, which is what a
rollout replica calls. "handed on" lets go of every prompt when it is prepared, as after its put and its last sample; "kept"
holds all of them until the last, so that main has to hold their arrays, and nothing else. Peaks are of resident memory, read
every few milliseconds; workers are all descendants of this process together, and a page that several map counts for each.
"above" is beyond what they had when the pool had loaded, before the first prompt.

Bus: what `RingWriter.put` takes in a ring for the media of a group once and n rows of one sample, in the columns of the
rollout role, against n rows that each bring their media along. Payload, descriptors and alignment count.

The model is a Qwen3-Omni of half a million parameters with the processor of the full one: 24 KiB of float32 patches a token.
It and the images are made by a process of its own, so that this one imports no torch. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import uvloop

from rondo.comm.ring.records import GROUP_BLOB, Column, record_bytes
from rondo.comm.ring.ring import RingWriter, ring_bytes
from rondo.models.media.config import MediaConfig
from rondo.models.media.inputs import MediaInputs
from rondo.models.media.refs import Kind, MediaRef
from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import Row
from rondo.roles.data.media import MediaPool
from rondo.runtime.memory.segments import Segment

MIB = 1 << 20
HEIGHT, WIDTH = 3000, 4000
FRAME_HEIGHT, FRAME_WIDTH, NUM_FRAMES = 480, 640, 4
SOUND_S, SOUND_HZ = 2, 16_000
DATA = DataConfig(path="unused", apply_chat_template=True)
_INTERVAL_S = 0.002
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


# ---- what is measured with ------------------------------------------------------------------------------------------


def make(folder: Path, num_images: int) -> None:
    """The model, and images 0.jpg, 1.jpg, ... of 1.8 MB: waves with a light grain, each shifted and tinted its own way."""
    from PIL import Image

    from rondo.models.tiny import qwen3_omni

    qwen3_omni.build(folder / "model", patch_size=16)
    picture = scene(HEIGHT, WIDTH)
    for number in range(num_images):
        shifted = np.roll(picture, (31 * number, 47 * number, number), (0, 1, 2))
        Image.fromarray(shifted).save(folder / f"{number}.jpg", quality=85)


def scene(height: int, width: int) -> np.ndarray:
    """uint8 [height, width, 3]"""
    y, x = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)
    waves = [
        96 + 64 * np.sin(x / (40 + 30 * c)) * np.cos(y / (90 - 20 * c)) + 32 * np.sin((x + y) / 400) for c in range(3)
    ]
    grain = np.random.default_rng(0).normal(0, 6, (250, 250, 3)).astype(np.float32)
    tiled = np.tile(grain, (-(-height // 250), -(-width // 250), 1))[:height, :width]
    return np.clip(np.stack(waves, axis=-1) + tiled, 0, 255).astype(np.uint8)


def frames() -> list[str | bytes]:
    from PIL import Image

    picture, made = scene(FRAME_HEIGHT, FRAME_WIDTH), []
    for number in range(NUM_FRAMES):
        file = io.BytesIO()
        Image.fromarray(np.roll(picture, 8 * number, axis=1)).save(file, "JPEG")
        made.append(file.getvalue())
    return [*made]


def sound() -> bytes:
    """A WAV of one tone."""
    file = io.BytesIO()
    tone = np.sin(np.arange(SOUND_S * SOUND_HZ) * (2 * np.pi * 440 / SOUND_HZ))
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, SOUND_HZ, 0, "NONE", ""))
        out.writeframes((tone * 8192).astype("<i2").tobytes())
    return file.getvalue()


def prompt(name: str, kind: Kind, source: str | bytes | list[str | bytes]) -> Row:
    content = [{"type": kind}, {"type": "text", "text": "What is this?"}]
    return Row(name, [{"role": "user", "content": content}], None, {}, (MediaRef(kind, source),))


# ---- memory ---------------------------------------------------------------------------------------------------------


def resident_bytes(pid: int) -> int:
    """0 for a process that has ended. Not from `smaps_rollup`, which walks all pages while the process waits to map more."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except (FileNotFoundError, ProcessLookupError):
        return 0


def descendants() -> list[int]:
    """Processes that this one started, and those that they started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = [os.getpid()]
    for parent in found:  # it grows while it is read
        found += [pid for pid, its_parent in parents.items() if its_parent == parent]
    return found[1:]


class Memory:
    """A thread that reads what this process and its workers hold, and remembers the most since `restart`, which looks for the
    workers."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="memory")
        self.restart()

    def restart(self) -> None:
        with self._lock:
            self._workers = descendants()
            self.main_bytes = self.workers_bytes = 0

    def now(self) -> tuple[int, int]:
        """Bytes of this process, bytes of all workers."""
        return resident_bytes(os.getpid()), sum(map(resident_bytes, self._workers))

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            main, workers = self.now()
            with self._lock:
                self.main_bytes, self.workers_bytes = max(self.main_bytes, main), max(self.workers_bytes, workers)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes, absolute, of main and of all workers together; and how it went."""

    main_bytes: int
    workers_bytes: int
    prepared_bytes: int
    most_at_door: int
    took_s: float


async def fly(pool: MediaPool, rows: Sequence[Row], max_tokens: int, memory: Memory, *, keep: bool) -> Peak:
    """Prepares all rows at once."""
    kept: list[MediaInputs] = []
    prepared_bytes = most_at_door = 0

    async def one(row: Row) -> None:
        nonlocal prepared_bytes, most_at_door
        _, media = await pool.prepare(row, DATA, max_tokens)
        assert media is not None
        prepared_bytes += media.num_bytes
        most_at_door = max(most_at_door, pool.stats().num_at_door)
        if keep:
            kept.append(media)

    memory.restart()
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for row in rows:
            tasks.create_task(one(row))
    took_s = time.perf_counter() - started
    main, workers = memory.now()  # all that is kept is here now
    return Peak(
        max(main, memory.main_bytes),
        max(workers, memory.workers_bytes),
        prepared_bytes,
        most_at_door,
        took_s,
    )


# ---- bus ------------------------------------------------------------------------------------------------------------


def row_columns(tokens: np.ndarray, num_response: int) -> list[Column]:
    """One sample as the rollout role puts it."""
    answer = np.ones(num_response, np.int32)
    return [
        Column("tokens", "int32", [np.concatenate([tokens, answer])]),
        Column("loss_mask", "uint8", [answer.astype(np.uint8)]),
        Column("rollout_log_probs", "float32", [answer.astype(np.float32)]),
        Column("policy_versions", "int32", [answer]),
    ]


def media_columns(media: MediaInputs) -> list[Column]:
    return [Column(name, array.dtype.name, [array]) for name, array in media.arrays.items()]


Put = tuple[list[list[int]], list[Column], dict[str, Any], list[list[float]]]
"""Spans, columns and what is said of one record and of its rows."""


def puts(tokens: np.ndarray, media: MediaInputs, num_samples: int, num_response: int, *, shared: bool) -> list[Put]:
    """The records of group 0: its media once before its samples, or again in each of them."""
    length = [len(tokens) + num_response, num_response, 1.0, 0, 0, 0]
    described = {"reservation": "group.0.0"}
    carried = [] if shared else media_columns(media)
    blob: Put = ([[0, 0, GROUP_BLOB, 1]], media_columns(media), described, [[media.encoder_positions]])
    rows: list[Put] = [
        ([[0, 0, sample, 1]], [*row_columns(tokens, num_response), *carried], described, [[each] for each in length])
        for sample in range(num_samples)
    ]
    return [blob, *rows] if shared else rows


def ring_bytes_of(records: list[Put]) -> int:
    """Bytes of a real ring that these take."""
    num_bytes = ring_bytes(2 * sum(record_bytes(*record) for record in records))
    fd = os.memfd_create("benchmark-media", os.MFD_CLOEXEC)
    os.truncate(fd, num_bytes)
    with Segment("ring/benchmark-media", num_bytes, fd) as segment:
        writer = RingWriter(segment, None, "ring/benchmark-media")
        try:
            for spans, columns, described, info in records:
                writer.put(spans, columns, epoch=0, attempt=0, meta=described, info=info)
            return writer.head
        finally:
            writer.close()


async def group(pool: MediaPool, row: Row, options: argparse.Namespace) -> dict[str, Any]:
    tokens, media = await pool.prepare(row, DATA, options.max_tokens)
    assert media is not None
    once, again = (
        ring_bytes_of(puts(tokens, media, options.samples, options.response, shared=shared)) for shared in (True, False)
    )
    return {
        "prompt_tokens": len(tokens),
        "media_bytes": media.num_bytes,
        "bytes_per_group": once,
        "bytes_per_sample_times_n": again,
        "ratio": round(once / again, 4),
    }


# ---- the report -----------------------------------------------------------------------------------------------------


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    rows = [prompt(f"image {n}", "image", str(folder / f"{n}.jpg")) for n in range(options.images)]
    config = MediaConfig(
        num_workers=options.workers, image_max_tokens=options.image_max_tokens, max_group_bytes=1 << 30
    )
    with Memory() as memory:
        async with MediaPool(str(folder / "model"), config, load_deadline_s=600) as pool:
            memory.restart()
            base_main, base_workers = memory.now()
            peaks = {
                name: await fly(pool, rows, options.max_tokens, memory, keep=name == "kept")
                for name in ("handed on", "kept")
            }
            assert pool.stats().num_restarts == 0
            after_main, after_workers = memory.now()
            groups = {
                "image": await group(pool, rows[0], options),
                "video": await group(pool, prompt("video", "video", frames()), options),
                "audio": await group(pool, prompt("audio", "audio", sound()), options),
            }
    decoded = options.images * HEIGHT * WIDTH * 3
    prepared = peaks["kept"].prepared_bytes
    files = sum((folder / f"{n}.jpg").stat().st_size for n in range(options.images))
    print(
        f"{options.images} images of {WIDTH} x {HEIGHT} in flight, {options.workers} workers: {mib(files):,.0f} MiB of files, "
        f"{mib(decoded):,.0f} MiB decoded, {mib(prepared):,.0f} MiB prepared"
    )
    print(f"before the first prompt: main {mib(base_main):,.0f} MiB, workers {mib(base_workers):,.0f} MiB")
    print(f"\n{'peak MiB':10} {'main':>8} {'above':>8} {'workers':>9} {'above':>8} {'at door':>8} {'images/s':>9}")
    for name, peak in peaks.items():
        print(
            f"{name:10} {mib(peak.main_bytes):8,.0f} {mib(peak.main_bytes - base_main):8,.0f} "
            f"{mib(peak.workers_bytes):9,.0f} {mib(peak.workers_bytes - base_workers):8,.0f} "
            f"{peak.most_at_door:8} {options.images / peak.took_s:9.2f}"
        )
    print(f"afterwards: main {mib(after_main):,.0f} MiB, workers {mib(after_workers):,.0f} MiB")
    title = f"a group of {options.samples}"
    print(
        f"\n{title:16} {'prompt tokens':>14} {'media bytes':>14} {'bytes of group':>16} {'per sample x n':>16} {'ratio':>7}"
    )
    for name, found in groups.items():
        print(
            f"{name:16} {found['prompt_tokens']:14,} {found['media_bytes']:14,} {found['bytes_per_group']:16,} "
            f"{found['bytes_per_sample_times_n']:16,} {found['ratio']:7.4f}"
        )
    handed_on, kept = peaks["handed on"], peaks["kept"]
    return {
        "images": options.images,
        "workers": options.workers,
        "peak_main_mib": mib(handed_on.main_bytes - base_main),
        "peak_workers_mib": mib(handed_on.workers_bytes - base_workers),
        "peak_main_absolute_mib": mib(handed_on.main_bytes),
        "peak_workers_absolute_mib": mib(handed_on.workers_bytes),
        "kept_peak_main_mib": mib(kept.main_bytes - base_main),
        "kept_peak_workers_mib": mib(kept.workers_bytes - base_workers),
        "decoded_mib": mib(decoded),
        "prepared_mib": mib(prepared),
        "images_s": round(options.images / handed_on.took_s, 2),
        "samples": options.samples,
        **{key: groups["image"][key] for key in ("bytes_per_group", "bytes_per_sample_times_n", "ratio")},
        "groups": groups,
    }


def mib(num_bytes: int) -> float:
    return round(num_bytes / MIB, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100, help="prompts in flight")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--image-max-tokens", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=8, help="of a prompt group on the bus")
    parser.add_argument("--response", type=int, default=512, help="tokens of one sample")
    parser.add_argument("--max-tokens", type=int, default=16_384 + 1024, help="of one prompt")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make(options.make, options.images)
        return
    with tempfile.TemporaryDirectory(prefix="rondo-media-") as name:
        line = [sys.executable, "-m", "benchmarks.media", "--make", name, "--images", str(options.images)]
        subprocess.run(line, check=True, cwd=Path(__file__).parents[1], env={**os.environ, "TQDM_DISABLE": "1"})
        result = uvloop.run(measure(Path(name), options))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
