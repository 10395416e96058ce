"""What training leaves on disk: checkpoints to go on from with any number of processes, and Hugging Face folders.

Owns what lies in such a folder. Does not own which checkpoints count, their names and rotation (`runtime/checkpoints.py`), nor
what belongs to the state (`state.py`). torch's distributed checkpoint writes the shards and reshards them; its metadata, which
it pickles, is read only from folders that carry the marker. Every rank computes the digests of the files that it wrote; a load
compares them, each rank a share.

Invariants: a folder is written aside, flushed, marked and then renamed; so whoever is killed when, what counts is whole. A saving
that fails on one rank fails on all, leaves nothing behind, and raises `NoRoom` on all where it failed for want of room: whoever
called may try again.

    step_000050/
        shards/        parameters, moments and random states, a file a rank, and their metadata
        trainer.json   number of processes, learning rates
        index.json     whatever the caller gave as `extra`
        ...            what the caller wrote `beside` them
        hf/            optional: config, safetensors, tokenizer, processor files, adapters merged; of a policy with adapters,
        adapter/       of which alone the shards are, these in peft's form
        COMPLETE
"""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rondo.models.hf_folder import write_adapter, write_folder
from rondo.models.load import empty_model, generation_config
from rondo.models.names import (
    adapter_tensors,
    disk_dtypes,
    disk_groups,
    local_part,
    memory_tensors,
    to_disk,
    with_local_part,
)
from rondo.models.published import weights_on_first
from rondo.models.state import named_tensors, options, random_states, set_options, set_random_states
from rondo.models.value_head import give_value_head, value_head_of
from rondo.runtime.checkpoints import (
    NoRoom,
    digests,
    files_of,
    flush,
    flush_tree,
    free_bytes,
    has,
    is_full,
    mark_again,
    publish,
    verify,
)
from rondo.runtime.errors import CorruptData, PeerGone, RondoError
from rondo.runtime.memory.to_host import to_host

SHARDS, TRAINER, EXTRA, HF, ADAPTER = "shards", "trainer.json", "index.json", "hf", "adapter"
Beside = Callable[[Path], None]
"""Writes files of the caller's own into the folder of a checkpoint, before it is marked."""
Held = tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]
"""A snapshot: what `training_state` gave."""
_READ_BYTES = 1 << 30
"""Of a checkpoint's weights that are read at a time."""


@dataclass(frozen=True, slots=True)
class Staged:
    """What this rank writes into a checkpoint, apart from the model: training may go on while it is written."""

    tensors: Mapping[str, torch.Tensor]
    options: Mapping[str, Any]


def stage(model: Any, optimizer: torch.optim.Optimizer, held: Held | None = None) -> Staged:
    """This rank's state in host memory; no collective. The only part of a saving that training waits for: copies, or where a
    snapshot of it is `held` already, what that holds, which must stay until it is written."""
    if held is not None:
        tensors, state = held
        places = named_tensors(model, optimizer)
        found = {name: with_local_part(place, tensors[name]) for name, place in places.items()}
        return Staged(found | {_of_rank(name): tensors[name] for name in random_states(model)}, state)
    with torch.no_grad():
        copies = {name: _copied(tensor) for name, tensor in _state(model, optimizer).items()}
    return Staged(copies, options(optimizer))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    local = local_part(tensor)
    host = torch.empty_like(local, device="cpu")
    to_host(host, local)
    return with_local_part(tensor, host)


def write(
    folder: Path,
    staged: Staged,
    extra: Mapping[str, Any],
    beside: Beside | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    gives_way: bool = False,
) -> bool:
    """Write what was staged as the checkpoint `folder`, on any thread. Collective over `group` when sharded: one of its own,
    since the default group has the collectives of training meanwhile. Of `beside`, rank 0's counts.

    Where any rank says `gives_way`, nothing is written, and the answer is False. Raises NoRoom."""
    if _Ranks(group, folder).sum(gives_way) > 0:
        return False
    _write(folder, staged, extra, group, beside)
    return True


