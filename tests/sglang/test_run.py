"""A whole run of `rondo train` that generates with servers which rondo starts itself."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import orjson
import psutil
from safetensors.torch import load_file

from tests.e2e.runs import left_behind, start
from tests.sglang.served_runs import CONFIG, events, finish, launchers, line, read_until
from tests.sglang.servers import Served


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_neither_killed_servers_nor_a_killed_rollout_lose_a_sample_or_leave_a_process(tmp_path: Path) -> None:
    """Of two servers one is killed, and then the other; and the rollout, with the successors of both."""
    run_dir = tmp_path / "small"
    running = start([*line(tmp_path, "rollout.sglang.num_servers=2"), "--kill", "rollout@6"], tmp_path)
    read_until(running, run_dir, "step=1/8")
    first, second = ([each, *each.children(recursive=True)] for each in launchers(tmp_path))
    assert len(first) >= 3
    first[0].kill()
    read_until(running, run_dir, "step=3/8")  # one is enough to go on
    second[0].kill()
    read_until(running, run_dir, "step=5/8")  # without any, the run waits for the first one's successor
    assert alive([*first, *second]) == []
    successors = [process for each in launchers(tmp_path) for process in (each, *each.children(recursive=True))]
    read_until(running, run_dir, "step=8/8")  # and for those of the rollout that was killed at step 6
    assert alive(successors) == []
    ended = finish(running, run_dir)
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == summary["samples_admitted"] == 8 * 4 * 4
    assert summary["restarts"] == {"rollout": 1} and summary["steps"] == 8
    assert {event["why"] for event in events(run_dir, "sglang_gone")} == {"killed by SIGKILL"}
    assert {event["version"] for event in events(run_dir, "sglang")} == {"0.5.23"}
    print(
        "a killed server serves again, with proved weights, after",
        [e["after_s"] for e in events(run_dir, "sglang_back")],
    )
    print(f"log-prob difference to the trainer over a run, dense, float32: {summary['log_prob_gap']}")
    assert summary["log_prob_gap"]["all"] < 1e-5
    assert left_behind(tmp_path) == []


def test_a_run_uses_a_server_that_runs_already_evaluates_beside_it_and_leaves_it_running(
    served: Served, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text(served.key)
    sglang = {"urls": [served.url], "api_key_file": str(key)}
    sets = (
        f"run_dir={tmp_path}", "num_steps=3", "model.build=null", "model.build_args={}", f"model.path={served.model}",
        f"rollout.sglang={orjson.dumps(sglang).decode()}", "data.held_out=4",
        'evaluation={"every": 2, "at_start": false, "at_end": false, "num_prompts": 4, "num_slots": 4}',
    )  # fmt: skip
    chosen = [part for text in sets for part in ("--set", text)]
    pid = served.server.pid
    running = start([sys.executable, "-m", "rondo.launch.cli", "train", str(CONFIG), *chosen], tmp_path)
    ended = finish(running, tmp_path / "small")
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"], summary["restarts"]) == (0, 0, {})
    assert summary["samples_trained"] == 3 * 4 * 4 and summary["log_prob_gap"]["all"] < 1e-5
    assert {label: list(found) for label, found in summary["evaluations"].items()} == {"2": ["mean@1", "pass@1"]}
    assert [event["server"] for event in events(ended.run_dir, "sglang")] == [served.url]

    async def what_it_serves() -> str:
        async with served.engine(tmp_path / "weights") as engine:
            told = await engine.client.get("/model_info", deadline_s=60)
            await engine.update_weights(4, load_file(served.model / "model.safetensors"))
            assert (await engine.client.get("/model_info", deadline_s=60))["weight_version"] == "4"
        return str(told["weight_version"])

    # The last version is given to nobody where nothing more is to be sampled; one that was on its way then is marked as unproved,
    # and the next update repairs it.
    assert asyncio.run(what_it_serves()) in ("2", "3", "unproved-3") and served.server.pid == pid is not None
    assert left_behind(tmp_path) == []


def test_a_run_without_sglang_in_its_interpreter_says_how_to_get_it(tmp_path: Path) -> None:
    told = subprocess.run(
        line(tmp_path, interpreter=sys.executable),
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert told.returncode == 2
    assert f"must be an interpreter that has SGLang, got {sys.executable}" in told.stderr
    assert "rondo sglang install" in told.stderr
