"""Trained samples on disk: to the bit what the loss was given, each row once, and never in the way of the training."""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from rondo.models.media.inputs import MediaInputs, with_turns
from rondo.roles.config import SamplesConfig
from rondo.roles.rewards.pool import RewardResult
from rondo.roles.sampling.columns import words_of
from rondo.roles.training import trained_samples
from rondo.roles.training.objective import TrainRow
from rondo.roles.training.reading import row_of
from rondo.roles.training.trained_samples import TrainedSamples, rows_of_step, steps_of
from rondo.runtime.errors import CorruptData
from rondo.runtime.records.telling import PROCESS
from tests.roles.test_actor import Given, role, rounds
from tests.roles.training.test_backend import model, rows
from tests.roles.training.test_trainer_updates import several

__all__ = ["model"]
ALL = SamplesConfig(keep=1)
WORDS = np.frombuffer(b'{"response":"2<end>","prompt":"1 + 1?","details":{"right":1.0}}', np.uint8)


class Named(Given):
    """As a run that keeps samples has it."""

    columns = (*Given.columns, "words")

    def array(self, column: str) -> np.ndarray:
        return WORDS if column == "words" else super().array(column)


def equal(one: Any, other: Any) -> None:
    """Of two rows, or what they hold."""
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, MediaInputs):
        assert one.key == other.key and one.arrays.keys() == other.arrays.keys()
        for name in one.arrays:
            equal(one.arrays[name], other.arrays[name])
        for (at, mine), (there, its) in zip(one.turns, other.turns, strict=True):
            assert at == there
            equal(mine, its)
    elif isinstance(one, tuple):
        for mine, its in zip(one, other, strict=True):
            equal(mine, its)
    else:
        assert one == other


def same(one: TrainRow, other: TrainRow) -> None:
    for each in fields(TrainRow):
        equal(getattr(one, each.name), getattr(other, each.name))


def keep(
    run: Path, step: int, batch: list[TrainRow], config: SamplesConfig = ALL, of: tuple[int, int] = (0, 1)
) -> None:
    """One round of one rank."""
    kept = TrainedSamples(run, config, *of)
    kept.begin(step)
    kept.add(step, 0, 0, cast(Any, [Named(row, at) for at, row in enumerate(batch)]), batch)
    asyncio.run(kept.write(step))


def everything() -> list[TrainRow]:
    """Rows with every column that there is, some of which some have not."""
    draw = np.random.default_rng(1)
    image = MediaInputs(
        "a", {"positions": np.ones((3, 4), np.float32), "pixel_values": draw.normal(size=(4, 6)).astype(np.float32)}
    )
    behind = replace(image, key="b")
    found = []
    for at, row in enumerate(rows(4, 4)):
        length = len(row.mask)
        ids = draw.integers(-1, 90, (length, 3)).astype(np.int32)
        experts = draw.integers(0, 200, (len(row.tokens) - 1, 2, 2)).astype(np.uint8)
        found.append(replace(
            row, ref_log_probs=None, old_log_probs=row.old_log_probs if at else None,
            scored=(7, row.advantages) if at > 1 else None, compared_ids=ids, compared_log_probs=ids * np.float32(0.3),
            media=[None, image, image, with_turns(image, [(9, behind)])][at],
            routed_experts=experts if at != 2 else np.zeros(0, np.uint8),
        ))  # fmt: skip
    found[0].rollout_log_probs[0] = np.nan
    return found


def test_what_is_read_is_what_was_trained_to_the_bit(tmp_path: Path) -> None:
    batch = everything()
    keep(tmp_path, 3, batch)
    found = rows_of_step(tmp_path, 3)
    for one, other in zip(batch, found, strict=True):
        same(one, row_of(other))
    assert found[1].media is found[2].media, "media of a prompt group lie there once"
    assert [(row.group, row.reward, row.finish, row.response, row.prompt, row.details) for row in found[:1]] == [
        (0, 1.0, "stop", "2<end>", "1 + 1?", {"right": 1.0})
    ]
    assert rows_of_step(tmp_path, 4) == [] and rows_of_step(tmp_path, 3, ["tokens"])[0].columns.keys() == {"tokens"}


async def test_the_actor_keeps_the_batch_that_its_trainer_accumulates(model: str, tmp_path: Path) -> None:
    """Token by token, of a step with two updates and two passes: each row stands there once."""
    batch = rows(5, num_rows=4)
    made = rounds(batch, [1, 1, 2])
    made += [SimpleNamespace(**{**vars(each), "update": each.update + 2, "index": each.index + 3}) for each in made]
    actor, _ = role(several(model, 2, 2), model, made)
    actor._kept = TrainedSamples(tmp_path, ALL, 0, 1)
    given: list[tuple[int, TrainRow]] = []
    inner = actor._trainer.accumulate

    def noted(step: int, chosen: Any, spans: Any, *, last: bool, update: int) -> None:
        given.extend((update, row) for row in chosen)
        inner(step, chosen, spans, last=last, update=update)

    actor._trainer.accumulate = noted  # type: ignore[method-assign,assignment]
    for _ in range(2):  # a step that was given up, and begins again
        given.clear()
        assert await actor._train(0) is None
    await actor._keep(0)
    found = rows_of_step(tmp_path, 0)
    assert [row.update for row in found] == [update for update, _ in given if update < 2] == [0, 0, 1, 1]
    for row, (_, trained) in zip(found, given, strict=False):
        same(row_of(row), trained)


