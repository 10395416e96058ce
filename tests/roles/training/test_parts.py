"""A checkpoint that two roles write: whole with both parts alone, whoever is killed, gives way or is late."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rondo.roles.training.parts import Parts
from rondo.runtime.checkpoints import complete, folder_of, publish
from rondo.runtime.waits import wait_for
from tests.roles.training.test_saving import Disk, saving


def write(parts: Parts, version: int, text: str = "") -> None:
    aside = parts.place / ".aside"
    (aside / "shards").mkdir(parents=True)
    (aside / "shards" / "file").write_text(text or str(version))
    publish(aside, parts.folder(version))


def test_a_part_is_of_its_attempt_and_its_version_and_stays_while_the_checkpoint_may_fail(tmp_path: Path) -> None:
    before, parts = Parts(tmp_path, "critic", 1), Parts(tmp_path, "critic", 2)
    before.open(0)
    write(before, 10)
    parts.open(0)
    assert not parts.is_whole(10) and not before.place.exists()
    assert not parts.never_comes(10)
    for version in (10, 20, 30):
        write(parts, version)
        parts.none_before(version)
    assert [parts.is_whole(version) for version in (10, 20, 30)] == [False, True, True]  # the newest stay
    assert parts.never_comes(10) and not parts.never_comes(40)
    for _ in range(2):  # whoever took it was killed
        parts.take(20, tmp_path / "aside")
        assert (tmp_path / "aside" / "critic" / "shards" / "file").read_text() == "20"
        (tmp_path / "aside").rename(tmp_path / f"lost{_}")
    parts.open(35)  # the role has died, and begins with a version that was committed meanwhile
    assert parts.never_comes(34) and not parts.never_comes(35) and parts.is_whole(20)


@pytest.mark.parametrize("comes", [True, False])
async def test_a_checkpoint_waits_for_the_critics_part_and_gives_way_where_none_comes(
    tmp_path: Path, comes: bool
) -> None:
    disk, told, parts = Disk(), list[dict[str, Any]](), Parts(tmp_path / "checkpoints", "critic", 0)
    parts.open(0)
    async with asyncio.TaskGroup() as tasks:
        actor = saving(tmp_path, disk, told, tasks, critic=object())
        await actor.save(10, final=False)  # beside the training
        assert disk.done == ["stage"] and not told
        if comes:
            write(parts, 10)
        else:
            parts.none_before(11)
        disk.go.release()
        await wait_for(actor.settled(), name="saved", peer="disk", deadline_s=60)
    there = [folder_of(tmp_path / "checkpoints", 10)] if comes else []
    assert complete(tmp_path / "checkpoints") == there and len(told) == len(there)
    for folder in there:
        assert (folder / "critic" / "shards" / "file").read_text() == "10"
    assert not actor.is_due(13)  # the other one would not save it


async def test_the_critic_writes_its_part_aside_and_tells_of_no_checkpoint(tmp_path: Path) -> None:
    disk, told, parts = Disk(), list[dict[str, Any]](), Parts(tmp_path / "checkpoints", "critic", 0)
    parts.open(0)
    async with asyncio.TaskGroup() as tasks:
        critic = saving(tmp_path, disk, told, tasks, critic=object(), part="critic")
        disk.go.release()
        await critic.save(10, final=False)
        await wait_for(critic.settled(), name="saved", peer="disk", deadline_s=60)
        await critic.save(10, final=False)  # there it is
    assert parts.is_whole(10) and parts.never_comes(9) and not told and not complete(tmp_path / "checkpoints")
    assert disk.done == ["stage", "step_000010 of a part"]
