"""Versions on disk: a Hugging Face folder each, with the manifest that proves it.

Owns how a version lies in a folder, when it counts, and how many are kept. Does not own checkpoints (`models/checkpoint.py`),
which training goes on from; these are for engines that read files, and for nodes without another way.

    version_000005/
        model-00001-of-00002.safetensors, ...     tensors under their Hugging Face disk names
        model.safetensors.index.json              name -> file
        manifest.json                             names, dtypes, shapes, offsets, a sum a bucket
        version.json                              [attempt, version, checksum], and a sum of that

Invariant: a folder is written aside, flushed, and renamed; so it is whole or not there. A reader counts nothing before every
bucket, laid out as the manifest says, has its sum, and the manifest its checksum.

    write_version(run_dir / "weights", published, keep=2)
    id = read_version(newest(run_dir / "weights"), held)
"""

from __future__ import annotations

import os
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rondo.comm.weights.held import Held, Published, VersionId
from rondo.runtime.checkpoints import flush, flush_tree
from rondo.runtime.errors import CorruptData

MAX_FILE_BYTES = 4 << 30
_ABOUT = "version.json"
_MANIFEST = "manifest.json"
_INDEX = "model.safetensors.index.json"
_NAME = re.compile(r"version_(\d{6,})")


def write_version(
    root: Path, published: Published, *, keep: int, max_file_bytes: int = MAX_FILE_BYTES, durable: bool = True
) -> Path:
    """Write `published` as `root/version_000005`, then remove all but the newest `keep` (at least 1). Returns the folder.

    One of that name is replaced. `durable=False` leaves flushing to the system, for a folder in memory.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}.")
    folder = root / f"version_{published.id.version:06d}"
    aside = root / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        _write(aside, published, max_file_bytes)
        if durable:
            flush_tree(aside)
        if folder.exists():
            # A rename replaces no folder that holds files: the old one steps aside, and no reader meets a half of either.
            gone = root / f".{folder.name}.{os.getpid()}.old"
            folder.rename(gone)
            aside.rename(folder)
            shutil.rmtree(gone)
        else:
            aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    if durable:
        flush(root)
    for old in versions(root)[:-keep]:
        gone = root / f".{old.name}.{os.getpid()}.old"
        old.rename(gone)  # at once: a reader finds all of it or nothing
        shutil.rmtree(gone)
    return folder


def _write(folder: Path, published: Published, max_file_bytes: int) -> None:
    tensors = published.tensors()
    files = list(_files(tensors, max_file_bytes))
    where: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({each: tensors[each] for each in names}, folder / name, {"format": "pt"})
        where |= dict.fromkeys(names, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / _INDEX).write_bytes(orjson.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / _MANIFEST).write_bytes(published.manifest.raw)
    (folder / _ABOUT).write_bytes(_about(published.id))


def _about(id: VersionId) -> bytes:
    return orjson.dumps({"id": id.to_json(), "sum": zlib.crc32(orjson.dumps(id.to_json()))})


def _files(tensors: dict[str, torch.Tensor], max_file_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        if names and num_bytes + tensor.nbytes > max_file_bytes:
            yield names
            names, num_bytes = [], 0
        names.append(name)
        num_bytes += tensor.nbytes
    if names:
        yield names


def read_version(folder: Path, held: Held, *, num_threads: int = 1) -> VersionId:
    """Read the version in `folder` into `held`, which serves it then. Raises CorruptData for files that are damaged, cut off
    or of another version, FileNotFoundError for no folder; before its first byte is read, what was held stays."""
    about, raw = (folder / _ABOUT).read_bytes(), (folder / _MANIFEST).read_bytes()
    try:
        id = VersionId.from_json(orjson.loads(about)["id"])
        where = orjson.loads((folder / _INDEX).read_bytes())["weight_map"]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise CorruptData(
            f"{folder.name} must name its version, manifest and files, got {error!r}. Write it again"
        ) from error
    if about != _about(id):
        raise CorruptData(f"{folder.name}/{_ABOUT} must have the sum of its version, got another. Write it again")
    held.begin(id, raw)
    into = held.coming_tensors()
    if where.keys() != into.keys():
        raise CorruptData(f"{folder.name} must hold the tensors of its manifest, got others. Write it again")
    for file in sorted(set(where.values())):
        names = [name for name, its in where.items() if its == file]
        try:
            with safe_open(folder / file, framework="pt") as opened:
                for name in names:
                    found = opened.get_tensor(name)
                    if found.shape != into[name].shape or found.dtype != into[name].dtype:
                        raise CorruptData(f"tensor {name} in {file} must be as its manifest says, got {found.dtype}.")
                    into[name].copy_(found)
        except (SafetensorError, FileNotFoundError) as error:
            raise CorruptData(
                f"{folder.name}/{file} must be a whole safetensors file, got {error}. Write it again"
            ) from error
    held.prove(num_threads=num_threads)
    return id


def versions(root: Path) -> list[Path]:
    """The folders of whole versions, oldest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("version_")))


def newest(root: Path) -> Path | None:
    return next(reversed(versions(root)), None)
