"""The actor's way back to a committed version; what computes is scripted, the calls are the role's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from rondo.roles.actor import ActorRole
from rondo.roles.training.saving import Saving


class ScriptedTrainer:
    """Rank 0 of two, beside a rank 1 that says `other` in every sum. Tells what was called."""

    def __init__(self, other: float) -> None:
        self.other, self.model, self.objective = other, None, SimpleNamespace(balance=None)
        self.calls: list[str] = []

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return [value + self.other for value in values]

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def beside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def weights(self) -> Iterator[tuple[str, Any]]:
        return iter(())

    def checksum(self) -> int:
        return 7

    def load_state(self, *_: Any) -> None:
        self.calls.append("load_state")

    def count_from(self, _: list[int], version: int) -> None: ...

    def load_checkpoint(self, *_: Any) -> None:
        self.calls.append("load_checkpoint")

    def join_checksums(self, part: int) -> int:
        return part

    def add_result(self, folder: Path, _: str) -> None:
        self.calls.append(f"add result to {folder.name}")

    def save(self, *_: Any, **__: Any) -> None:
        self.calls.append("save")


def actor(run_dir: Path, other: float) -> tuple[ActorRole, ScriptedTrainer]:
    """An actor whose run committed version 2, which lies in a checkpoint and in rank 0's snapshot."""

    async def compute(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    async def call(*_: Any) -> dict[str, Any]:
        return {"version": 2, "checksums": {"actor": 7}}

    def section(*_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    folder = run_dir / "checkpoints" / "step_000002"
    folder.mkdir(parents=True)
    (folder / "index.json").write_bytes(orjson.dumps({"version": 2}))
    (folder / "COMPLETE").write_text("2\n")
    ctx = cast(Any, SimpleNamespace(run_dir=run_dir, rank=0, world_size=2, compute=compute, section=section))
    role = ActorRole(ctx)
    trainer = ScriptedTrainer(other)
    snapshot = SimpleNamespace(
        versions=lambda: (2,), read=lambda _: ({}, {}), write=lambda *_, **__: None, checksum=lambda _: 7
    )
    role._trainer, role._snapshot = cast(Any, trainer), cast(Any, snapshot)
    config = SimpleNamespace(
        supervision=SimpleNamespace(save_s=60.0, grace_s=60.0), train=SimpleNamespace(wait_for_room_s=60.0), critic=None
    )
    role._job = cast(Any, SimpleNamespace(config=config, bus=SimpleNamespace(call=call), model_path="model"))
    role._saving = Saving(ctx, role._job, cast(Any, trainer), role._snapshot, role._settled, role._beside)
    return role, trainer


async def test_a_version_that_every_rank_holds_comes_from_the_snapshots(tmp_path: Path) -> None:
    role, trainer = actor(tmp_path, other=1.0)
    assert await role._restore() == 2 and trainer.calls == ["load_state"]


async def test_ranks_that_were_killed_while_they_copied_a_checkpoint_all_read_it_again(tmp_path: Path) -> None:
    role, trainer = actor(tmp_path, other=0.0)
    assert await role._restore() == 2 and trainer.calls == ["load_checkpoint"]


async def test_the_last_version_gets_its_folder_even_where_its_checkpoint_was_written_before(tmp_path: Path) -> None:
    role, trainer = actor(tmp_path, other=0.0)
    await role._saving.save(2, final=False)
    assert trainer.calls == []
    await role._saving.save(2, final=True)
    assert trainer.calls == ["add result to step_000002"]


async def test_a_warm_up_that_a_stop_cuts_short_makes_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role, trainer = actor(tmp_path, other=1.0)

    async def call(*_: Any) -> dict[str, Any]:
        return {"version": None}

    async def cut_short(*_: Any, **__: Any) -> bool:
        return False

    config = SimpleNamespace(sft=True)
    role._job = cast(Any, SimpleNamespace(config=config, bus=SimpleNamespace(call=call), model_path="model"))
    role._ctx = cast(Any, SimpleNamespace(span=lambda _: nullcontext(), rank=0, world_size=1))
    monkeypatch.setattr("rondo.roles.actor.run_warm_up", cut_short)
    assert await role._restore() is None and trainer.calls == []
