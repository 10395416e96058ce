"""Pairs of answers: what is made of a row, the loss against TRL's and the paper's, and the reference of each row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models.load import load_model, load_tokenizer
from rondo.models.packing import Packing
from rondo.models.tiny import qwen3
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.algorithms.preference import preference_sums
from rondo.roles.config import DataConfig, DpoConfig
from rondo.roles.data.datasets import Row, RowError, open_dataset, row_of
from rondo.roles.training.backend import Backend, Use
from rondo.roles.training.preference import Pair, PreferenceLoss, pair_encoder
from rondo.roles.training.supervised import Learning

PAIRS = """
def rows():
    found = [(a, b) for a in range(5) for b in range(5)]
    return [{"prompt": f"s{a}{b}>", "chosen": f"{min(a, b)}{max(a, b)}", "rejected": f"{a}{b}{a}"} for a, b in found]
"""
CHOSEN, REJECTED = [-12.25, -3.5, -40.0], [-14.0, -3.0, -31.5]
REF_CHOSEN, REF_REJECTED = [-13.0, -3.25, -39.0], [-13.5, -4.0, -33.0]
NUM_CHOSEN, NUM_REJECTED = [7, 2, 21], [5, 3, 17]


def config(**options: Any) -> DpoConfig:
    return DpoConfig(**{"rows": "m:f", "steps": 4, "batch_size": 4} | options)


def of_pairs(**options: Any) -> tuple[float, dict[str, float]]:
    """The mean loss, and the means of what is measured."""
    columns = {
        "chosen": CHOSEN, "rejected": REJECTED, "reference_chosen": REF_CHOSEN, "reference_rejected": REF_REJECTED,
        "chosen_tokens": NUM_CHOSEN, "rejected_tokens": NUM_REJECTED,
    }  # fmt: skip
    free = not options.get("reference", True)
    tensors = {
        name: torch.zeros(3, dtype=torch.float64)
        if free and "reference" in name
        else torch.tensor(values, dtype=torch.float64)
        for name, values in columns.items()
    }
    found = preference_sums(config(**options), **tensors)
    assert float(found.sums["samples"]) == 3 and float(found.sums["tokens"]) == sum(NUM_CHOSEN + NUM_REJECTED)
    return float(found.loss) / 3, {name: float(value) / 3 for name, value in found.sums.items()}


TRL: list[tuple[dict[str, Any], float]] = [
    ({"beta": 0.3}, 0.8527058447981934),
    ({"beta": 0.3, "loss": "hinge"}, 1.25),
    ({"beta": 0.3, "loss": "ipo"}, 3.298305578767455),
    ({"beta": 2.0, "length_normalized": True}, 0.8661798985550249),
    ({"beta": 0.3, "label_smoothing": 0.1}, 0.8277058447981934),
    (
        {"beta": 2.0, "reference": False, "length_normalized": True, "margin": 0.5, "label_smoothing": 0.1},
        1.0834350674971513,
    ),
]
"""What TRL 1.16 makes of these pairs: `DPOTrainer` with "sigmoid", "hinge", "ipo" and "sigmoid_norm", `CPOTrainer` with
smoothing and with "simpo"."""


def test_orpo_is_the_loss_of_the_better_answer_and_the_ratio_of_their_odds() -> None:
    """By the paper's own words: odds of the mean probability of a token, in float64 numpy."""
    loss, told = of_pairs(beta=0.25, loss="orpo", reference=False)
    better, worse = (
        np.exp(np.array(side) / np.array(count)) for side, count in ((CHOSEN, NUM_CHOSEN), (REJECTED, NUM_REJECTED))
    )
    ratio = (better / (1 - better)) / (worse / (1 - worse))
    assert loss == pytest.approx(float(np.mean(-np.log(better) - 0.25 * np.log(ratio / (1 + ratio)))), rel=1e-9)
    assert told["rewards/chosen"] == pytest.approx(0.25 * float(np.log(better).mean()), rel=1e-9)
    sure = {"chosen": torch.tensor([-1e-9], requires_grad=True), "rejected": torch.tensor([-2.0], requires_grad=True)}
    none = dict.fromkeys(("reference_chosen", "reference_rejected"), torch.zeros(1))
    one = dict.fromkeys(("chosen_tokens", "rejected_tokens"), torch.ones(1))
    preference_sums(config(loss="orpo", reference=False), **sure, **none, **one).loss.backward()  # type: ignore[arg-type]
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in sure.values())
    with pytest.raises(ValueError, match=r"dpo.reference must be False with dpo.loss 'orpo'"):
        config(loss="orpo")


