"""What a teacher adds, against values worked out by hand, exact gradients over small vocabularies, and float64 numpy."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rondo.models.config import ModelConfig
from rondo.roles.algorithms.advantages import with_teacher
from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.algorithms.batch import Batch
from rondo.roles.algorithms.distillation import at_likeliest, at_sampled, divergence, sampled
from rondo.roles.algorithms.losses import policy_sums
from rondo.roles.algorithms.teachers import NONE, DistillationConfig, TeacherConfig

TEACHER = TeacherConfig(model=ModelConfig(path="teacher"))


def settings(**options: Any) -> DistillationConfig:
    return DistillationConfig(teacher=TEACHER, **options)


def test_a_teacher_in_the_advantages_by_hand() -> None:
    # 2 x 0.5 + 3 x (-1 + 2) = 4; 2 x -1 + 3 x (-4 + 0.5) = -12.5; a token that does not train has none
    config = settings(coef=3.0, task_coef=2.0)
    columns = [np.array(each, np.float32) for each in ([0.5, -1, 9], [1, 1, 0], [-2, -0.5, np.nan], [-1, -4, np.nan])]
    assert with_teacher(config, *columns).tolist() == [4, -12.5, 0]
    alone = settings(task_coef=0.0, min_log_prob=-3.0)
    assert with_teacher(alone, *columns).tolist() == [1, -2.5, 0]
    assert with_teacher(alone, *columns).dtype == np.float32


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_over_sampled_tokens_the_gradient_of_the_loss_is_that_of_the_divergence(kind: str) -> None:
    """Each token of the vocabulary counts as often as it is sampled; then the sum is exact."""
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    kinds = {"reverse": log_probs.exp() * (log_probs - teacher), "forward": teacher.exp() * (teacher - log_probs)}
    [wanted] = torch.autograd.grad(kinds[kind].sum(), logits, retain_graph=True)
    loss = (log_probs.exp().detach() * sampled(settings(form="loss", divergence=kind), log_probs, teacher)).sum()
    [found] = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_an_advantage_of_the_teacher_alone_descends_the_reverse_kl_too() -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(5, dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    [wanted] = torch.autograd.grad((log_probs.exp() * (log_probs - teacher)).sum(), logits, retain_graph=True)
    ones = np.ones(5)
    own = log_probs.detach().numpy()
    advantages = torch.from_numpy(with_teacher(settings(task_coef=0.0), ones, ones, own, teacher.numpy()))
    [found] = torch.autograd.grad(-(log_probs.exp().detach() * advantages * log_probs).sum(), logits)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss_aggregation", ["sample", "token"])
@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_the_term_is_added_to_every_tokens_loss_before_that_is_divided(loss_aggregation: str, kind: str) -> None:
    draw, lengths = np.random.default_rng(0), [2, 4, 1]
    columns = {
        name: torch.from_numpy(draw.normal(-1.5, 0.4, 7).astype(np.float32))
        for name in ("log_probs", "rollout_log_probs", "advantages", "teacher")
    }
    mask = torch.tensor([1.0, 1, 0, 1, 1, 1, 1])
    teacher = columns.pop("teacher")
    algorithm = AlgorithmConfig(loss_aggregation=loss_aggregation)
    config = settings(form="loss", divergence=kind, coef=0.7)
    run = partial(policy_sums, algorithm, mask=mask, lengths=lengths, **columns)
    alone, both = run(), run(beside=partial(at_sampled, config, teacher_log_probs=teacher))
    added, gap, start = 0.0, [], 0
    for length in lengths:
        kept = [t for t in range(start, start + length) if mask[t]]
        x = [float(columns["log_probs"][t].double() - teacher[t].double()) for t in kept]
        terms = [each**2 / 2 if kind == "reverse" else math.exp(-each) - 1 + each for each in x]
        added += 0.7 * sum(terms) / (len(kept) if loss_aggregation == "sample" else 1)
        gap += x
        start += length
    assert float(both.loss - alone.loss) == pytest.approx(added, abs=1e-5)
    assert both.metrics()["teacher_kl"] == pytest.approx(np.mean(gap), abs=1e-6)
    in_advantages = run(beside=partial(at_sampled, settings(), teacher_log_probs=teacher))
    assert float(in_advantages.loss) == float(alone.loss) and "teacher_kl" in in_advantages.metrics()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"teacher": None}, "must be set one without the other, got neither"),
        ({"teachers": {"math": TEACHER}}, "must be set one without the other, got both"),
        ({"teacher": None, "teachers": {"a b": TEACHER}}, "names of letters, digits"),
        ({"divergence": "forward"}, "divergence must be left out with distillation.form 'advantage'"),
        ({"support": "teacher", "top_k": 4}, "support must be left out with distillation.form 'advantage'"),
        ({"form": "loss", "support": "teacher"}, "top_k must be set with distillation.support"),
        ({"form": "loss", "top_k": 4}, "top_k must be set with distillation.support"),
        ({"form": "loss", "divergence": "jsd"}, "top_k must be set with distillation.divergence 'jsd'"),
        ({"form": "loss", "beta": 0.1}, "beta must be left out without divergence 'jsd'"),
        ({"tail": "truncate"}, "tail must be left out without top_k"),
        ({"forward_above_entropy": 1.0}, "forward_above_entropy must be left out without top_k and divergence"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DistillationConfig(**{"teacher": TEACHER, **options})


LIKELIEST = {"form": "loss", "support": "teacher", "top_k": 3}
TAILS = ("bucket", "renormalize", "truncate")


def in_numpy(config: DistillationConfig, policy: list[float], teacher: list[float]) -> float:
    """The divergence at one place, in float64, from the papers; log-probs of the tokens that are compared."""
    q, p = np.exp(policy), np.exp(teacher)
    if config.tail == "bucket":
        q, p = np.append(q, 1 - q.sum()), np.append(p, 1 - p.sum())
    elif config.tail == "renormalize":
        q, p = q / q.sum(), p / p.sum()

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return float(sum(x * math.log(x / y) for x, y in zip(a, b, strict=True)))

    if config.divergence == "jsd":
        mixed = config.beta * p + (1 - config.beta) * q
        return config.beta * kl(p, mixed) + (1 - config.beta) * kl(q, mixed)
    found = kl(p, q) if config.divergence == "forward" else kl(q, p)
    if config.forward_above_entropy is not None and -sum(p * np.log(p)) > config.forward_above_entropy:
        found += kl(p, q)
    return found


def places(seed: int = 0, num: int = 4, compared: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the policy and of a teacher for some of 7 tokens, float64 [N, K]."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, num, 7, dtype=torch.float64, generator=draw) * 2
    found = logits.log_softmax(-1)[:, :, :compared]
    return found[0], found[1]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "options",
    [
        {"divergence": "reverse"}, {"divergence": "forward"}, {"divergence": "jsd", "beta": 0.3},
        {"forward_above_entropy": 0.6},
    ],
)  # fmt: skip
def test_divergences_of_the_likeliest_tokens_are_those_of_the_papers(tail: str, options: dict[str, Any]) -> None:
    config = settings(**LIKELIEST, tail=tail, **options)
    policy, teacher = places()
    found = divergence(config, policy, teacher, torch.ones_like(policy, dtype=torch.bool))
    wanted = [in_numpy(config, q, p) for q, p in zip(policy.tolist(), teacher.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-12)
    if tail != "truncate":
        assert min(wanted) > 0
        again = divergence(config, policy, policy, torch.ones_like(policy, dtype=torch.bool))
        assert again.tolist() == pytest.approx([0] * 4, abs=1e-9)


@pytest.mark.parametrize("tail", TAILS)
def test_a_floor_lifts_a_teachers_log_probs_and_takes_nothing_from_other_tokens(tail: str) -> None:
    """P = 1/2, 1/16, 1/16 and 3/8 beside, of which none counts as less than 1/8."""
    policy, teacher = torch.full((1, 3), 0.25).log(), torch.tensor([[0.5, 0.0625, 0.0625]]).log()
    config = settings(**LIKELIEST, tail=tail, min_log_prob=math.log(0.125))
    q, p = np.full(4, 0.25), np.array([0.5, 0.125, 0.125, 0.375])
    if tail == "renormalize":
        q, p = np.full(3, 1 / 3), np.array([0.8, 0.125, 0.125])
    elif tail == "truncate":
        q, p = q[:3], p[:3]
    found = divergence(config, policy, teacher, torch.ones(1, 3, dtype=torch.bool))
    assert float(found) == pytest.approx(float((q * np.log(q / p)).sum()), abs=1e-6)


def test_a_divergence_by_hand() -> None:
    # Q = 1/2, 1/4 and 1/4 beside; P = 1/4, 1/2 and 1/4: KL(Q || P) = 1/2 ln 2 - 1/4 ln 2 = 1/4 ln 2 = KL(P || Q)
    policy, teacher = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.5]]).log()
    every = torch.ones(1, 2, dtype=torch.bool)
    for kind in ("reverse", "forward"):
        found = divergence(settings(**LIKELIEST, divergence=kind), policy, teacher, every)
        assert float(found) == pytest.approx(math.log(2) / 4, abs=1e-6)
    # M = 3/8, 3/8, 1/4: 1/2 (2 x (1/2 ln 4/3 + 1/4 ln 2/3)) = 1/2 ln 4/3 + 1/4 ln 2/3
    found = divergence(settings(**LIKELIEST, divergence="jsd"), policy, teacher, every)
    assert float(found) == pytest.approx(math.log(4 / 3) / 2 + math.log(2 / 3) / 4, abs=1e-6)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_gradients_of_divergences_are_finite_differences(tail: str, kind: str) -> None:
    config = settings(**LIKELIEST, tail=tail, divergence=kind)
    policy, teacher = places(seed=3)
    present = torch.ones_like(policy, dtype=torch.bool)
    present[0, 1] = False
    policy.requires_grad_()
    assert torch.autograd.gradcheck(lambda q: divergence(config, q, teacher, present), policy)


@pytest.mark.parametrize("tail", TAILS)
def test_empty_places_and_masked_tokens_change_nothing(tail: str) -> None:
    config = settings(**LIKELIEST, tail=tail, coef=2.0)
    policy, teacher = (each.float() for each in places())
    few = at_likeliest(config, batch([1, 1, 1, 1]), ids=torch.ones(4, 3).long(), policy=policy, teacher=teacher)
    wider = [torch.cat([each, torch.full((4, 2), value)], 1) for each, value in ((policy, -0.1), (teacher, -9.0))]
    ids = torch.tensor([[5, 6, 7, NONE, NONE]] * 4)
    mine = wider[0].requires_grad_()
    more, measured = at_likeliest(config, batch([1, 0, 1, 1]), ids=ids, policy=mine, teacher=wider[1])
    assert few[0] is not None and more is not None
    assert more.tolist() == pytest.approx([float(few[0][0]), 0, *few[0][2:].tolist()])
    assert measured["teacher_divergence"].tolist() == pytest.approx((more / 2).tolist())
    more.sum().backward()
    assert (
        mine.grad is not None and not mine.grad[1].any() and not mine.grad[:, 3:].any() and mine.grad.isfinite().all()
    )


def test_a_policy_that_is_sure_has_finite_gradients() -> None:
    """Where rounding leaves nothing outside of the compared tokens, or less."""
    sure = torch.tensor([[0.0, -30.0], [1e-7, -18.0]], requires_grad=True)
    teacher = torch.tensor([[-0.5, -1.0], [-1e-7, -17.0]])
    for kind in ("reverse", "forward", "jsd"):
        found = divergence(settings(**LIKELIEST, divergence=kind), sure, teacher, torch.ones(2, 2, dtype=torch.bool))
        found.sum().backward()
        assert found.isfinite().all() and sure.grad is not None and sure.grad.isfinite().all()


def batch(mask: list[int]) -> Batch:
    zeros = torch.zeros(len(mask))
    return Batch(zeros, zeros, zeros, zeros, torch.tensor(mask) > 0, [len(mask)])
