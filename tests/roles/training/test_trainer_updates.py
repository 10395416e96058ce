"""Steps of several updates: against a plain loop over one row at a time, under any cut, and undone when they are not whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models.load import load_model
from rondo.roles.algorithms.whitening import Whitening, contribution
from rondo.roles.config import JobConfig
from rondo.roles.training.objective import TrainRow
from tests.roles.training.test_backend import Policy, job, model, rows, trainer, weights

__all__ = ["model"]


def several(model: str, mini_batches: int, passes: int, **algorithm: Any) -> JobConfig:
    config = job(model, **algorithm)
    train = config.train.model_copy(update={"num_mini_batches": mini_batches, "passes": passes})
    return config.model_copy(update={"train": train})


def run(made: Policy, batch: list[TrainRow], cuts: list[list[int]], passes: int) -> tuple[dict[str, float], Any]:
    """Train on `batch`; cuts: for each mini-batch the sizes of its rounds. Rows without old log-probs are scored first."""
    at = sum(cuts[0])
    for size in [size for sizes in cuts[1:] for size in sizes]:
        if batch[0].old_log_probs is None:
            made.objective.score(made.model, batch[at : at + size], [[at, 0, 0, 1] for at in range(at, at + size)])
        at += size
    for use in range(passes):
        at = 0
        for number, sizes in enumerate(cuts):
            for i, size in enumerate(sizes):
                last = i == len(sizes) - 1
                made.accumulate(
                    0, batch[at : at + size], [[at, 0, 0, 1] for at in range(at, at + size)],
                    last=last, update=use * len(cuts) + number,
                )  # fmt: skip
                at += size
            if (use, number) != (passes - 1, len(cuts) - 1):
                made.update(0)
    return made.finish(0)


def plain(config: JobConfig, path: str, batch: list[TrainRow], sizes: list[int]) -> tuple[torch.Tensor, float]:
    """The same with one row at a time, whole logits and torch's own AdamW: (weights, mean loss of the updates)."""
    policy = load_model(path, dtype="float32", device="cpu", attn=config.model.attn)
    train, algorithm = config.train, config.algorithm
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=train.lr, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay
    )
    old, losses = [chosen(policy, row, config).detach() for row in batch], []
    for _ in range(train.passes):
        at = 0
        for size in sizes:
            total = torch.zeros(())
            mine = range(at, at + size)
            for i in mine:
                row, given = batch[i], batch[i].old_log_probs
                log_probs, was = chosen(policy, row, config), old[i] if given is None else torch.from_numpy(given)
                ratio, advantage = (log_probs - was).exp(), torch.from_numpy(row.advantages)
                bounded = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
                loss = -torch.minimum(ratio * advantage, bounded * advantage)
                difference = log_probs - torch.from_numpy(row.ref_log_probs)
                loss = loss + algorithm.kl_coef * ((-difference).exp() - 1 + difference)
                total = total + (loss.sum() if algorithm.loss_aggregation == "token" else loss.mean())
            at += size
            tokens_or_samples = sum(len(batch[i].mask) for i in mine) if algorithm.loss_aggregation == "token" else size
            total = total / tokens_or_samples
            optimizer.zero_grad()
            total.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), train.clip_grad_norm)
            optimizer.step()
            losses.append(float(total.detach()))
    # The policy's tensors in the trainer's order.
    made = trainer(config, path)
    made.model.load_state_dict(policy.state_dict())
    return weights(made), sum(losses) / len(losses)


def chosen(policy: Any, row: TrainRow, config: JobConfig) -> torch.Tensor:
    """The log-probs of a row's response."""
    tokens = torch.from_numpy(row.tokens).long()
    logits = policy(tokens[None]).logits[0].float() / config.rollout.temperature
    return logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[-len(row.mask) :, 0]


