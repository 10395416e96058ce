"""Whole runs as no other test here has them: all roles in one process, with media; a server of two ranks, with an agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from tests.e2e import omni
from tests.e2e.runs import left_behind, start
from tests.sglang.served_runs import events, finish, line, read_until
from tests.strength import LONG

OMNI = Path(omni.__file__)
ALONE = (
    "num_steps=4", "role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages']}]", "max_staleness=0",
    "algorithm.kl_coef=0", "reference.refresh_every=null", "sft=null", "evaluation=null", "data.held_out=0",
    "model.build_args={'whole': True, 'num_deepstack': 3, 'vision_layers': 3, 'num_layers': 3}",
)  # fmt: skip
"""The run of `e2e/omni.py` in one process that generates and trains in turn, on a model that SGLang serves."""


def server_log(run_dir: Path) -> str:
    [log] = run_dir.glob("logs/attempt_0/*.sglang-0.log")
    return log.read_text(errors="replace")


def test_a_server_gives_its_memory_to_the_trainer_in_turn_in_a_run_that_sees_and_hears(tmp_path: Path) -> None:
    sets = (*ALONE, "rollout.sglang.release_memory=True", 'rollout.sglang.arguments={"log-level-http": "info"}')
    ended = finish(start(line(tmp_path, *sets, config=OMNI), tmp_path), tmp_path / "omni")
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == 4 * 6 * 4
    told = server_log(ended.run_dir)
    released, resumed = (told.count(f'"POST /{name}_memory_occupation HTTP/1.1" 200') for name in ("release", "resume"))
    assert released >= 4 - 1  # before each step is trained, but for what was still generated then
    assert resumed == 2 * released or resumed == 2 * (
        released - 1
    )  # the weights, then the cache; not after the last step
    print(f"log-prob difference to the trainer over a run that sees and hears: {summary['log_prob_gap']}")
    assert summary["log_prob_gap"]["all"] < 1e-5
    [found] = events(ended.run_dir, "sglang")
    assert found["media"] == ["image", "audio", "video"]
    assert left_behind(tmp_path) == []


ADAPTERS = ("train.lora={'rank': 4, 'alpha': 8.0}", "train.lr=1e-2")
IN_FULL = pytest.mark.skipif(not LONG, reason="two more servers: RONDO_TEST_LONG=1")


@pytest.mark.parametrize(
    "trained", [pytest.param(ADAPTERS, id="adapters"), pytest.param((), id="weights", marks=IN_FULL)]
)
def test_each_of_two_processes_that_generate_and_train_in_turn_has_a_server_of_its_own_that_keeps_adapters_asleep(
    tmp_path: Path, trained: tuple[str, ...]
) -> None:
    sets = (
        "num_steps=4", "role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages'], 'processes': 2}]",
        "rollout.sglang.release_memory=True", 'rollout.sglang.arguments={"log-level-http": "info"}',
        "rollout.endpoint.max_sessions=2", *trained,
    )  # fmt: skip
    ended = finish(start(line(tmp_path, *sets), tmp_path), tmp_path / "small")
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == 4 * 4 * 4 and summary["restarts"] == {}
    servers = {found["server"] for found in events(ended.run_dir, "sglang")}
    assert servers == {"actor-0.1.0.sglang-0", "actor-0.1.1.sglang-0"}
    for name in servers:
        assert "POST /generate" in (ended.run_dir / "logs" / "attempt_0" / f"{name}.log").read_text(errors="replace")
    assert summary["log_prob_gap"]["all"] < 1e-5
    assert left_behind(tmp_path) == []


def test_a_server_of_two_ranks_serves_a_run_and_its_agents_with_proved_weights(tmp_path: Path) -> None:
    sets = (
        "rollout.sglang.tensor_parallel=2", "rollout.sglang.weights=tensor", "rollout.sglang.pause=retract",
        "rollout.on_new_weights=recompute", "max_staleness=1", "rollout.endpoint.max_sessions=8",
    )  # fmt: skip
    running = start(line(tmp_path, *sets), tmp_path)
    run_dir = tmp_path / "small"
    read_until(running, run_dir, "step=1/8")
    [record] = (run_dir / "endpoints").glob("*.json")
    told = orjson.loads(record.read_bytes())
    token = Path(told["token_path"]).read_text().strip()
    with openai.OpenAI(base_url=f"{told['url']}/v1", api_key=token, max_retries=0) as agent:
        asked: dict[str, Any] = {"model": told["model"], "prompt": "31>", "max_tokens": 12}
        session = {"X-Rondo-Session": "agent"}
        extra = {"return_token_ids": True, "ignore_eos": True}
        done = agent.completions.create(**asked, extra_headers=session, extra_body=extra)
        chunks = list(agent.completions.create(**asked, stream=True, extra_headers=session, extra_body=extra))
        with_token = {"headers": {"Authorization": f"Bearer {token}"}}
        kept: Any = agent.get(f"{told['url']}/rondo/trajectories/agent", cast_to=object, options=with_token)
    ended = finish(running, run_dir)
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == 8 * 4 * 4 and summary["restarts"] == {}
    [found] = events(ended.run_dir, "sglang")
    assert found["tensor_parallel"] == 2 and events(ended.run_dir, "sglang_gone") == []
    first, second = kept["calls"]
    choice = done.choices[0].model_extra or {}
    assert first["token_ids"] == choice["token_ids"] and first["policy_versions"] == choice["policy_versions"]
    streamed = [
        token for chunk in chunks for each in chunk.choices for token in (each.model_extra or {}).get("token_ids", [])
    ]
    assert second["token_ids"] == streamed and len(streamed) == len(first["token_ids"]) == 12
    assert min(first["policy_versions"]) >= 0
    print(f"log-prob difference to the trainer over a run, two ranks: {summary['log_prob_gap']}")
    assert summary["log_prob_gap"]["all"] < 1e-5
    assert left_behind(tmp_path) == []
