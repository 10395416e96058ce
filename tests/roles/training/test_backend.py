from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from rondo.comm.bus.group import NO_VERSION
from rondo.models.config import ModelConfig
from rondo.models.load import load_model, prepare
from rondo.models.logprobs import response_log_probs
from rondo.models.media.config import MediaConfig
from rondo.models.packing import Packing
from rondo.models.packing import Sequence as Packable
from rondo.models.scaling import LossScale
from rondo.roles.algorithms.losses import policy_sums
from rondo.roles.config import (
    AlgorithmConfig,
    DataConfig,
    JobConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    TrainConfig,
)
from rondo.roles.training.backend import Backend, Use
from rondo.roles.training.objective import PolicyObjective, TrainRow, open_policy
from rondo.roles.training.sft import backend_of
from rondo.roles.training.warm_up import train_on_demonstrations
from tests.models.builders import SIZES, tiny

VOCABULARY = 256


def digits() -> list[dict[str, str]]:
    return [{"prompt": f"{n}=", "answer": str(n)} for n in range(16)]


def exact(response: str, label: str, *, prompt: str, metadata: dict[str, object]) -> float:
    return float(response == label)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    build = ModelConfig(build="rondo.models.tiny.qwen3:build", build_args={"hidden_size": 32, "num_layers": 2})
    return prepare(build, tmp_path_factory.mktemp("model") / "tiny")


def job(model: str, **algorithm: object) -> JobConfig:
    return JobConfig(
        name="trainer",
        num_steps=4,
        model=ModelConfig(path=model),
        data=DataConfig(rows=digits, label="answer"),
        reward=RewardConfig(function=exact),
        algorithm=AlgorithmConfig(**{"kl_coef": 0.1, **algorithm}),
        rollout=RolloutConfig(prompts_per_step=2, samples_per_prompt=2, max_prompt_tokens=8, max_new_tokens=8),
        train=TrainConfig(
            lr=1e-2, eps=1e-2, micro_batch_tokens=64
        ),  # eps: Adam else magnifies rounding of tiny gradients
        sft=SftConfig(rows=digits, steps=2, batch_size=4, lr=1e-3),
    )


Policy = Backend[PolicyObjective]


def trainer(config: JobConfig, model: str) -> Policy:
    torch.manual_seed(0)
    return open_policy(config, model, world_size=1, device="cpu")


def rows(seed: int, num_rows: int = 6) -> list[TrainRow]:
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(num_rows):
        response = int(draw.integers(1, 7))
        columns = [draw.normal(-1, 0.1, response).astype(np.float32) for _ in range(4)]
        tokens = draw.integers(0, VOCABULARY, 4 + response).astype(np.int32)
        made.append(TrainRow(tokens, np.ones(response, np.uint8), *columns, np.zeros(response, np.int32)))
    return made


FOUR = (
    "mask", "rollout_log_probs", "advantages", "old_log_probs", "ref_log_probs", "policy_versions",
)  # fmt: skip
"""Columns of a response's tokens."""


def weights(made: Backend[Any]) -> torch.Tensor:
    return torch.cat([tensor.flatten().clone() for _, tensor in made.weights()])


@pytest.mark.parametrize("loss_aggregation", ["sample", "token", "constant"])
def test_a_step_cut_into_rounds_makes_the_same_weights_as_one_round(model: str, loss_aggregation: str) -> None:
    config, batch = job(model, loss_aggregation=loss_aggregation), rows(0)
    results = []
    for cuts in ([6], [1, 5], [2, 0, 2, 2]):
        made, start = trainer(config, model), 0
        for number, size in enumerate(cuts):
            ids = [[0, 0, start + i, 1] for i in range(size)]
            made.accumulate(0, batch[start : start + size], ids, last=number == len(cuts) - 1)
            start += size
        metrics, trained = made.finish(0)
        assert trained == [[0, 0, i, 1] for i in range(6)]
        results.append((weights(made), metrics["loss"], metrics["grad_norm"]))
    for other in results[1:]:
        torch.testing.assert_close(other[0], results[0][0], atol=2e-5, rtol=0)
        assert other[1:] == pytest.approx(results[0][1:], abs=1e-5)


