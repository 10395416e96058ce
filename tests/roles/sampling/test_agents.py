"""Agents: what a program's calls become, how it may end, and what one that means no good gets."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import numpy as np
import orjson
import pytest
from pydantic import ValidationError

from rondo.comm.bus.group import NO_VERSION
from rondo.comm.bus.unfinished import FOLDER
from rondo.launch import agents as commanded
from rondo.models.tiny.tokenizer import END_OF_TURN, build_tokenizer
from rondo.roles.config import JobConfig
from rondo.roles.data.datasets import Row, RowError
from rondo.roles.engines.engine import Completion, Request, SamplingParams
from rondo.roles.engines.stops import Stops, whole_sample
from rondo.roles.rewards.pool import RewardResult
from rondo.roles.sampling.agent_sessions import Session, Sessions
from rondo.roles.sampling.agents import Agents
from rondo.roles.sampling.environments import EnvironmentStats
from rondo.roles.sampling.episode import Limits, Made, SampleRow
from rondo.roles.sampling.evaluation import limits_of, scored
from rondo.roles.sampling.kept_turns import EpisodeCounts, KeptTurns
from rondo.roles.sampling.leases import Progress
from rondo.roles.sampling.workflow import Client, Context
from rondo.runtime.errors import Closed, RondoError
from rondo.runtime.processes.process import below, stat
from tests.roles.serve.serving import in_thread, until
from tests.schedules import later

TOKENIZER = build_tokenizer()
END = TOKENIZER.convert_tokens_to_ids(END_OF_TURN)
ROW = Row("row 9", "Play.", "3", {"level": 2})
LIMIT_S = 300.0
ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"
SPEAKS = """
import json, os, sys
from http.client import HTTPConnection
host = os.environ["OPENAI_BASE_URL"].split("/")[2]
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
def post(path, body):
    link = HTTPConnection(host)
    link.request("POST", path, json.dumps(body), head)
    answer = link.getresponse()
    return answer.status, json.loads(answer.read())
def chat(messages):
    status, told = post("/v1/chat/completions", {"messages": messages})
    return told["choices"][0]["message"]
number = int(os.environ["RONDO_SESSION"].split(".")[1].split("-")[0])
"""


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def left(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def job(*command: str, limits: Any = None, components: Any = None, data: Any = None, **agent: Any) -> JobConfig:
    reward = {"function": "rewards:exact"} | ({"components": components} if components else {})
    return JobConfig.model_validate(
        {
            "name": "played", "num_steps": 1, "model": {"path": "model"}, "reward": reward,
            "data": {"path": "train.jsonl", "prompt": "question", "label": "answer", "apply_chat_template": True} | (data or {}),
            "rollout": {
                "prompts_per_step": 1, "samples_per_prompt": 2, "max_prompt_tokens": 128, "max_new_tokens": 256,
                "agent": ({} if "elsewhere" in agent else {"command": command or ("true",)}) | agent, **(limits or {}),
            },
        }
    )  # fmt: skip


class Stub:
    """An engine that says what `says` makes of a prompt's text, a token at a time; that may be an error, or an event to await."""

    version = 3

    def __init__(self, says: Callable[[str], Any]) -> None:
        self.says, self.asked, self.cancelled = says, list[Request](), list[str]()
        self.held: asyncio.Event | None = None

    def stats(self) -> Any:
        return SimpleNamespace(num_slots=8)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        if self.held is not None:
            await self.held.wait()
        said = self.says(TOKENIZER.decode(request.prompt.tolist()))
        if isinstance(said, Exception):
            raise said
        if isinstance(said, asyncio.Event):
            await said.wait()
        made = [*ids(said), END]
        cut = made[: request.params.max_new_tokens]
        for size in range(1, len(cut) + 1):
            done = self._done(request, cut[:size], "stop" if size == len(made) else "length")
            if request.progress is not None:
                request.progress(done.as_prefix())
            if request.id in self.cancelled:
                return self._done(request, cut[: size + 2], "cancelled")
        return done

    def _done(self, request: Request, tokens: list[int], why: Any) -> Completion:
        size = len(tokens)
        values = -np.arange(1, size + 1, dtype=np.float32) / 8
        return Completion(request.id, np.array(tokens, np.int32), values, np.full(size, self.version, np.int32), why)