def test_a_step_that_is_trained_again_replaces_what_was_kept_of_it_also_on_other_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        for step in range(3):
            keep(tmp_path, step, rows(rank), of=(rank, 2))
    (tmp_path / "samples" / "trained" / ".step_000009.0-of-1.parquet.77").write_bytes(b"half")
    assert list(steps_of(tmp_path)) == [0, 1, 2]
    keep(tmp_path, 1, rows(9), of=(0, 1))  # resumed at version 1, on one rank
    assert {step: len(files) for step, files in steps_of(tmp_path).items()} == {0: 2, 1: 1}
    for row, other in zip(rows_of_step(tmp_path, 1), rows(9), strict=True):
        same(row_of(row), other)


def test_a_share_is_of_prompt_groups_and_rewards_choose_among_their_samples(tmp_path: Path) -> None:
    tenth = SamplesConfig(keep=0.1)
    assert 0.08 < np.mean([tenth.keeps(group) for group in range(10_000)]) < 0.12
    assert all(tenth.keeps(group) <= SamplesConfig(keep=0.5).keeps(group) for group in range(1000))
    batch = rows(1)
    batch[2] = replace(batch[2], mask=np.zeros_like(batch[2].mask))  # its reward failed
    keep(tmp_path, 0, batch, SamplesConfig(keep=1, rewards=(0.5, None)))
    assert [row.group for row in rows_of_step(tmp_path, 0)] == [0, 1, 3, 4, 5]
    keep(tmp_path, 1, batch, SamplesConfig(keep=1, rewards=(None, 0.5)))
    assert rows_of_step(tmp_path, 1) == []
    assert ALL.keeps_reward(None) and not SamplesConfig(keep=1, rewards=(0, 1)).keeps_reward(None)


def test_the_oldest_steps_make_room(tmp_path: Path) -> None:
    big = [
        replace(row, tokens=np.random.default_rng(0).integers(0, 1 << 30, 60_000).astype(np.int32))
        for row in rows(0, 1)
    ]
    config = SamplesConfig(keep=1, max_bytes=1 << 20)
    kept = TrainedSamples(tmp_path, config, 0, 1)
    for step in range(9):
        kept.add(step, 0, 0, cast(Any, [Named(row) for row in big]), big)
        asyncio.run(kept.write(step))
    found = list(steps_of(tmp_path))
    assert found == list(range(9 - len(found), 9)) and 2 <= len(found) <= 4
    again = TrainedSamples(tmp_path, config, 0, 1)
    again.begin(9)
    assert len(again._files) == len(found), "another process goes on with the count"


async def test_a_disk_that_is_full_or_hangs_is_told_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, data: bytes) -> None:
        if "step_000000" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        if "step_000001" in path.name:
            hangs.wait()
        else:
            whole(path, data)

    batch, hangs = rows(0), threading.Event()
    named = cast(Any, [Named(row) for row in batch])
    before = PROCESS.counts().get("trained samples", 0)
    kept = TrainedSamples(tmp_path, ALL, 0, 1)
    whole = trained_samples.write_whole
    monkeypatch.setattr(trained_samples, "write_whole", write)
    for step in range(4):
        monkeypatch.setattr(trained_samples, "HOLD_S", 0.05 if step == 1 else 10.0)
        if step == 3:
            hangs.set()
            await cast(Any, kept._writing)
        kept.add(step, 0, 0, named, batch)
        await kept.write(step)
    assert PROCESS.counts()["trained samples"] - before == 3, "the full one, that which hung, and the one behind it"
    assert list(steps_of(tmp_path)) == [3]


def test_a_file_that_is_none_of_these_is_named(tmp_path: Path) -> None:
    keep(tmp_path, 0, rows(0))
    (path,) = steps_of(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptData, match="must be a file of trained samples"):
        rows_of_step(tmp_path, 0)


@pytest.mark.parametrize(
    "prompt", ["why?", '"\\' * 9000, "é\u2028" * 5000, "\ud800", [{"role": "user", "content": "x" * 9000}]]
)
@pytest.mark.parametrize("details", [{}, {"right": float("nan")}, {"big": 1 << 70}, {"why": "\x00" * 9000}])
def test_words_fit_whatever_they_are(prompt: Any, details: dict[str, Any]) -> None:
    row = cast(Any, SimpleNamespace(prompt=prompt, label=None))
    words = words_of(row, RewardResult(1.0, details, None), 1024, "because")
    assert 0 < len(words) <= 1024
    found = orjson.loads(words.tobytes())
    assert found.keys() == {"response", "prompt", "details"}
    if prompt == "why?":
        assert found["prompt"] == "why?" or len(str(details)) > 50