@pytest.mark.parametrize("lends", [False, True])
def test_a_trainer_that_rests_between_steps_trains_the_same_bits_and_is_read_meanwhile(model: str, lends: bool) -> None:
    plain, resting = (open_policy(job(model), model, world_size=1, device="cpu", lends=lends) for _ in range(2))
    for step in range(3):
        for made in (plain, resting):
            made.wake()
            made.accumulate(step, rows(step), [[step, 0, 0, 6]], last=True)
            made.finish(step)
        resting.rest()
        resting.rest()
        hosts = {host.data_ptr() for host in resting._at_rest._hosts.values()}
        state = {
            name: each for name, each in resting.state()[0].items() if not name.startswith("random.") and each.ndim
        }
        moved = {name for name, each in state.items() if each.untyped_storage().data_ptr() in hosts}
        assert moved == {name for name in state if not (lends and name.startswith("model."))}
        for name, tensor in plain.state()[0].items():
            assert torch.equal(tensor, resting.state()[0][name]), name
        assert plain.checksum() == resting.checksum() and torch.equal(weights(plain), weights(resting))


def test_a_restored_trainer_goes_on_bit_by_bit(model: str) -> None:
    config = job(model)
    made = trainer(config, model)
    made.accumulate(0, rows(1), [[0, 0, 0, 6]], last=True)
    made.finish(0)
    tensors, state = made.state()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    before = made.checksum()
    made.accumulate(0, rows(2), [[1, 0, 0, 6]], last=True)
    made.finish(1)
    after = made.checksum()
    again = trainer(config, model)
    again.load_state(kept, state)
    assert again.checksum() == before
    again.accumulate(0, rows(2), [[1, 0, 0, 6]], last=True)
    again.finish(1)
    assert again.checksum() == after != before


@pytest.mark.parametrize(("loss_aggregation", "sums_over"), [("sample", 8), ("token", 32)])
def test_the_first_loss_scale_follows_from_what_the_loss_sums_over(
    model: str, loss_aggregation: str, sums_over: int
) -> None:
    """Not from the tokens of a micro-batch, where each sample's loss is a mean already: gradients would vanish."""
    config = job(model, loss_aggregation=loss_aggregation)
    train = config.train.model_copy(update={"dtype": "float16", "micro_batch_tokens": 1 << 16})
    made = trainer(config.model_copy(update={"train": train}), model)
    same = [replace(row, **{name: np.resize(getattr(row, name), 4) for name in FOUR}) for row in rows(0, 8)]
    same = [replace(row, tokens=np.resize(row.tokens, 8)) for row in same]
    made.accumulate(0, same, [[0, 0, 0, 8]], last=True)
    assert made.optimizer.param_groups[0]["loss_scale"] == 2.0**13 / sums_over


def test_the_scale_grows_after_many_finite_gradients_falls_no_further_than_it_helps_and_is_part_of_the_state(
    model: str,
) -> None:
    config = job(model)
    config = config.model_copy(update={"train": config.train.model_copy(update={"dtype": "float16"})})
    made = trainer(config, model)
    scale = LossScale(made.optimizer)
    scale.begin(512)
    seen = [scale.value]
    for finite in (*[True] * 199, False, *[True] * 200):
        scale.after(finite)
        seen += [scale.value] if scale.value != seen[-1] else []
    assert seen == [16.0, 8.0, 16.0]
    scale.after(True)
    tensors, state = made.state()
    other = trainer(config, model)
    other.load_state({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(state)))
    assert other.optimizer.param_groups[0]["loss_scale"] == 16.0 and other.optimizer.param_groups[0]["num_finite"] == 1
    for _ in range(100):
        scale.after(False)
    assert scale.is_least and scale.value > 0


def test_a_discarded_step_leaves_no_trace(model: str) -> None:
    config = job(model)
    made, other = trainer(config, model), trainer(config, model)
    made.accumulate(0, rows(3), [[9, 0, 9, 6]], last=False)
    made.discard()
    for each in (made, other):
        each.accumulate(0, rows(4), [[0, 0, 0, 6]], last=True)
    assert made.finish(0)[1] == [[0, 0, 0, 6]] and other.finish(0)[1] == [[0, 0, 0, 6]]
    assert made.checksum() == other.checksum()


def test_without_old_log_probs_the_ratio_is_one(model: str) -> None:
    made = trainer(job(model), model)
    batch = [replace(row, old_log_probs=None) for row in rows(5)]
    made.accumulate(0, batch, [[0, 0, 0, 6]], last=True)
    metrics, _ = made.finish(0)
    assert metrics["ratio_mean"] == 1.0 and metrics["clip_fraction"] == 0.0


NOISY: dict[str, Callable[[], Any]] = {  # in modules, in functions, in routers
    "gpt2": lambda: tiny("gpt2"),
    "attention": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES, attention_dropout=0.5)),
    "routers": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.5)),
}


