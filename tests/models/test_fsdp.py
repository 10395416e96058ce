"""FSDP2 on two real processes against one process: the same numbers, and state that goes from two to one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rondo.models import checkpoint, parallel, random_weights
from rondo.models.load import load_model
from rondo.models.logprobs import response_log_probs
from rondo.models.names import adapter_tensors
from rondo.models.optimizer import make_optimizer
from rondo.models.packing import pack
from rondo.models.published import published_shapes
from rondo.models.routing import enable_replay
from rondo.models.state import training_state
from rondo.models.tiny import qwen3_vl
from rondo.runtime.checkpoints import files_of, verify
from tests.models.builders import (
    EPS,
    LR,
    RAGGED,
    default_folder,
    folder_of,
    full_tensors,
    give_adapters,
    new_slab,
    published,
    sequences,
    train_step,
    written,
)
from tests.strength import LONG

ROOT = Path(__file__).parents[2]


class Run:
    """What two ranks did, and the same done here by one process."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        self.dense, self.moe = default_folder(folder / "dense"), folder_of(folder / "moe", "qwen3_moe", tied=False)
        self.fused = folder / "fused"  # experts are joined on disk, and lie there the other way round
        self.fused.mkdir()
        qwen3_vl.build(self.fused, num_experts=3, vision_layers=1)
        self.whole, self.whole_optimizer = self.saved_by_one()
        self.drawn = folder / "drawn"
        self.drawn.mkdir()
        random_weights.build(self.drawn, config=self.moe, seed=3)
        folders = map(str, (self.out, self.dense, self.moe, self.fused, self.drawn))
        command = [sys.executable, str(Path(__file__).with_name("fsdp_worker.py")), *folders]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=560, check=False)
        assert done.returncode == 0, done.stderr[-20_000:]
        self.facts: dict[str, Any] = json.loads((self.out / "facts.json").read_text())

    def saved_by_one(self) -> tuple[Any, Any]:
        """One process trains two steps and saves; what it would go on with."""
        model = load_model(self.moe)
        optimizer = make_optimizer(model, lr=LR, eps=EPS)
        for step in range(2):
            train_step(model, optimizer, step)
        checkpoint.save(self.out / "one" / "step_000002", model, optimizer, {"version": 2})
        return model, optimizer

    def alone(
        self, path: str, *, replay: bool = False, **options: Any
    ) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
        model = load_model(path)
        if replay:
            enable_replay(model)
        model = parallel.compute_in(model, **options)
        optimizer = make_optimizer(model, lr=LR, eps=EPS)
        told = [train_step(model, optimizer, step, replay=replay) for step in range(3)]
        return told, dict(full_tensors(model))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("fsdp"))


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


@pytest.mark.parametrize(("name", "path"), [("dense", "dense"), ("recomputed", "dense"), ("moe", "moe")])
def test_two_ranks_train_as_one_process_does(run: Run, name: str, path: str) -> None:
    told, weights = run.alone(getattr(run, path))
    for (loss, norm), (other_loss, other_norm) in zip(told, run.facts[name], strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-5)
        assert norm == pytest.approx(other_norm, rel=1e-4)
    assert len({norm for _, norm in told}) == 3
    before = dict(full_tensors(load_model(getattr(run, path))))
    two = load_file(run.out / f"{name}.safetensors")
    assert difference(weights, two) < 1e-6 < 1e-3 < difference(before, two)


@pytest.mark.parametrize(
    ("name", "part"),
    [("2x2", 2), ("ep2 x2", 4), ("2x ep2", 2), *([("1x4", 4), ("4x1", 1), ("ep4", 4)] if LONG else [])],
)
def test_four_ranks_in_any_mesh_train_as_one_process_does(run: Run, name: str, part: int) -> None:
    facts = json.loads((run.out / "meshes.json").read_text())[name]
    model = load_model(run.moe if "ep" in name else run.dense)
    optimizer = make_optimizer(model, lr=LR, eps=EPS)
    train_step(model, optimizer, 0, take=False)
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    assert difference(gradients, load_file(run.out / f"{name}.gradients.safetensors")) < 1e-6
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    parallel.discard_gradients(model)
    for step, told in enumerate(facts["told"]):
        loss, norm = train_step(model, optimizer, step)
        assert told == [pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)]
    trained = load_file(run.out / f"{name}.safetensors")
    assert difference(dict(full_tensors(model)), trained) < 1e-6
    in_order = ((key, trained[key].to(torch.bfloat16)) for key in published_shapes(model))
    assert facts["published"] == written(in_order, new_slab(model))
    assert facts["held"] == pytest.approx(1 / part, abs=0.02)
    # A checkpoint of it goes on in another mesh.
    assert facts["next of another"][0] == pytest.approx(facts["next"][0], rel=1e-5)
    assert train_step(model, optimizer, 2) == pytest.approx(facts["next"][0], rel=1e-4)


