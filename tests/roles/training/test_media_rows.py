"""Demonstrations and pairs whose prompts hold media, through the model's processor: losses are those of transformers row by row,
and are learnt from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rondo.models.load import load_model, load_tokenizer
from rondo.models.media.config import MediaConfig
from rondo.models.packing import Packing
from rondo.models.tiny import qwen3_omni
from rondo.roles.config import DataConfig, DpoConfig, SftConfig
from rondo.roles.data.datasets import Row, row_of
from rondo.roles.data.media import preparer
from rondo.roles.training.backend import Backend
from rondo.roles.training.preference import PreferenceLoss, pair_encoder
from rondo.roles.training.sft import Prepare, backend_of, encoder
from rondo.roles.training.supervised import Learning
from tests.e2e.omni import whole
from tests.models.multimodal import alone

KINDS = [(), ("image",), ("audio",), ("video",), ("image", "audio")]
"""Of the first rows of `whole`."""


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prepare]:
    """A tiny model, and its processor."""
    folder = tmp_path_factory.mktemp("omni")
    qwen3_omni.build(folder)
    return folder, preparer(str(folder), MediaConfig(video_min_tokens=4, max_group_bytes=1 << 20))


class Shown:
    """A row of each kind with two answers, read as any source's are."""

    def __init__(self, source: DataConfig) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(KINDS)

    def row(self, index: int) -> Row:
        values = {"prompt": whole(index), "answer": f"{index}{index + 1}", "worse": "0" * (index + 1)}
        return row_of(values, self._source, f"row {index}")


def test_the_loss_of_demonstrations_with_media_is_that_of_transformers_and_falls(omni: tuple[Path, Prepare]) -> None:
    folder, prepare = omni
    source = DataConfig(path="unused", label="answer", apply_chat_template=True, shuffle=False)
    config = SftConfig(data=source, steps=2, batch_size=5, lr=1e-2, micro_batch_tokens=200)
    model, encode = load_model(str(folder)), encoder(load_tokenizer(str(folder)), config, source, prepare=prepare)
    rows = [encode(Shown(source).row(index)) for index in range(5)]
    found = [() if row.sequence.media is None else row.sequence.media.modalities for row in rows]
    assert found == KINDS
    with torch.no_grad():
        wanted = [alone(model, row.sequence) for row in rows]
    backend = backend_of(model, config, 2)
    learning = Learning(backend, encode, Shown(source), None, config, source, seed=0)
    made = [learning.step(step) for step in range(2)]
    assert made[0] is not None and made[-1] is not None
    assert made[0]["loss"] == pytest.approx(-float(torch.cat(wanted).mean()), rel=1e-5)
    assert (made[0]["tokens"], made[0]["skipped"]) == (15, 0) and made[-1]["loss"] < made[0]["loss"]


def test_log_probs_of_pairs_with_media_are_those_of_transformers_and_what_is_learnt_tells_them_apart(
    omni: tuple[Path, Prepare],
) -> None:
    folder, prepare = omni
    columns: dict[str, Any] = {"label": "answer", "rejected": "worse"}
    source = DataConfig(path="unused", apply_chat_template=True, shuffle=False, **columns)
    config = DpoConfig(data=source, steps=3, batch_size=5, lr=1e-2, beta=1.0, micro_batch_tokens=400)
    model, encode = load_model(str(folder)), pair_encoder(load_tokenizer(str(folder)), config, source, prepare=prepare)
    backend = Backend(model, PreferenceLoss(config, Packing.of(model), "cpu"), config, num_steps=3)
    learning, objective = Learning(backend, encode, Shown(source), None, config, source, seed=0), backend.objective
    for batch in learning.ahead():
        objective.refer(backend, batch)  # type: ignore[arg-type]
    for index in range(5):
        pair = encode(Shown(source).row(index))
        with torch.no_grad():
            wanted = [float(alone(model, side).sum()) for side in (pair.chosen, pair.rejected)]
        assert objective.reference[pair.key] == pytest.approx(wanted, rel=1e-4), KINDS[index]
    assert len(objective.reference) == 5  # media are part of what tells pairs apart
    made = [learning.step(step) for step in range(3)]
    assert made[0] is not None and made[-1] is not None
    assert made[0]["loss"] == pytest.approx(0.6931, abs=1e-3) and made[-1]["loss"] < made[0]["loss"]
    assert made[-1]["rewards/margins"] > 0
