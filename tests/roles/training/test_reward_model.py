"""Reward models: the loss against the papers', and a job from its first step to a folder that transformers scores alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rondo.launch.export import main as export
from rondo.models.load import load_tokenizer
from rondo.models.mesh import Mesh
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.tiny import qwen3
from rondo.roles.algorithms.preference import reward_sums
from rondo.roles.config import DataConfig, JobConfig, RewardModelConfig
from rondo.roles.data.datasets import RowError, row_of
from rondo.roles.scorer import RewardModel
from rondo.roles.training.backend import Backend
from rondo.roles.training.preference import Pair
from rondo.roles.training.reward_model import RewardLoss, rewards_of
from rondo.roles.training.supervised import Learning
from rondo.roles.training.warm_up import open_learning
from tests.roles.training.test_preference import PAIRS

CHOSEN, REJECTED, NUM_TOKENS = [1.5, -0.25, 3.0], [0.5, 0.75, -2.0], [12, 5, 38]


@pytest.mark.parametrize(("margin", "coef"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.01), (1.25, 0.2)])
def test_loss_gradient_and_what_is_measured_are_those_of_bradley_and_terry(margin: float, coef: float) -> None:
    config = RewardModelConfig(rows="m:f", steps=1, batch_size=3, margin=margin, center_rewards_coef=coef)
    chosen, rejected = (torch.tensor(side, dtype=torch.float64, requires_grad=True) for side in (CHOSEN, REJECTED))
    found = reward_sums(config, chosen=chosen, rejected=rejected, num_tokens=torch.tensor(NUM_TOKENS))
    found.loss.backward()
    better, worse = np.array(CHOSEN), np.array(REJECTED)
    wrong = 1 / (1 + np.exp(better - worse - margin))  # how probable it is that the worse one wins
    assert float(found.loss.detach()) == pytest.approx(
        np.sum(-np.log(1 - wrong) + coef * (better + worse) ** 2), rel=1e-12
    )
    assert chosen.grad is not None and rejected.grad is not None
    np.testing.assert_allclose(chosen.grad.numpy(), -wrong + 2 * coef * (better + worse), rtol=1e-12)
    np.testing.assert_allclose(rejected.grad.numpy(), wrong + 2 * coef * (better + worse), rtol=1e-12)
    told = {name: float(value) for name, value in found.sums.items()}
    assert told == {
        "tokens": 55, "samples": 3, "rewards/chosen": 4.25, "rewards/rejected": -0.75, "rewards/margins": 5.0,
        "rewards/accuracies": 2,
    }  # fmt: skip


def test_a_row_may_have_a_margin_of_its_own_as_in_trl() -> None:
    config = RewardModelConfig(rows="m:f", steps=1, batch_size=3, margin=0.5)
    chosen, rejected = (torch.tensor(side, dtype=torch.float64) for side in (CHOSEN, REJECTED))
    own = [0.0, 1.5, 3.0]
    found = reward_sums(
        config, chosen=chosen, rejected=rejected, num_tokens=torch.tensor(NUM_TOKENS), margins=torch.tensor(own)
    )
    gaps = np.array(CHOSEN) - REJECTED - 0.5 - own
    assert float(found.loss) == pytest.approx(np.sum(np.log1p(np.exp(-gaps))), rel=1e-12)


@pytest.mark.parametrize("margin", ["1", -0.5, float("nan"), float("inf"), None, True])
def test_a_margin_that_is_none_fails_its_row(margin: Any) -> None:
    values = {"prompt": "s21>", "chosen": "12", "rejected": "21", "margin": margin}
    columns = DataConfig(rows="m:f", label="chosen", rejected="rejected", margin="margin")
    with pytest.raises(RowError, match="row 7: 'margin' must be a number, at least 0, got"):
        row_of(values, columns, "row 7")


def test_a_column_of_margins_is_learnt_from(folder: Path) -> None:
    """Of two jobs that differ in it alone the first step's loss differs as the formula has it, and the gradients with it."""
    columns = {"label": "chosen", "rejected": "rejected"}
    plain, wide = (
        opened(folder, data={"rows": f"{folder}/rows.py:{name}", **columns, **more}, evaluate_every=None)[1].step(0)
        for name, more in (("rows", {}), ("with_margins", {"margin": "margin"}))
    )
    assert plain is not None and wide is not None and wide["loss"] > plain["loss"] + 1
    assert wide["rewards/margins"] == pytest.approx(plain["rewards/margins"], abs=1e-6)


Opened = tuple[Backend[RewardLoss], Learning]


def opened(folder: Path, position: int = 0, *, rank: int = 0, **options: Any) -> Opened:
    """rank: of adapters."""
    own = {
        "data": {"rows": f"{folder}/rows.py:rows", "label": "chosen", "rejected": "rejected", "held_out": 5},
        "steps": 12, "batch_size": 10, "lr": 1e-2, "evaluate_every": 4,
    } | options  # fmt: skip
    tree = {"name": "test", "job": "reward_model", "model": {"path": f"{folder}/model"}, "reward_model": own}
    tree |= {"train": {"lora": {"rank": rank, "targets": ["q_proj", "v_proj", "down_proj"]}}} if rank else {}
    backend, learn = open_learning(
        JobConfig.model_validate(tree), f"{folder}/model", folder, world_size=1, device="cpu"
    )
    return backend, learn(position)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    qwen3.build(folder / "model", hidden_size=32, num_layers=2)
    (folder / "rows.py").write_text(
        f"{PAIRS}\n\ndef with_margins():\n    return [each | {{'margin': 2}} for each in rows()]\n"
    )
    return folder


