"""Weights to a server through files: a whole Hugging Face folder a version, which the server loads by itself.

    folder/version_000005/
        model-00001-of-00002.safetensors, ...    tensors under their Hugging Face disk names
        model.safetensors.index.json             name -> file
        config.json, tokenizer.json, ...         as in the model's folder

Owns such a folder from its writing to its removal. Does not own the protocol around the update (`weights.py`), nor checkpoints.

Invariant: a folder is written aside and renamed, so it is whole or not there. One of a version that is there already, which the
server before this one has loaded, is not written again, unless it was refused. A folder goes when a later version is proved; the
last one stays, since a server that is started anew may begin with it. Nothing is flushed to the disk itself: the files are read
at once, and never again after a crash. A server elsewhere needs `folder` on shared storage.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import orjson
import torch
from safetensors.torch import save_file

from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.engines.sglang.weights_buckets import Transfer, plan

MAX_FILE_BYTES = 4 << 30
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)(\.index\.json)?")
_NAME = re.compile(r"version_\d{6,}")


class DiskTransfer(Transfer):
    """Sends versions to the server behind `client` through `folder`; `model` is the folder that it was started from."""

    in_session = False

    def __init__(self, client: SGLangClient, *, folder: Path, model: Path, deadline_s: float) -> None:
        self._client = client
        self._folder = folder
        self._model = model
        self._deadline_s = deadline_s

    async def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    async def prepare(self, version: str, tensors: Mapping[str, torch.Tensor]) -> None:
        await asyncio.to_thread(write, self._of(version), tensors, self._model)

    async def send(self, version: str, tensors: Mapping[str, torch.Tensor], *, flush: bool) -> None:
        if not self._of(version).is_dir():  # what was prepared has been refused
            await self.prepare(version, tensors)
        body = {"model_path": str(self._of(version).resolve()), "weight_version": version, "flush_cache": flush}
        await self._client.post("/update_weights_from_disk", body, deadline_s=self._deadline_s)

    async def proved(self, version: str) -> None:
        """The folders of other versions are not needed any more."""
        await asyncio.to_thread(self._remove_but, self._of(version))

    async def refused(self, version: str) -> None:
        """What lies there is not used again."""
        folder = self._of(version)
        if folder.is_dir():
            await asyncio.to_thread(_remove, folder)

    def _of(self, version: str) -> Path:
        return self._folder / f"version_{int(version):06d}"

    def _remove_but(self, kept: Path) -> None:
        for old in self._folder.iterdir():
            if _NAME.fullmatch(old.name) and old != kept:
                _remove(old)


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Where the folder is written, which is put in place when the body has ended; one that is there is replaced."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write(folder: Path, tensors: Mapping[str, torch.Tensor], model: Path) -> Path:
    """Write `tensors`, and what else is in `model`, as `folder`, unless that is there. Returns `folder`."""
    if folder.is_dir():
        return folder
    with whole(folder) as aside:
        _write_weights(aside, {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()})
        for file in model.iterdir():
            if file.is_file() and not _WEIGHTS.fullmatch(file.name):
                shutil.copyfile(file, aside / file.name)
    return folder


def _write_weights(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    files = [[place.name for place in bucket.places] for bucket in plan(tensors, MAX_FILE_BYTES)]
    where: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / _INDEX).write_bytes(orjson.dumps({"metadata": {"total_size": total}, "weight_map": where}))


def _remove(folder: Path) -> None:
    """At once for whoever looks, then its files."""
    gone = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.rename(gone)
    shutil.rmtree(gone)
