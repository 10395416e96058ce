"""Rows and rewards of reasoning-gym, by the package itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rondo.roles.config import DataConfig
from rondo.roles.data.datasets import open_dataset
from rondo.roles.rewards.worker import in_worker
from rondo.runtime.errors import ConfigError

pytest.importorskip("reasoning_gym", reason="`make test-environments` installs reasoning-gym")

ROOT = Path(__file__).parents[2]
ONE_GROUP = "role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages']}]"
LOOK = """
import hashlib, json, sys
from reasoning_gym.factory import DATASETS
from rondo.roles.data.gym import GymRows, score
found = {}
for name in sorted(set(DATASETS) - {"composite"}):
    rows = GymRows(name, {"size": 50})
    got = {at: rows[at] for at in json.loads(sys.argv[1])}
    first = got[min(got)]
    made = first["metadata"]["reasoning_gym"]
    worth = None if first["label"] is None else score(first["label"], **made, label=first["label"])
    found[name] = [hashlib.sha256(repr(first).encode()).hexdigest(), worth]
print("\\n" + json.dumps(found))  # some data sets print
"""


def test_every_data_set_makes_the_same_rows_in_every_process_in_any_order_and_takes_its_own_answers() -> None:
    def looking(*places: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", LOOK, json.dumps(places)],
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )

    with looking(11, 3) as one, looking(3) as other:
        found, again = (json.loads(each.communicate()[0].splitlines()[-1]) for each in (one, other))
    assert len(found) > 100
    assert {name for name in found if found[name] != again[name]} == set()
    assert {name for name, (_, worth) in found.items() if worth not in (1.0, None)} == set()


def test_a_response_is_worth_what_the_package_says_of_the_answer_in_it() -> None:
    row = open_dataset(DataConfig(path="gym:leg_counting@[:5]", metadata="metadata")).row(3)

    def worth(response: str, **args: object) -> float:
        score = in_worker(
            "rondo.roles.rewards.worker:open_function",
            {"function": "rondo.roles.rewards.hub:reasoning_gym", "args": args},
        )
        told = score([response, row.label, row.prompt, row.metadata, ["stop", 1, 2, [response]]])
        return float(json.loads(told.text)[0])

    assert worth(f"It has <answer>{row.label}</answer>") == 1
    assert worth(row.label) == 0
    assert worth(row.label, inside=None) == 1
    assert worth("<answer>none</answer>") == 0


def test_levels_follow_each_other_and_are_those_of_the_curriculum() -> None:
    data = open_dataset(DataConfig(path="gym:chain_sum", args={"size": 30, "level": [0, {"num_digits": 3}]}))
    assert len(data) == 30
    longest = [max(len(word) for word in str(data.row(at).prompt).split() if word.isdigit()) for at in range(30)]
    assert max(longest[:15]) == 1 < max(longest[15:]) <= 4


@pytest.mark.parametrize(
    ("path", "args", "said"),
    [
        ("gym:leg_count", {}, "Did you mean 'leg_counting'?"),
        ("gym:composite", {}, "Mix data sets in data.sources"),
        ("gym:leg_counting", {"level": 99}, "level must be at most 35, got 99"),
        ("gym:leg_counting", {"level": {"number": 1}}, "levels of num_animals, num_instances"),
        ("gym:leg_counting", {"animals": 3}, "It has min_animals, max_animals"),
        ("gym:leg_counting", {"min_animals": 0}, "min_animals must be positive"),
    ],
)
def test_what_the_package_does_not_have_is_refused_with_what_it_has(
    path: str, args: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match="must") as refused:
        open_dataset(DataConfig(path=path, args=args))
    assert said in str(refused.value)


def test_the_example_trains_on_a_mixture(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rondo.launch.cli", "train", str(ROOT / "examples/reasoning_gym_mixture.py")]
    short = ("num_steps=2", "rollout.prompts_per_step=8", "sft.steps=4", "sft.warmup_steps=1", "sft.batch_size=8")
    short += ("evaluation.num_prompts=8", "train.warmup_steps=1", "max_staleness=0", ONE_GROUP)
    for value in short:
        command += ["--set", value]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs/reasoning_gym_mixture/metrics.jsonl").read_text().splitlines()
    assert any("reward_mean_sums" in line for line in lines) and any("reward_mean_backward" in line for line in lines)