def test_adapters_of_attention_and_of_experts_that_lie_apart_train_as_in_one_process(run: Run) -> None:
    facts = json.loads((run.out / "meshes.json").read_text())["adapters"]
    model = load_model(run.moe)
    give_adapters(model)
    optimizer = make_optimizer(model, lr=LR, eps=EPS)
    train_step(model, optimizer, 0, take=False)
    gradients = {name: p.grad.clone() for name, p in adapter_tensors(model).items()}
    assert difference(gradients, load_file(run.out / "adapters.gradients.safetensors")) < 1e-6
    assert min(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    parallel.discard_gradients(model)
    for step, told in enumerate(facts["told"] + facts["next"]):
        loss, norm = train_step(model, optimizer, step)
        assert told == [pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)]
    # Its checkpoint goes on in another mesh, and in one process.
    assert facts["next of another"][0] == pytest.approx(facts["next"][0], rel=1e-5)
    alone = load_model(run.moe)
    give_adapters(alone)
    other = make_optimizer(alone, lr=LR, eps=EPS)
    checkpoint.load(run.out / "adapters" / "step_000002", alone, other)
    assert train_step(alone, other, 2) == pytest.approx(facts["next"][0], rel=1e-5)


@pytest.mark.parametrize(("name", "most"), [("dense", 0.26), ("moe", 0.26), ("fused", 0.36), ("apart", 0.26)])
def test_each_of_four_ranks_reads_its_part_of_the_files_alone(run: Run, name: str, most: float) -> None:
    read = json.loads((run.out / "meshes.json").read_text())["read"][name]
    assert read["whole"]
    assert 0.9 < sum(read["parts"]) <= 1
    assert max(read["parts"]) < most  # 3 experts over 4 ranks: one has none, the others a third each


def test_random_weights_are_the_same_model_in_every_mesh_and_each_rank_draws_its_part_alone(run: Run) -> None:
    assert json.loads((run.out / "meshes.json").read_text())["drawn alike"]


def test_experts_that_lie_apart_go_to_one_process_with_their_moments(run: Run) -> None:
    model = load_model(run.moe)
    optimizer = make_optimizer(model, lr=LR, eps=EPS)
    assert checkpoint.load(run.out / "ep2 x2" / "step_000002", model, optimizer) == {}
    alone = load_model(run.moe)
    other = make_optimizer(alone, lr=LR, eps=EPS)
    for step in range(2):
        train_step(alone, other, step)
    found, wanted = (training_state(*each)[0] for each in ((model, optimizer), (alone, other)))
    assert any(name.endswith("exp_avg_sq") and "experts" in name for name in wanted)
    random = {name for name in wanted if name.startswith("random.")}
    for name in wanted.keys() - random:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-6)


def test_experts_go_from_two_ranks_to_all_and_back_to_the_bit(run: Run) -> None:
    assert json.loads((run.out / "meshes.json").read_text())["there and back"]


@pytest.mark.skipif(not LONG, reason="one more model on four ranks: RONDO_TEST_LONG=1")
def test_experts_that_transformers_shares_out_have_the_same_gradients(run: Run) -> None:
    theirs = load_file(run.out / "by transformers.safetensors")
    assert difference(load_file(run.out / "ep2 x2.gradients.safetensors"), theirs) < 1e-6


def test_experts_without_a_token_and_with_all_of_them_compute_as_in_one_piece(run: Run) -> None:
    assert json.loads((run.out / "meshes.json").read_text())["crowded"] == {"all over": True, "on one rank": True}


def test_recomputed_layers_and_moments_in_host_memory_change_no_bit(run: Run) -> None:
    plain, found = (load_file(run.out / f"{name}.safetensors") for name in ("dense", "recomputed"))
    assert all(torch.equal(plain[name], found[name]) for name in plain)
    assert run.facts["dense"] == run.facts["recomputed"]


@pytest.mark.skipif(not LONG, reason="compiles on two ranks: RONDO_TEST_LONG=1")
def test_two_ranks_have_the_same_gradients_through_compiled_layers_and_compile_no_more_from_the_third_length_on(
    run: Run,
) -> None:
    found = run.facts["compiled"]
    assert found["equal"]
    first, second, *others = found["graphs"]
    assert 0 < first < second == others[0] == others[1]
    assert run.facts["compiled experts"]["equal"]


def test_two_ranks_that_recompute_replay_experts_as_one_process_does(run: Run) -> None:
    told, weights = run.alone(run.moe, replay=True)
    assert [loss for loss, _ in run.facts["replayed"]] == pytest.approx([loss for loss, _ in told], rel=1e-5)
    assert [norm for _, norm in run.facts["replayed"]] == pytest.approx([norm for _, norm in told], rel=1e-4)
    assert difference(weights, load_file(run.out / "replayed.safetensors")) < 1e-6
    plain, _ = run.alone(run.moe)
    assert abs(plain[0][0] - told[0][0]) > 1e-3 * abs(plain[0][0])


