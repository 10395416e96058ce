from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import openai
import orjson

from rondo.launch.status import ask_to_stop, show_status
from tests.e2e.runs import command, finish, left_behind, read_until, start


def test_an_agent_asks_the_policy_through_its_endpoint_while_the_run_trains_it(tmp_path: Path, capsys: Any) -> None:
    groups = "[{'name': 'rollout', 'roles': ['rollout']}, {'name': 'actor', 'roles': ['actor', 'advantages']}]"
    sets = (
        "rollout.endpoint.max_sessions=8", "evaluation=null", "data.held_out=0", "sft.steps=6", "num_steps=5000",
        f"groups={groups}", "max_staleness=0", "algorithm.kl_coef=0",
    )  # fmt: skip
    process = start(command(tmp_path, "--plain", sets=sets), tmp_path)
    run = tmp_path / "quickstart"
    try:
        read_until(process, "step=1/5000")
        [record] = (run / "endpoints").glob("*.json")
        assert stat.S_IMODE(record.stat().st_mode) == 0o600
        told = orjson.loads(record.read_bytes())
        assert show_status(run) == 0
        assert told["url"] in capsys.readouterr().out
        token = Path(told["token_path"]).read_text().strip()
        with openai.OpenAI(base_url=f"{told['url']}/v1", api_key=token, max_retries=0) as client:
            versions = ask_until(client, process, told["model"])
            with_token = {"Authorization": f"Bearer {token}"}
            kept = client.get(
                f"{told['url']}/rondo/trajectories/agent", cast_to=object, options={"headers": with_token}
            )
    finally:
        if process.poll() is None:
            ask_to_stop(run, reason="seen enough", wait=False)
        ended = finish(process, run)
    assert ended.code == 75, ended.output
    assert versions == sorted(versions) and versions[0] >= 1 and versions[-1] > versions[0]
    assert isinstance(kept, dict)
    assert [call["policy_versions"] for call in kept["calls"]] and kept["rows"]
    assert sorted({v for call in kept["calls"] for v in call["policy_versions"]}) == sorted(set(versions))
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] > 0
    assert not record.exists() and left_behind(tmp_path) == []


def ask_until(client: openai.OpenAI, process: Any, model: str) -> list[int]:
    """Asks until the answers come from a newer policy; the versions of all their tokens, in order."""
    versions: list[int] = []
    while len(set(versions)) < 2:
        assert process.poll() is None
        done = client.completions.create(
            model=model,
            prompt="s31>",
            max_tokens=4,
            extra_headers={"X-Rondo-Session": "agent"},
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        versions += (done.choices[0].model_extra or {})["policy_versions"]
    return versions