@pytest.mark.parametrize("loss_aggregation", ["sample", "token"])
@pytest.mark.parametrize("given", [False, True])
def test_mini_batches_and_passes_equal_a_plain_loop(model: str, loss_aggregation: str, given: bool) -> None:
    config = several(model, 2, 2, loss_aggregation=loss_aggregation)
    batch = rows(0) if given else [replace(row, old_log_probs=None) for row in rows(0)]
    made = trainer(config, model)
    metrics, trained = run(made, batch, [[4], [1, 1]], passes=2)
    wanted, loss = plain(config, model, batch, [4, 2])
    torch.testing.assert_close(weights(made), wanted, atol=3e-5, rtol=0)
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    assert (metrics["num_updates"], metrics["samples"], metrics["skipped"]) == (4, 6, 0)
    assert metrics["tokens"] == sum(len(row.mask) for row in batch)
    assert trained == [[i, 0, 0, 1] for i in range(6)]  # once, however often they were used


@pytest.mark.parametrize("loss_aggregation", ["sample", "token", "constant"])
@pytest.mark.parametrize(
    "correction", [{}, {"tis_high": 1.5, "tis_mode": "mask", "tis_level": "geometric"}, {"normalize_batch": "tokens"}]
)
def test_updates_cut_into_any_rounds_make_the_same_weights(
    model: str, loss_aggregation: str, correction: dict[str, Any]
) -> None:
    config = several(model, 2, 2, loss_aggregation=loss_aggregation, **correction)
    batch = [replace(row, old_log_probs=None) for row in rows(1)]
    results = []
    for cuts in ([[3], [3]], [[1, 0, 2], [1, 1, 1, 0]]):
        made = trainer(config, model)
        if "normalize_batch" in correction:
            made.objective.whiten([contribution(row.advantages, row.mask, "tokens") for row in batch])
        metrics, _ = run(made, batch, cuts, passes=2)
        results.append((weights(made), metrics))
    torch.testing.assert_close(results[1][0], results[0][0], atol=2e-5, rtol=0)
    # Near a bound a last bit may decide on which side of it a token is.
    for name in results[0][1].keys() - {
        "tis_mask_fraction",
        "clip_fraction",
        "clip_low_fraction",
        "clip_high_fraction",
    }:
        assert results[1][1][name] == pytest.approx(results[0][1][name], abs=2e-4), name


def test_later_passes_compare_with_the_first_forward_and_not_with_themselves(model: str) -> None:
    batch = [replace(row, old_log_probs=None) for row in rows(2)]
    once, _ = run(trainer(several(model, 1, 1), model), batch, [[6]], passes=1)
    twice, _ = run(trainer(several(model, 1, 2), model), batch, [[6]], passes=2)
    assert once["ratio_max"] == 1.0 and once["approx_kl"] == 0.0
    assert twice["ratio_max"] > 1.01 and twice["approx_kl"] > 1e-4


def test_later_mini_batches_compare_with_the_weights_that_the_step_began_with(model: str) -> None:
    batch = [replace(row, old_log_probs=None) for row in rows(2)]
    made = trainer(several(model, 2, 1, tis_high=2.0), model)
    metrics, _ = run(made, batch, [[3], [3]], passes=1)
    assert metrics["ratio_max"] > 1.01 and metrics["approx_kl"] > 1e-5
    made.accumulate(1, batch[:1], [[0, 0, 0, 1]], last=True)
    made.update(1)
    with pytest.raises(KeyError):  # never with themselves
        made.accumulate(1, batch[1:2], [[1, 0, 0, 1]], last=True, update=1)


def test_a_correction_that_nobody_set_bounds_what_numerics_do_to_the_gradient(model: str) -> None:
    config = job(model)
    config = config.model_copy(update={"train": config.train.model_copy(update={"dtype": "bfloat16"})})
    (row,) = (
        replace(row, old_log_probs=None) for row in rows(4, num_rows=1)
    )  # the engine gave e^4 as much, or as little
    norms = {}
    for gap in (-4.0, 0.0, 4.0):
        mine = np.array([-5.5] * len(row.mask), np.float32)
        made = trainer(config, model)
        metrics, _ = run(made, [replace(row, rollout_log_probs=mine + np.float32(gap))], [[1]], passes=1)
        norms[gap] = metrics["tis_weight_mean"]
        assert metrics["ratio_max"] == 1.0
    assert norms[-4.0] == 2.0 and 0.5 < norms[0.0] < 1.6 and norms[4.0] < 0.04


