"""The teacher role: rows go to their own models, in pieces that these can hold, and come back in their order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rondo.models.config import ModelConfig
from rondo.models.logprobs import Scores
from rondo.models.lora import PREFIX
from rondo.models.mesh import Mesh
from rondo.models.names import adapter_tensors
from rondo.models.packing import Sequence as Packable
from rondo.models.tiny import qwen3
from rondo.roles.algorithms.teachers import NONE
from rondo.roles.config import JobConfig, TeacherConfig
from rondo.roles.forward import Scored, Scorer, _compared
from rondo.roles.streams import row_bytes, streams_of
from rondo.roles.teacher import Asked, TeacherRole, Teachers
from rondo.runtime.errors import ConfigError
from tests.roles.sampling.test_teaching import job

MODEL = TeacherConfig(model=ModelConfig(path="teacher"))


class Named:
    """A model that tells who it is, and the length of what it saw."""

    def __init__(self, name: float, top_k: int = 0) -> None:
        self.name, self.top_k, self.attention = name, top_k, None
        self.asked: list[list[int]] = []

    def score(self, rows: Sequence[Packable], *, ids: Sequence[np.ndarray] = ()) -> Scored:
        self.asked.append([len(row.tokens) for row in rows])
        log_probs = [np.full(row.response, self.name + len(row.tokens) / 100, np.float32) for row in rows]
        told = [(each, np.full(each.shape, self.name, np.float32)) for each in ids]
        return Scored(0, log_probs, compared=told or None)


def asked(teacher: int, length: int, ids: int | None = None) -> Asked:
    told = None if ids is None else np.full((2, 3), ids, np.int32)
    return teacher, Packable(np.zeros(length, np.int32), 2), told


def test_each_row_is_scored_by_its_own_model_in_pieces_that_fit_and_one_without_rows_rests() -> None:
    models = {0: Named(-1.0), 2: Named(-2.0), 5: Named(-3.0)}
    teachers = Teachers(models, Mesh(), tokens=20)  # type: ignore[arg-type]
    found = teachers.score([asked(2, 9), asked(0, 30), asked(2, 8), asked(2, 7), asked(0, 4)])
    assert found.log_probs is not None and not found.stops and found.compared is None
    assert [float(each[0]) for each in found.log_probs] == pytest.approx([-1.91, -0.7, -1.92, -1.93, -0.96])
    assert (models[0].asked, models[2].asked, models[5].asked) == ([[30], [4]], [[9, 8], [7]], [])


def test_tokens_to_tell_of_go_with_their_rows() -> None:
    teachers = Teachers({0: Named(-1.0), 1: Named(-2.0)}, Mesh(), tokens=100)  # type: ignore[arg-type]
    found = teachers.score([asked(1, 5, 7), asked(0, 5, 8), asked(1, 5, 9)], stops=True)
    assert found.compared is not None and found.stops
    assert [(int(ids[0, 0]), float(values[0, 0])) for ids, values in found.compared] == [(7, -2), (8, -1), (9, -2)]


def test_of_two_sets_of_tokens_each_token_is_compared_once() -> None:
    told, likeliest = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[2, 5], [3, 4]])
    values = torch.tensor([[-1.0, -2], [-3, -4]])
    found = _compared(told, Scores(values[:, 0], others=values, top_ids=likeliest, top_log_probs=values - 10))
    assert found is not None
    assert found[0].tolist() == [[1, 2, NONE, 5], [3, 4, NONE, NONE]]
    assert found[1].tolist() == [[-1, -2, -11, -12], [-3, -4, -13, -14]]
    assert _compared(None, Scores(values[:, 0])) is None


@pytest.mark.parametrize("floor", [None, -20.0])
def test_a_token_that_a_teacher_has_no_chance_for_ends_the_role_unless_log_probs_have_a_floor(
    floor: float | None,
) -> None:
    role = TeacherRole(None)  # type: ignore[arg-type]
    role._floor, told = floor, [np.array([-1.0, -np.inf], np.float32)]
    with nullcontext() if floor else pytest.raises(ConfigError, match=r"distillation\.min_log_prob must be set"):
        assert role.columns(Scored(0, told), told) == {"teacher_log_probs": told}


@pytest.mark.parametrize("adapters", [False, True])
def test_a_teacher_that_is_an_average_moves_by_a_part_of_each_version_and_keeps_what_bfloat16_loses(
    adapters: bool, tmp_path: Path
) -> None:
    qwen3.build(tmp_path, hidden_size=16, num_layers=1)
    tree = job(teacher=TeacherConfig(policy="average", decay=0.99)).model_dump(exclude_unset=True)
    tree["train"] = {"dtype": "bfloat16"} | ({"lora": {"rank": 2}} if adapters else {})
    made: Any = SimpleNamespace(config=JobConfig.model_validate(tree), device="cpu")
    scorer = Scorer(str(tmp_path), made, mesh=Mesh(), adapts=True, decay=0.99)
    own = adapter_tensors(scorer._model) or dict(scorer._model.named_parameters())
    first = {name: tensor.detach().clone() for name, tensor in own.items()}
    wanted = {name: torch.randn_like(tensor, dtype=torch.float32).bfloat16() for name, tensor in first.items()}
    published = {f"{PREFIX if adapters else ''}{name}": tensor for name, tensor in wanted.items()}
    assert bool(adapters) == all("lora_" in name for name in own)

    def moved(versions: int) -> None:
        for name, tensor in own.items():
            mean = first[name].float() * 0.99**versions + wanted[name].float() * (1 - 0.99**versions)
            torch.testing.assert_close(tensor, mean.bfloat16(), rtol=1 / 128, atol=1e-6)

    scorer.load(0, published)
    moved(0)
    for version in range(1, 101):
        scorer.load(version, published)
    moved(100)
    scorer.load(150, published)  # the versions between it did not get
    moved(150)
    scorer.load(3, published)  # of a trainer that went back
    moved(150)

    again = Teachers({1: Scorer(str(tmp_path), made, mesh=Mesh(), adapts=True, decay=0.99)}, Mesh(), tokens=100)
    for name, tensor in again.lasting.items():
        tensor.copy_(scorer.lasting[name.removeprefix("1.")])
    again.restored(150)
    before, scorer = own, again._scorers[1]
    own = adapter_tensors(scorer._model) or dict(scorer._model.named_parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.items())
    moved(150)
    again.load(151, published, [1])
    moved(151)


@pytest.mark.parametrize(("policy", "decay"), [("average", None), ("current", 0.9), (None, 0.9)])
def test_an_average_has_a_decay_and_nothing_else_has(policy: Any, decay: float | None) -> None:
    with pytest.raises(ValueError, match=r"decay must be set with distillation\.teacher\.policy 'average', and not"):
        TeacherConfig(policy=policy, decay=decay, model=None if policy else ModelConfig(path="m"))


def test_an_average_begins_with_the_weights_before_the_first_step_and_follows_the_policy() -> None:
    config = job(teacher=TeacherConfig(policy="average", decay=0.9))
    assert config.teacher_follows and config.needs_initial


def context(sample: Any, siblings: Any) -> None:
    return None


ROLES = ("rollout", "actor", "actor_fwd", "teacher", "advantages")


def test_columns_of_teachers_cross_the_bus_only_where_they_are_used() -> None:
    plain = {stream.name: stream for stream in streams_of(job(teacher=MODEL), ROLES)}
    assert plain["teacher"].outputs == ("teacher_log_probs",) and plain["teacher"].media
    assert plain["advantages"].inputs == ("loss_mask", "rollout_log_probs", "teacher_log_probs")
    assert "teacher_log_probs" in plain["actor"].inputs and "likeliest" not in plain["actor_fwd"].outputs

    union = job(teachers={"a": MODEL, "b": MODEL}, form="loss", support="union", top_k=5)
    found = {stream.name: stream for stream in streams_of(union, ROLES)}
    assert found["teacher"].inputs == ("tokens", "teacher", "likeliest")
    assert found["teacher"].outputs == ("compared_ids", "compared_log_probs")
    assert found["teacher"].output_bytes_per_token == 2 * 5 * 4
    assert found["actor_fwd"].outputs[-1] == "likeliest" and found["actor_fwd"].output_bytes_per_token >= 5 * 4
    assert found["advantages"].inputs == ("loss_mask",)
    assert {"compared_ids", "compared_log_probs"} < set(found["actor"].inputs) and "likeliest" not in found[
        "actor"
    ].inputs

    seen = job(teacher=MODEL, context=context, max_context_tokens=100)
    assert next(each for each in streams_of(seen, ROLES) if each.name == "teacher").inputs == (
        "tokens",
        "teacher_prompt",
    )
    assert row_bytes(seen) >= row_bytes(job(teacher=MODEL)) + 400


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature must be 1 with a teacher behind urls"),
        ({"distillation": {"task_coef": 1.0}}, "reward must be set, got nothing"),
    ],
)
def test_what_a_teacher_behind_urls_cannot_do_and_rewards_that_are_missing_are_refused(
    changes: dict[str, dict[str, Any]], said: str
) -> None:
    served = job(teacher=TeacherConfig(urls=("http://h:1",)))
    tree = served.model_dump(exclude_unset=True)
    for name, fields in changes.items():
        tree[name] |= fields
    with pytest.raises(ValueError, match=said):
        JobConfig.model_validate(tree)
