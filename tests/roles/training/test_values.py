"""One step of PPO, from rewards to the gradients of policy and critic, against plain torch and numpy that share no code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from rondo.models.config import LoraConfig, ModelConfig
from rondo.models.load import prepare
from rondo.models.lora import canary_of, load_published, pairs, published_adapter
from rondo.models.names import adapter_tensors
from rondo.models.packing import Sequence as Packable
from rondo.roles.advantages import _advantages, _of_values
from rondo.roles.algorithms.advantages import of_group
from rondo.roles.algorithms.whitening import contribution
from rondo.roles.config import AlgorithmConfig, CriticConfig, JobConfig
from rondo.roles.training.backend import Backend, Use
from rondo.roles.training.objective import TrainRow, open_policy
from rondo.roles.training.values import ValueObjective, ValueRow, open_critic
from tests.roles.training.test_backend import job

GAMMA, LAMBDA = 0.9, 0.8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    build = ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": 2})
    return prepare(build, tmp_path_factory.mktemp("model") / "tiny")


def ppo(model: str, **critic: Any) -> JobConfig:
    found = job(model, name="ppo", gamma=GAMMA, gae_lambda=LAMBDA, kl_coef=0.0)
    return found.model_copy(update={"critic": CriticConfig(lr=1e-2, micro_batch_tokens=64, **critic)})


def critic_of(config: JobConfig, model: str) -> Backend[ValueObjective]:
    return open_critic(config, model, model, world_size=1, device="cpu")


class Given:
    """A row of the bus, as the advantages see it."""

    def __init__(self, reward: float | None, finish: str = "stop", **columns: np.ndarray) -> None:
        self.reward, self.finish, self._columns = reward, finish, columns
        self.response, self.columns, self.sample, self.part = len(columns["values"]), columns, 0, 0

    def array(self, column: str) -> np.ndarray:
        return self._columns[column]


def samples(seed: int = 0) -> list[TrainRow]:
    """Of three to six response tokens, the second of each sampled by nobody."""
    draw, made = np.random.default_rng(seed), []
    for response in (3, 5, 6):
        mask = np.ones(response, np.uint8)
        mask[1] = 0
        tokens, nothing = draw.integers(0, 256, 4 + response).astype(np.int32), np.zeros(response, np.float32)
        old = draw.normal(-5, 0.3, response).astype(np.float32)
        made.append(TrainRow(tokens, mask, nothing, old, old, None, np.zeros(response, np.int32)))
    return made


def second_gae(rewards: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The paper's sum of discounted temporal differences, for tokens that follow each other."""
    deltas = rewards + GAMMA * np.append(values[1:], 0.0) - values
    size = len(deltas)
    return np.array([sum((GAMMA * LAMBDA) ** (i - t) * deltas[i] for i in range(t, size)) for t in range(size)])


