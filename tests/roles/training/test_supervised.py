"""Steps over rows with answers: they go on from a checkpoint to the same bits, and measure what is held out."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch

from rondo.models.load import load_model, load_tokenizer
from rondo.roles.config import DataConfig, SftConfig
from rondo.roles.data.datasets import RowError, open_dataset
from rondo.roles.training import sft
from rondo.roles.training.backend import Backend
from rondo.roles.training.supervised import Learning
from tests.roles.training.test_sft import folder  # noqa: F401  # a fixture


def learning(folder: Path, position: int = 0, **options: Any) -> tuple[Backend[Any], Learning]:  # noqa: F811
    data = DataConfig(rows=f"{folder}/rows.py:rows", label="answer", held_out=5)
    # Rows of 16 tokens and an answer are too long: they are skipped, so places and rows differ.
    config = SftConfig(
        **{"data": data, "steps": 4, "batch_size": 4, "evaluate_every": 2, "micro_batch_tokens": 17} | options
    )
    path = str(folder / "model")
    backend = sft.backend_of(load_model(path), config, 4)
    train, held_out = open_dataset(data).split(5, 0)
    encode = sft.encoder(load_tokenizer(path), config, data)
    return backend, Learning(backend, encode, train, held_out, config, data, seed=3, position=position)


def test_training_goes_on_from_a_checkpoint_to_the_same_bits(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    backend, whole = learning(folder)
    made = [whole.step(step) for step in range(2)]
    backend.save(tmp_path / "step_000002", {"position": whole.position})
    assert whole.position > 8  # rows were skipped
    made += [whole.step(step) for step in range(2, 4)]
    position = orjson.loads((tmp_path / "step_000002" / "index.json").read_bytes())["position"]
    later_backend, later = learning(folder, position)
    later_backend.load_checkpoint(tmp_path / "step_000002")
    for step in range(2, 4):
        found, wanted = later.step(step), made[step]
        assert found is not None and wanted is not None
        names = ("loss", "lr", "grad_norm", "tokens")
        assert [found[name] for name in names] == [wanted[name] for name in names]
    assert later.position == whole.position and later_backend.checksum() == backend.checksum()


def test_what_is_held_out_is_measured_as_transformers_would_and_trains_nothing(folder: Path) -> None:  # noqa: F811
    backend, found = learning(folder, micro_batch_tokens=40)
    figures = found.evaluate()
    tokenizer, held_out = load_tokenizer(str(folder / "model")), found._held_out
    assert held_out is not None
    total, right, count = 0.0, 0, 0
    for index in range(5):
        row = held_out.row(index)
        prompt, answer = (
            tokenizer(row.prompt)["input_ids"],
            [*tokenizer(row.label)["input_ids"], tokenizer.eos_token_id],
        )
        with torch.no_grad():
            logits = backend.model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        targets = torch.tensor(answer)
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        right, count = right + int((logits.argmax(-1) == targets).sum()), count + len(answer)
    assert figures == {
        "eval_loss": pytest.approx(total / count, rel=1e-5),
        "eval_token_accuracy": pytest.approx(right / count),
    }
    cut_backend, cut = learning(folder, micro_batch_tokens=19)
    assert cut.evaluate() == pytest.approx(figures, rel=1e-5)
    before = cut_backend.checksum()
    cut.evaluate()
    assert cut_backend.checksum() == before


def test_it_ends_with_the_last_pass_over_the_rows(folder: Path) -> None:  # noqa: F811
    source = DataConfig(rows=f"{folder}/rows.py:rows", label="answer")
    config = SftConfig(data=source, epochs=1, batch_size=10)
    path = str(folder / "model")
    backend = sft.backend_of(load_model(path), config, 3)
    ends = Learning(
        backend, sft.encoder(load_tokenizer(path), config, source), open_dataset(source), None, config, source, seed=0
    )
    tokens = [made["tokens"] for step in range(3) if (made := ends.step(step)) is not None]
    assert tokens == [30, 30, 15] and ends.step(3) is None


def test_sources_are_mixed_by_their_weights_as_in_reinforcement(tmp_path: Path) -> None:
    for name, size in (("a", 12), ("b", 40)):
        lines = (orjson.dumps({"prompt": f"{name}{at}", "label": "x"}) for at in range(size))
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(lines))
    of = {name: {"path": str(tmp_path / f"{name}.jsonl"), "weight": each} for name, each in (("a", 3), ("b", 1))}
    config = SftConfig(data=DataConfig.model_validate({"sources": of}), steps=5, batch_size=8)
    assert config.data is not None
    backend: Any = SimpleNamespace(sum_over_ranks=lambda values: values)
    mixed = Learning(
        backend, lambda row: Said(row.source), open_dataset(config.data), None, config, config.data, seed=0
    )
    assert [sorted(item.source for item in batch) for batch in mixed.ahead()] == [["a"] * 6 + ["b"] * 2] * 5


@dataclass(frozen=True, slots=True)
class Said:
    """Which source a row is of."""

    source: str
    cost: int = 1
    num_bytes: int = 0


class Numbers:
    """Ten rows, each its own number."""

    def __len__(self) -> int:
        return 10

    def row(self, index: int) -> Any:
        return index


def test_a_row_that_one_rank_alone_cannot_use_is_left_out_by_all() -> None:
    """Two ranks, each with a disk of its own, one of which lacks what rows 2 and 5 show."""
    config = SftConfig(rows="m:f", epochs=1, batch_size=4)
    source = DataConfig(rows="m:f", shuffle=False, max_bad_rows=0.3)
    meeting, said = threading.Barrier(2, timeout=60), dict[int, list[float]]()

    def rank(number: int) -> tuple[list[list[Any]], dict[str, Any]]:
        def summed(values: list[float]) -> list[float]:
            said[number] = values
            meeting.wait()
            total = [sum(both) for both in zip(*said.values(), strict=True)]
            meeting.wait()
            return total

        def encode(row: Any) -> Any:
            if number == 1 and row in (2, 5):
                raise RowError("no such file")
            return SimpleNamespace(row=row, num_bytes=0)

        backend: Any = SimpleNamespace(sum_over_ranks=summed)
        rows: Any = Numbers()
        found = Learning(backend, encode, rows, None, config, source, seed=0)
        return [[item.row for item in batch] for batch in found.ahead()], found._encoded.skipped()

    with ThreadPoolExecutor(2) as threads:
        (one, told), (other, missing) = threads.map(rank, range(2))
    assert one == other == [[0, 1, 3, 4], [6, 7, 8, 9]]
    assert (told["skipped"], missing["skipped"]) == (2, 2)
    assert "another could not use" in told["first_skipped"] and missing["first_skipped"] == "no such file"