@dataclass
class Opened:
    """An endpoint, with one session of it."""

    agents: Agents
    engine: Stub
    context: Context
    client: Client

    @property
    def sessions(self) -> Sessions:
        assert self.agents._sessions is not None
        return self.agents._sessions

    def open(self, number: int = 0) -> Any:
        return self.sessions.opened(self.client, number, self.context.limits)

    async def post(self, session: Session | str, body: Any, path: str = CHAT, **headers: str) -> tuple[int, Any]:
        key = session if isinstance(session, str) else session.key
        sent = {"Authorization": f"Bearer {key}", **{name.replace("_", "-"): each for name, each in headers.items()}}
        async with (
            aiohttp.ClientSession() as link,
            link.post(self.agents._url + path, json=body, headers=sent) as answer,
        ):
            return answer.status, await answer.json() if answer.status != 204 else None

    async def chat(self, session: Session, *messages: dict[str, str], **more: Any) -> str:
        status, told = await self.post(session, {"messages": messages, **more})
        assert status == 200, told
        content: str = told["choices"][0]["message"]["content"]
        return content

    async def refused(self, session: Session, *messages: dict[str, str], **more: Any) -> tuple[int, Any]:
        status, told = await self.post(session, {"messages": messages, **more})
        return status, told["error"]["code"]


@asynccontextmanager
async def opened(
    config: JobConfig, folder: Path, says: Callable[[str], Any] = lambda prompt: "hello", *, samples: int = 1,
    stop: tuple[str, ...] = (), temperature: float = 1.0, row: Row = ROW, turns: KeptTurns | None = None,
) -> AsyncIterator[Opened]:  # fmt: skip
    rollout, stops = config.rollout, Stops((END,), stop, TOKENIZER)
    engine, prompt = Stub(says), np.array(ids("Play."), np.int32)
    context = Context(row, prompt, None, TOKENIZER, range(samples), limits_of(config, rollout.max_new_tokens))
    params = SamplingParams(rollout.max_new_tokens, temperature, stop_token_ids=(END,))

    async def ask(request: Request) -> Completion:
        if turns is not None and (had := turns.sampled(request)) is not None:
            return had
        done = await whole_sample(cast(Any, engine), request, stops)
        if turns is not None:
            turns.add(request, done)
        return done

    client = Client(context, lambda number: Request(f"g/{number}", prompt, params, seed=number), ask, engine.cancel)
    agents, work = Agents(config, "model", folder), in_thread(TOKENIZER)
    if turns is not None:
        turns.keeps = agents.replays
    reports = list[Any]()

    async def report(*told: Any) -> None:
        reports.append(told)

    ctx = SimpleNamespace(
        group="rollout-0", rank=0, world_size=1, run_dir=folder, rt_dir=folder, token="own" * 16, report=report
    )
    serving = agents.serving(cast(Any, ctx), cast(Any, engine), TOKENIZER, stops, lambda path: nullcontext(work))
    async with asyncio.timeout(LIMIT_S), serving:
        yield Opened(agents, engine, context, client)


async def made_by(at: Opened) -> list[Made]:
    made = [each async for some in at.context.samples(at.agents, at.client) for each in some]
    return sorted(made, key=lambda each: each.number)


def texts(row: SampleRow) -> list[tuple[bool, str]]:
    """What of a row is trained, and what is read."""
    own = np.append(np.full(len(row.prompt), NO_VERSION), row.completion.policy_versions) != NO_VERSION
    tokens = np.append(row.prompt, row.completion.tokens)
    cuts = np.flatnonzero(np.diff(own)) + 1
    pairs = zip(np.split(own, cuts), np.split(tokens, cuts), strict=True)
    return [(bool(mask[0]), TOKENIZER.decode(each.tolist())) for mask, each in pairs]


# ---- programs --------------------------------------------------------------------------------------------------------------


