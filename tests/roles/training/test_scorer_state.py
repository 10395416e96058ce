"""Averaged teachers and refreshed references that start again: they go on with the weights that they had."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rondo.models.mesh import Mesh
from rondo.roles.training.scorer_state import NONE, ScorerState
from rondo.runtime.checkpoints import MARKER, folder_of
from tests.comm.memory import MemorySegment


class Average:
    """A scorer: half of what it was, half of what comes."""

    mesh = Mesh()

    def __init__(self, start: float = 0.0) -> None:
        self.mean, self.version = torch.full((3,), start), 0

    @property
    def lasting(self) -> Mapping[str, torch.Tensor]:
        return {"w": self.mean}

    def load(self, version: int) -> None:
        self.mean.lerp_(torch.full((3,), float(version)), 0.5)
        self.version = version

    def restored(self, version: int) -> None:
        self.version = version


class Memory:
    """Segments of a supervisor, which outlive whoever asks for them."""

    def __init__(self) -> None:
        self._made: dict[str, MemorySegment] = {}

    def segment(self, name: str, num_bytes: int) -> MemorySegment:
        return self._made.setdefault(name, MemorySegment(num_bytes))


class Place:
    def __init__(self, run_dir: Path, save_every: int | None = 4) -> None:
        self.run_dir, self.save_every, self.memory = run_dir, save_every, Memory()
        self.reported: list[str] = []

    def start(self, *, in_memory: bool = True) -> tuple[Average, ScorerState]:
        async def compute(function: Any, *args: Any) -> Any:
            return function(*args)

        async def report(kind: str, fields: Any) -> None:
            self.reported.append(kind)

        ctx: Any = SimpleNamespace(
            run_dir=self.run_dir, group="teacher-0", rank=0, segments=self.memory, compute=compute, report=report
        )
        scorer = Average()
        return scorer, ScorerState(ctx, scorer, self.save_every, in_memory=in_memory)

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "scorers" / "teacher-0").glob("*"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def follow(scorer: Average, state: ScorerState, *versions: int) -> Average:
    for version in versions:
        await state.load(version, functools.partial(scorer.load, version))
    return scorer


async def undisturbed(*versions: int) -> torch.Tensor:
    scorer = Average()
    for version in versions:
        scorer.load(version)
    return scorer.mean


async def test_a_scorer_that_starts_again_goes_on_with_the_weights_that_it_had(place: Place) -> None:
    await follow(*place.start(), 1, 2, 3)
    scorer, state = place.start()
    assert state.restore(3) and (scorer.version, state.version) == (3, 3)
    await follow(scorer, state, 4, 5)
    assert torch.equal(scorer.mean, await undisturbed(1, 2, 3, 4, 5))


async def test_a_first_start_restores_nothing(place: Place) -> None:
    scorer, state = place.start()
    assert not state.restore(0) and state.version == NONE and not scorer.mean.any()


@pytest.mark.parametrize("in_memory", [True, False])
async def test_a_resumed_run_has_the_state_of_its_checkpoint(place: Place, in_memory: bool) -> None:
    await follow(*place.start(in_memory=in_memory), 1, 2, 3, 4, 5, 6)
    place.memory = Memory()  # of the machine that is gone
    scorer, state = place.start(in_memory=in_memory)
    assert state.restore(4) and scorer.version == 4
    await follow(scorer, state, 5)
    assert torch.equal(scorer.mean, await undisturbed(1, 2, 3, 4, 5))


async def test_a_version_that_is_saved_and_was_never_seen_has_the_state_before_it(place: Place) -> None:
    await follow(*place.start(), 1, 2, 3, 5, 6)
    place.memory = Memory()
    scorer, state = place.start()
    assert state.restore(4) and scorer.version == 3
    assert torch.equal(scorer.mean, await undisturbed(1, 2, 3))


async def test_states_that_the_run_went_back_behind_are_gone(place: Place) -> None:
    await follow(*place.start(), 4, 8, 12)
    place.memory = Memory()
    scorer, state = place.start()
    assert state.restore(8) and scorer.version == 8
    assert place.files() == ["step_000004", "step_000008"]


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
async def test_a_damaged_file_is_passed_over_for_an_older_one(place: Place, damage: str) -> None:
    await follow(*place.start(), 4, 8)
    place.memory = Memory()
    file = place.run_dir / "scorers" / "teacher-0" / "step_000008" / "0.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(bytes(raw if damage == "flip" else raw[:-5]))
    scorer, state = place.start()
    assert state.restore(8) and scorer.version == 4
    assert torch.equal(scorer.mean, await undisturbed(4))


async def test_the_state_of_another_model_is_none(place: Place) -> None:
    await follow(*place.start(), 4)
    place.memory = Memory()
    scorer, state = place.start()
    scorer.mean = torch.zeros(5)
    assert not state.restore(4)


async def test_states_that_no_checkpoint_needs_are_removed(place: Place) -> None:
    for version in (8, 12):
        folder = folder_of(place.run_dir / "checkpoints", version)
        folder.mkdir(parents=True)
        (folder / MARKER).touch()
    await follow(*place.start(), 4, 8, 12)
    assert place.files() == ["step_000008", "step_000012"]


async def test_a_full_disk_is_told_and_ends_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rondo.roles.training.scorer_state.save_file", full)
    scorer = await follow(*place.start(), 4, 5)
    assert scorer.version == 5 and place.reported == ["unsaved"]


async def test_the_end_saves_what_no_file_has(place: Place) -> None:
    scorer, state = place.start()
    await follow(scorer, state, 4, 5)
    await state.save()
    assert place.files() == ["step_000004", "step_000005"]
