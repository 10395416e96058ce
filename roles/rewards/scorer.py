"""The scorer's numbers for responses, which are part of their reward: asked for of the processes of its role.

Owns the way from responses to scores, and the counts of it. Does not own how a response becomes its number (`roles/scorer.py`),
or which process is asked (`engines/equal_servers.py`).

    async with Scorer(config, Records(run_dir, "scorer")) as scorer:
        results = await scorer.score([RewardItem("1234", prompt="s3142>"), ...])      # one result an item

Invariant: `score` returns one result an item, in order; a response without a number has an error.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rondo.roles.config.genrm import SCORER, ScorerConfig
from rondo.roles.engines.equal_servers import EqualServers
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.roles.rewards.genrm import Clients, GenrmStats
from rondo.roles.rewards.pool import RewardItem, RewardResult
from rondo.runtime.errors import ConfigError, PeerGone
from rondo.runtime.values import as_json

SCORES = "/scores"


class Scorer:
    """Of one rollout process. `clients`: of the role's processes."""

    def __init__(self, config: ScorerConfig, clients: Clients) -> None:
        self.config, self._clients, self._counts = config, clients, GenrmStats()
        self._servers = EqualServers(
            clients, what="scorer", num_calls=config.num_calls, deadline_s=config.deadline_s
        )  # fmt: skip

    async def start(self) -> None: ...

    async def close(self) -> None:
        for client in self._clients():
            await client.__aexit__()

    def stats(self) -> GenrmStats:
        return self._counts.of(self._servers)

    async def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """One result an item, in order, which are of one prompt."""
        if not items:
            return []
        body: dict[str, Any] = {
            "answers": [{"prompt": item.prompt, "response": item.response, "tools": list(item.tools)} for item in items]
        }
        if items[0].media:
            body["media"] = as_json([[ref.kind, ref.source, ref.use_audio] for ref in items[0].media])

        async def call(client: SGLangClient) -> tuple[dict[str, Any], float]:
            started = time.monotonic()
            told = await client.post(SCORES, body, deadline_s=self.config.call_deadline_s)
            return told, time.monotonic() - started

        counts = self._counts
        try:
            told, took_s = await self._servers.ask(call)
        except (ConfigError, PeerGone) as error:
            counts.no_verdict += len(items)
            return [RewardResult(None, {}, str(error), isinstance(error, PeerGone), str(error))] * len(items)
        counts.answers += 1
        counts.prompt_tokens += told["num_tokens"]
        counts.answer_s += took_s
        found = list(zip(told["scores"], told["errors"], strict=True))
        counts.no_verdict += (failed := sum(score is None for score, _ in found))
        counts.verdicts += len(found) - failed
        return [
            RewardResult(score, {} if score is None else {SCORER: score}, error, brief=error) for score, error in found
        ]