def save(
    folder: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    extra: Mapping[str, Any],
    beside: Beside | None = None,
    *,
    tokenizer_path: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the checkpoint `folder` (`step_000050`, on storage that all ranks share). Collective when sharded, on the CPU over
    `group`.

    `extra` is any JSON object; of it and `beside`, rank 0's count. With `tokenizer_path`, that of the model's folder, the
    checkpoint holds what others load of it too: a Hugging Face folder `hf`, or `adapter`. Raises NoRoom.
    """

    alone = _leaves_adapter(model)

    def write_result(aside: Path) -> None:
        if tokenizer_path is not None and not alone:
            tensors = weights_on_first(model, "float32", beside=_group(group))
            _write_hf(aside / HF, model, tokenizer_path, "float32", tensors)
        elif tokenizer_path is not None and _rank() == 0:
            write_adapter(aside / ADAPTER, model, tokenizer_path, "float32")

    written = adapter_tensors(model).values() if alone else model.parameters()
    num_bytes = _folder_bytes(written, "float32") if tokenizer_path is not None else 0
    _write(folder, Staged(_state(model, optimizer), options(optimizer)), extra, group, beside, write_result, num_bytes)


def add_result(folder: Path, model: Any, tokenizer_path: str, *, group: dist.ProcessGroup | None = None) -> None:
    """What `save` adds with `tokenizer_path`, to a checkpoint that lacks it (collective). Raises NoRoom."""
    export, name = (write_adapter_folder, ADAPTER) if _leaves_adapter(model) else (export_hf, HF)
    if not has(folder, name):
        export(folder / name, model, tokenizer_path, group=group)
        _Ranks(group, folder).first(functools.partial(mark_again, folder))


def _leaves_adapter(model: Any) -> bool:
    """A model that scores is asked whole: by a scorer, or as the beginning of a critic."""
    return bool(adapter_tensors(model)) and value_head_of(model) is None


def _state(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return named_tensors(model, optimizer) | {_of_rank(name): t for name, t in random_states(model).items()}


def _write(
    folder: Path,
    staged: Staged,
    extra: Mapping[str, Any],
    group: dist.ProcessGroup | None,
    beside: Beside | None,
    by_all: Callable[[Path], None] | None = None,
    num_bytes: int = 0,
) -> None:
    """`num_bytes`: what `by_all` writes."""
    aside = _aside(folder)
    ranks = _Ranks(group, folder.parent)
    ranks.needed_bytes = int(ranks.sum(_local_bytes(staged.tensors))) + num_bytes
    written: dict[str, tuple[int, str]] = {}

    def begin() -> None:
        for left in folder.parent.glob(_aside(folder.with_name("step_*")).name):
            shutil.rmtree(left)  # of savers that were killed; one saving is in progress at a time
        ranks.look_for_room()
        (aside / SHARDS).mkdir(parents=True)
        (aside / TRAINER).write_bytes(orjson.dumps({"num_ranks": _num_ranks(), **staged.options}))
        (aside / EXTRA).write_bytes(orjson.dumps(extra))
        if beside is not None:
            beside(aside)

    def digest() -> None:
        """Of what this rank wrote."""
        mine = (aside / SHARDS).glob(f"__{_rank()}_*")
        written.update(digests(aside, (path.relative_to(aside).as_posix() for path in mine)))

    with _removed_after_a_failure(aside):
        ranks.first(begin)
        ranks.all(functools.partial(_write_shards, aside / SHARDS, staged.tensors, group))
        ranks.all(digest)
        known = {name: of for part in ranks.gathered(orjson.dumps(written)) for name, of in orjson.loads(part).items()}
        if by_all is not None:
            ranks.all(functools.partial(by_all, aside))
        ranks.first(functools.partial(publish, aside, folder, known))


def _write_shards(folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None) -> None:
    writer = _ShardWriter(folder)
    try:
        with _single_process_allowed():
            dcp.save(dict(tensors), storage_writer=writer, process_group=group)
        return
    except CheckpointException as failed:  # which is no Exception
        error = writer.error or RondoError(f"{folder} must be written by all ranks, got {failed}")
    raise error


class _ShardWriter(dcp.FileSystemWriter):
    """Remembers why this rank could not write: an error that has gone over all ranks has lost its cause."""

    error: Exception | None = None

    def write_data(self, *arguments: Any, **named: Any) -> Any:
        with self._remembering():
            return super().write_data(*arguments, **named)

    def finish(self, *arguments: Any, **named: Any) -> None:
        with self._remembering():
            super().finish(*arguments, **named)

    @contextmanager
    def _remembering(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error
            raise


class _Ranks:
    """What the ranks that write in `place` say to each other, over `group`, so that all go the same way."""

    def __init__(self, group: dist.ProcessGroup | None, place: Path) -> None:
        self._group, self._place = group, place
        self.needed_bytes = 0

    def sum(self, value: float) -> float:
        if not dist.is_initialized():
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(shared, group=self._group)
        return float(shared)

    def gathered(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in their order."""
        if not dist.is_initialized():
            return [data]
        sizes = torch.zeros(_num_ranks(), dtype=torch.int64)
        sizes[_rank()] = len(data)
        dist.all_reduce(sizes, group=self._group)
        parts = torch.zeros(int(sizes.sum()), dtype=torch.uint8).split(sizes.tolist())
        parts[_rank()].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        whole = torch.cat(parts)
        dist.all_reduce(whole, group=self._group)
        return [bytes(part.numpy()) for part in whole.split(sizes.tolist())]

    def look_for_room(self) -> None:
        """NoRoom where the whole cannot fit, before anything of it is written."""
        free = free_bytes(self._place)
        if free < self.needed_bytes:
            raise NoRoom(self._place, self.needed_bytes, free)

    def first(self, work: Callable[[], object]) -> None:
        """`work` on the first rank, as `all` does."""
        self.all(work if _rank() == 0 else lambda: None)

    def all(self, work: Callable[[], object]) -> None:
        """`work` on every rank; what one of them raises is an error on all, and want of room goes before anything else."""
        failed: Exception | None = None
        try:
            work()
        except Exception as error:  # noqa: BLE001  # raised again when all ranks know
            failed = error
        full = failed is not None and is_full(failed)
        if self.sum(full) > 0:
            if isinstance(failed, NoRoom):
                raise failed
            raise NoRoom(self._place, self.needed_bytes, free_bytes(self._place)) from failed
        if failed is not None:
            self.sum(True)
            raise failed
        if self.sum(False) > 0:
            raise PeerGone(
                f"{self._place} must be written, or read, by all ranks, got an error on another one. See its log"
            )


@contextmanager
def _removed_after_a_failure(aside: Path) -> Iterator[None]:
    """Whatever fails, no part of a folder stays to fill the disk. All ranks have stopped to write it by then."""
    try:
        yield
    except BaseException:
        if _rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def load(
    folder: Path, model: Any, optimizer: torch.optim.Optimizer, *, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Put the checkpoint `folder` into model and optimizer, in place, and return its `extra`. Collective when sharded, on the CPU
    over `group`.

    It may come from another number of processes; only the random states, which belong to a rank, are then left as they are.
    Raises CorruptData for a checkpoint that is not as it was written, or of another model, and ConfigError for one of a newer
    release.
    """
    compare = functools.partial(verify, folder, (f"{SHARDS}/", TRAINER, EXTRA), _rank(), _num_ranks())
    _Ranks(group, folder).all(compare)
    trainer = orjson.loads((folder / TRAINER).read_bytes())
    tensors, randoms = named_tensors(model, optimizer), {}
    if trainer["num_ranks"] == _num_ranks():
        randoms = {_of_rank(name): tensor for name, tensor in random_states(model).items()}
    _check(folder, tensors | randoms)
    with _single_process_allowed():
        dcp.load(tensors | randoms, checkpoint_id=folder / SHARDS)
    set_options(optimizer, trainer)
    if randoms:
        set_random_states({name: randoms[_of_rank(name)] for name in random_states(model)})
    return dict(orjson.loads((folder / EXTRA).read_bytes()))


def export_hf(
    folder: Path,
    model: Any,
    tokenizer_path: str,
    *,
    dtype: str = "float32",
    group: dist.ProcessGroup | None = None,
    tensors: Iterator[tuple[str, torch.Tensor]] | None = None,
) -> None:
    """Write a folder that transformers loads by its auto classes, replacing what was there. Collective when sharded, on the CPU
    over `group`. `tensors`: None for those of `model`. Raises NoRoom.

    It holds the tokenizer of `tokenizer_path`, and for a multimodal model the processor's files. The thinker of a whole
    Qwen3-Omni becomes a folder of the thinker alone, whose weights keep their names (`thinker.*`).
    """
    if tensors is None:
        tensors = weights_on_first(model, dtype, beside=_group(group))
    write = functools.partial(_write_hf, model=model, tokenizer_path=tokenizer_path, dtype=dtype, tensors=tensors)
    _replace(folder, write, _folder_bytes(model.parameters(), dtype), group)


def write_adapter_folder(
    folder: Path,
    model: Any,
    base: str,
    *,
    dtype: str = "float32",
    group: dist.ProcessGroup | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """The same of the adapter alone, as peft loads it beside its `base`."""

    def write(aside: Path) -> None:
        if _rank() == 0:
            write_adapter(aside, model, base, dtype, tensors)

    _replace(folder, write, _folder_bytes(adapter_tensors(model).values(), dtype), group)


def _replace(folder: Path, write: Callable[[Path], None], num_bytes: int, group: dist.ProcessGroup | None) -> None:
    """`folder` as all ranks `write` it aside, in the place of what was there."""
    aside = _aside(folder)
    ranks = _Ranks(group, folder.parent)
    ranks.needed_bytes = num_bytes

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        ranks.look_for_room()

    def finish() -> None:
        flush_tree(aside)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        flush(folder.parent)

    with _removed_after_a_failure(aside):
        ranks.first(begin)
        ranks.all(functools.partial(write, aside))
        ranks.first(finish)


def read_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Fill `weights` (names in memory, on the CPU) out of the checkpoint `folder`, in one process. CorruptData for one that has
    not all of them, or others. Whoever chose the checkpoint has compared its digests."""
    found = {f"model.{name}": tensor for name, tensor in weights.items()}
    files_of(folder)
    _check(folder, found, "model.")
    with _single_process_allowed():
        dcp.load(found, checkpoint_id=folder / SHARDS)


def export(folder: Path, out: Path, model_path: str, *, dtype: str = "float32", scores: bool = False) -> None:
    """Write the weights of the checkpoint `folder`, of any number of processes, as the Hugging Face folder `out`, with the config
    and the tokenizer of `model_path`: in one process, which holds a file of it at a time and never a model. scores: they are a
    reward model's.

    Whoever chose the checkpoint has compared its digests. Raises CorruptData for one of another model, and NoRoom.
    """
    files_of(folder)
    model = empty_model(model_path)
    model.generation_config = generation_config(model_path) or model.generation_config
    if scores:
        give_value_head(model)
    _check(folder, {f"model.{name}": tensor for name, tensor in memory_tensors(model).items()}, "model.")
    export_hf(out, model, model_path, dtype=dtype, tensors=_stored(folder / SHARDS, model, dtype))


def _stored(shards: Path, model: Any, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name on disk, whole tensor) of the `model` without memory, out of a checkpoint."""
    memory, dtypes, found = memory_tensors(model), disk_dtypes(model, dtype), dict[str, torch.Tensor]()
    groups, pending = disk_groups(model), []
    for number, group in enumerate(groups, 1):
        pending.append(group)
        found |= {f"model.{name}": torch.empty_like(memory[name], device="cpu") for name in group.sources}
        if number < len(groups) and sum(tensor.nbytes for tensor in found.values()) < _READ_BYTES:
            continue
        with _single_process_allowed():
            dcp.load(found, checkpoint_id=shards)
        for group in pending:
            cast = {name: found.pop(f"model.{name}").to(dtypes[name]) for name in group.sources}
            yield from to_disk(model, group, cast).items()
        pending = []


def _folder_bytes(tensors: Iterable[torch.Tensor], dtype: str) -> int:
    """About what a folder of these takes."""
    return sum(tensor.numel() for tensor in tensors) * getattr(torch, dtype).itemsize


def _local_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Of this rank's parts."""
    return sum(local_part(tensor).nbytes for tensor in tensors.values())


def _write_hf(
    folder: Path, model: Any, tokenizer_path: str, dtype: str, tensors: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """`tensors`: whole ones on the first rank, which writes them."""
    try:
        if _rank() == 0:
            write_folder(folder, model, tokenizer_path, dtype, tensors)
    finally:
        for _ in tensors:
            pass  # what this rank sends, or what is sent to one that could not write


def _check(folder: Path, tensors: Mapping[str, torch.Tensor], of: str = "") -> None:
    """`of`: how the names begin that count."""
    entries = dcp.FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata
    named = {name: entry for name, entry in entries.items() if name.startswith(of)}
    stored = {name: tuple(entry.size) for name, entry in named.items() if not name.startswith("random.")}
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items() if not name.startswith("random.")}
    wrong = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
    if wrong:
        raise CorruptData(
            f"{folder} must hold exactly the tensors of this model, got {len(wrong)} that differ ({', '.join(wrong[:3])}). "
            "Resume with the model that the checkpoint was made from"
        )


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


@contextmanager
def _single_process_allowed() -> Iterator[None]:
    """torch warns when it saves without a process group, which is how one process trains here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _of_rank(name: str) -> str:
    return f"{name}.{_rank()}"


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group`, or that of all ranks; None for one process."""
    return group or dist.group.WORLD if dist.is_initialized() else None


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