async def test_what_a_program_was_answered_is_trained_to_the_token_and_it_is_told_all_that_it_needs(
    tmp_path: Path,
) -> None:
    code = f"""{SPEAKS}
row = json.load(open(os.environ["RONDO_ROW"]))
talk = [{{"role": "user", "content": row["question"] + str(row["level"])}}]
talk.append(chat(talk))
talk.append({{"role": "user", "content": row["answer"]}})
chat(talk)
assert row["more"] == [1], row
limits = json.loads(os.environ["RONDO_LIMITS"])
assert limits == {{"max_new_tokens": 256, "max_tokens": 384, "max_turns": None, "max_rows": 1, "deadline_s": 600.0}}, limits
assert os.environ["TMPDIR"] == os.path.dirname(os.environ["RONDO_OUTPUT"]) and os.environ["RONDO_EVALUATES"] == "0"
status, told = post("/" + os.environ["RONDO_REWARD_URL"].split("/", 3)[3], 0.5)
assert status == 200, told
sys.exit(7)
"""
    config = job(sys.executable, "-S", "-c", code)
    row_with_more = replace(ROW, columns={"more": [1], "unfit": object()})
    async with opened(config, tmp_path, lambda prompt: f"said {prompt.count('assistant')}", row=row_with_more) as at:
        [made] = await made_by(at)
        stats = at.agents.stats()["agent"]
    assert made.error is None and made.reward == 0.5, "once it has told its worth, how it ends says nothing"
    [row] = made.rows
    assert texts(row) == [
        (False, "<|im_start|>user\nPlay.2<|im_end|>\n<|im_start|>assistant\n"),
        (True, "said 1<|im_end|>"),
        (False, "\n<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n"),
        (True, "said 2<|im_end|>"),
    ]
    sampled = row.completion.policy_versions == 3
    assert row.completion.log_probs[sampled].tolist() == 2 * (-np.arange(1, 8) / 8).tolist()
    assert not row.completion.log_probs[~sampled].any() and row.completion.finish_reason == "stop"
    assert row.rewards == ((len(row.completion.tokens) - 1, 0.5),)
    assert [(each.kind, each.params.max_new_tokens) for each in at.engine.asked] == [
        ("train", 256),
        ("train", 256 - 28),
    ]
    assert len({each.seed for each in at.engine.asked}) == 2
    assert (stats.steps, stats.errors, stats.timeouts) == (1, 0, 0) and left(tmp_path) == []
    assert made.turns == [reply("said 1"), user("3"), reply("said 2")]
    items = list[Any]()

    async def score(given: Any) -> Any:
        items.extend(given)
        return [RewardResult(0.0)] * len(given)

    pool = cast(Any, SimpleNamespace(score=score))
    await scored(pool, TOKENIZER, ROW, [replace(made, reward=None)], 8)
    assert [(each.response, each.turns) for each in items] == [("said 2", made.turns)]


async def test_the_agent_of_the_example_adds_in_two_calls_and_says_how_well(tmp_path: Path) -> None:
    config = job(
        sys.executable,
        "-S",
        str(ROOT / "examples" / "external_agent_process.py"),
        data={"prompt": "numbers", "label": None},
    )

    def says(prompt: str) -> str:
        asked = prompt.rsplit("user\n", 1)[1].split("<")[0]
        return str(eval(asked)) if "12" not in asked else "21"

    async with opened(config, tmp_path, says, row=Row("row 1", "7 5 8", None, {})) as at:
        [made] = await made_by(at)
    assert (made.error, made.reward) == (None, 0.5)
    assert [text for own, text in texts(made.rows[0]) if own] == ["12<|im_end|>", "21<|im_end|>"]


ENDS = f"""{SPEAKS}
def put(text):
    open(os.environ["RONDO_OUTPUT"], "w").write(text)
if number != 6:
    chat([{{"role": "user", "content": "?"}}])
if number == 0:
    put('{{"reward": 0.25, "metadata": 1}}')
elif number == 1:
    pass
elif number == 2:
    os.write(2, b"no such thing")
    os._exit(3)
elif number == 3:
    put("[1")
elif number == 4:
    for at in range(40):
        os.write(1, b"x" * 65536)
    sys.stderr.write("y" * 300000 + " the end")  # all of it, which a single write that a stop interrupts is not
    sys.stderr.flush()
    os._exit(1)
elif number == 5:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        import time
        time.sleep(1000)
    put('{{"reward": {{"score": 1, "pid": %d}}}}' % pid)
elif number == 7:
    os.mkfifo(os.environ["RONDO_OUTPUT"])
"""


async def test_a_program_ends_its_own_sample_in_its_own_way_and_leaves_nothing_alive(tmp_path: Path) -> None:
    config = job(sys.executable, "-S", "-c", ENDS, max_processes=3)
    async with opened(config, tmp_path, samples=8) as at:
        before = {each.pid for each in below(os.getpid())}
        made = await made_by(at)
        stats = at.agents.stats()["agent"]
        assert {each.pid for each in below(os.getpid())} <= before, "no process of theirs"
    assert [each.reward for each in made] == [0.25, None, None, None, None, 1.0, None, None]
    errors = [each.error for each in made]
    assert [errors[0], errors[1], errors[5]] == [None] * 3, "without a word of its worth reward.function is asked"
    assert errors[2] == "agent.command must end with 0, got exit code 3. Its last words: no such thing"
    assert errors[3] is not None and errors[3].startswith("RONDO_OUTPUT must be a file of JSON, got unexpected end")
    assert errors[4] is not None and errors[4].endswith("yyy the end") and len(errors[4]) < 2200
    assert errors[6] == "the agent must be answered at least once, got no call that was"
    assert errors[7] == "RONDO_OUTPUT must be a file of at most 1048576 bytes, got something else. Write less"
    child = stat(made[5].details["pid"])
    assert child is None or not child.alive, "what it left behind is gone with it"
    assert (stats.steps, stats.errors, stats.timeouts) == (8, 4, 0) and left(tmp_path) == []
    [result] = await scored(cast(Any, None), TOKENIZER, ROW, [made[5]], 256)
    assert (result.score, list(result.details)) == (1.0, ["pid"])