def test_whitened_advantages_are_what_the_loss_uses(model: str) -> None:
    batch = rows(3)
    parts = [contribution(row.advantages, row.mask, "samples") for row in batch]
    made, by_hand = trainer(several(model, 1, 1), model), trainer(several(model, 1, 1), model)
    made.objective.whiten(parts)
    metrics, _ = run(made, batch, [[6]], passes=1)
    white = Whitening.of(parts)
    run(by_hand, [replace(row, advantages=white.apply(row.advantages, row.mask)) for row in batch], [[6]], passes=1)
    assert made.checksum() == by_hand.checksum()
    assert (metrics["advantage_mean"], metrics["advantage_std"]) == (white.mean, white.deviation)
    assert "advantage_mean" not in run(made, batch, [[6]], passes=1)[0]  # it was that step's


def test_the_drift_of_a_step_is_that_of_all_its_tokens_and_forgotten_with_it(model: str) -> None:
    config = several(model, 1, 1, name="p3o", kl_coef=0.0)
    batch = rows(3)
    made = trainer(config, model)
    for at, row in enumerate(batch):
        made.objective.score(made.model, [row], [[at, 0, 0, 1]])
    made.objective.score(made.model, [], [])
    made.objective.measure_drift(made.sum_over_ranks)
    log_ratios = [
        chosen(load_model(model, dtype="float32", device="cpu", attn=config.model.attn), row, config).detach().numpy()
        - row.rollout_log_probs
        for row in batch
    ]
    ratios = np.exp(np.concatenate([each[row.mask > 0] for each, row in zip(log_ratios, batch, strict=True)]))
    metrics, _ = run(made, [replace(row, old_log_probs=row.rollout_log_probs) for row in batch], [[6]], passes=1)
    assert metrics["ess"] == pytest.approx(ratios.sum() ** 2 / (len(ratios) * np.square(ratios).sum()), rel=1e-4)
    assert (
        "ess" not in run(made, [replace(row, old_log_probs=row.rollout_log_probs) for row in batch], [[6]], passes=1)[0]
    )


def test_a_row_is_refused_a_second_time_in_one_pass(model: str) -> None:
    made = trainer(several(model, 1, 2), model)
    batch = rows(4, num_rows=1)
    made.accumulate(0, batch, [[0, 0, 0, 1]], last=True)
    with pytest.raises(AssertionError, match="used once in every pass"):
        made.accumulate(0, batch, [[0, 0, 0, 1]], last=True)
    made.discard()
    with pytest.raises(AssertionError, match="used once in every pass"):
        made.accumulate(0, batch, [[0, 0, 0, 1]], last=True, update=1)


def test_a_step_that_is_stopped_between_its_updates_says_that_it_moved_and_can_be_undone(model: str) -> None:
    config = several(model, 2, 1)
    made, other = trainer(config, model), trainer(config, model)
    tensors, state = made.state()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    before = made.checksum()
    made.accumulate(0, rows(5), [[i, 0, 0, 1] for i in range(6)], last=False)
    assert not made.moved
    made.update(0)
    assert made.moved and made.checksum() != before
    made.load_state(kept, state)
    made.discard()
    assert not made.moved and made.checksum() == before
    for each in (made, other):
        run(each, rows(6), [[3], [3]], passes=1)
    assert made.checksum() == other.checksum()


def test_the_gap_is_measured_only_while_the_weights_are_those_of_the_step(model: str) -> None:
    made = trainer(several(model, 2, 2), model)
    batch = [replace(row, policy_versions=np.zeros(len(row.mask), np.int32)) for row in rows(7)]
    metrics, _ = run(made, batch, [[2], [4]], passes=2)
    assert metrics["log_prob_gap_tokens"] == sum(len(row.mask) for row in batch[:2])