@pytest.mark.parametrize("family", NOISY)
def test_a_model_trains_without_the_noise_that_its_config_asks_for(family: str, tmp_path: Path) -> None:
    NOISY[family]().save_pretrained(tmp_path)
    scoring = load_model(str(tmp_path))
    packed = Packing.of(scoring).pack([Packable(row.tokens, len(row.mask)) for row in rows(5)])
    with torch.no_grad():
        log_probs = response_log_probs(scoring, packed)[0].numpy()
    parts = np.split(log_probs, np.cumsum([len(row.mask) for row in rows(5)])[:-1])
    batch = [replace(row, old_log_probs=old) for row, old in zip(rows(5), parts, strict=True)]
    made = trainer(job(str(tmp_path)), str(tmp_path))
    made.accumulate(0, batch, [[0, 0, 0, 6]], last=True)
    metrics, _ = made.finish(0)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4) and metrics["clip_fraction"] == 0.0


def test_the_warm_up_trains_and_can_be_stopped(model: str) -> None:
    config, seen = job(model), list[dict[str, Any]]()
    made = trainer(config, model)
    assert config.sft is not None
    before, beside = made.checksum(), backend_of(made.model, config.sft, 2, beside=made)
    assert train_on_demonstrations(lambda _: beside, config, model, seen.append, lambda: False)
    assert [metrics["step"] for metrics in seen] == [0, 1] and made.checksum() != before
    assert not train_on_demonstrations(lambda _: beside, config, model, seen.append, lambda: True)
    assert len(seen) == 2


def test_a_checkpoint_holds_the_index_and_a_folder_for_transformers(model: str, tmp_path: Path) -> None:
    made = trainer(job(model), model)
    made.accumulate(0, rows(6), [[0, 0, 0, 6]], last=True)
    made.finish(0)
    folder = tmp_path / "step_000001"
    made.save(folder, {"version": 1, "index": {"next_group": 3}}, tokenizer_path=model)
    again = trainer(job(model), model)
    assert again.load_checkpoint(folder) == {"version": 1, "index": {"next_group": 3}}
    assert again.checksum() == made.checksum()
    assert (folder / "hf" / "model.safetensors").is_file()


def test_a_checkpoint_with_a_reset_gives_its_weights_a_fresh_optimizer_and_schedule_and_a_younger_one_its_own(
    model: str, tmp_path: Path
) -> None:
    config = job(model)
    config = config.model_copy(update={"train": config.train.model_copy(update={"warmup_steps": 2})})
    made, again = trainer(config, model), trainer(config, model)
    made.accumulate(0, rows(6), [[0, 0, 0, 6]], last=True)
    made.finish(0)
    for version in (1, 2):
        made.save(tmp_path / f"step_{version:06d}", {"version": version, "index": {}})
    moments = [tensor for state in again.optimizer.state.values() for tensor in state.values()]
    for version in (2, 1):  # of which one alone is fresh
        again.load_checkpoint(tmp_path / f"step_{version:06d}", [1])
        again.count_from([1], version)
        assert again.checksum() == made.checksum() and any(each.any() for each in moments) == (version == 2)
        assert (again.lr(1), again.lr(2)) == (made.lr(0), made.lr(1)) != (made.lr(1), made.lr(2))
    again.count_from([1], 0)
    assert again.lr(1) == made.lr(1)


