"""Supervised fine-tuning: it learns answers and nothing else, however its batches are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rondo.models import parallel
from rondo.models.load import load_model, load_tokenizer
from rondo.models.mesh import Mesh
from rondo.models.tiny import qwen3
from rondo.roles.config import DataConfig, MeshConfig, SftConfig
from rondo.roles.data.datasets import Row, open_dataset
from rondo.roles.data.prompts import TooLong, render_prompt
from rondo.roles.training import sft
from rondo.roles.training.supervised import Learning, cut
from rondo.runtime.errors import ConfigError, Fatal
from tests.models.builders import full_tensors
from tests.strength import strength

ROWS = """
def rows():
    return [{"prompt": f"s{a}{b}>" + "." * (a * 3), "answer": "".join(sorted(f"{a}{b}"))} for a in range(5) for b in range(5)]
"""

PROMPTS = DataConfig(path="unused")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and the file with its demonstrations."""
    folder = tmp_path_factory.mktemp("sft")
    qwen3.build(folder / "model", hidden_size=32, num_layers=2)
    (folder / "rows.py").write_text(ROWS)
    return folder


def config_of(folder: Path, **options: Any) -> SftConfig:
    return SftConfig(**{"rows": f"{folder}/rows.py:rows", "steps": 3, "batch_size": 8, "lr": 1e-3} | options)


def train(folder: Path, config: SftConfig, **options: Any) -> tuple[Any, list[dict[str, float]]]:
    """The trained model and what `on_step` saw."""
    options = {"on_step": lambda step: steps.append(step), "should_stop": lambda: False} | options
    steps: list[dict[str, float]] = []
    path = str(folder / "model")
    mesh = Mesh.open(MeshConfig(), options.pop("world_size", 1))
    model = load_model(path, cut=lambda model: parallel.shard(model, mesh))
    source = config.source(options.pop("prompts", PROMPTS))
    rows = open_dataset(source)
    backend = sft.backend_of(parallel.compute_in(model), config, config.num_steps(len(rows)), mesh=mesh)
    encode = sft.encoder(load_tokenizer(path), config, source)
    learning = Learning(backend, encode, rows, None, config, source, seed=options.pop("seed", 0))
    learning.run(config.num_steps(len(rows)), **options)
    return model, steps


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in full_tensors(model)}


def test_the_policy_learns_the_answers_and_to_stop(folder: Path) -> None:
    model, steps = train(folder, config_of(folder, steps=90, batch_size=25, lr=1e-2))
    assert steps[0]["loss"] > 5 and steps[-1]["loss"] < 0.1
    tokenizer = load_tokenizer(str(folder / "model"))
    prompt = tokenizer("s41>" + "." * 12, return_tensors="pt")["input_ids"]
    made = model.eval().generate(prompt, max_new_tokens=5, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(made) == "14" + tokenizer.eos_token


def test_the_loss_is_that_of_transformers_on_the_answer_tokens_alone(folder: Path) -> None:
    config = config_of(folder, steps=1, batch_size=25)
    _, (first,) = train(folder, config)
    path = str(folder / "model")
    model, tokenizer = load_model(path, dtype="float32", device="cpu"), load_tokenizer(path)
    data, total, num_tokens = open_dataset(config.source(PROMPTS)), 0.0, 0
    for i in range(25):
        row = data.row(i)
        prompt = tokenizer(row.prompt)["input_ids"]
        answer = [*tokenizer(row.label)["input_ids"], tokenizer.eos_token_id]
        labels = torch.tensor([[-100] * len(prompt) + answer])
        with torch.no_grad():
            total += float(model(input_ids=torch.tensor([prompt + answer]), labels=labels).loss) * len(answer)
        num_tokens += len(answer)
    assert first["loss"] == pytest.approx(total / num_tokens, rel=1e-5)
    assert first["tokens"] == num_tokens == 75


def test_micro_batches_do_not_change_the_result(folder: Path) -> None:
    whole, steps = train(folder, config_of(folder))
    cut, cut_steps = train(folder, config_of(folder, micro_batch_tokens=24))
    for step, cut_step in zip(steps, cut_steps, strict=True):
        assert cut_step == pytest.approx(step, rel=1e-4)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(cut)[name], tensor, rtol=1e-3, atol=2e-5)


