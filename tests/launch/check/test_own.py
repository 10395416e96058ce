"""Parts of a run that are the user's own: tried before it, taken along, and used in the place of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rondo.launch.check.findings import Report
from rondo.launch.check.own import look_at_own
from rondo.launch.code import take
from rondo.launch.config import RunConfig, load, resolve, unresolve
from rondo.launch.plan import group_specs
from rondo.roles.algorithms.losses import denominator, policy_sums
from tests.launch.configs import write

DOCS = Path(__file__).parents[3] / "docs" / "your-own.md"
ROLE = """
from rondo.roles.advantages import AdvantagesRole
class Own(AdvantagesRole): ...
class Other(AdvantagesRole):
    role = "critic"
class Plain:
    def __init__(self, context): ...
"""


def config_of(folder: Path, *sets: str) -> RunConfig:
    (example,) = re.findall(r"```python\n(import numpy.*?)```", DOCS.read_text(), re.DOTALL)
    (folder / "own.py").write_text(example + ROLE)
    return load(write(folder), sets)


def found(config: RunConfig) -> list[tuple[str, str]]:
    report = Report()
    look_at_own(config, report)
    return [(finding.level, finding.text) for finding in report.findings]


def own(folder: Path) -> list[str]:
    """The settings of the page's example, and a role."""
    parts = {"advantage": "later_counts_more", "policy_loss": "one_ratio", "correction": "unlikely_counts_nothing"}
    return [
        *(f"algorithm.{part}={folder}/own.py:{name}" for part, name in parts.items()),
        f"roles.advantages={folder}/own.py:Own",
    ]


def test_the_example_of_the_page_works_and_is_taken_along(tmp_path: Path) -> None:
    config = config_of(tmp_path, *own(tmp_path), "algorithm.name=mine", "algorithm.own=True")
    names = ["algorithm.advantage", "algorithm.policy_loss", "algorithm.correction", "roles.advantages"]
    assert found(config) == [("ok", f"{name} works on a dummy batch") for name in names]
    assert found(config_of(tmp_path)) == []  # ours are ours
    taken = take(config, tmp_path / "demo_config.py", tmp_path / "run" / "code")
    assert taken.loss().policy_loss == f"{tmp_path}/run/code/own.py:one_ratio"
    assert (tmp_path / "run" / "code" / "own.py").read_text() == (tmp_path / "own.py").read_text()
    assert unresolve(resolve(taken)).algorithm == taken.algorithm and (taken.algorithm.name, taken.algorithm.own) == (
        "mine",
        True,
    )
    classes = {spec.role: spec.roles for spec in group_specs(unresolve(resolve(taken)))}
    assert classes["advantages"] == (f"{tmp_path}/run/code/own.py:Own",)
    assert classes["actor"] == ("rondo.roles.actor:ActorRole",)


def test_a_sequence_level_loss_is_that_of_its_paper(tmp_path: Path) -> None:
    algorithm = config_of(tmp_path, own(tmp_path)[1], "algorithm.clip_low=0.1", "algorithm.clip_high=0.2").loss()
    draw, lengths = np.random.default_rng(0), [3, 1, 5, 2]
    made: dict[str, Any] = {
        name: torch.from_numpy(draw.normal(-1, 0.3, sum(lengths)).astype(np.float32))
        for name in ("log_probs", "old_log_probs", "rollout_log_probs")
    }
    advantages = draw.normal(size=len(lengths))
    made["advantages"] = torch.from_numpy(np.repeat(advantages, lengths).astype(np.float32))
    made["mask"] = torch.tensor([1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1])
    log_probs = made["log_probs"].requires_grad_()
    sums = policy_sums(algorithm, **made, lengths=lengths)
    wanted, start, drift = [], 0, (log_probs - made["old_log_probs"]).detach()
    for length, advantage in zip(lengths, advantages, strict=True):
        kept = [at for at in range(start, start + length) if made["mask"][at]]
        ratio = np.exp(np.mean([float(drift[at]) for at in kept]))
        wanted.append(-min(ratio * advantage, np.clip(ratio, 0.9, 1.2) * advantage))
        start += length
    assert float(sums.loss.detach()) / denominator(sums, algorithm, 1) == pytest.approx(np.mean(wanted), rel=1e-5)
    sums.loss.backward()
    assert log_probs.grad is not None and log_probs.grad.isfinite().all()
    assert sums.metrics()["clip_fraction"] > 0 and sums.metrics()["approx_kl"] > 0


