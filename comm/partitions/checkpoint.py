"""A partition on disk, and back into rings of any number and size.

Owns the folder's form. Rows are written record by record in the form in which they lie in a ring (`records.py`), so at most one
record is in memory beside the rings, and nothing is pickled. A manifest, written last, says that the rest is whole.

    folder/rows.bin         record | record | ...     header, descriptor (with keys, groups, tags, what was read), payload
    folder/manifest.json    {"num_records", "num_rows", "num_bytes", "spec", "tasks"}

    await save(part, folder)
    await restore(bus.partition("eval", capacity_bytes=...), folder)     # rank of ranks: each takes its share of the records

Invariant: what is restored has the same rows, columns, keys, groups, versions, tags, tasks and read rows; row ids are new, and
rows that were claimed and not acknowledged are ready again.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from rondo.comm.partitions.batch import Batch
from rondo.comm.partitions.client import Partition
from rondo.comm.partitions.entry import SAID
from rondo.comm.partitions.runs import compress
from rondo.comm.partitions.spec import load_sampler
from rondo.comm.ring.records import (
    RECORD,
    Column,
    Descriptor,
    Header,
    column_arrays,
    plan,
    read_descriptor,
    read_header,
    write_header,
    write_payload,
)
from rondo.runtime.errors import CorruptData

ROWS, MANIFEST = "rows.bin", "manifest.json"
_ROWS_A_RECORD = 256


async def save(part: Partition, folder: Path, *, rows_a_record: int = _ROWS_A_RECORD) -> int:
    """Write every row to `folder`, which is made; how many rows. Clear nothing meanwhile: a row that goes is a KeyError."""
    folder.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240  # one system call beside megabytes of writes
    tasks = await part.tasks()
    read = {task["name"]: {id for start, rows in task["done"] for id in range(start, start + rows)} for task in tasks}
    num_rows = num_records = 0
    with (folder / f"{ROWS}.tmp").open("wb") as file:
        async for page in part.pages():
            for alike in _alike(page, rows_a_record):
                ids = [row["id"] for row in alike]
                batch = await part.get(ids, alike[0]["columns"], copy=False)
                done = {name: compress([i for i, id in enumerate(ids) if id in seen]) for name, seen in read.items()}
                _write(file, batch, {name: runs for name, runs in done.items() if runs}, num_records)
                num_rows, num_records = num_rows + len(ids), num_records + 1
                await asyncio.sleep(0)  # a large partition must not stop this process's other work
        num_bytes = file.tell()
    (folder / f"{ROWS}.tmp").rename(folder / ROWS)
    manifest = {
        "num_records": num_records, "num_rows": num_rows, "num_bytes": num_bytes,
        "tasks": [{name: task[name] for name in ("name", "columns", "sampler", "num_passes")} for task in tasks],
    }  # fmt: skip
    (folder / f"{MANIFEST}.tmp").write_bytes(orjson.dumps(manifest))
    (folder / f"{MANIFEST}.tmp").rename(folder / MANIFEST)
    return num_rows


async def restore(part: Partition, folder: Path, *, rank: int = 0, ranks: int = 1, deadline_s: float = 600.0) -> int:
    """Put this rank's share of the saved rows; how many. CorruptData for a folder that is not whole, before anything is put.

    Waits for room like any put. Call `end` when every rank is through, where the partition had ended.
    """
    if not (folder / MANIFEST).exists():
        raise CorruptData(
            f"folder {folder} must hold {MANIFEST}, which is written last, got none. Save the partition again."
        )
    manifest = orjson.loads((folder / MANIFEST).read_bytes())
    if (folder / ROWS).stat().st_size != manifest["num_bytes"]:
        raise CorruptData(
            f"{folder / ROWS} must have {manifest['num_bytes']} bytes, got {(folder / ROWS).stat().st_size}."
        )
    for task in manifest["tasks"]:
        stream = part.stream(task["name"], columns=task["columns"], sampler=load_sampler(task["sampler"]))
        await stream.open()
        await part.reset(task["name"], task["num_passes"])
    rows = np.asarray(np.memmap(folder / ROWS, np.uint8, "r")) if manifest["num_bytes"] else np.empty(0, np.uint8)
    num_rows = 0
    for number, (descriptor, columns) in enumerate(_records(rows)):
        if number % ranks != rank:
            continue
        if _sum(columns) != descriptor.meta["sum"]:
            raise CorruptData(f"record {number} of {folder / ROWS} must match its checksum, got another one.")
        meta = {name: value for name, value in descriptor.meta.items() if name != "sum"}
        n = sum(count for *_, count in descriptor.spans)
        await part.put_record(columns, n, meta, deadline_s=deadline_s)
        num_rows += n
    return num_rows


def _alike(page: list[dict[str, Any]], most: int) -> Iterator[list[dict[str, Any]]]:
    """Neighbours that have the same columns, and all or none a key; at most so many."""
    for _, rows in groupby(page, key=lambda row: (row["columns"], "key" in row)):
        while alike := list(islice(rows, most)):
            yield alike


def _write(file: BinaryIO, batch: Batch, done: dict[str, Any], seq: int) -> None:
    columns = [Column(name, batch.dtype(name), batch.arrays(name)) for name in batch]
    said = {name: getattr(batch, name) for name in SAID if getattr(batch, name) is not None}
    meta = {**said, "json": [name for name in batch if batch.is_json(name)], "done": done, "sum": _sum(columns)}
    n = len(batch)
    record = plan([(0, 0, 0, n)], columns, meta)
    buffer = np.zeros(record.num_bytes, np.uint8)
    write_payload(record, columns, buffer[record.payload :])
    header = Header(RECORD, file.tell(), seq, record.num_bytes, len(record.descriptor), 0, 0)
    write_header(buffer.data, 0, header, record.descriptor)
    file.write(buffer.data)


def _records(rows: np.ndarray) -> Iterator[tuple[Descriptor, list[Column]]]:
    """Records of the mapped file one by one, each checked before its payload is looked at."""
    at = 0
    while at < len(rows):
        header, encoded = read_header(rows.data, at, at, len(rows) - at)
        descriptor = read_descriptor(header, encoded)
        payload = rows[at + descriptor.payload : at + header.num_bytes]
        yield descriptor, [Column(c.name, c.dtype, column_arrays(payload, c)) for c in descriptor.columns]
        at += header.num_bytes


def _sum(columns: Sequence[Column]) -> int:
    """CRC-32 over every array, column by column."""
    found = 0
    for column in columns:
        for array in column.arrays:
            found = zlib.crc32(np.ascontiguousarray(array).data, found) if array.size else found
    return found
