"""The optimizer against torch's plain one, and learning rates by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from rondo.models import offload
from rondo.models.optimizer import learning_rate, make_optimizer
from rondo.models.state import load_training_state, training_state
from tests.models.builders import SIZES, tiny, train_step


def test_steps_are_those_of_plain_adamw_and_vectors_do_not_decay() -> None:
    ours, theirs = tiny("gpt2"), tiny("gpt2")
    optimizer = make_optimizer(ours, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-6)
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95), eps=1e-6, foreach=False, fused=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        optimizer.step()
        plain.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_moments_in_host_memory_make_the_same_steps_to_the_bit_and_go_on_from_the_others_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "PIECE_ELEMENTS", 5000)  # some tensors are larger, some pieces hold many
    models = [tiny("qwen3") for _ in range(2)]
    plain, offloaded = (
        make_optimizer(model, lr=1e-2, weight_decay=0.1, offload=number == 1) for number, model in enumerate(models)
    )
    assert isinstance(offloaded, offload.OffloadedAdamW) and not isinstance(plain, offload.OffloadedAdamW)
    optimizers = [plain, offloaded]
    for step in range(3):
        told = [train_step(model, optimizer, step) for model, optimizer in zip(models, optimizers, strict=True)]
        assert told[0] == told[1]
        states = [training_state(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        assert all(torch.equal(states[0][0][name], states[1][0][name]) for name in states[0][0])
        if step == 1:  # each goes on with what the other has, and would stop at what it has not
            models = [tiny("qwen3") for _ in range(2)]
            optimizers = [
                make_optimizer(model, lr=1.0, weight_decay=0.1, offload=not i) for i, model in enumerate(models)
            ]
            for model, optimizer, (tensors, state) in zip(models, optimizers, states, strict=True):
                load_training_state(model, optimizer, tensors, state)


@pytest.mark.cuda
def test_moments_that_pass_through_a_gpu_make_the_steps_of_those_that_stay_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload, "PIECE_ELEMENTS", 5000)
    models = [tiny("qwen3").to("cuda") for _ in range(2)]
    optimizers = [make_optimizer(model, lr=1e-2, offload=number == 1) for number, model in enumerate(models)]
    draw = torch.Generator(device="cuda").manual_seed(0)
    for _ in range(3):
        for mine, other in zip(*(model.parameters() for model in models), strict=True):
            mine.grad = torch.randn(mine.shape, generator=draw, device="cuda")
            other.grad = mine.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
    moments = [optimizers[1].state[p]["exp_avg"] for p in models[1].parameters()]
    assert all(moment.device.type == "cpu" and moment.is_pinned() for moment in moments)


def test_biases_and_norms_do_not_decay_whatever_their_shape() -> None:
    sizes = SIZES | {"num_hidden_layers": 1}
    gpt_oss = hf.GptOssForCausalLM(hf.GptOssConfig(**sizes, num_local_experts=2, layer_types=["full_attention"]))
    cohere = hf.CohereForCausalLM(hf.CohereConfig(**sizes, use_qk_norm=True))
    gated = hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**sizes, num_experts=2))
    kept = {type(model).__name__: undecayed(model) for model in (gpt_oss, cohere, gated)}
    experts, attention = "model.layers.0.mlp.experts.", "model.layers.0.self_attn."
    assert kept["GptOssForCausalLM"] == {experts + "gate_up_proj_bias", experts + "down_proj_bias"}
    assert kept["CohereForCausalLM"] == {attention + "q_norm.weight", attention + "k_norm.weight"}
    assert kept["Qwen2MoeForCausalLM"] == set()  # the gate of the shared expert is a matrix of one row


def undecayed(model: Any) -> set[str]:
    """What does not decay, vectors apart."""
    (decaying, still) = make_optimizer(model, lr=1e-3, weight_decay=0.1).param_groups
    assert (decaying["weight_decay"], still["weight_decay"]) == (0.1, 0.0)
    left = {id(parameter) for parameter in still["params"]}
    return {name for name, p in model.named_parameters() if id(p) in left and p.ndim >= 2}


def test_moments_exist_before_the_first_step_for_what_is_trained() -> None:
    model = tiny("qwen3")
    model.model.layers[0].requires_grad_(False)
    optimizer = make_optimizer(model, lr=1e-3)
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    assert optimizer.state.keys() == trained < set(model.parameters())
    assert all(moment.eq(0).all() for moments in optimizer.state.values() for moment in moments.values())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [0.5, 1.0, 1.0, 0.88284271, 0.6, 0.31715729, 0.2, 0.2]),
    ],
)
def test_the_rate_rises_in_equal_parts_and_falls_towards_its_end(schedule: str, expected: list[float]) -> None:
    rates = [
        learning_rate(step, 2e-3, warmup_steps=2, schedule=schedule, total=6, min_fraction=0.2)  # type: ignore[arg-type]
        for step in range(8)
    ]
    assert rates == pytest.approx([2e-3 * part for part in expected])


def test_no_step_of_a_run_has_rate_zero() -> None:
    assert min(
        learning_rate(step, 1.0, warmup_steps=3, schedule="linear", total=9) for step in range(9)
    ) == pytest.approx(1 / 6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warm_up_longer_than_the_run_reaches_the_rate_in_its_last_step(schedule: str) -> None:
    for total, expected in ((4, [1 / 3, 2 / 3, 1, 1]), (1, [1])):
        rates = [learning_rate(step, 1.0, warmup_steps=100, schedule=schedule, total=total) for step in range(total)]  # type: ignore[arg-type]
        assert rates == pytest.approx(expected)
