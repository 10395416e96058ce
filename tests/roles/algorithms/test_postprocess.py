"""Post-processing: a user's function sees the rewards that belong together, and advantages are made of what it returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rondo.launch.config import load
from rondo.roles.advantages import _advantages, _of_values, _processed
from rondo.roles.algorithms.advantages import of_group
from rondo.roles.algorithms.algorithm import AlgorithmConfig
from rondo.roles.algorithms.postprocess import process_of
from rondo.roles.streams import PARTS, SOURCE, streams_of
from rondo.runtime.errors import ConfigError, Fatal
from tests.launch import configs

FUNCTIONS = """
import numpy as np

seen = []


def scaled(rewards, samples):
    seen.append([(each.group, each.number, each.num_tokens, each.finish, dict(each.components), each.source) for each in samples])
    return (rewards - rewards.mean()) / rewards.std()


def by_length(rewards, samples):
    return [reward / each.num_tokens for reward, each in zip(rewards, samples)]


def few(rewards, samples):
    return rewards[:1]


def endless(rewards, samples):
    rewards[0] = np.inf
    return rewards


def large(rewards, samples):
    return [1.0, 4e38]


def fails(rewards, samples):
    raise KeyError(len(samples))
"""


class Row:
    """A row of the bus, as the advantages see it."""

    def __init__(
        self, group: int, sample: int, reward: float | None, mask: list[int], part: int = 0, **told: Any
    ) -> None:
        self.group, self.sample, self.reward, self.part, self.finish = group, sample, reward, part, "stop"
        self.response = len(mask)
        columns = {"loss_mask": np.array(mask, np.uint8), "values": np.zeros(len(mask), np.float32)}
        self.columns = columns | {name: np.array(value) for name, value in told.items()}

    def array(self, column: str) -> np.ndarray:
        return self.columns[column]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "post.py").write_text(FUNCTIONS)
    return tmp_path / "post.py"


def test_advantages_are_made_of_what_becomes_of_the_rewards_of_a_step(file: Path) -> None:
    told = {PARTS: [1.0, 0.5], SOURCE: [1]}
    groups: Any = [
        [Row(4, 0, 4.0, [1], **told), Row(4, 1, None, [1], **told), Row(4, 2, 0.0, [1, 0], **told)],
        [Row(7, 0, 2.0, [1, 1], **told), Row(7, 1, 2.0, [0, 1], **told), Row(7, 0, 2.0, [1], part=1, **told)],
    ]
    process = process_of(f"{file}:scaled")
    rewards = _processed(groups, process, ["right", "form"], ["maths", "code"])
    # Of 4, 0, 2, 2: mean 2, deviation the root of 2.
    root = 2**0.5
    assert rewards == pytest.approx({(4, 0): root, (4, 2): -root, (7, 0): 0.0, (7, 1): 0.0})
    parts = {"right": 1.0, "form": 0.5}
    seen = process.__closure__[0].cell_contents.__globals__["seen"]  # type: ignore[index]
    assert seen == [[(4, 0, 1, "stop", parts, "code"), (4, 2, 1, "stop", parts, "code"),
                     (7, 0, 3, "stop", parts, "code"), (7, 1, 1, "stop", parts, "code")]]  # fmt: skip
    compute = of_group(AlgorithmConfig(name="dr_grpo"), [])
    found = [_advantages(rows, compute, None, rewards) for rows in groups]
    for rows, wanted in zip(found, ([[root], [0], [-root, 0]], [[0, 0], [0, 0], [0]]), strict=True):
        assert [row.tolist() for row in rows] == [pytest.approx(each) for each in wanted]
    assert [row.reward for rows in groups for row in rows] == [4.0, None, 0.0, 2.0, 2.0, 2.0], "as they were"
    _, returns = _of_values(groups[0], AlgorithmConfig(name="ppo"), rewards)
    assert returns[0].tolist() == pytest.approx([root])
    assert _processed([[Row(1, 0, None, [1])]], process, [], []) == {}  # type: ignore[list-item]


def test_groups_by_themselves_are_told_nothing_of_others(file: Path) -> None:
    process = process_of(f"{file}:by_length")
    rewards = _processed([[Row(1, 0, 3.0, [1, 1]), Row(1, 1, 3.0, [1, 1, 1])]], process, [], [])  # type: ignore[list-item]
    assert rewards == {(1, 0): 1.5, (1, 1): 1.0}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("few", r"return one number of at most 1.7e\+38 in size for each of 2 rewards, got shape \[1\]. Correct it"),
        ("endless", r"return one number of at most 1.7e\+38 in size for each of 2 rewards, got inf. Correct it"),
        ("large", r"return one number of at most 1.7e\+38 in size for each of 2 rewards, got 4e\+38. Correct it"),
        ("fails", r"not fail, got KeyError: 2 \(.*post.py:.*\) of 2 rewards. Correct it"),
    ],
)
def test_what_it_must_not_return_ends_the_run_with_its_name(file: Path, name: str, error: str) -> None:
    given = np.array([1.0, 2.0], np.float32)
    with pytest.raises(Fatal, match=f"reward.postprocess must {error}"):
        process_of(f"{file}:{name}")(given, [None, None])  # type: ignore[list-item]
    assert given.tolist() == [1.0, 2.0]


def test_it_is_refused_where_rewards_are_not_read_and_streams_follow_it(file: Path, tmp_path: Path) -> None:
    def made(*sets: str) -> Any:
        return load(configs.write(tmp_path), [f"reward.postprocess={file}:scaled", *sets])

    advantages = streams_of(made("reward.postprocess_per=step"), ("advantages", "actor"))[0]
    assert advantages.whole_step and PARTS not in advantages.inputs
    advantages = streams_of(made('reward.components={"a": 1.0}'), ("advantages", "actor"))[0]
    assert not advantages.whole_step and PARTS in advantages.inputs
    with pytest.raises(ConfigError, match=r"reward.postprocess must be None with algorithm.advantage 'decoupled'"):
        made("algorithm.name=gdpo", 'reward.components={"a": 1.0}')
    with pytest.raises(ConfigError, match=r"reward.postprocess must be set with reward.postprocess_per, got only"):
        made("reward.postprocess=null", "reward.postprocess_per=step")