def test_equal_seeds_give_equal_weights_and_others_do_not(folder: Path) -> None:
    first, again, other = (weights(train(folder, config_of(folder), seed=seed)[0]) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_the_rate_warms_up_and_falls(folder: Path) -> None:
    """By steps, and by epochs, which 25 rows make 6 of."""
    rates = {"warmup_steps": 2, "min_lr_fraction": 0.5}
    for options in ({"steps": 6, "batch_size": 2}, {"steps": None, "epochs": 2, "batch_size": 9}):
        _, steps = train(folder, config_of(folder, **options, **rates))
        assert [step["lr"] for step in steps] == pytest.approx([5e-4, 1e-3, 1e-3, 8.75e-4, 7.5e-4, 6.25e-4])


def test_it_stops_before_the_next_step_when_asked(folder: Path) -> None:
    seen: list[dict[str, float]] = []
    train(folder, config_of(folder, steps=50), on_step=seen.append, should_stop=lambda: len(seen) == 2)
    assert [step["step"] for step in seen] == [0, 1]


def test_a_gradient_that_is_not_finite_ends_it(folder: Path) -> None:
    config = config_of(folder)
    path, source = str(folder / "model"), config.source(PROMPTS)
    model = load_model(path, dtype="float32", device="cpu")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    backend, encode = sft.backend_of(model, config, 3), sft.encoder(load_tokenizer(path), config, source)
    with pytest.raises(ConfigError, match="the gradient of sft step 0 must be finite, got norm nan"):
        Learning(backend, encode, open_dataset(source), None, config, source, seed=0).step(0)


def test_a_demonstration_that_cannot_be_used_costs_itself_alone(folder: Path) -> None:
    _, steps = train(folder, config_of(folder, batch_size=25, micro_batch_tokens=17, steps=1))
    assert (steps[0]["skipped"], steps[0]["tokens"]) == (5, 75)  # others of the next pass take their places
    assert "prompt and answer must have at most 17 tokens, got 16 + 3" in str(steps[0]["first_skipped"])
    with pytest.raises(
        Fatal, match=r"^sft must have demonstrations that can be used, got none in 25; the first: rows row"
    ):
        train(folder, config_of(folder, batch_size=25, micro_batch_tokens=3))
    (folder / "some.py").write_text(
        "def rows():\n    return [{'prompt': 'a', 'answer': 'b'}, {'prompt': 'a'}, {'prompt': 7, 'answer': 'b'}]\n"
    )
    broken = config_of(folder, rows=f"{folder}/some.py:rows", batch_size=1)
    allowed = PROMPTS.model_copy(update={"max_bad_rows": 0.7})
    _, steps = train(folder, broken, prompts=allowed)
    assert [step["tokens"] for step in steps] == [2, 2, 2] and steps[-1]["skipped"] == 2
    with pytest.raises(
        Fatal, match=r"^sft must have at most 1 % unusable rows, got .* of 3 rows: .* raise data.max_bad_rows"
    ):
        train(folder, broken)


def test_long_demonstrations_lose_the_beginning_of_their_prompt_or_end_the_job_where_the_settings_say_so(
    folder: Path,
) -> None:
    tokenizer = load_tokenizer(str(folder / "model"))

    def encode(most: int, **options: Any) -> sft.Demonstration:
        config = config_of(folder, micro_batch_tokens=most)
        return sft.encoder(tokenizer, config, DataConfig(path="unused", **options))(
            Row("a.jsonl:1", "0123456789", "ab", {})
        )

    assert tokenizer.decode(encode(8, too_long="truncate").sequence.tokens) == "56789ab" + tokenizer.eos_token
    with pytest.raises(TooLong):  # nothing would be left of the prompt
        encode(3, too_long="truncate")
    with pytest.raises(Fatal, match=r"a.jsonl:1: prompt must have 1 to 8 tokens, got 10"):
        encode(8, too_long="error")


def test_a_prompt_is_the_same_in_the_warm_up_as_in_reinforcement(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "model"))
    prompts = DataConfig(path="unused", apply_chat_template=True, system="Sort.", too_long="truncate")
    row = Row("rows row 1", "s41>", "14", {})
    reinforced = render_prompt(tokenizer, row, prompts, 20)
    config = config_of(folder, micro_batch_tokens=64)
    tokens = sft.encoder(tokenizer, config, config.source(prompts), max_prompt_tokens=20)(row).sequence.tokens
    assert tokens[: len(reinforced)].tolist() == reinforced.tolist() and len(tokens) == 20 + 3


@settings(max_examples=strength(quick=80, full=200), deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40), num_ranks=st.integers(1, 5))
def test_a_cut_takes_every_row_once_within_the_limit_and_gives_every_rank_as_much_work(
    lengths: list[int], num_ranks: int
) -> None:
    rounds = cut(lengths, 20, num_ranks)
    assert {len(micro_batches) for micro_batches in rounds} == {num_ranks}
    flat = [micro_batch for micro_batches in rounds for micro_batch in micro_batches]
    assert sorted(i for micro_batch in flat for i in micro_batch) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro_batch) <= 20 for micro_batch in flat)
