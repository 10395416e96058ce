"""A driver that stays: makes the samples of a run with an environment of `verifiers` 0.4, in a Python without rondo.

    python examples/verifiers_driver.py '{"taskset": {"id": "verifiers_sums"}}' --url http://127.0.0.1:8300 --token-file token

The first word is the `[env]` table of verifiers' settings as JSON; what it names is imported from this folder or the environment.
A row {"index": 7} is the task set's eighth task. Any other row is a task by itself: its columns are fields of the task set's
data, such as {"prompt": ...}. Seats that name no harness talk in this process, without tools (`Chat`); those that name no
runtime run on this machine.

    POST /episodes -> Env.run_episode(task), whose model is the policy -> POST /sessions/SESSION/reward

A sample is worth the mean of the rewards of its agents that train, and 0 where the run's budgets refused a call. Any other error
fails it and no other. It ends when nobody has answered for a minute, as behind the end of the run; at first it waits for ten.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

__all__ = ["Chat"]
REFUSED = "context_length_exceeded", "max_turns", "max_rows"
GONE_S, BEGUN_S = 60.0, 600.0
http = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))


class Chat(vf.Harness[vf.HarnessConfig]):
    """A call of the model for each turn, without a process of its own."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "system", "content": system}] if system else []
        said += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        body = {"model": ctx.model, "messages": said}
        answer = await post(f"{endpoint.rstrip('/')}/chat/completions", secret, body)
        return ProgramResult(int(answer.is_error), "", answer.text)


class Driver:
    def __init__(self, env, urls, token):
        self.env, self.urls, self.token = env, urls, token
        self.taskset = load_environment(configured(env)).taskset
        self.unread, self.tasks = iter(self.taskset), []
        self.over_at, self.numbers = time.monotonic() + BEGUN_S, itertools.count()

    async def work(self, number):
        """One sample after the other."""
        for turn in itertools.count(number):
            url = self.urls[turn % len(self.urls)]
            try:
                answer = await post(f"{url}/episodes", self.token, {"wait_s": 5})
            except httpx.TransportError:
                if time.monotonic() > self.over_at:
                    return
                await asyncio.sleep(1)
                continue
            self.over_at = time.monotonic() + GONE_S
            if answer.status_code == 200:
                await self.make(url, answer.json())
            elif answer.is_client_error:
                sys.exit(f"{url} must be where rollout.agent.elsewhere listens, got: {answer.text}")
            elif answer.is_error:
                await asyncio.sleep(1)

    async def make(self, url, told):
        """A sample, and what there is to tell at its end."""
        said = {"error": "the driver must make its sample, got a stop. Start it again"}
        try:
            async with asyncio.timeout(told["limits"]["deadline_s"]):
                said = await self.play(url, told)
        except Exception as error:  # noqa: BLE001  # whatever an environment does wrong, the next sample is played
            said = {"error": f"{type(error).__name__}: {error}"}
        finally:
            if isinstance(said, dict):
                print(f"{told['session']}: {said['error']}", file=sys.stderr)
            telling = post(f"{url}/sessions/{told['session']}/reward", told["key"], said)
            with suppress(httpx.TransportError, TimeoutError):  # the run has not waited
                await asyncio.shield(asyncio.wait_for(telling, 5))

    async def play(self, url, told):
        """The sample's worth, or what went wrong. Its key is an environment variable, since verifiers takes it from there; an
        environment of its own closes the connections that go with it."""
        variable = f"SAMPLE_{next(self.numbers)}_API_KEY"
        client = vf.EvalClientConfig(base_url=f"{url}/v1", api_key_var=variable)
        config = configured(self.env, told["limits"]["max_turns"])
        os.environ[variable] = told["key"]
        try:
            env = load_environment(config)
            async with env.serving():
                model = vf.ModelContext(model=told["model"], client=client)
                episode = await env.run_episode(self.task(told["row"]), model)
        finally:
            del os.environ[variable]
        if episode.ok:
            return statistics.fmean(trace.reward for trace in episode.traces if trace.agent.trainable)
        errors = [str(error.message) for each in (*episode.traces, episode) for error in each.errors]
        return 0.0 if any(code in error for error in errors for code in REFUSED) else {"error": "; ".join(errors)}

    def task(self, row):
        if "index" not in row:
            kind = self.taskset.task_type()
            return kind(kind.data_type().model_validate(row), self.taskset.config.task)
        index = int(row["index"])
        self.tasks += itertools.islice(self.unread, max(0, index + 1 - len(self.tasks)))
        if not 0 <= index < len(self.tasks):
            raise ValueError(f"index must be 0 to {len(self.tasks) - 1}, got {index}. Correct the row")
        return self.tasks[index]


def configured(env, max_turns=None):
    """The settings of an environment, with ours where neither they nor its author say anything."""
    config, ours = resolve_env_config(env), {"runtime": {"type": "subprocess"}, "max_turns": max_turns}
    if default_harness_id(config.taskset.id) == "bash":  # the task set brings none
        ours["harness"] = {"id": "verifiers_driver"}
    for name, seat in agent_config_fields(config).items():
        unsaid = {key: value for key, value in ours.items() if key not in seat.model_fields_set}
        env = {**env, name: {**unsaid, **env.get(name, {})}}
    return resolve_env_config(env)


async def post(url, key, body):
    return await http.post(url, json=body, headers={"Authorization": f"Bearer {key}"})


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", type=json.loads, help="the environment, as JSON")
    parser.add_argument(
        "--url", action="append", required=True, help="of a replica, as `rondo status` says; again for each"
    )
    parser.add_argument("--token-file", type=Path, required=True, help="that of rollout.agent.elsewhere")
    parser.add_argument("--at-once", type=int, default=64, help="so many samples are made at once (default: 64)")
    options = parser.parse_args()
    driver = Driver(options.env, [url.rstrip("/") for url in options.url], options.token_file.read_text().strip())
    ours = asyncio.current_task()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, ours.cancel)
    async with asyncio.TaskGroup() as group:
        for number in range(options.at_once):
            group.create_task(driver.work(number))


if __name__ == "__main__":
    sys.modules["verifiers_driver"] = sys.modules[__name__]  # by this name verifiers finds `Chat`
    with suppress(asyncio.CancelledError):
        asyncio.run(main())