def test_the_gap_compares_each_token_with_a_log_prob_of_the_version_it_was_sampled_under(model: str) -> None:
    made = trainer(job(model), model)
    (row,) = rows(7, num_rows=1)
    length = len(row.mask)
    fresh = replace(row, policy_versions=np.full(length, 3, np.int32))
    made.accumulate(3, [fresh], [[0, 0, 0, 1]], last=True)
    metrics, _ = made.finish(3)
    assert metrics["log_prob_gap_tokens"] == length and metrics["log_prob_gap"] > 0.1
    # One version older: actor_fwd has scored it under that version, so its log-probs are compared and the trainer's are not.
    scored = row.rollout_log_probs + np.float32(0.25)
    older = replace(row, policy_versions=np.full(length, 2, np.int32), scored=(2, scored))
    made.accumulate(3, [older], [[0, 0, 0, 1]], last=True)
    assert made.finish(3)[0]["log_prob_gap"] == pytest.approx(0.25, abs=1e-6)
    # Nobody has scored it under its own version.
    made.accumulate(3, [replace(older, scored=(1, scored))], [[0, 0, 0, 1]], last=True)
    assert "log_prob_gap" not in made.finish(3)[0]
    # After a change of version in mid-sample the engine's cache is older than its weights: only what stands before counts, but
    # for the last token there, since servers tell the change one token off.
    changed = replace(row, policy_versions=np.arange(length, dtype=np.int32) // 3 + 3)
    made.accumulate(3, [changed], [[0, 0, 0, 1]], last=True)
    assert made.finish(3)[0]["log_prob_gap_tokens"] == 2
    arrived = replace(row, policy_versions=np.array([2] * 2 + [3] * (length - 2), np.int32))
    made.accumulate(3, [arrived], [[0, 0, 0, 1]], last=True)
    assert "log_prob_gap" not in made.finish(3)[0]
    # Tokens of an environment, at the beginning and in the middle, are no change of version.
    versions = np.full(length, 3, np.int32)
    versions[[0, 2]] = NO_VERSION
    made.accumulate(3, [replace(row, policy_versions=versions)], [[0, 0, 0, 1]], last=True)
    assert made.finish(3)[0]["log_prob_gap_tokens"] == length - 2
    nothing = replace(row, policy_versions=np.full(length, NO_VERSION, np.int32), mask=np.zeros_like(row.mask))
    made.accumulate(3, [fresh, nothing], [[0, 0, 0, 2]], last=True)
    assert made.finish(3)[0]["log_prob_gap_tokens"] == length


@pytest.mark.parametrize(("name", "joins"), [("grpo", True), ("gspo", True), ("cispo", False), ("dr_grpo", True)])
def test_the_rows_of_a_sample_count_as_one_and_are_one_to_losses_of_whole_samples(
    model: str, name: str, joins: bool
) -> None:
    config = job(model, name=name, kl_coef=0.0)
    assert config.algorithm.joins_samples == joins
    made, (a, b, c) = trainer(config, model), rows(8, num_rows=3)
    a.mask[0] = b.mask[-1] = 0
    with torch.no_grad():
        packing = Packing.of(made.model)
        packed = [packing.pack([Packable(each.tokens, len(each.mask))]) for each in (a, b, c)]
        alone = [response_log_probs(made.model, each)[0] for each in packed]
    column = lambda field: torch.from_numpy(np.concatenate([getattr(each, field) for each in (a, b, c)]))  # noqa: E731
    names = ("rollout_log_probs", "old_log_probs", "advantages", "mask")
    lengths = [len(a.mask) + len(b.mask), len(c.mask)]
    whole = policy_sums(
        config.loss(), log_probs=torch.cat(alone), lengths=lengths, **{each: column(each) for each in names}
    )
    found = made.objective.sums(made.model, [a, c, b], Use(0, 0, 0, [[0, 0, 0, 2], [0, 1, 0, 1]]))
    torch.testing.assert_close(found.loss.detach(), whole.loss, atol=1e-5, rtol=1e-5)
    assert found.sums["samples"] == whole.sums["samples"] == 2
    assert made.objective.denominator(found) == made.objective.denominator(whole)
    made.objective._config = config.model_copy(update={"media": MediaConfig()})  # kinds are those of samples, too
    kinds = made.objective.sums(made.model, [a, c, b], Use(0, 0, 0, [[0, 0, 0, 2], [0, 1, 0, 1]]))
    assert kinds.counts["clip_fraction_text"] == kinds.sums["tokens"]
    if joins:  # also where the first row of a sample trains nothing, as of weights that are too old
        nothing = replace(a, mask=np.zeros_like(a.mask))
        found = made.objective.sums(made.model, [nothing, c, b], Use(0, 0, 0, [[0, 0, 0, 2], [0, 1, 0, 1]]))
        assert found.sums["samples"] == 2
    else:  # rows of a sample in several micro-batches
        parts = [
            made.objective.sums(made.model, own, Use(0, 0, 0, spans))
            for own, spans in (([a, c], [[0, 0, 0, 2]]), ([b], [[0, 1, 0, 1]]))
        ]
        torch.testing.assert_close((parts[0] + parts[1]).loss.detach(), whole.loss, atol=1e-5, rtol=1e-5)
        assert (parts[0] + parts[1]).sums["samples"] == 2


def test_lent_weights_are_no_version_from_the_optimizer_on_and_stay_the_trainers_tensors(model: str) -> None:
    config = job(model)
    torch.manual_seed(0)
    made = open_policy(config, model, world_size=1, device="cpu", lends=True)
    assert made.lent is not None
    made.lent.holds(0)
    tensors, state = made.state()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    made.accumulate(0, rows(0), [[0, 0, i, 1] for i in range(6)], last=True)
    assert made.lent.version == 0
    made.finish(0)
    assert made.lent.version is None
    pairs = list(zip(made.lent.model.parameters(), made.model.parameters(), strict=True))
    assert all(lent is own for lent, own in pairs)
    made.load_state(before, state)  # a step that is undone, or a restart
    assert all(lent.data_ptr() == own.data_ptr() for lent, own in pairs)
    assert trainer(config, model).lent is None
