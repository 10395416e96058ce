"""Which checkpoints of a run are whole, whether their files are still what was written, and whether a disk has room for one.

Owns the names, the marker with its format and digests, the rotation of `checkpoints/step_000050/`, and where a run went on from
(`optimizer_resets.json`, and a record in `metrics.jsonl`); not what lies inside (`models/checkpoint.py`) or which are worth
keeping (`launch/keeping.py`). Light, since the coordinator and the command line ask too.

    COMPLETE    {"version": 50, "format": 2, "release": "0.1.0",
                 "files": {"shards/__0_0.distcp": [123456, "5f2a..."], ...}, "digest": "77e0..."}

`files` has the size and the BLAKE2b digest of every file, `digest` that of the marker without it. Files that the marker does not
name are left alone and never read.

Invariant: a folder has its name only with its `COMPLETE` marker, which is written after everything else is on the disk, and
before the folder is renamed; so a half-written checkpoint is never picked. One of a newer release is refused, not passed over.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from rondo.runtime import formats
from rondo.runtime.errors import CorruptData, RondoError
from rondo.runtime.records.record import JsonLines, write_whole

MARKER = "COMPLETE"
ASIDE = "set_aside"
"""Where checkpoints lie that a run went back behind, or whose files are not what was written."""
GOES_ON = "goes_on_from"
"""Of a record in metrics.jsonl: the version that the run goes on from; older records of later steps count no more."""
RESETS = "optimizer_resets.json"
_NAME = re.compile(r"step_(\d{6,})")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OLD_KEYS = {"version", "format", "release"}
"""Of markers before format 2, which have no digests."""
_MOST_THREADS = 16

Digests = Mapping[str, tuple[int, str]]
"""Name of a file below a checkpoint's folder -> its size in bytes, and its digest."""


class NoRoom(RondoError, OSError):
    """A disk has no room for a checkpoint; there may be some later."""

    def __init__(self, place: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(f"{place} must have room for {needed_bytes} bytes, got {free_bytes} free. Make room there")
        self.place, self.needed_bytes, self.free_bytes = place, needed_bytes, free_bytes


def folder_of(checkpoints: Path, version: int) -> Path:
    return checkpoints / f"step_{version:06d}"


def version_of(folder: Path) -> int:
    """The policy version of a checkpoint's folder. ValueError for other folders."""
    match = _NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"a checkpoint's folder must be named step_000050 or so, got {folder.name}.")
    return int(match[1])


def is_named(folder: Path) -> bool:
    """Whether a folder is named as a checkpoint's, whole or not."""
    return folder.is_dir() and _NAME.fullmatch(folder.name) is not None


def publish(aside: Path, folder: Path, known: Digests | None = None) -> None:
    """Make what was written in `aside` the checkpoint `folder`: flush it, mark it, rename it. `known`: digests of files that
    their writers have computed; the others are read."""
    flush_tree(aside)
    marker = aside / MARKER
    marker.write_bytes(_marker_of(aside, version_of(folder), known or {}))
    flush(marker)
    flush(aside)
    if folder.exists():
        # Unmarked before it goes: a half-removed checkpoint of the same version must not count.
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)
    aside.rename(folder)
    flush(folder.parent)


def mark_again(folder: Path) -> None:
    """Take files into the marker that were added to the whole checkpoint `folder`. It stays as old as it was."""
    marker, known = folder / MARKER, files_of(folder)
    if known is None:
        return
    status = marker.stat()
    write_whole(marker, _marker_of(folder, version_of(folder), known))
    os.utime(marker, ns=(status.st_atime_ns, status.st_mtime_ns))


def _marker_of(folder: Path, version: int, known: Digests) -> bytes:
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MARKER}
    known = dict(known)
    for name in (name for name in files if name.endswith(f"/{MARKER}")):  # a checkpoint inside this one
        inner = files_of(folder / Path(name).parent) or {}
        known |= {f"{name.removesuffix(MARKER)}{part}": found for part, found in inner.items()}
    found = {name: known[name] for name in files & known.keys()} | digests(folder, files - known.keys())
    told = {"version": version, **formats.stamp(formats.CHECKPOINT), "files": dict(sorted(found.items()))}
    return orjson.dumps(told | {"digest": _digest_of(told)}) + b"\n"


def _digest_of(told: Mapping[str, Any]) -> str:
    """Of a marker without its digest."""
    return _hash(orjson.dumps({name: told[name] for name in told if name != "digest"})).hexdigest()


_hash = functools.partial(hashlib.blake2b, digest_size=16)


