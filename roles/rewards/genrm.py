"""The judge's verdicts on responses, which are part of their reward: asked for, read, and asked for again where there is none.

Owns the way of a question from responses to scores, and the counts of it. Does not own how texts are made and read
(`verdicts.py`), which server is asked (`engines/equal_servers.py`), or the role that serves a judge of the run's own
(`roles/genrm.py`); of these, `records` finds the addresses.

    responses -> question (user's function, in a process) -> POST /v1/chat/completions -> verdict (in a process) -> score
                                                                      ^ again, `retries` times |
    async with Genrm(config, found, seed=0, ...) as judge:
        results = await judge.score([RewardItem("1234", label="1234", prompt="s3142>"), ...])      # one result an item

Invariant: `score` returns one result an item, in order, whatever the judge says or does not: a response without a verdict has an
error, and never a score.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from rondo.roles.config.genrm import SCORE, GenrmConfig
from rondo.roles.engines.equal_servers import EqualServers, first_model
from rondo.roles.engines.sglang.client import SGLangClient, read_key
from rondo.roles.rewards.function import UserFunction
from rondo.roles.rewards.pool import RewardItem, RewardResult, encoded_of
from rondo.roles.rewards.verdicts import ASK, READ, Message
from rondo.runtime.errors import ConfigError, PeerGone, ProtocolError
from rondo.runtime.processes.pool import Outcome
from rondo.runtime.values import Encoded, encode, write_json

_SETTINGS = "genrm.urls, genrm.api_key_file or genrm.served_model"
_SEED = 1 << 31
_SETTLED_NS = 2_000_000_000
Clients = Callable[[], Sequence[SGLangClient]]


@dataclass(slots=True)
class GenrmStats:
    """Counts since the start but for the two last, which are now. `answer_s`: what all answers took together."""

    verdicts: int = 0
    no_verdict: int = 0
    """Questions that ended without one, each an error of its responses."""
    answers: int = 0
    unparsed: int = 0
    """Answers that had no verdict, each asked for again while there are retries."""
    failed_calls: int = 0
    prompt_tokens: int = 0
    """These two of answers that say how many."""
    answer_tokens: int = 0
    answer_s: float = 0.0
    asking: int = 0
    waiting: int = 0

    def of(self, servers: EqualServers) -> GenrmStats:
        """With what those who are asked count themselves."""
        self.failed_calls, self.asking, self.waiting = servers.num_failed, servers.num_busy, servers.num_waiting
        return self


class Records:
    """Clients for the processes of a role that serve now, by their records in the folder of its name in a run directory."""

    def __init__(self, run_dir: Path, role: str) -> None:
        self._folder = run_dir / role
        self._changed: int | None = None
        self._clients: dict[str, SGLangClient] = {}

    def __call__(self) -> list[SGLangClient]:
        try:
            changed = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            return []
        if changed != self._changed:
            self._clients = dict(self._read())
            # Within a clock's tick the folder may change again and its time not.
            self._changed = changed if time.time_ns() - changed > _SETTLED_NS else None
        return list(self._clients.values())

    def _read(self) -> Iterator[tuple[str, SGLangClient]]:
        for path in sorted(self._folder.glob("*.json")):
            with suppress(FileNotFoundError, ConfigError):  # one that leaves takes its record and its key with it
                told = orjson.loads(path.read_bytes())  # records are put in place whole
                name = f"{told['url']} {told['pid']}"
                yield name, self._clients.get(name) or SGLangClient(told["url"], api_key=read_key(told["token_path"]))


@dataclass
class Genrm:
    """Of one rollout process. `clients`: of the run's own judges; those of `config.urls` are its own. `deadline_s` and
    `load_deadline_s`: of the user's functions."""

    config: GenrmConfig
    clients: Clients
    seed: int = 0
    num_workers: int = 1
    deadline_s: float = 10.0
    load_deadline_s: float = 1800.0
    _model: str | None = field(default=None, init=False)
    _counts: GenrmStats = field(default_factory=GenrmStats, init=False)

    def __post_init__(self) -> None:
        config = self.config
        if config.urls:
            key = read_key(config.api_key_file, "genrm.api_key_file")
            attached = [SGLangClient(url, api_key=key) for url in config.urls]
            self.clients = lambda: attached
        self._model = config.served_model or (None if config.urls else "default")
        self._servers = EqualServers(
            self.clients, what="judge", num_calls=config.num_calls, deadline_s=config.deadline_s,
            settings=_SETTINGS if config.urls else None,
        )  # fmt: skip
        own = ("per", "prompt", "template", "system", "tag", "bounds", "parse", "components")
        self._functions = UserFunction(
            "rondo.roles.rewards.verdicts:open_verdicts",
            config.model_dump(include=set(own)) | {"choices": config.words},
            work="judge's text",
            source="genrm.template" if config.template is not None else "genrm",
            num_workers=self.num_workers,
            deadline_s=self.deadline_s,
            load_deadline_s=self.load_deadline_s,
        )

    async def start(self) -> None:
        """Loads the user's functions. ConfigError when they cannot be."""
        await self._functions.start()

    async def close(self) -> None:
        await self._functions.close()
        for client in self.clients():
            await client.__aexit__()

    async def __aenter__(self) -> Genrm:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def stats(self) -> GenrmStats:
        return self._counts.of(self._servers)

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result an item, in order; per group and per pair they are of one prompt. Raises Closed after `close`."""
        if self.config.per == "pair":
            return await self._score_pairs(items)
        asked = [items] if self.config.per == "group" and items else [[item] for item in items]
        return [result for verdict in await asyncio.gather(*map(self._verdict, asked)) for result in verdict]

    async def _score_pairs(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """The mean of a response's pairs that have a verdict. Each response is about as often the first as the second, since
        judges prefer a place."""
        pairs = [(i, j) if (i + j) % 2 else (j, i) for j in range(len(items)) for i in range(j)]
        found = await asyncio.gather(*(self._verdict([items[i], items[j]], 1) for i, j in pairs))
        parts: list[list[float]] = [[] for _ in items]
        failed = [RewardResult(None, error=_ALONE, brief=_ALONE)] * len(items)
        for (i, j), [result] in zip(pairs, found, strict=True):
            if result.score is None:
                failed[i] = failed[j] = result
            else:
                parts[i].append(result.score)
                parts[j].append(1 - result.score)
        return [
            RewardResult(sum(each) / len(each), {SCORE: sum(each) / len(each)}) if each else why
            for each, why in zip(parts, failed, strict=True)
        ]

    async def _verdict(self, items: Sequence[RewardItem], num_scores: int | None = None) -> list[RewardResult]:
        """On one question about these responses: one result each, or `num_scores`."""
        number = len(items) if num_scores is None else num_scores
        text, outcome = "", await self.question(items)
        try:
            if outcome.error is None:
                text, outcome = await self._asked(outcome.value, number)
        except (ConfigError, PeerGone) as error:
            outcome = Outcome(error=str(error), brief=str(error), timed_out=isinstance(error, PeerGone))
        if outcome.error is None:
            self._counts.verdicts += 1
            return [RewardResult(score, {**details, SCORE: score, "said": text}) for score, details in outcome.value]
        self._counts.no_verdict += 1
        details = {"said": text} if text else {}
        return [RewardResult(None, details, outcome.error, outcome.timed_out, outcome.brief)] * number

    async def _asked(self, messages: Sequence[Message], number: int) -> tuple[str, Outcome]:
        """(what the judge said last, its scores or why these are none)."""
        for attempt in range(self.config.retries + 1):
            text = await self.answer(messages, attempt)
            outcome = await self.read(text, number)
            if outcome.error is None:
                break
            self._counts.unparsed += 1
        return text, outcome

    async def question(self, items: Sequence[RewardItem]) -> Outcome:
        """The messages that ask about these responses."""
        asked = [ASK, [each.response for each in items]]
        item = await encoded_of(items, asked, self._functions.takes, together=self.config.per != "response")
        return (await self._functions.run([item]))[0] if isinstance(item, Encoded) else item

    async def read(self, text: str, number: int) -> Outcome:
        """[[score, details], ...], so many."""
        [outcome] = await self._functions.run([encode([READ, text, number])])
        return outcome

    async def answer(self, messages: Sequence[Message], attempt: int = 0) -> str:
        """What the judge says. ConfigError where it refuses the question, PeerGone where none answers in time."""
        config = self.config
        drawn = hashlib.sha256(write_json([self.seed, attempt, messages])).digest()
        body = {
            "messages": messages, "temperature": config.temperature, "top_p": config.top_p,
            "max_tokens": config.max_new_tokens, "seed": int.from_bytes(drawn[:8], "little") % _SEED,
        }  # fmt: skip
        if config.chat_template_args:
            body["chat_template_kwargs"] = config.chat_template_args

        async def call(client: SGLangClient) -> tuple[str, int, int, float]:
            if self._model is None:
                self._model = await first_model(client, deadline_s=config.call_deadline_s, setting="genrm.served_model")
            path, started = "/v1/chat/completions", time.monotonic()
            told = await client.post(path, body | {"model": self._model}, deadline_s=config.call_deadline_s)
            try:
                said, usage = told["choices"][0]["message"]["content"] or "", told.get("usage") or {}
                asked, answered = (int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion"))
                return str(said), asked, answered, time.monotonic() - started
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise ProtocolError(
                    f"the judge {client.url} must answer {path} with a message, got {told!s:.200}. Name its address up to, and "
                    "without, /v1"
                ) from error

        text, asked, said, took_s = await self._servers.ask(call)
        self._counts.answers += 1
        self._counts.prompt_tokens += asked
        self._counts.answer_tokens += said
        self._counts.answer_s += took_s
        return text


_ALONE = "a pair must have two responses to compare, got one that has a reward to get. Raise rollout.samples_per_prompt"