@pytest.mark.parametrize(
    ("setting", "code", "error"),
    [
        ("algorithm.advantage", "def own(rewards): ...", "algorithm.advantage must take (rewards, masks), got "),
        (
            "algorithm.advantage",
            "def own(rewards, masks): return rewards[:2]",
            "algorithm.advantage must return one finite number for each of 3 samples, or for each of their 8 tokens, "
            "got shape [2]. Correct it",
        ),
        (
            "algorithm.advantage",
            "def own(rewards, masks): return [float('-inf')] * 3",
            "algorithm.advantage must return one finite number for each of 3 samples, or for each of their 8 tokens, got -inf. ",
        ),
        (
            "algorithm.advantage",
            "def own(rewards, masks): return rewards[7]",
            "algorithm.advantage must load without errors, got IndexError: ",
        ),
        (
            "algorithm.policy_loss",
            "def own(batch, algorithm): return batch.log_probs.mean()",
            "algorithm.policy_loss must give tensors with a number for each of 8 tokens, got []. Correct it",
        ),
        (
            "algorithm.policy_loss",
            "def own(batch, algorithm): return batch.advantages",
            "algorithm.policy_loss must depend on batch.log_probs, got a loss without a gradient. Correct it",
        ),
        (
            "algorithm.policy_loss",
            "def own(batch, algorithm): return batch.log_probs.log()",
            "algorithm.policy_loss must give finite losses and gradients, got nan. Correct it",
        ),
        (
            "algorithm.policy_loss",
            "def own(batch, algorithm): return -batch.log_probs * (batch.advantages - batch.advantages.mean())",
            "algorithm.policy_loss must be the same whichever samples share a micro-batch, got other gradients for each alone. ",
        ),
        (
            "algorithm.correction",
            "def own(batch, algorithm): return 1.0",
            "algorithm.correction must give tensors with a number for each of 8 tokens, got 1.0. Correct it",
        ),
        ("reward.postprocess", "def own(rewards): ...", "reward.postprocess must take (rewards, samples), got "),
        (
            "reward.postprocess",
            "def own(rewards, samples): return rewards / rewards.std()",
            "reward.postprocess must return one number of at most 1.7e+38 in size for each of 3 rewards, got inf. Correct it",
        ),
        ("rollout.keep", "def own(samples): ...", "rollout.keep must return True or False, got None"),
        (
            "roles.advantages",
            "def own(context): ...",
            "roles.advantages must be a class with `async def run(self)`, got ",
        ),
    ],
)
def test_what_cannot_work_is_told_before_the_run(tmp_path: Path, setting: str, code: str, error: str) -> None:
    (tmp_path / "broken.py").write_text(code + "\n")
    ((level, text),) = found(config_of(tmp_path, f"{setting}={tmp_path}/broken.py:own"))
    assert level == "error" and text.startswith(error)


def test_a_role_of_another_name_is_refused_and_one_without_a_place(tmp_path: Path) -> None:
    ((_, text),) = found(config_of(tmp_path, f"roles.advantages={tmp_path}/own.py:Other"))
    assert text == "roles.advantages must be a class whose `role` is 'advantages', got 'critic'. Derive it from ours"
    with pytest.raises(ValueError, match="roles must name roles of the run, got 'reference', which no group holds"):
        config_of(tmp_path, f"roles.reference={tmp_path}/own.py:Plain")


def test_the_function_after_each_save_is_taken_along_and_must_take_path_and_step(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("def saved(path, step): ...\ndef other(path): ...\n")
    right, wrong = (
        load(write(tmp_path), [f"train.after_save={{'function': '{tmp_path}/hooks.py:{name}'}}"])
        for name in ("saved", "other")
    )
    assert found(right) == []
    [(level, text)] = found(wrong)
    assert level == "error" and text.startswith("train.after_save.function must take (path, step), got ")
    taken = take(right, tmp_path / "demo_config.py", tmp_path / "run" / "code")
    assert taken.train.after_save is not None
    assert taken.train.after_save.function == f"{tmp_path}/run/code/hooks.py:saved"


def test_functions_around_a_step_are_taken_along_and_must_take_what_they_are_given(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("def begins(step): ...\ndef ended(step, metrics): ...\n")
    right, wrong = (
        load(
            write(tmp_path), [f"train.before_step={tmp_path}/hooks.py:{a}", f"train.after_step={tmp_path}/hooks.py:{b}"]
        )
        for a, b in (("begins", "ended"), ("ended", "begins"))
    )
    assert found(right) == []
    assert [(level, text.partition(", got")[0]) for level, text in found(wrong)] == [
        ("error", "train.before_step must take (step)"),
        ("error", "train.after_step must take (step, metrics)"),
    ]
    taken = take(right, tmp_path / "demo_config.py", tmp_path / "run" / "code")
    assert taken.train.after_step == f"{tmp_path}/run/code/hooks.py:ended"


def test_a_sandbox_that_is_asked_for_is_tried_and_one_that_runs_nothing_is_an_error(tmp_path: Path) -> None:
    works = 'sandbox.command=["sh","-c","cd {folder} && \\"$@\\"","run"]'
    assert found(config_of(tmp_path, works)) == [("ok", "sandbox runs commands (as you say)")]
    [(level, text)] = found(config_of(tmp_path, 'sandbox.command=["false"]'))
    assert level == "error" and "got exit code 1" in text
