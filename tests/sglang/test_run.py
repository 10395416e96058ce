"""A whole run of `rondo train` that generates with servers which rondo starts itself."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import psutil
from safetensors.torch import load_file

from tests.e2e.runs import finish, left_behind, read_until, start
from tests.sglang.servers import Served, environment, python

CONFIG = Path(__file__).parent / "small.py"


def line(folder: Path, *arguments: str, interpreter: str | None = None, config: Path = CONFIG) -> list[str]:
    sets = {
        "run_dir": str(folder),
        "rollout.sglang.python": interpreter or python(),
        "rollout.sglang.environment": orjson.dumps(environment()).decode(),
    }
    chosen = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "rondo.launch.cli", "train", str(config), *chosen, *arguments]


def kept_in_shared_memory(processes: list[psutil.Process]) -> list[str]:
    """Their files there that have a name, and would stay there when these processes are killed."""
    lines = [line for each in processes for line in Path(f"/proc/{each.pid}/maps").read_text().splitlines()]
    return [line for line in lines if re.search("/dev/shm/(sgl|sem)", line) and not line.endswith("(deleted)")]


def family_of(folder: Path) -> list[psutil.Process]:
    """The processes of the one server of this run."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        text = " ".join(process.info["cmdline"] or ())
        if "sglang.launch_server" in text and "guard.py" not in text and str(folder) in run_dir_of(process):
            found.append(process)
    [launcher] = found
    return [launcher, *launcher.children(recursive=True)]


def run_dir_of(process: psutil.Process) -> str:
    try:
        return process.environ().get("RONDO_RUN_DIR", "")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_bytes().splitlines()
    return [event for event in map(orjson.loads, lines) if event["kind"] == kind]


def test_neither_a_killed_server_nor_a_killed_rollout_loses_a_sample_or_leaves_a_process(
    tmp_path: Path,
) -> None:
    running = start(line(tmp_path, "--kill", "rollout@5"), tmp_path)
    read_until(running, "step=1/8")
    first = family_of(tmp_path)
    assert len(first) >= 3 and kept_in_shared_memory(first) == []
    first[0].send_signal(signal.SIGKILL)
    read_until(running, "step=4/8")  # its successor generates by now
    assert alive(first) == []
    second = family_of(tmp_path)
    read_until(running, "step=8/8")  # and that of the rollout which was killed at step 5
    assert alive(second) == []
    ended = finish(running, tmp_path / "small", limit_s=600)
    assert ended.code == 0, ended.output
    summary = ended.summary
    assert (summary["samples_lost"], summary["samples_trained_twice"]) == (0, 0)
    assert summary["samples_trained"] == summary["samples_admitted"] == 8 * 4 * 4
    assert summary["restarts"] == {"rollout": 1} and summary["steps"] == 8
    [gone], [back] = events(ended.run_dir, "sglang_gone"), events(ended.run_dir, "sglang_back")
    assert gone["why"] == "killed by SIGKILL"
    assert [event["version"] for event in events(ended.run_dir, "sglang")] == ["0.5.23"] * 3
    print(f"a killed server serves again, with proved weights, after {back['after_s']:.1f} s")
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
    ended = finish(running, tmp_path / "small", limit_s=900)
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