async def test_one_that_never_ends_is_killed_at_its_deadline_and_its_lease_lasts_so_long(tmp_path: Path) -> None:
    key, leases, lasts = (1, 0), Progress(10.0), []
    leases.begin(key)

    @contextmanager
    def elsewhere() -> Iterator[None]:
        with leases.elsewhere(key):
            yield
            lasts.append(leases.since_last({}, 0) == leases.since_last({}, 0) == [key])

    async with opened(job("sleep", "1000", deadline_s=1.5), tmp_path) as at:
        at.context.elsewhere = elsewhere
        [made] = await made_by(at)
        assert at.agents.stats() == {"agent": EnvironmentStats(1, pytest.approx(1.5, abs=60), 0, 1)}
    assert made.error == "agent.command must end within 1.5 s, got no end. Its last words: none" and lasts == [True]
    assert made.rows[0].completion.policy_versions.tolist() == [NO_VERSION] and left(tmp_path) == []


async def test_a_lost_lease_kills_the_programs_of_its_group(tmp_path: Path) -> None:
    async with opened(job("sleep", "1000"), tmp_path, samples=2) as at:
        running = asyncio.create_task(made_by(at))
        await until(lambda: len(left(tmp_path)) == 2 and all((each / "row.json").exists() for each in left(tmp_path)))
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: not (left(tmp_path) or at.sessions._by_key or at.sessions._by_name))


async def test_a_program_that_begins_again_is_answered_what_it_was_where_it_asks_the_same(tmp_path: Path) -> None:
    """Sample 0 asks the same again, sample 1 asks otherwise, and sample 2 for fewer tokens each time."""
    code = f"""{SPEAKS}
with open({str(tmp_path / "started")!r} + str(number), "a") as file:
    file.write("x")
    times = file.tell()
talk = [{{"role": "user", "content": "?" * (times if number == 1 else 1)}}]
for turn in range(3):
    body = {{"messages": talk}} | ({{"max_tokens": 9 - times}} if number == 2 else {{}})
    talk += [post("/v1/chat/completions", body)[1]["choices"][0]["message"], {{"role": "user", "content": "on"}}]
"""
    config, counts = job(sys.executable, "-S", "-c", code), EpisodeCounts()

    async def life(epoch: int, says: Callable[[str], Any], num_asked: int) -> list[Made]:
        folder = tmp_path / str(epoch)
        folder.mkdir()
        with KeptTurns(tmp_path, 7, epoch, range(3), counts) as turns:
            async with opened(config, folder, says, samples=3, turns=turns) as at:
                at.engine.version = epoch
                making = asyncio.create_task(made_by(at))
                await until(lambda: len(at.engine.asked) == num_asked)
                if epoch == 0:
                    making.cancel()
                return await making

    with suppress(asyncio.CancelledError):
        await life(0, lambda prompt: asyncio.Event() if prompt.count("assistant") == 3 else "so", 9)
    made = await life(1, lambda prompt: "so", 7)
    assert counts == EpisodeCounts(resumed=3, turns_resumed=2)
    versions = [row.completion.policy_versions for each in made for row in each.rows]
    assert [each[each != NO_VERSION].tolist() for each in versions] == [6 * [0] + 3 * [1], 9 * [1], 9 * [1]]
    assert left(tmp_path / FOLDER) == []


def test_a_command_that_is_not_there_and_settings_that_contradict_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="must begin with a program that can be run, got 'no-such-thing'"):
        Agents(job("no-such-thing"), "model", tmp_path)
    for others in (
        {"max_episode_s": 9.0},
        {"workflow": "mine:play"},
        {"environment": {"factory": "mine:Play"}, "max_turns": 1},
    ):
        with pytest.raises(ValidationError, match=f"rollout.{next(iter(others))} must not be set with rollout.agent"):
            job(limits=others)


