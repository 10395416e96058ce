"""A trainer with adapters: they alone move, last and are published; and the base beside them is the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.lora import adapt, load_published
from rondo.models.names import disk_shapes
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.roles.config import JobConfig, LoraConfig
from tests.roles.training.test_backend import Policy, model, rows, trainer
from tests.roles.training.test_backend import job as full_job
from tests.strength import LONG

__all__ = ["model"]

LORA = LoraConfig(rank=4)


def job(model: str, *, sft: bool = False, lora: LoraConfig = LORA, **train: Any) -> JobConfig:
    config = full_job(model)
    made = config.train.model_copy(update={"lora": lora, **train})
    return config.model_copy(update={"train": made} if sft else {"train": made, "sft": None})


def step(made: Policy, number: int, *, seed: int = 0, cuts: tuple[int, ...] = (6,)) -> dict[str, float]:
    batch, start = [replace(row, old_log_probs=None, ref_log_probs=None) for row in rows(seed)], 0
    for at, size in enumerate(cuts):
        ids = [[number, 0, start + i, 1] for i in range(size)]
        made.accumulate(number, batch[start : start + size], ids, last=at == len(cuts) - 1)
        start += size
    return made.finish(number)[0]


def test_adapters_alone_move_and_are_what_lasts_and_what_is_published(model: str) -> None:
    made, plain = trainer(job(model), model), load_model(model)
    before, checksum = {name: tensor.clone() for name, tensor in made.weights()}, made.checksum()
    step(made, 0)
    after = dict(made.weights())
    assert checksum != made.checksum() and after.keys() == before.keys() == made.shapes().keys()
    assert all(name.startswith("base_model.model.model.layers.") for name in after)
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in after if ".lora_B." in name}  # A moves when B is no longer 0
    own = {name: tensor for name, tensor in made.model.named_parameters() if "lora_" not in name}
    assert all(torch.equal(tensor, own[name]) for name, tensor in plain.named_parameters())
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in own.values())
    kept = {name.split(".lora_")[-1] for name in made.state()[0] if not name.startswith("random.")}
    assert kept == {f"{m}.weight{kind}" for m in "AB" for kind in ("", ".step", ".exp_avg", ".exp_avg_sq")}


@pytest.mark.parametrize("lends", [False, True])
def test_a_restored_trainer_goes_on_bit_by_bit(model: str, lends: bool, tmp_path: Path) -> None:
    made = trainer(job(model), model)
    step(made, 0)
    tensors, state = made.state()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    made.save(tmp_path / "step_000001", {"version": 1}, tokenizer_path=model)
    step(made, 1, seed=1)
    again = trainer(job(model), model)
    again.load_state(kept, state) if lends else again.load_checkpoint(tmp_path / "step_000001")
    step(again, 1, seed=1)
    assert again.checksum() == made.checksum()
    assert sorted(each.name for each in (tmp_path / "step_000001" / "adapter").glob("adapter_*")) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


WAYS: list[dict[str, Any]] = [{}, {"activation_checkpointing": True}, {"passes": 2}, {"offload_optimizer": True}]


@pytest.mark.parametrize("train", [*WAYS, {"compile": True}] if LONG else WAYS)
def test_a_step_cut_into_rounds_is_the_same_step(model: str, train: dict[str, Any]) -> None:
    config = job(model, **train)
    whole, cut = trainer(config, model), trainer(config, model)
    passes = config.train.passes
    for made, cuts in ((whole, (6,)), (cut, (1, 0, 2, 3))):
        batch = [replace(row, old_log_probs=None, ref_log_probs=None) for row in rows(0)]
        for update in range(passes):
            start = 0
            for at, size in enumerate(cuts):
                ids = [[0, 0, start + i, 1] for i in range(size)]
                last = at == len(cuts) - 1
                made.accumulate(0, batch[start : start + size], ids, last=last, update=update)
                start += size
            if update < passes - 1:
                made.update(0)
        made.finish(0)
    for name, tensor in cut.weights():
        torch.testing.assert_close(tensor, dict(whole.weights())[name], atol=2e-5, rtol=0)


def test_the_reference_is_the_base_with_its_adapters_off(model: str) -> None:
    base = load_model(model)
    packed = Packing.of(base).pack([Packable(row.tokens, len(row.mask)) for row in rows(0)])
    with torch.no_grad():
        log_probs = response_log_probs(base, packed)[0].numpy()
    parts = np.split(log_probs, np.cumsum([len(row.mask) for row in rows(0)])[:-1])
    batch = [replace(row, old_log_probs=None, ref_log_probs=ref) for row, ref in zip(rows(0), parts, strict=True)]
    by_itself, given = trainer(job(model), model), trainer(job(model, sft=True), model)
    for made in (by_itself, given):  # the second has a warm-up, and so a role for its reference
        step(made, 0, seed=9) if made is by_itself else None
    load_published(given.model, dict(by_itself.weights()))
    found = step(by_itself, 1)
    given.accumulate(1, batch, [[1, 0, i, 1] for i in range(6)], last=True)
    wanted = given.finish(1)[0]
    assert found["kl"] == pytest.approx(wanted["kl"], rel=1e-5) and found["kl"] > 0
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def test_a_base_of_sixteen_bits_stays_so_beside_adapters_in_float32(model: str) -> None:
    made = trainer(job(model, dtype="bfloat16"), model)
    dtypes = {("lora_" in name, tensor.dtype) for name, tensor in made.model.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    found = [step(made, number, seed=number) for number in range(2)]
    assert all(math.isfinite(each["loss"]) and each["grad_norm"] > 0 for each in found)


def test_merged_the_whole_model_is_published_with_the_adapter_in_it(model: str) -> None:
    made = trainer(job(model, lora=LORA.model_copy(update={"publish": "merged"})), model)
    step(made, 0)
    plain = load_model(model)
    assert made.shapes().keys() == disk_shapes(plain).keys()
    load_published(plain, dict(made.weights()))
    adapt(plain, LORA)  # fresh, and so without effect
    ids = torch.arange(2, 12)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, made.model(ids).logits, atol=1e-4, rtol=1e-4)
