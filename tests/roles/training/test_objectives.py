"""A backend trains, restores, saves and publishes whatever its objective is: here values of tokens, with a value head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

from rondo.roles.algorithms.sums import LossSums
from rondo.roles.config import TrainConfig
from rondo.roles.training.backend import Backend, Use, make_ready
from tests.models.builders import SIZES


@dataclass(frozen=True)
class ValueRow:
    tokens: np.ndarray  # int32 [T]
    returns: np.ndarray  # float32 [R], of the last R tokens


class Values:
    """Half the squared distance of a token's value from its return, over the number of tokens."""

    def sums(self, model: Any, rows: Sequence[ValueRow], use: Use) -> LossSums:
        loss, num_tokens = torch.zeros(()), 0
        for row in rows or [ValueRow(np.zeros(2, np.int32), np.zeros(1, np.float32))]:
            values = model(input_ids=torch.from_numpy(row.tokens).long()[None]).logits[0, -len(row.returns) :, 0]
            loss = loss + (values - torch.from_numpy(row.returns)).square().sum() / 2
            num_tokens += len(row.returns)
        counted = {"tokens": num_tokens, "samples": len(rows), "value_loss": loss.detach()}
        sums = LossSums(loss, {name: torch.as_tensor(value, dtype=torch.float64) for name, value in counted.items()})
        return sums if rows else sums.weightless()

    def measure(self) -> None: ...

    def denominator(self, total: LossSums) -> float:
        return float(total.sums["tokens"])

    def figures(self) -> dict[str, float]:
        return {}

    def forget(self) -> None: ...


def critic() -> Backend[Values]:
    torch.manual_seed(0)
    model = hf.Qwen3ForTokenClassification(hf.Qwen3Config(**SIZES, num_labels=1)).eval()
    train = TrainConfig(lr=1e-2, dtype="float32")
    return Backend(make_ready(model, train), Values(), train, num_steps=4, mini_batches=2, passes=2)


def step(made: Backend[Values], number: int) -> tuple[dict[str, float], Any]:
    draw = np.random.default_rng(number)
    rows = [ValueRow(draw.integers(0, 16, 6).astype(np.int32), draw.normal(2, 1, 3).astype(np.float32)) for _ in "ab"]
    for update in range(4):
        made.accumulate(number, [rows[update % 2]], [[update % 2, 0, 0, 1]], last=False, update=update)
        made.accumulate(number, [], [], last=True, update=update)
        if update < 3:
            made.update(number)
    return made.finish(number)


def test_a_value_loss_trains_in_mini_batches_and_passes_and_leaves_state_that_goes_on_bit_by_bit(
    tmp_path: Path,
) -> None:
    made, folder = critic(), tmp_path / "step_000001"
    metrics, spans = step(made, 0)
    assert sorted(spans) == [[0, 0, 0, 1], [1, 0, 0, 1]]
    assert (metrics["tokens"], metrics["samples"], metrics["num_updates"]) == (6, 2, 4)
    kept = {name: tensor.clone() for name, tensor in made.state()[0].items()}
    state, before = made.state()[1], made.checksum()
    made.save(folder, {"version": 1, "index": {}})
    published = dict(made.weights())
    assert "score.weight" in published and all(tensor.isfinite().all() for tensor in published.values())
    after, _ = step(made, 1)
    assert after["value_loss"] < metrics["value_loss"] and made.checksum() != before
    for restore in (lambda each: each.load_state(kept, state), lambda each: each.load_checkpoint(folder)):
        again = critic()
        restore(again)
        assert again.checksum() == before
        assert step(again, 1)[0] == after and again.checksum() == made.checksum()