@pytest.mark.parametrize(("options", "wanted"), TRL)
def test_losses_are_those_of_trl_and_so_are_the_rewards(options: dict[str, Any], wanted: float) -> None:
    loss, told = of_pairs(**options)
    assert loss == pytest.approx(wanted, rel=1e-9)
    beta, free = options["beta"], not options.get("reference", True)
    ratios = [
        np.array(side) - (0 if free else np.array(ref))
        for side, ref in ((CHOSEN, REF_CHOSEN), (REJECTED, REF_REJECTED))
    ]
    if options.get("length_normalized") or options.get("loss") == "ipo":
        ratios = [ratio / np.array(count) for ratio, count in zip(ratios, (NUM_CHOSEN, NUM_REJECTED), strict=True)]
    better, worse = (beta * ratio for ratio in ratios)
    assert told["rewards/chosen"] == pytest.approx(better.mean()) and told["rewards/rejected"] == pytest.approx(
        worse.mean()
    )
    assert told["rewards/margins"] == pytest.approx((better - worse).mean())
    assert told["rewards/accuracies"] == pytest.approx((better > worse).mean())


def test_the_gradient_is_that_of_the_paper() -> None:
    """Rafailov et al. 2023, section 4: -beta sigmoid(r(rejected) - r(chosen)) on the log-prob of the better answer."""
    chosen = torch.tensor(CHOSEN, dtype=torch.float64, requires_grad=True)
    rest = [
        torch.tensor(each, dtype=torch.float64)
        for each in (REJECTED, REF_CHOSEN, REF_REJECTED, NUM_CHOSEN, NUM_REJECTED)
    ]
    names = ("rejected", "reference_chosen", "reference_rejected", "chosen_tokens", "rejected_tokens")
    preference_sums(config(beta=0.3), chosen=chosen, **dict(zip(names, rest, strict=True))).loss.backward()
    gap = (np.array(CHOSEN) - REF_CHOSEN) - (np.array(REJECTED) - REF_REJECTED)
    assert chosen.grad is not None
    np.testing.assert_allclose(chosen.grad.numpy(), -0.3 / (1 + np.exp(0.3 * gap)), rtol=1e-12)


SYSTEM = {"role": "system", "content": "be"}
ASKED, BETTER, WORSE = (
    {"role": role, "content": text} for role, text in (("user", "s21"), ("assistant", "12"), ("assistant", "21"))
)
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"prompt": "s21", "chosen": "12", "rejected": "21"}, {}),
    ({"prompt": [ASKED], "chosen": [BETTER], "rejected": [WORSE]}, {}),
    ({"prompt": [ASKED], "chosen": [ASKED, BETTER], "rejected": [ASKED, WORSE]}, {}),
    ({"prompt": "s21", "chosen": [ASKED, BETTER], "rejected": [ASKED, WORSE]}, {}),
    ({"chosen": [ASKED, BETTER], "rejected": [ASKED, WORSE]}, {"prompt": "chosen", "label": None}),
]


@pytest.mark.parametrize(("values", "columns"), FORMS)
def test_every_form_of_a_pair_gives_the_same_tokens(values: dict[str, Any], columns: dict[str, Any]) -> None:
    tokenizer = build_tokenizer()
    source = DataConfig(
        **{"path": "a", "label": "chosen", "rejected": "rejected", "apply_chat_template": True} | columns
    )
    pair = pair_encoder(tokenizer, config(), source)(row_of(values, source, "a.jsonl:1"))
    assert tokenizer.decode(pair.chosen.tokens).endswith(
        f"s21<|im_end|>\n<|im_start|>assistant\n12{tokenizer.eos_token}"
    )
    assert tokenizer.decode(pair.rejected.tokens[-3:]) == f"21{tokenizer.eos_token}"
    assert (pair.chosen.response, pair.rejected.response) == (3, 3)