def digests(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Size and digest of files below `folder`, which are read by several threads. FileNotFoundError for a missing one."""

    def of(name: str) -> tuple[int, str]:
        with (folder / name).open("rb") as file:
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, _hash).hexdigest()

    names = list(names)
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        return dict(zip(names, threads.map(of, names), strict=True))


def files_of(folder: Path) -> Digests | None:
    """What the marker of `folder` says of its files; None for one of an older release, which has no digests.

    Raises CorruptData where there is no marker, or it is not what was written, and ConfigError where only a newer release can
    read the checkpoint.
    """
    try:
        told = orjson.loads((folder / MARKER).read_bytes())
    except FileNotFoundError:
        raise CorruptData(
            f"a checkpoint must carry its {MARKER} marker, got {folder} without. Choose a whole one"
        ) from None
    except orjson.JSONDecodeError:
        raise _broken(folder, f"a damaged {MARKER} marker") from None
    if isinstance(told, int):  # the first releases'
        return None
    is_old = isinstance(told, dict) and told.keys() <= _OLD_KEYS
    if (
        isinstance(told, dict) and told.get("release") != formats.release()
    ):  # a newer one may compute its digest otherwise
        formats.check(told, formats.CHECKPOINT, folder)
    if not isinstance(told, dict) or not (is_old or told.get("digest") == _digest_of(told)):
        raise _broken(folder, f"a damaged {MARKER} marker")
    formats.check(told, formats.CHECKPOINT, folder)
    if is_old:
        return None
    if _NAME.fullmatch(folder.name) and told["version"] != version_of(folder):
        raise _broken(folder, f"the marker of version {told['version']}")
    return dict(told["files"])


def has(folder: Path, name: str) -> bool:
    """Whether the checkpoint `folder` has the file or folder `name`, such as "hf", as its marker says. Raises like `files_of`."""
    files = files_of(folder)
    return (folder / name).exists() and (files is None or any(f"{each}/".startswith(f"{name}/") for each in files))


def verify(folder: Path, within: tuple[str, ...] = ("",), rank: int = 0, num_ranks: int = 1) -> bool:
    """Compare the files of the checkpoint `folder` with its marker: all that are there, and the digests of this rank's share of
    them. `within`: files and folders that are looked at. False for a checkpoint of an older release, which has no digests.

    Raises CorruptData and ConfigError like `files_of`.
    """
    if (files := files_of(folder)) is None:
        return False
    told = {name: tuple(found) for name, found in sorted(files.items()) if name.startswith(within)}
    for name, (size, _) in told.items():
        got = (folder / name).stat().st_size if (folder / name).is_file() else None
        if got != size:
            raise _broken(folder, f"{name} missing" if got is None else f"{name} of {got} bytes for {size}")
    for name, found in digests(folder, list(told)[rank::num_ranks]).items():
        if found != told[name]:
            raise _broken(folder, f"{name} with other bytes")
    return True


def _broken(folder: Path, got: str) -> CorruptData:
    return CorruptData(f"{folder} must be a checkpoint as it was written, got {got}. Choose a whole one")


def free_bytes(place: Path) -> int:
    """What an ordinary user may still write where `place` lies, or will lie."""
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def is_full(error: BaseException) -> bool:
    """Whether a write failed for want of room: of the disk, a quota, or the greatest size of a file."""
    return any(
        isinstance(each, NoRoom)
        or getattr(each, "errno", None) in _FULL
        or any(f"os error {number})" in str(each) for number in _FULL)
        for each in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def complete(checkpoints: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name) and (path / MARKER).is_file()]
    return sorted(found, key=version_of)


def newest_complete(checkpoints: Path) -> Path | None:
    """The newest checkpoint with a marker, whose files nobody looks at here; None where there is none. ConfigError for one that
    only a newer release can read."""
    newest = next(reversed(complete(checkpoints)), None)
    if newest is not None:
        with suppress(CorruptData):
            files_of(newest)
    return newest


def newest_whole(checkpoints: Path, passed_over: Callable[[Path, CorruptData], object]) -> Path | None:
    """The newest checkpoint whose files are what was written; None where there is none. `passed_over` gets every newer one, and
    what is wrong with it. ConfigError for one that only a newer release can read."""
    named = [path for path in checkpoints.iterdir() if is_named(path)] if checkpoints.is_dir() else []
    for folder in sorted(named, key=version_of, reverse=True):
        try:
            verify(folder)
        except CorruptData as error:
            passed_over(folder, error)
        else:
            return folder
    return None


def rotate(checkpoints: Path, keep: int, held: Collection[int] = ()) -> None:
    """Remove whole checkpoints but the newest `keep` and those of the versions `held`, marker first, so that a half-removed one
    does not count; and what is older and has no marker: what others left who were killed while they removed."""
    kept = complete(checkpoints)[-keep:]
    for folder in checkpoints.iterdir() if kept else ():
        if _NAME.fullmatch(folder.name) and version_of(folder) < version_of(kept[0]) and version_of(folder) not in held:
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder)


def set_aside(checkpoints: Path, newest: int) -> list[Path]:
    """Whole checkpoints of versions above `newest` count no more: where each lies now."""
    aside = checkpoints / ASIDE
    moved = []
    for folder in complete(checkpoints):
        if version_of(folder) > newest:
            aside.mkdir(exist_ok=True)
            place = aside / folder.name
            if place.exists():  # of a time before
                shutil.rmtree(place)
            moved.append(folder.rename(place))
    return moved


def set_broken_aside(folder: Path) -> Path:
    """Move a checkpoint whose files are not what was written to where it counts no more, and nothing removes it: its place."""
    aside = folder.parent / ASIDE
    aside.mkdir(exist_ok=True)
    taken = {path.name for path in aside.iterdir()}
    names = (f"{folder.name}.broken{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    return folder.rename(aside / next(name for name in names if name not in taken))


def resets(run_dir: Path) -> list[int]:
    """The versions from which the run at `run_dir` went on with a fresh optimizer, in their order."""
    try:
        return list(map(int, orjson.loads((run_dir / RESETS).read_bytes())))
    except FileNotFoundError:
        return []


def goes_on_from(run_dir: Path, version: int, *, reset: bool = False) -> None:
    """Write down that the run goes on from `version`, with a fresh optimizer if `reset`: what was told of later versions, which
    it goes back behind, counts no more."""
    before = resets(run_dir)
    found = sorted({*(each for each in before if each <= version), *([version] if reset else [])})
    if found != before:
        write_whole(run_dir / RESETS, orjson.dumps(found))
    with JsonLines(run_dir / "metrics.jsonl") as metrics:
        metrics.write({"kind": "metrics", "source": "supervisor", GOES_ON: version})


def flush_tree(folder: Path) -> None:
    """Everything in `folder`, and its own list of names, is on the disk."""
    for path in [*sorted(folder.rglob("*")), folder]:
        flush(path)


def flush(path: Path) -> None:
    """What was written to a file, or the names in a folder, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