def test_a_step_has_the_losses_and_gradients_of_plain_torch(model: str) -> None:
    config, rows, rewards = ppo(model), samples(), [1.0, -0.5, 2.0]
    policy, critic = open_policy(config, model, world_size=1, device="cpu"), critic_of(config, model)
    scored = critic.objective.score(critic.model, [Packable(row.tokens, len(row.mask)) for row in rows])
    found = [
        _of_values([Given(reward, loss_mask=row.mask, values=values)], config.loss())  # type: ignore[list-item]
        for reward, row, values in zip(rewards, rows, scored, strict=True)
    ]
    made = [(advantages, returns) for [advantages], [returns] in found]
    rows = [replace(row, advantages=advantages) for row, (advantages, _) in zip(rows, made, strict=True)]
    policy.objective.whiten([contribution(row.advantages, row.mask, "tokens") for row in rows])
    use = Use(0, 0, 0, [[at, 0, 0, 1] for at in range(3)])
    of_policy = policy.objective.sums(policy.model, rows, use)
    # Values that have moved since, so that the clip acts.
    old = [values + np.float32(shift) for values, shift in zip(scored, (0.5, -0.5, 0.0), strict=True)]
    of_values = critic.objective.sums(
        critic.model, [ValueRow(row.tokens, returns, each) for row, (_, returns), each in zip(rows, made, old, strict=True)], use
    )  # fmt: skip
    for sums, backend in ((of_policy, policy), (of_values, critic)):
        (sums.loss / backend.objective.denominator(sums)).backward()

    # The second implementation, a sample at a time, in float64 from here on.
    plain, trunk = (hf.AutoModelForCausalLM.from_pretrained(model).double() for _ in range(2))
    head = critic.model.lm_head.value.detach().double().requires_grad_()
    kept = [row.mask > 0 for row in rows]
    hidden = [trunk.model(torch.from_numpy(row.tokens).long()[None]).last_hidden_state[0] for row in rows]
    values = [each[-len(row.mask) - 1 : -1] @ head[0] for each, row in zip(hidden, rows, strict=True)]
    advantages, value_loss = [], torch.zeros((), dtype=torch.float64)
    num_tokens = sum(int(each.sum()) for each in kept)
    for value, keep, reward, before in zip(values, kept, rewards, old, strict=True):
        mine = value.detach().numpy()[keep]
        last = np.zeros(len(mine))
        last[-1] = reward
        advantages.append(second_gae(last, mine))
        target, v, held = torch.from_numpy(advantages[-1] + mine), value[keep], torch.from_numpy(before[keep]).double()
        near = torch.minimum(torch.maximum(v, held - 0.2), held + 0.2)
        value_loss = value_loss + 0.5 * torch.maximum((v - target) ** 2, (near - target) ** 2).sum()
    (value_loss / num_tokens).backward()
    every = np.concatenate(advantages)
    policy_loss = torch.zeros((), dtype=torch.float64)
    for row, keep, mine in zip(rows, kept, advantages, strict=True):
        tokens = torch.from_numpy(row.tokens).long()
        logits = plain(tokens[None]).logits[0, -len(row.mask) - 1 : -1] / config.rollout.temperature
        chosen = torch.log_softmax(logits, -1).gather(1, tokens[-len(row.mask) :, None])[:, 0][keep]
        assert row.old_log_probs is not None
        ratio = (chosen - torch.from_numpy(row.old_log_probs[keep])).exp()
        white = torch.from_numpy((mine - every.mean()) / np.sqrt(every.var() + 1e-8))
        loss = torch.maximum(-ratio * white, -ratio.clamp(0.8, 1.2) * white)
        policy_loss = policy_loss + torch.where(white < 0, torch.minimum(loss, -3 * white), loss).sum()
    (policy_loss / num_tokens).backward()

    assert float(of_policy.loss.detach()) == pytest.approx(float(policy_loss.detach()), rel=1e-4)
    assert float(of_values.loss.detach()) == pytest.approx(float(value_loss.detach()), rel=1e-4)
    for mine, other in ((policy.model, plain), (critic.model.model, trunk.model)):
        theirs = dict(other.named_parameters())
        for name, parameter in mine.named_parameters():
            torch.testing.assert_close(parameter.grad.double(), theirs[name].grad, atol=2e-5, rtol=2e-3, msg=name)
    torch.testing.assert_close(critic.model.lm_head.value.grad.double(), head.grad, atol=2e-5, rtol=2e-3)


def test_a_sample_that_was_cut_off_is_worth_what_the_critic_says_behind_it_where_that_is_asked_for(model: str) -> None:
    config = ppo(model)
    critic = critic_of(config, model)
    row = Packable(np.arange(8, dtype=np.int32), 3)
    (values,), (longer,) = (
        critic.objective.score(critic.model, [row]),
        critic.objective.score(critic.model, [row], behind=True),
    )
    np.testing.assert_allclose(longer[:3], values, atol=1e-5)
    algorithm = config.algorithm.model_copy(update={"bootstrap_truncated": True})
    for finish, behind in (("length", longer[3]), ("stop", 0.0)):
        given = Given(1.0, finish, loss_mask=np.ones(3, np.uint8), values=values, value_behind=longer[3:])
        [advantages], _ = _of_values([given], algorithm)  # type: ignore[list-item]
        assert advantages[-1] == pytest.approx(1.0 + GAMMA * behind - values[-1], abs=1e-5)
    given = Given(None, loss_mask=np.ones(3, np.uint8), values=values)
    [advantages], [returns] = _of_values([given], algorithm)  # type: ignore[list-item]
    assert not advantages.any() and np.isnan(returns).all()  # its reward failed


def test_a_critic_learns_returns_in_passes_of_its_own_and_a_dummy_counts_nothing(model: str) -> None:
    config = ppo(model, passes=3, value_clip=None)
    critic, draw = critic_of(config, model), np.random.default_rng(1)
    rows = [
        ValueRow(row.tokens, draw.normal(1, 0.1, len(row.mask)).astype(np.float32), np.zeros(len(row.mask), np.float32))
        for row in samples()
    ]
    losses = []
    for step in range(4):
        for update in range(3):
            critic.accumulate(step, rows, [[at, 0, 0, 1] for at in range(3)], last=False, update=update)
            critic.accumulate(step, [], [], last=True, update=update)
            if update < 2:
                critic.update(step)
        figures, _ = critic.finish(step)
        assert (figures["tokens"], figures["samples"], figures["num_updates"]) == (14, 3, 3)
        losses.append(figures["value_loss"])
    assert losses[-1] < losses[0] / 2