# ---- programs that run elsewhere -------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "shown"
    path.write_text(SHOWN)
    path.chmod(0o600)
    return {"token_file": path}


SHOWN = "shown" * 8


async def test_whoever_asks_elsewhere_is_given_a_sample_once_and_says_how_it_ended(
    tmp_path: Path, elsewhere: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    config = job(elsewhere=elsewhere, deadline_s=100.0, max_processes=5)
    async with opened(config, folder, samples=5) as at:
        record = orjson.loads((folder / "agents" / "rollout-0.json").read_bytes())
        assert (record["url"], record["token_path"]) == (at.agents._url, str(elsewhere["token_file"]))
        assert (await at.post("wrong", {}, "/episodes"))[0] == 401
        assert (await at.post(SHOWN, {"wait_s": 0.01}, "/episodes"))[0] == 204, "there is none yet"
        waiting = asyncio.create_task(at.post(SHOWN, {}, "/episodes"))
        running = asyncio.create_task(made_by(at))
        given = [await waiting, *[await at.post(SHOWN, {}, "/episodes") for _ in range(4)]]
        assert {status for status, _ in given} == {200} and len({told["session"] for _, told in given}) == 5
        assert (await at.post(SHOWN, {"wait_s": 0.01}, "/episodes"))[0] == 204, "each is given once"
        told = given[0][1]
        assert told["row"] == {"level": 2, "question": "Play.", "answer": "3"} and told["evaluates"] is False
        assert told["model"] == "played" and told["limits"]["deadline_s"] == 100.0
        assert (await at.post(told["key"], {}, "/episodes"))[0] == 401, "a session's key opens that session alone"
        says = {0: 0.5, 1: {"over": True}, 2: {"error": "lost its way"}, 3: 1}
        for _, each in given:
            number = int(each["session"].split(".")[1].split("-")[0])
            if number != 3:
                await at.post(each["key"], {"messages": [user("?")]})
            if number in says:
                path = f"/sessions/{each['session']}/reward"
                assert (await at.post(each["key"], says[number], path))[0] == 200
                assert (await at.post(each["key"], says[number], path))[0] in (401, 409, 410)
        await until(lambda: len(at.sessions._by_key) == 1)
        later(100.0)  # of which nobody says anything
        made = await running
        stats = at.agents.stats()["agent"]
    assert [each.reward for each in made] == [0.5, None, None, None, None]
    assert [each.error for each in made[:3]] == [None, None, "the agent says: lost its way"]
    assert made[3].error == "the agent must be answered at least once, got no call that was"
    assert made[4].error is not None and "agents that take samples and end them" in made[4].error
    assert (stats.steps, stats.errors, stats.timeouts) == (5, 1, 1)
    assert not (folder / "agents" / "rollout-0.json").exists()


async def test_a_sample_of_a_lost_lease_is_given_to_nobody_and_one_that_nobody_takes_has_failed(
    tmp_path: Path, elsewhere: dict[str, Any]
) -> None:
    async with opened(job(elsewhere=elsewhere, taken_deadline_s=0.2), tmp_path) as at:
        running = asyncio.create_task(made_by(at))
        await until(lambda: bool(at.sessions._offers))
        running.cancel()
        await asyncio.wait([running])
        assert (await at.post(SHOWN, {"wait_s": 0.01}, "/episodes"))[0] == 204 and not at.sessions._offers
        [made] = [each async for some in again(at).samples(at.agents, at.client) for each in some]
    assert made.error is not None and "a sample to be taken" in made.error


def again(at: Opened) -> Context:
    had = at.context
    return Context(ROW, had.prompt, None, TOKENIZER, range(1), had.limits)


async def test_the_command_makes_samples_by_programs_as_the_run_itself_would_and_a_stop_finishes_them(
    tmp_path: Path, elsewhere: dict[str, Any]
) -> None:
    code = f"""{SPEAKS}
assert json.load(open(os.environ["RONDO_ROW"]))["answer"] == "3" and os.path.isdir(os.environ["TMPDIR"])
chat([{{"role": "user", "content": "?"}}])
if number == 0:
    open(os.environ["RONDO_OUTPUT"], "w").write("0.5")
elif number == 1:
    HTTPConnection(host)
    assert post("/" + os.environ["RONDO_REWARD_URL"].split("/", 3)[3], 0.25)[0] == 200
elif number == 2:
    os.write(2, b"no such thing")
    os._exit(3)
"""
    async with opened(job(elsewhere=elsewhere), tmp_path, samples=4) as at:
        words = ("--url", at.agents._url, "--token-file", str(elsewhere["token_file"]), "--processes", "2", "--")
        line = ("-m", "rondo.launch.cli", "agents", *words, sys.executable, "-S", "-c", code)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *line, stdout=pipe, stderr=pipe)
        made = await made_by(at)
        process.terminate()
        said, wrong = await process.communicate()
    assert [each.reward for each in made] == [0.5, 0.25, None, None]
    assert [each.error for each in made] == [
        None, None, "the agent says: agent.command must end with 0, got exit code 3. Its last words: no such thing", None,
    ]  # fmt: skip
    assert process.returncode == 0 and said.decode() == "took 4 samples, of which 1 failed\n"
    assert "no such thing" in wrong.decode()


