"""What the rows of a step were: by modality, over all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rondo.roles.streams import PARTS
from rondo.roles.training.step_totals import StepTotals

PICTURE, SOUND = {"pixel_values": np.zeros((1, 1))}, {"input_features": np.zeros((1, 1, 1))}


def row(media: Any, reward: float | None, response: int, finish: str = "stop") -> Any:
    tokens = np.zeros(response + 4, np.int32)
    return SimpleNamespace(
        media=media, media_key="a", columns=("tokens",), array=lambda _: tokens, reward=reward, response=response,
        finish=finish, part=0,
    )  # fmt: skip


def told(*ranks: list[Any]) -> dict[str, Any]:
    """The figures of a step whose rows lie on ranks so."""
    totals = [StepTotals(0) for _ in ranks]
    for each, rows in zip(totals, ranks, strict=True):
        each.add(rows, [np.zeros(row.response, np.int64) for row in rows])
    return totals[0].of([sum(values) for values in zip(*(each.sums() for each in totals), strict=True)])


def test_reward_and_length_are_told_of_each_modality_that_is_there() -> None:
    rows = [
        row(PICTURE, 1.0, 3), row(PICTURE, None, 5, "length"), row(PICTURE | SOUND, 0.5, 4), row(None, 0.0, 2),
    ]  # fmt: skip
    found = told(rows[:1], rows[1:])
    of_image = {name.removesuffix("_image"): value for name, value in found.items() if name.endswith("_image")}
    assert of_image == {
        "reward_mean": 0.75, "num_samples": 3, "truncated_fraction": pytest.approx(1 / 3), "response_tokens": 4.0,
    }  # fmt: skip
    assert [found[f"reward_mean_{kind}"] for kind in ("text", "audio", "mixed")] == [0.0, 0.5, 0.5]
    assert found["reward_mean"] == 0.5 and found["num_samples"] == 4 and "reward_mean_video" not in found


def test_components_of_the_reward_are_told_by_name_over_the_samples_that_have_them() -> None:
    def scored(right: float, form: float, part: int = 0) -> Any:
        found = row(None, right, 3)
        parts = np.array([right, form], np.float32)
        found.array = lambda name: parts if name == PARTS else np.zeros(7, np.int32)
        found.part = part
        return found

    ranks = [[scored(1, 0.5), scored(1, 0.5, part=1)], [scored(0, np.nan)]]
    totals = [StepTotals(0, (), ["right", "form"]) for _ in ranks]
    for each, rows in zip(totals, ranks, strict=True):
        each.add(rows, [])
    found = totals[0].of([sum(values) for values in zip(*(each.sums() for each in totals), strict=True)])
    assert (found["component_right"], found["component_form"], found["reward_mean"]) == (0.5, 0.5, 0.5)


def test_of_text_alone_nothing_is_told_by_modality() -> None:
    assert not [name for name in told([row(None, 1.0, 3)]) if name.endswith("_text")]
