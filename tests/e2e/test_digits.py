"""The example with pictures and sounds: what it makes can be told apart, and a tiny model learns from it as it is shipped."""

from __future__ import annotations

import io
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.runs import ROOT, finish, start
from tests.strength import LONG


@pytest.fixture
def digits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import digits

    return digits


def test_a_drawn_digit_is_told_by_the_mean_of_others(digits: Any) -> None:
    """As a first layer sees them: bold enough, and in one place."""
    draw = random.Random(0)
    pictures = [(n % 10, np.asarray(Image.open(io.BytesIO(digits._drawn(n % 10, draw))), float)) for n in range(600)]
    means = np.stack([np.mean([picture for digit, picture in pictures[:400] if digit == n], 0) for n in range(10)])
    right = sum(int(((means - picture) ** 2).sum((1, 2)).argmin()) == digit for digit, picture in pictures[400:])
    assert right / 200 > 0.7


@pytest.mark.skipif(not LONG, reason="RONDO_TEST_LONG is not set: the whole example, several minutes")
@pytest.mark.parametrize(("modality", "seed"), [("image", 0), ("audio", 1), ("mixed", 0)])
def test_a_tiny_model_learns_from_the_example_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modality: str, seed: int
) -> None:
    monkeypatch.setenv("MODALITY", modality)
    monkeypatch.delenv("DIGITS", raising=False)
    line = [sys.executable, "-m", "rondo.launch.cli", "train", str(ROOT / "examples" / "omni_digits.py"), "--plain"]
    line += ["--set", f"run_dir={tmp_path}", "--set", f"seed={seed}"]
    ended = finish(start(line, tmp_path), tmp_path / f"{modality}_digits", limit_s=3000)
    assert ended.code == 0, ended.output
    assert ended.summary["reward_after"] > max(0.3, ended.summary["reward_before"] + 0.1), os.linesep + ended.output