def test_adapters_and_head_of_a_critic_learn_what_its_weights_would_and_the_base_has_no_gradient(model: str) -> None:
    """Beside what plain torch makes of the merged weights W: with s = alpha / rank, dB = s dW A^T and dA = s B^T dW."""
    lora, found = LoraConfig(rank=4, alpha=2.0), list[Any]()
    adapted, dense = (critic_of(ppo(model, value_clip=None, lora=own), model) for own in (lora, None))
    load_published(adapted.model, canary_of({n: t.shape for n, t in published_adapter(adapted.model).items()}, lora))
    with torch.no_grad():
        dense.model.lm_head.value.copy_(adapted.model.lm_head.value)
        for name, pair in pairs(adapted.model).items():
            weight = dense.model.get_parameter(name)
            weight.copy_(pair.merged(weight, torch.float32))
    given = [
        ValueRow(row.tokens, np.ones(len(row.mask), np.float32), np.zeros(len(row.mask), np.float32))
        for row in samples()
    ]
    for backend in (adapted, dense):
        sums = backend.objective.sums(backend.model, given, Use(0, 0, 0, [[at, 0, 0, 1] for at in range(3)]))
        sums.loss.backward()
        found.append({name: p.grad for name, p in backend.model.named_parameters() if p.grad is not None})
    ours, theirs = found
    assert ours.keys() == adapter_tensors(adapted.model).keys() and len(ours) == 1 + 2 * 7 * 2
    assert "lm_head.value" in ours and sum("lora_" in name for name in ours) == 28
    torch.testing.assert_close(ours["lm_head.value"], theirs["lm_head.value"], atol=1e-4, rtol=1e-3)
    for name, pair in pairs(adapted.model).items():
        path, dense_gradient = name.removesuffix(".weight"), theirs[name]
        wanted = {"A": pair.scaling * pair.wide.T @ dense_gradient, "B": pair.scaling * dense_gradient @ pair.narrow.T}
        for half, gradient in wanted.items():
            torch.testing.assert_close(ours[f"{path}.lora_{half}.weight"], gradient, atol=1e-3, rtol=1e-2, msg=name)


def test_a_folder_that_knows_fewer_tokens_than_the_policy_is_refused(model: str, tmp_path: Path) -> None:
    fields = json.loads((Path(model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(fields | {"vocab_size": 8, "pad_token_id": None, "eos_token_id": 1})
    )
    with pytest.raises(ValueError, match=r"critic\.path must know the tokens of the policy, \d+, got a model of 8"):
        open_critic(ppo(model, path=str(tmp_path)), str(tmp_path), model, world_size=1, device="cpu")


def test_the_rows_of_a_sample_are_one_line_of_tokens_to_what_advantages_are_made_of() -> None:
    """Its reward stands at its end alone, and the others of its group are compared with it once."""
    masks, values = [np.array([1, 0, 1], np.uint8), np.array([1, 1], np.uint8)], np.arange(5, dtype=np.float32) / 7

    def given(cut: bool) -> list[Given]:
        columns = {"loss_mask": np.concatenate(masks), "values": values}
        if not cut:
            return [Given(1.0, **columns)]
        rows = [Given(1.0, **{name: each[at] for name, each in columns.items()}) for at in (slice(0, 3), slice(3, 5))]
        rows[1].part = 1
        return rows

    algorithm = AlgorithmConfig(name="ppo", gae_lambda=0.9, gamma=0.9)
    [whole], [of_whole] = _of_values(given(False), algorithm)  # type: ignore[arg-type]
    other = Given(0.0, loss_mask=np.ones(1, np.uint8), values=values[:1])
    other.sample = 1
    first, second = given(True)
    found, returns = _of_values([first, other, second], algorithm)  # type: ignore[list-item]
    assert np.array_equal(np.concatenate([found[0], found[2]]), whole)
    assert np.array_equal(np.concatenate([returns[0], returns[2]]), of_whole, equal_nan=True)
    compute = of_group(AlgorithmConfig(name="dr_grpo"), [])
    rows = [first, other, second, Given(None, loss_mask=np.ones(1, np.uint8), values=values[:1])]
    rows[3].sample = 2
    advantages = _advantages(rows, compute)  # type: ignore[arg-type]
    assert [each.tolist() for each in advantages] == [[0.5, 0.0, 0.5], [-0.5], [0.5, 0.5], [0.0]]