@pytest.mark.parametrize("rank", [0, 4])
def test_a_job_learns_goes_on_to_the_same_bits_and_leaves_a_folder_that_transformers_scores_alike(
    folder: Path, tmp_path: Path, rank: int
) -> None:
    """The whole model, and then adapters and the head beside a base that stays."""
    backend, learning = opened(folder, rank=rank)
    (before, made), saved = (learning.evaluate(), []), tmp_path / "checkpoints" / "step_000006"
    began = {name: tensor.detach().clone() for name, tensor in backend.model.named_parameters()}
    for step in range(12):
        if step == 6:
            backend.save(saved, {"version": 6, "position": learning.position})
        made.append(learning.step(step))
    last, after = made[-1], learning.evaluate()
    moved = {name for name, tensor in backend.model.named_parameters() if not torch.equal(tensor, began[name])}
    learnt = {name for name in began if not rank or "lora_" in name or name == "lm_head.value"}
    assert moved == learnt and len(learnt) == (len(began) if not rank else 13)
    assert last is not None and last["rewards/accuracies"] >= 0.9 and last["loss"] < 0.5
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-5)
    assert after.keys() == {"eval_loss", "eval_rewards/accuracies", "eval_rewards/margins"}
    assert after["eval_loss"] < before["eval_loss"] and after["eval_rewards/margins"] > before["eval_rewards/margins"]

    again, later = opened(folder, orjson.loads((saved / "index.json").read_bytes())["position"], rank=rank)
    again.load_checkpoint(saved)
    assert [later.step(step) for step in range(6, 12)] == made[6:] and again.checksum() == backend.checksum()

    # Of the run that went on; by itself, and as `rondo export` makes it of a checkpoint.
    done, path = tmp_path / "checkpoints" / "step_000012", str(folder / "model")
    again.save(done, {"version": 12, "position": later.position}, tokenizer_path=path)
    train = {"lora": {"rank": rank, "targets": ["q_proj", "v_proj", "down_proj"]}} if rank else {}
    (tmp_path / "config.resolved.json").write_bytes(orjson.dumps({"job": "reward_model", "train": train}))
    (tmp_path / "prepared.json").write_bytes(orjson.dumps({"model_path": path}))
    assert export(tmp_path, tmp_path / "out", "float32", merged=bool(rank)) == 0
    folders: list[Any] = [AutoModelForSequenceClassification.from_pretrained(done / "hf")]
    folders.append(AutoModelForSequenceClassification.from_pretrained(tmp_path / "out"))
    if rank:  # the checkpoint holds them alone, and peft computes the same beside the base
        assert export(tmp_path, tmp_path / "adapter", "float32") == 0
        base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
        folders.append(pytest.importorskip("peft").PeftModel.from_pretrained(base, tmp_path / "adapter"))
        folders[-1].config.pad_token_id = folders[0].config.pad_token_id
    pairs = [pair for batch in learning.ahead() for pair in batch if isinstance(pair, Pair)]
    sides = [side for pair in pairs[:6] for side in (pair.chosen, pair.rejected)]
    with torch.no_grad():
        rewards = rewards_of(again.model, Packing.of(again.model), sides, "cpu")
    tokenizer = load_tokenizer(path)
    assert {int(side.tokens[-1]) for side in sides} == {tokenizer.eos_token_id}
    padded = tokenizer.pad({"input_ids": [side.tokens.tolist() for side in sides]}, return_tensors="pt")
    assert bool((padded["attention_mask"] == 0).any())
    assert {tuple(scores.config.architectures) for scores in folders[:2]} == {("Qwen3ForSequenceClassification",)}
    # Its scorer, in whose settings the run of the policy names that folder.
    judge = {"scorer": {"model": {"path": str(done / "hf"), "dtype": "float32"}, "max_prompt_tokens": 64}}
    judging = JobConfig.model_validate(
        {"name": "j", "num_steps": 1, "model": {"path": path}, "data": {"rows": "m:f"}, **judge}
        | {"rollout": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_tokens": 8, "max_new_tokens": 8}}
    )
    at: Any = SimpleNamespace(config=judging, judge_paths={"scorer": str(done / "hf")}, device="cpu")
    answers = [Packable(side.tokens, 1) for side in sides]
    assert RewardModel(at, Mesh()).score(answers) == pytest.approx(rewards.tolist(), abs=1e-5)
    for scores in folders:
        assert scores.config.num_labels == 1
        with torch.no_grad():
            torch.testing.assert_close(scores(**padded).logits[:, 0], rewards, atol=1e-5, rtol=1e-5)


def test_micro_batches_change_nothing_and_every_pair_counts_once(folder: Path) -> None:
    whole, cut = (opened(folder, micro_batch_tokens=tokens)[1].step(0) for tokens in (4096, 50))
    assert whole is not None and whole == pytest.approx(cut, rel=1e-5)