def test_the_command_waits_for_a_run_to_begin_as_long_as_it_is_told_and_says_so(
    elsewhere: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    token = Path(elsewhere["token_file"])
    taking = commanded._Taking(("true",), None, ["http://127.0.0.1:9"], token, 1, timeout_s=1000)
    for _ in range(4):
        taking._heard_at -= 200
        assert not taking._is_gone()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4 and all(each.startswith("waiting for the run to begin: no answer for ") for each in said)
    taking._heard_at -= 200
    with pytest.raises(RondoError, match=r"got no answer for 1000 s\. Correct it, or raise --timeout"):
        taking._is_gone()
    taking._has_heard = True  # and then no more
    assert taking._is_gone()
    taking._heard_at, taking._next_s = time.monotonic() - 5, 2.0
    assert not taking._is_gone()
    said = capsys.readouterr().err
    assert said == (
        "waiting for the run, which has ended or starts its replicas again, up to 60 s: no answer for 5 s\n"
    )


# ---- sessions --------------------------------------------------------------------------------------------------------------


async def test_a_session_is_opened_by_its_own_key_alone_and_for_nobody_once_it_is_over(tmp_path: Path) -> None:
    async with opened(job(), tmp_path) as at:
        with (
            at.open() as one,
            at.open(1) as two,
        ):
            body = {"messages": [user("hi")]}
            assert (await at.post("wrong", body))[0] == 401 == (await at.post("", body))[0]
            for number in range(20):
                assert (await at.post(one, body, X_Rondo_Session=f"another-{number}"))[0] == 403
            assert (await at.post(one, body, X_Rondo_Session=two.name))[0] == 403
            assert (await at.post(one, body, X_Rondo_Session=one.name, X_Session_ID=two.name))[0] == 200
            assert (await at.post(one, 1.0, f"/sessions/{two.name}/reward"))[0] == 403
            assert (await at.post(one, body, "/abort_request"))[0] == 401 == (await at.post(one, body, "/generate"))[0]
            assert two.worth is None and len(at.sessions.trajectories.names()) == 1
            path = f"/sessions/{one.name}/reward"
            for wrong in ("much", None, [1.0], True, {"reward": {}}):
                assert (await at.post(one, wrong, path))[0] == 400
            assert (await at.post(one, {"reward": 2}, path))[0] == 200 and one.ends.is_set()
            assert (await at.post(one, 3.0, path))[0] == 409
            assert one.worth == (2.0, {}) and await at.refused(one, user("more")) == (410, "session_over")
            assert len(at.sessions.ended(one)) == 1 and at.sessions.ended(two) == ()
        assert (await at.post(one, body))[0] == 401 and at.sessions.trajectories.stats().num_bytes == 0


async def test_a_session_that_ends_takes_its_calls_out_of_the_engine_and_records_them_not(tmp_path: Path) -> None:
    async with opened(job(), tmp_path) as at:
        at.engine.held = asyncio.Event()
        with at.open() as session:
            waiting = asyncio.create_task(at.refused(session, user("hi")))
            await until(lambda: bool(at.engine.asked))
            assert (await at.post(session, 1, f"/sessions/{session.name}/reward"))[0] == 200
            assert await waiting == (410, "session_over") and session.asking == {} == session.claims
            assert at.sessions.ended(session) == ()


async def test_a_budget_that_is_spent_is_told_in_words_that_programs_know_and_one_may_go_on_otherwise(
    tmp_path: Path,
) -> None:
    limits = {"max_turns": 4, "max_rows": 2, "max_new_tokens": 48, "max_prompt_tokens": 64}
    async with opened(job(limits=limits), tmp_path, lambda prompt: "x" * (60 if "long" in prompt else 3)) as at:
        with at.open() as session:
            assert await at.refused(session, user("y" * 120)) == (400, "context_length_exceeded")
            assert at.sessions.ended(session) == ()
        with at.open() as session:
            first = [user("a"), reply(await at.chat(session, user("a"), max_tokens=4000))]
            assert await at.refused(session, *first, user("b" * 30)) == (400, "context_length_exceeded")
            assert session.spent and session.num_turns == 1
            assert await at.chat(session, user("in short")) == "xxx" and not session.spent
            assert await at.refused(session, user("a third")) == (400, "max_rows")
            assert await at.chat(session, *first, user("c"), max_tokens=2) == "xx"
            assert await at.refused(session, user("in short"), reply("xxx"), user("d"), n=2) == (400, "max_turns")
            rows = at.sessions.ended(session)
        assert [each.completion.finish_reason for each in rows] == ["length", "length"], (
            "the sample was cut, in all of its rows"
        )
        assert [text for own, text in texts(rows[-1]) if own] == ["xxx<|im_end|>", "xx"], (
            "what was said last stands last"
        )
        assert [text for own, text in texts(rows[0]) if own] == ["xxx<|im_end|>"]
        with at.open() as session:
            assert len(await at.chat(session, user("long"))) == 48
            [row] = at.sessions.ended(session)
        assert (len(row.completion.tokens), row.completion.finish_reason) == (48, "length")


async def test_a_request_whose_answer_was_lost_is_answered_the_same_where_there_is_no_room_for_another(
    tmp_path: Path,
) -> None:
    said = iter("abcdef")
    async with opened(job(limits={"max_turns": 2}), tmp_path, lambda prompt: next(said)) as at:
        with at.open() as session:
            assert [await at.chat(session, user("x")) for _ in range(3)] == ["a"] * 3
            assert await at.refused(session, user("y")) == (400, "max_rows")
            assert await at.chat(session, user("x")) == "a"
            talk = [user("x"), reply(" a\n"), user("on")]  # as much as spaces do not matter
            assert [await at.chat(session, *talk) for _ in range(2)] == ["b"] * 2, "max_turns is 2"
            [row] = at.sessions.ended(session)
    assert [text for own, text in texts(row) if own] == ["a<|im_end|>", "b<|im_end|>"]
    assert row.completion.finish_reason == "stop"


async def test_calls_at_once_branch_and_those_in_flight_count(tmp_path: Path) -> None:
    async with opened(job(limits={"max_rows": 3}), tmp_path) as at:
        with at.open() as session:
            begun = [user("a"), reply(await at.chat(session, user("a")))]
            at.engine.held = asyncio.Event()
            waiting = [asyncio.create_task(at.chat(session, *begun, user(f"{n}"))) for n in range(3)]
            await until(lambda: len(session.claims) == 3)
            assert await at.refused(session, *begun, user("3")) == (400, "max_rows")
            assert await at.refused(session, user("other")) == (400, "max_rows")
            at.engine.held.set()
            await asyncio.gather(*waiting)
            rows = at.sessions.ended(session)
    assert len(rows) == 3 and sorted(sum(own for own, _ in texts(row)) for row in rows) == [1, 1, 2]
    assert sum((row.completion.policy_versions == 3).sum() for row in rows) == 4 * len([*ids("hello"), END])


@pytest.mark.parametrize("seed", range(4))
async def test_of_any_tree_of_calls_each_sampled_token_is_in_one_row_that_fits(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    config = job(limits={"max_rows": draw.choice([2, 5]), "max_new_tokens": draw.choice([64, 160])})
    async with opened(config, tmp_path, lambda prompt: "w" * (len(prompt) % 13)) as at:
        with at.open() as session:
            talks, num_told, refused = [list[dict[str, str]]()], 0, set[str]()
            for turn in range(16):
                asking = []
                for other in range(draw.choice([1, 1, 2])):
                    talk = draw.choice(talks)
                    asked = f"{turn}.{other}" + "q" * draw.randint(1, 9)  # no request comes twice
                    talk = [*talk[: 2 * draw.randint(0, len(talk) // 2)], user(asked)]
                    asking.append(
                        (
                            talk,
                            at.post(session, {"messages": talk, "return_token_ids": True, "n": draw.choice([1, 1, 2])}),
                        )
                    )
                answers = await asyncio.gather(*(each for _, each in asking))
                for (talk, _), (status, told) in zip(asking, answers, strict=True):
                    if status != 200:
                        refused.add(told["error"]["code"])
                        continue
                    for choice in told["choices"]:
                        num_told += len(choice["token_ids"])
                        talks.append([*talk, reply(choice["message"]["content"])])
            rows = at.sessions.ended(session)
        at.context.done(Made(0, rows))  # which judges their number and sizes
    assert refused <= {"max_rows", "context_length_exceeded"} and num_told > 0
    assert sum((row.completion.policy_versions == 3).sum() for row in rows) == num_told
    whole = [np.append(row.prompt, row.completion.tokens).tolist() for row in rows]
    for request in at.engine.asked:
        prompt = request.prompt.tolist()
        assert any(each[: len(prompt)] == prompt for each in whole), "what was asked behind is what is trained behind"


async def test_sampling_is_the_runs_whatever_a_program_asks_for(tmp_path: Path) -> None:
    for other in (False, True):
        async with opened(job(limits={"max_rows": 3}, other_sampling=other), tmp_path, temperature=0.7) as at:
            with at.open() as session:
                assert (await at.refused(session, user("a"), temperature=0.0))[0] == 400 if not other else True
                assert await at.chat(session, user("a"), temperature=0.2 if other else 0.7, seed=5, n=2) == "hello"
                assert await at.chat(session, user("b")) == "hello"
        assert {each.params.temperature for each in at.engine.asked} == {0.7}
        assert len({each.seed for each in at.engine.asked}) == 3, (
            "not even a seed of theirs, which would make samples alike"
        )


async def test_texts_that_end_what_the_run_samples_stay_and_a_programs_own_end_it_too(tmp_path: Path) -> None:
    async with opened(job(), tmp_path, lambda prompt: "1+2; and 3", stop=(";",)) as at:
        with at.open() as session:
            said = await at.chat(session, user("a"))
            assert said == "1+2;" and await at.chat(session, user("a"), reply(said), user("b")) == "1+2;"
            assert len(at.sessions.ended(session)) == 1
    async with opened(job(), tmp_path, lambda prompt: "thought: 1 seen: 2") as at:
        with at.open() as session:
            assert await at.chat(session, user("a"), stop=["seen:"]) == "thought: 1 "
            [row] = at.sessions.ended(session)
    assert texts(row)[-1] == (True, "thought: 1 seen:") and at.engine.cancelled


async def test_an_engine_that_fails_ends_the_group_and_a_request_of_its_own_fault_ends_nothing(tmp_path: Path) -> None:
    closed: Any = Closed("the engine must be open, got one that ended. Ask another")
    async with opened(
        job("sleep", "1000"), tmp_path, lambda prompt: RowError("x") if "own" in prompt else closed
    ) as at:
        with at.open() as session:
            assert (await at.refused(session, user("own")))[0] == 400 and not session.ends.is_set()
            assert (await at.refused(session, user("a")))[0] == 503
            assert session.fault is closed and session.ends.is_set()
        running = asyncio.create_task(made_by(at))
        await until(lambda: bool(at.sessions._by_key))
        [session] = at.sessions._by_key.values()
        assert (await at.refused(session, user("a")))[0] == 503
        with pytest.raises(Closed, match="the engine must be open"):
            await running
    assert left(tmp_path) == []


async def test_components_of_a_reward_are_weighed_by_the_settings_and_told(tmp_path: Path) -> None:
    async with opened(job(components={"right": 1.0, "short": 0.5}), tmp_path) as at:
        with at.open() as session:
            path = f"/sessions/{session.name}/reward"
            status, told = await at.post(session, 1.0, path)
            assert status == 400 and "without right, short" in told["error"]["message"]
            assert (await at.post(session, {"reward": {"right": 1, "short": 1}}, path))[0] == 200
            assert session.worth == (1.5, {"right": 1.0, "short": 1.0})


def test_what_a_session_may_have_is_what_its_sample_may() -> None:
    assert limits_of(job(limits={"max_turns": 3}), 256) == Limits(256, 384, 3, 1, None)


@pytest.mark.parametrize("said", ["1<|im_start|>2", "<|im_start|>"])
async def test_special_tokens_that_a_program_is_not_told_are_there_behind_its_answer_in_the_same_row(
    said: str, tmp_path: Path
) -> None:
    async with opened(job(), tmp_path, lambda prompt: said) as at:
        with at.open() as session:
            told = await at.chat(session, user("a"))
            assert told == said.replace("<|im_start|>", "")
            await at.chat(session, user("a"), reply(told), user("b"))
            [row] = at.sessions.ended(session)
    assert [text for own, text in texts(row) if own] == 2 * [f"{said}<|im_end|>"]
