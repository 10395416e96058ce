"""Routers of a trainer: the load-balancing loss against transformers' own, biases, metrics, and routes of a first forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rondo.models.packing import Packing, pack
from rondo.models.packing import Sequence as Packable
from rondo.models.routing import listen, routers_of
from rondo.models.tiny.tokenizer import build_tokenizer
from rondo.roles.config import JobConfig
from rondo.roles.training.backend import Use
from rondo.roles.training.objective import TrainRow
from rondo.roles.training.sft import Demonstration, backend_of
from rondo.runtime.errors import ConfigError
from tests.models.builders import SIZES, folder_of
from tests.roles.training.test_backend import Policy, job, rows, trainer
from tests.roles.training.test_trainer_updates import run


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def with_train(path: str, **train: Any) -> JobConfig:
    config = job(path, kl_coef=0.0)
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def accumulated(config: JobConfig, path: str, batch: list[TrainRow]) -> Policy:
    made = trainer(config, path)
    made.accumulate(0, batch, [[i, 0, 0, 1] for i in range(len(batch))], last=True)
    return made


def gradients(made: Policy) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_load_balancing_loss_and_its_gradient_are_those_of_transformers(
    mixture: str, checkpointing: bool, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over the tokens that are there: padding of a row counts nowhere, and a shared prompt once, as it is computed."""
    if not shared:
        monkeypatch.setattr(Packing, "pack", lambda self, sequences, train=False: pack(sequences, share_rows=False))
    coefficient, batch = 0.5, rows(3, num_rows=4)
    plain = accumulated(with_train(mixture, activation_checkpointing=checkpointing), mixture, batch)
    options = {"activation_checkpointing": checkpointing, "router_aux_loss_coef": coefficient}
    evened = accumulated(with_train(mixture, **options), mixture, batch)
    found = {name: grad - gradients(plain)[name] for name, grad in gradients(evened).items()}

    oracle = hf.AutoModelForCausalLM.from_pretrained(mixture)
    width = max(len(row.tokens) for row in batch)
    ids, mask = torch.zeros(len(batch), width, dtype=torch.int64), torch.zeros(len(batch), width, dtype=torch.int64)
    for at, row in enumerate(batch):
        # What is alone in a flat batch is all of its tokens but the last, which predicts nothing.
        size = len(row.tokens) - shared
        ids[at, :size], mask[at, :size] = torch.from_numpy(row.tokens[:size].astype(np.int64)), 1
    output = oracle(input_ids=ids, attention_mask=mask, output_router_logits=True)
    loss = load_balancing_loss_func(output.router_logits, 4, 2, mask)
    loss.backward()
    metrics = evened.finish(0)[0]
    assert metrics["router_aux_loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    for name, parameter in oracle.named_parameters():
        if parameter.grad is not None:
            expected = coefficient * len(batch) * parameter.grad  # undivided, as the loss of four samples is
            torch.testing.assert_close(found[name], expected, atol=2e-5, rtol=1e-4)
    assert metrics["loss"] == pytest.approx(plain.finish(0)[0]["loss"] + coefficient * float(loss.detach()), abs=1e-5)


def test_a_warm_up_adds_the_load_balancing_loss_as_a_step_does(mixture: str) -> None:
    coefficient, batch, use = 0.5, rows(3, num_rows=4), Use(0, 0, 0, [[i, 0, 0, 1] for i in range(4)])
    shown = [Demonstration(Packable(row.tokens, len(row.mask)), np.ones(len(row.mask), np.uint8)) for row in batch]
    made = trainer(with_train(mixture, router_aux_loss_coef=coefficient), mixture)
    config = made.objective._config.sft
    assert config is not None
    plain, evened = (
        backend_of(made.model, config, 1, beside=made, balance=balance).objective.sums(made.model, shown, use)
        for balance in (None, made.objective.balance)
    )
    steps = made.objective.sums(made.model, batch, use).sums
    loss = steps["router_aux_loss"] / steps["tokens"]
    assert float(evened.sums["router_aux_loss"] / evened.sums["tokens"]) == pytest.approx(float(loss), abs=1e-6)
    added = float((evened.loss - plain.loss).detach() / plain.sums["tokens"])
    assert added == pytest.approx(coefficient * float(loss), abs=1e-5) and "router_aux_loss" not in plain.sums
    gates = [router.weight for router in routers_of(made.model).values()]
    grads = [torch.autograd.grad(each.loss, gates) for each in (evened, plain)]
    assert all(not torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_metrics_of_routers_are_of_a_whole_step_however_it_is_cut(mixture: str) -> None:
    batch, told = rows(0), []
    for cuts in ([[6]], [[2, 0, 3, 1]]):
        made = trainer(with_train(mixture), mixture)
        metrics, _ = run(made, batch, cuts, passes=1)
        told.append({name: value for name, value in metrics.items() if name.startswith("router_")})
    assert told[0] == pytest.approx(told[1], abs=1e-6)
    chosen: dict[int, torch.Tensor] = {}
    made = trainer(with_train(mixture), mixture)
    listen(made.model, chosen.__setitem__)
    made.accumulate(0, batch, [[i, 0, 0, 1] for i in range(6)], last=True)
    shares = [torch.bincount(experts.flatten(), minlength=4) / experts.numel() for experts in chosen.values()]
    assert told[0]["router_max_share"] == pytest.approx(float(torch.stack(shares).max()), abs=1e-6)
    assert told[0]["router_dropped"] == 0 and 0 < told[0]["router_entropy"] < np.log(4)
    assert "router_differs" not in told[0] and "router_aux_loss" not in told[0]


def test_replayed_routes_that_the_router_would_not_have_chosen_are_told(mixture: str) -> None:
    batch, chosen = rows(1, num_rows=1), dict[int, torch.Tensor]()
    made = trainer(with_train(mixture, router_replay="r3"), mixture)
    listen(made.model, chosen.__setitem__)
    made.accumulate(0, batch, [[0, 0, 0, 1]], last=True)
    own = torch.stack([chosen[0], chosen[1]], 1)[: len(batch[0].tokens) - 1].numpy().astype(np.uint8)
    other = own.copy()
    other[3, 1, 0] = next(expert for expert in range(4) if expert not in own[3, 1])
    for routes, expected in ((own, 0.0), (other, 1 / own.size)):
        made = trainer(with_train(mixture, router_replay="r3"), mixture)
        made.accumulate(0, [replace(batch[0], routed_experts=routes)], [[0, 0, 0, 1]], last=True)
        assert made.finish(0)[0]["router_differs"] == pytest.approx(expected)


def test_biases_follow_the_counts_of_every_update_and_the_model_chooses_by_them(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    torch.manual_seed(0)
    kind = hf.Glm4MoeConfig(**SIZES | sizes, first_k_dense_replace=1, n_group=1, topk_group=1, initializer_range=0.1)
    hf.Glm4MoeForCausalLM(kind).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    path, rate, batch = str(tmp_path), 0.125, rows(2)
    made = trainer(with_train(path, router_bias_update_rate=rate, lr=1e-9, num_mini_batches=2), path)
    chosen: dict[int, list[torch.Tensor]] = {1: [], 2: []}
    listen(made.model, lambda layer, experts: chosen[layer].append(experts))
    expected = {layer: torch.zeros(4) for layer in chosen}
    for update, part in enumerate((batch[:4], batch[4:])):
        for heard in chosen.values():
            heard.clear()
        for at, row in enumerate(part):
            made.accumulate(0, [row], [[update, 0, at, 1]], last=at == len(part) - 1, update=update)
        for layer, heard in chosen.items():
            counts = torch.bincount(torch.cat(heard).flatten(), minlength=4).float()
            expected[layer] += rate * (counts.mean() - counts).sign()
        metrics = made.update(0) if update == 0 else made.finish(0)[0]
    for layer, router in routers_of(made.model).items():
        assert torch.equal(router.e_score_correction_bias, expected[layer]) and expected[layer].abs().max() > 0
    assert metrics["router_bias_max"] == max(float(each.abs().max()) for each in expected.values())  # type: ignore[index]
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in dict(made.weights())
    tensors, state = made.state()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    again = trainer(with_train(path, router_bias_update_rate=rate), path)
    again.load_state(kept, state)
    for router, other in zip(routers_of(again.model).values(), routers_of(made.model).values(), strict=True):
        assert torch.equal(router.e_score_correction_bias, other.e_score_correction_bias)
    assert again.checksum() == made.checksum()
    router.e_score_correction_bias[0] += rate  # a part of what a snapshot is proved by
    assert again.checksum() != made.checksum()


def test_settings_of_routers_are_refused_for_models_that_have_none(tmp_path: Path, mixture: str) -> None:
    dense = folder_of(tmp_path, "qwen3")
    for setting in ({"router_replay": "r2"}, {"router_aux_loss_coef": 0.1}, {"router_bias_update_rate": 0.1}):
        with pytest.raises(ConfigError, match=rf"train\.{next(iter(setting))} must be .* for a model without routers"):
            trainer(with_train(dense, **setting), dense)
    with pytest.raises(ConfigError, match=r"train\.router_bias_update_rate must be 0 .* no e_score_correction_bias"):
        trainer(with_train(mixture, router_bias_update_rate=0.1), mixture)
    assert not [name for name in run(trainer(job(dense), dense), rows(0), [[6]], 1)[0] if name.startswith("router")]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_later_updates_of_a_step_take_the_routes_of_its_first_forward_over_a_row(
    mixture: str, checkpointing: bool
) -> None:
    """Of the loss's own forward for the rows of the first mini-batch, of the scoring before it for those of the second."""
    options = {
        "router_replay": "r2",
        "num_mini_batches": 2,
        "passes": 2,
        "activation_checkpointing": checkpointing,
    }
    made = trainer(with_train(mixture, **options), mixture)
    batch = [replace(row, old_log_probs=None) for row in rows(4)]
    ids = [[at, 0, 0, 1] for at in range(6)]
    chosen: dict[int, torch.Tensor] = {}
    listen(made.model, chosen.__setitem__)

    def routes() -> torch.Tensor:
        return torch.stack([chosen[0], chosen[1]])

    made.objective.score(made.model, batch[3:], ids[3:])
    seen = [None, routes()]
    for use in range(4):
        part = slice(3 * (use % 2), 3 * (use % 2) + 3)
        sums = made.objective.sums  # the routes of the forward, not of what is computed again

        def heard(*args: Any, sums: Any = sums, use: int = use) -> Any:
            found = sums(*args)
            if use == 0:
                seen[0] = routes()
            else:
                assert seen[use % 2] is not None and torch.equal(routes(), seen[use % 2])
            return found

        made.objective.sums = heard  # type: ignore[method-assign]
        made.accumulate(0, batch[part], ids[part], last=True, update=use)
        made.objective.sums = sums  # type: ignore[method-assign]
        if use < 3:
            made.update(0)
            with torch.no_grad():
                for router in routers_of(made.model).values():
                    router.get_parameter("weight").neg_()  # by itself it would choose others
    metrics, _ = made.finish(0)
    assert metrics["router_differs"] > 0.2 and made.objective._routes == {}
