"""Environments of verifiers make the samples of a run, from an environment of their own (VERIFIERS_VENV)."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from rondo.roles.data.datasets import Row
from tests.roles.sampling.test_agents import SHOWN, Opened, job, made_by, opened, texts

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("VERIFIERS_VENV", "/no"), "bin", "python")
DRIVER = str(ROOT / "examples/verifiers_driver.py")
pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="VERIFIERS_VENV names no environment: `make test-environments` makes and names it"
)


def shown(folder: Path) -> Path:
    path = folder / "shown"
    path.write_text(SHOWN)
    path.chmod(0o600)
    return path


@asynccontextmanager
async def driven(tasks: str, token: Path, *urls: str) -> AsyncIterator[asyncio.subprocess.Process]:
    words = (DRIVER, json.dumps({"taskset": {"id": tasks}}), "--token-file", str(token))
    words += tuple(word for url in urls for word in ("--url", url))
    there = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HOME": str(token.parent)}
    process = await asyncio.create_subprocess_exec(str(PYTHON), *words, env=there, stderr=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_several_turns_of_an_environment_are_one_row_of_a_sample_which_is_worth_what_its_task_says(
    tmp_path: Path,
) -> None:
    def says(prompt: str) -> str:
        asked = prompt.rsplit("user\n", 1)[1].split("<")[0]
        return str(eval(asked)) if "12" not in asked else "21"

    token = shown(tmp_path)
    config = job(elsewhere={"token_file": token}, data={"prompt": "numbers", "label": None}, limits={"max_turns": 2})
    async with opened(config, tmp_path, says, samples=3, row=Row("row 1", "7 5 8", None, {})) as at:
        async with driven("verifiers_sums", token, at.agents._url):
            made = await made_by(at)
    assert [(each.error, each.reward) for each in made] == 3 * [(None, 0.5)]
    for each in made:
        [row] = each.rows
        assert [text for own, text in texts(row) if own] == ["12<|im_end|>", "21<|im_end|>"]


async def test_rows_name_tasks_by_index_and_one_that_cannot_be_scored_fails_alone(tmp_path: Path) -> None:
    token = shown(tmp_path)
    config = job(elsewhere={"token_file": token}, data={"prompt": "index", "label": None})
    async with AsyncExitStack() as stack:
        replicas = list[Opened]()
        for index in ("1", "0", "2"):
            (tmp_path / index).mkdir()
            at = opened(config, tmp_path / index, lambda _: "two", row=Row("row", index, None, {}))
            replicas.append(await stack.enter_async_context(at))
        urls = [at.agents._url for at in replicas]
        process = await stack.enter_async_context(driven("verifiers_echo", token, *urls))
        made = [one for [one] in await asyncio.gather(*map(made_by, replicas))]
        assert process.stderr is not None
        told = (await process.stderr.readline()).decode()
    assert [(each.reward, each.error) for each in made[:2]] == [(1.0, None), (0.25, None)]
    assert made[2].reward is None and "no rubric for this one" in told
    assert made[2].error is not None and "no rubric for this one" in made[2].error
    assert all("<|im_start|>system\nShort.<|im_end|>" in texts(each.rows[0])[0][1] for each in made)


async def test_a_conversation_that_the_runs_budgets_end_is_worth_nothing_and_is_no_failure(tmp_path: Path) -> None:
    token = shown(tmp_path)
    config = job(
        elsewhere={"token_file": token}, data={"prompt": "numbers", "label": None},
        limits={"max_new_tokens": 8, "max_turns": 2},
    )  # fmt: skip
    async with opened(config, tmp_path, lambda _: "7", row=Row("row 1", "4 3 2", None, {})) as at:
        async with driven("verifiers_sums", token, at.agents._url):
            [made] = await made_by(at)
    assert (made.error, made.reward) == (None, 0.0) and made.rows[0].completion.finish_reason == "length"


async def test_a_stop_tells_the_run_of_the_samples_in_hand(tmp_path: Path) -> None:
    token = shown(tmp_path)
    config = job(elsewhere={"token_file": token}, data={"prompt": "numbers", "label": None})
    reached = asyncio.Semaphore(0)

    class Held(asyncio.Event):
        async def wait(self) -> Literal[True]:
            reached.release()
            return await super().wait()

    async with opened(config, tmp_path, samples=3, row=Row("row 1", "4 3 2", None, {})) as at:
        at.engine.held = Held()
        async with driven("verifiers_sums", token, at.agents._url) as process:
            making = asyncio.create_task(made_by(at))
            for _ in range(3):
                await reached.acquire()
            process.terminate()
            made = await making
            assert await process.wait() == 0
    assert {each.error for each in made} == {
        "the agent says: the driver must make its sample, got a stop. Start it again"
    }


def test_a_run_trains_on_what_an_environment_of_verifiers_made(tmp_path: Path) -> None:
    token = shown(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    sets = (
        "num_steps=2", "max_staleness=0", "role_groups=[{'name': 'actor', 'roles': ['rollout', 'actor', 'advantages']}]",
        "sft.steps=4", "sft.batch_size=8", "sft.warmup_steps=1", "evaluation=null", "rollout.prompts_per_step=2",
        "rollout.samples_per_prompt=2", "train.warmup_steps=0", "rollout.agent.command=[]",
        f"rollout.agent.elsewhere={{'port': {port}, 'token_file': '{token}'}}",
    )  # fmt: skip
    words = (
        DRIVER,
        '{"taskset": {"id": "verifiers_sums"}}',
        "--url",
        f"http://127.0.0.1:{port}",
        "--token-file",
        str(token),
    )
    driver = subprocess.Popen([PYTHON, *words], cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)})
    command = [sys.executable, "-m", "rondo.launch.cli", "train", str(ROOT / "examples/external_agent.py")]
    try:
        subprocess.run(
            [*command, *(word for each in sets for word in ("--set", each))],
            cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=400,
        )  # fmt: skip
        assert driver.wait(120) == 0, "it ends with the run"
    finally:
        driver.kill()
        driver.wait()
    lines = [json.loads(line) for line in (tmp_path / "runs/external_agent/metrics.jsonl").read_text().splitlines()]
    trained = [each for each in lines if "reward_mean" in each]
    assert len(trained) == 2 and all(each["num_failed"] == 0 for each in trained)
    made = [each["environments"]["agent"] for each in lines if each.get("environments")][-1]
    assert made["steps"] > 0 and made["errors"] == made["timeouts"] == 0