def test_a_pair_that_is_none_is_refused() -> None:
    source = DataConfig(path="a", label="chosen", rejected="rejected", apply_chat_template=True)

    def made(chosen: Any, rejected: Any, most: int = 200) -> Pair:
        own = config(micro_batch_tokens=most)
        return pair_encoder(build_tokenizer(), own, source)(Row("a.jsonl:1", [ASKED], chosen, {}, rejected=rejected))

    with pytest.raises(RowError, match=r"a.jsonl:1: the answers of a pair must differ, got the same twice"):
        made("12", "12")
    with pytest.raises(RowError, match=r"a.jsonl:1: answer must be text, got None"):
        made("12", None)
    with pytest.raises(
        RowError, match=r"an answer must be text, a message of the assistant, or the prompt with one behind it"
    ):
        made("12", [SYSTEM, ASKED, WORSE])
    with pytest.raises(RowError, match=r"must have 1 to 15 tokens.*Raise dpo.micro_batch_tokens"):
        made("12", "21", 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    qwen3.build(folder / "model", hidden_size=32, num_layers=2)
    (folder / "rows.py").write_text(PAIRS)
    return folder


def learning(folder: Path, **options: Any) -> tuple[Backend[PreferenceLoss], Learning]:
    own = config(**{"rows": f"{folder}/rows.py:rows", "batch_size": 25, "lr": 3e-3, "weight_decay": 0.0} | options)
    source, path = own.source(DataConfig(path="unused")), str(folder / "model")
    model = load_model(path)
    backend = Backend(model, PreferenceLoss(own, Packing.of(model), "cpu"), own, num_steps=own.steps)
    encode = pair_encoder(load_tokenizer(path), own, source)
    return backend, Learning(backend, encode, open_dataset(source), None, own, source, seed=0)


def test_the_reference_is_computed_once_and_what_is_learnt_moves_away_from_it(folder: Path, tmp_path: Path) -> None:
    backend, steps = learning(folder, steps=4, lr=1e-2, beta=1.0)
    objective = backend.objective
    for batch in steps.ahead():
        objective.refer(backend, batch)  # type: ignore[arg-type]
    assert len(objective.reference) == 25
    first = steps.step(0)
    assert first is not None and first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)
    last = [steps.step(step) for step in range(1, 4)][-1]
    assert last is not None and last["loss"] < 0.5 and last["rewards/accuracies"] > 0.9
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-5)
    objective.keep(tmp_path / "kept.npz")
    again = PreferenceLoss(config(), Packing.of(backend.model), "cpu")
    again.take(tmp_path / "kept.npz")
    assert again.reference == objective.reference and [each.name for each in tmp_path.iterdir()] == ["kept.npz"]


def test_a_pair_that_the_reference_does_not_know_is_left_out_and_a_file_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that could not be read when the reference was computed, or were changed where no fingerprint looks."""
    source, rows = DataConfig(path="a", label="chosen", rejected="rejected"), ("12", "13")
    tokenizer, objective = build_tokenizer(), PreferenceLoss(config(), Packing(False, False, None), "cpu")
    encode = pair_encoder(tokenizer, config(), source)
    known, other = (Row("a.jsonl:1", "s21>", chosen, {}, rejected="21") for chosen in rows)
    assert objective.known(encode) is encode  # nothing is computed yet
    objective.reference[encode(known).key] = (-1.0, -2.0)
    assert objective.known(encode)(known).key == encode(known).key
    with pytest.raises(
        RowError, match=r"^a.jsonl:1: a pair must be as it was when the reference's log-probs were computed"
    ):
        objective.known(encode)(other)
    objective.keep(tmp_path / "no folder" / "kept.npz")
    assert "the reference's log-probs are not kept, a restart computes them anew" in caplog.text


def test_both_sides_of_a_pair_are_whole_answers_and_micro_batches_change_nothing(folder: Path) -> None:
    backend, steps = learning(folder, reference=False, beta=1.0)
    (pair,) = [each for each in next(steps.ahead())[:1] if isinstance(each, Pair)]
    told = backend.objective.sums(backend.model, [pair], Use(0, 0, 0, ())).sums
    for name, side in (("logps/chosen", pair.chosen), ("logps/rejected", pair.rejected)):
        ids = torch.from_numpy(side.tokens).long()[None]
        with torch.no_grad():
            log_probs = backend.model(input_ids=ids).logits[0].log_softmax(-1)
        answer = range(len(side.tokens) - side.response, len(side.tokens))
        wanted = sum(float(log_probs[at - 1, side.tokens[at]]) for at in answer)
        assert float(told[name]) == pytest.approx(wanted, rel=1e-5)
    whole, cut = (learning(folder, reference=False, micro_batch_tokens=tokens)[1].step(0) for tokens in (4096, 50))
    assert whole is not None and whole == pytest.approx(cut, rel=1e-5)