def test_two_ranks_in_bfloat16_train_as_one_process_does(run: Run) -> None:
    told, weights = run.alone(run.dense, dtype="bfloat16")
    for (loss, norm), (other_loss, other_norm) in zip(told, run.facts["bfloat16"], strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-3)
        assert norm == pytest.approx(other_norm, rel=2e-2)
    two = load_file(run.out / "bfloat16.safetensors")
    assert {tensor.dtype for tensor in two.values()} == {torch.float32}
    exact, _ = run.alone(run.dense)
    assert [loss for loss, _ in told] != [loss for loss, _ in exact]
    assert difference(weights, two) < 2 * LR


def test_the_version_that_shards_publish_has_the_checksum_of_the_whole_models(run: Run) -> None:
    assert run.facts["published"] == published(load_model(run.moe)) > 0


def test_a_sharded_model_scores_as_a_whole_one_in_both_precisions(run: Run) -> None:
    assert run.facts["float32_scores"]
    assert run.facts["bfloat16_scores"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_snapshot_of_shards_restores_every_bit_and_training_repeats(run: Run, dtype: str) -> None:
    names = ("restored", "scores_restored", "repeated", "changed", "is_a_shard")
    assert run.facts[f"{dtype}_snapshots"] == dict.fromkeys(names, True)


def test_a_checkpoint_goes_on_bit_by_bit_on_as_many_ranks(run: Run) -> None:
    assert run.facts["extra"] == {"version": 2}
    assert run.facts["loaded_scores"]
    assert run.facts["after_load"] == run.facts["after_save"]


def test_a_checkpoint_of_two_ranks_has_the_digests_of_both(run: Run) -> None:
    files = files_of(run.out / "step_000002")
    assert files is not None and {"shards/__0_0.distcp", "shards/__1_0.distcp", "shards/.metadata"} <= files.keys()
    assert verify(run.out / "step_000002")


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(run: Run) -> None:
    model = load_model(run.moe)
    optimizer = make_optimizer(model, lr=LR, eps=EPS)
    torch.manual_seed(3)
    mine = torch.get_rng_state()
    assert checkpoint.load(run.out / "step_000002", model, optimizer) == {"version": 2}
    assert torch.equal(torch.get_rng_state(), mine)
    scores = response_log_probs(model, pack(sequences(RAGGED, seed=9)))[0]
    torch.testing.assert_close(scores, load_file(run.out / "scores.safetensors")["scores"], rtol=0, atol=1e-6)
    tensors, _ = training_state(model, optimizer)
    assert {float(tensor) for name, tensor in tensors.items() if name.endswith(".step")} == {2.0}
    loss, norm = train_step(model, optimizer, 2)
    assert [loss, norm] == pytest.approx(run.facts["after_save"][0], rel=1e-5)


def test_a_checkpoint_of_one_process_goes_on_sharded_over_two(run: Run) -> None:
    loss, norm = train_step(run.whole, run.whole_optimizer, 2)
    assert run.facts["after_one"][0] == pytest.approx([loss, norm], rel=1e-5)


def test_ranks_that_save_fail_alike_where_one_has_no_room_and_leave_nothing(run: Run) -> None:
    assert run.facts["without_room"] == [[True, True], [True, True]]


def test_shards_are_written_beside_the_next_steps_as_they_were(run: Run) -> None:
    assert run.facts["after_staged"] == run.facts["after_save"]


def test_every_rank_writes_its_part_of_the_weights_beside_the_next_step(run: Run) -> None:
    assert run.facts["weights_beside"] == {"equal": True, "given once": True, "by both": True}


@pytest.mark.parametrize("folder", ["hf", "step_000002/hf"])
def test_the_export_of_two_ranks_loads_as_any_hugging_face_folder(run: Run, folder: str) -> None:
    path = run.out / folder
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(model).__name__ == "Qwen3MoeForCausalLM" == model.config.architectures[0]
    assert AutoTokenizer.from_pretrained(path)("é").input_ids == AutoTokenizer.from_pretrained(run.moe)("é").input_ids
    scores = response_log_probs(model, pack(sequences(RAGGED, seed=9)))[0]
    assert torch.equal(scores, load_file(run.out / "scores.safetensors")["scores"])


def test_of_four_ranks_in_two_copies_the_one_that_writes_an_export_receives_what_it_has_not_and_no_other(
    run: Run,
) -> None:
    weights = load_file(run.out / "2x2.safetensors")
    written = load_file(run.out / "hf of 2x2" / "model.safetensors")
    assert difference(written, weights) == 0
    facts = json.loads((run.out / "meshes.json").read_text())["2x2 exported"]
    first, *others = facts["received"]
    assert others == [0, 0, 0]
    assert first == sum(tensor[-(-len(tensor) // 2) :].nbytes for tensor in weights.values())
    assert facts["at a time"][0] <= 1


def test_experts_that_lie_apart_are_exported_one_by_one(run: Run) -> None:
    path = run.out / "hf of 2x ep2"
    assert difference(load_file(path / "model.safetensors"), load_file(run.out / "2x ep2.safetensors")) == 0
    _, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
