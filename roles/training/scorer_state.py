"""The state of a scorer whose weights the policy's newest version does not give back: an average of the policy's versions, or a
reference that is some versions old.

Owns where that state outlives its process: in memory that the supervisor owns, written with each version, and in files, written
with each version that the trainer saves. Does not own the weights (`roles/forward.py`), nor which versions come.

    <run>/scorers/<role group>/step_000050/0.safetensors     of rank 0: as scored with up to version 50

Invariant: a process that starts again scores with the weights that its predecessor had, and a resumed run with those of its
checkpoint's version, or of the newest version before it that the scorer had seen. All ranks restore the same version.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rondo.comm.weights.snapshot import HotSnapshot, snapshot_bytes
from rondo.comm.weights.sums import bucket_sum
from rondo.models.mesh import Mesh
from rondo.runtime.checkpoints import complete, folder_of, is_full, version_of
from rondo.runtime.worker.context import WorkerContext

NONE = -1
"""No version."""


class Lasting(Protocol):
    """What has such a state. `lasting` are the tensors themselves, by name; `version` is the policy's newest in them."""

    version: int
    mesh: Mesh

    @property
    def lasting(self) -> Mapping[str, torch.Tensor]: ...

    def restored(self, version: int) -> None:
        """Called once `lasting` hold the state of `version`."""


class ScorerState:
    """The state of `scorer` on this rank. All methods are called on all ranks in the same order."""

    def __init__(self, ctx: WorkerContext, scorer: Lasting, save_every: int | None, *, in_memory: bool) -> None:
        self._ctx, self._scorer, self._save_every = ctx, scorer, save_every
        self._folder = ctx.run_dir / "scorers" / ctx.group
        self.version = NONE
        """Which version was restored."""
        self._written = NONE
        self._memory: HotSnapshot | None = None
        if in_memory:
            tensors = scorer.lasting.values()
            num_bytes = snapshot_bytes(sum(each.numel() * each.element_size() for each in tensors), len(tensors))
            self._memory = HotSnapshot(ctx.segments.segment(f"scorer/{ctx.group}/{ctx.rank}", num_bytes))

    def restore(self, newest: int) -> bool:
        """Bring the scorer to the newest state of at most version `newest`, from memory or else from files; whether there was
        one (collective). States of later versions, which the run went back behind, are removed."""
        if self._ctx.rank == 0:
            for folder in self._saved():
                if version_of(folder) > newest:
                    shutil.rmtree(folder, ignore_errors=True)
        held = [] if self._memory is None else [version for version in self._memory.versions() if version <= newest]
        return self._restore(held, self._from_memory) or self._restore(
            [version_of(folder) for folder in self._saved() if version_of(folder) <= newest], self._from_file
        )

    def _restore(self, versions: list[int], read: Any) -> bool:
        """The newest of some versions that every rank can read."""
        below = max(versions, default=NONE)
        while True:
            # The least of all ranks; a rank that cannot read that one has all look further down.
            [negated] = self._scorer.mesh.most(-below)
            version = -negated
            if version == NONE:
                return False
            tensors = read(version) if version in versions else None
            [missing] = self._scorer.mesh.most(tensors is None)
            if not missing:
                assert tensors is not None
                for name, tensor in self._scorer.lasting.items():
                    tensor.copy_(tensors[name])
                self._scorer.restored(version)
                self.version = version
                return True
            below = max((each for each in versions if each < version), default=NONE)

    def _from_memory(self, version: int) -> Mapping[str, torch.Tensor] | None:
        assert self._memory is not None
        return self._fitting(self._memory.views(version)[0])

    def _from_file(self, version: int) -> Mapping[str, torch.Tensor] | None:
        """None for a file that is missing, damaged, or of another layout."""
        with suppress(OSError, SafetensorError, KeyError, orjson.JSONDecodeError):
            with safe_open(self._file(version), framework="pt") as file:
                sums = orjson.loads((file.metadata() or {})["sums"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            if {name: _sum(tensor) for name, tensor in tensors.items()} == sums:
                return self._fitting(tensors)
        return None

    def _fitting(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
        wanted = self._scorer.lasting
        same = tensors.keys() == wanted.keys() and all(
            tensors[name].shape == each.shape for name, each in wanted.items()
        )
        return tensors if same else None

    async def load(self, version: int, load: Callable[[], None]) -> None:
        """Bring the scorer to `version` by `load`, and keep its state: in memory always, in a file where the trainer saves the
        version, or saves one on the way that the scorer never sees."""
        every = self._save_every
        if every is not None and (version - 1) // every * every > self._scorer.version >= 0:
            await self.save()
        await self._ctx.compute(load)
        if self._memory is not None:
            await self._ctx.compute(self._memory.write, version, self._scorer.lasting, {})
        if every is not None and version % every == 0:
            await self.save()

    async def save(self) -> None:
        """Write the state into a file, unless it lies there or the disk is full."""
        version = self._scorer.version
        if version == self._written:
            return
        try:
            await asyncio.to_thread(self._write, version)
        except Exception as error:
            if not is_full(error):
                raise
            await self._ctx.report("unsaved", {"cause": f"no room for the state of {self._ctx.group}: {error}"})
        self._written = version

    def _write(self, version: int) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._scorer.lasting.items()}
        file = self._file(version)
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".aside")
        sums = orjson.dumps({name: _sum(tensor) for name, tensor in tensors.items()}).decode()
        save_file(tensors, aside, metadata={"sums": sums})
        aside.replace(file)
        if self._ctx.rank == 0:
            self._forget()

    def _forget(self) -> None:
        """Remove what no checkpoint that is kept may be resumed with."""
        checkpoints = [version_of(folder) for folder in complete(self._ctx.run_dir / "checkpoints")]
        if checkpoints:
            saved = self._saved()
            needed = [version_of(folder) for folder in saved if version_of(folder) <= checkpoints[0]]
            for folder in saved:
                if needed and version_of(folder) < needed[-1]:
                    shutil.rmtree(folder, ignore_errors=True)

    def _saved(self) -> list[Path]:
        """The folders of versions, oldest first."""
        return sorted(self._folder.glob("step_*"), key=version_of)

    def _file(self, version: int) -> Path:
        return folder_of(self._folder, version) / f"{self._ctx.rank}.safetensors"


def _sum(tensor: torch.Tensor) -> int:
    return bucket_sum(np.asarray(tensor.contiguous().flatten().view(torch.uint8).numpy()))
