"""A thin engine over one server in SGLang's dialect, requests for it, and the check that a completion is the right one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from rondo.roles.engines.dispatch.fleet import DispatchLimits
from rondo.roles.engines.engine import Completion, EngineStats, Kind, Request, SamplingParams
from rondo.roles.engines.sglang.client import SGLangClient
from rondo.runtime.errors import PeerGone, Refused
from tests.roles.engines.dispatch.stub import Stub, token_of

QUICK = DispatchLimits(
    queue_deadline_s=300.0, absent_deadline_s=300.0, health_interval_s=0.05, absent_interval_s=0.02, probe_deadline_s=60.0,
    silent_s=60.0, open_s=0.02, longest_open_s=0.2, update_deadline_s=300.0, most_kills=50, most_attempts=50,
)  # fmt: skip
"""Who looks, looks often, and is patient with a server that has to wait for the cores."""


@contextlib.asynccontextmanager
async def nothing() -> AsyncIterator[tuple[int, dict[str, Any]]]:
    """The newest published weights, where nothing opens them."""
    raise PeerGone("the newest weights must be there, got none")
    yield


class Load:
    def __init__(self, num_running: int, num_waiting: int) -> None:
        self.num_running, self.num_waiting = num_running, num_waiting


class ThinEngine:
    """`Engine` over a stub: what a real one does, without its care."""

    def __init__(self, stub: Stub, num_slots: int = 64) -> None:
        self.client, self.stub = SGLangClient(stub.url), stub
        self.num_slots = num_slots
        self.version = -1
        self.num_tokens = self.num_done = 0
        self.opened = False
        self.tasks: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, path: str, body: Any = None, deadline_s: float = 60.0) -> Any:
        if not self.opened:
            self.opened = True
            await self.client.__aenter__()
        if method == "get":
            return await self._look(path, deadline_s)
        return await self.client.post(path, body, deadline_s=deadline_s)

    async def _look(self, path: str, deadline_s: float) -> Any:
        """Patient with a server that runs, and not with one that was stopped, before it was asked or since."""
        asking = asyncio.ensure_future(self.client.get(path, deadline_s=deadline_s))
        try:
            while not (await asyncio.wait([asking], timeout=0.1))[0]:
                if self.stub.stopped:
                    raise PeerGone(f"the stub {self.stub.name} must run to answer, got one that was stopped")
            return asking.result()
        finally:
            asking.cancel()

    async def generate(self, request: Request) -> Completion:
        before = request.prefix
        num_before = 0 if before is None else len(before.tokens)
        body = {
            "rid": request.id, "input_ids": request.sequence.tolist(), "return_logprob": True,
            "sampling_params": {"max_new_tokens": request.params.max_new_tokens - num_before},
        }  # fmt: skip
        told = await self.call("post", "/generate", body)
        meta = told["meta_info"]
        triples = meta["output_token_logprobs"]
        tokens = np.array([t[1] for t in triples], np.int32)
        log_probs = np.array([t[0] for t in triples], np.float32)
        versions = np.full(len(tokens), -1, np.int32)
        for span in meta["weight_versions"]:
            versions[span["start"] : span["end"]] = int(span["version"]) if span["version"].isdigit() else -1
        self.num_tokens += len(tokens)
        self.num_done += 1
        if before is not None:
            tokens = np.concatenate([before.tokens, tokens])
            log_probs = np.concatenate([before.log_probs, log_probs])
            versions = np.concatenate([before.policy_versions, versions])
        reason: Any = {"abort": "cancelled"}.get(meta["finish_reason"]["type"], meta["finish_reason"]["type"])
        return Completion(request.id, tokens, log_probs, versions, reason)

    def progress(self) -> dict[str, int]:
        return {}

    def cancel(self, request_id: str) -> None:
        task = asyncio.create_task(self.call("post", "/abort_request", {"rid": request_id}))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def update_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        await self.call("post", "/pause_generation", {"mode": "in_place"})
        await self.call("post", "/update_weights_from_disk", {"weight_version": str(version)})
        if (served := await self.proved_version()) != version:
            raise Refused(f"the stub must serve version {version}, got {served}")
        self.version = version
        await self.call("post", "/continue_generation", {})

    async def ready(self) -> bool:
        return not isinstance(await self._answer("/ready"), Refused)

    async def _answer(self, path: str) -> Any:
        try:
            return await self.call("get", path)
        except Refused as error:
            return error

    async def proved_version(self) -> int | None:
        told = (await self.call("get", "/model_info"))["weight_version"]
        return int(told) if told.isdigit() else -1

    async def load(self) -> Load:
        told = (await self.call("get", "/v1/loads"))["loads"][0]
        return Load(told["num_running_reqs"], told["num_waiting_reqs"])

    def stats(self) -> EngineStats:
        return EngineStats(self.version, self.num_slots, 0, 0, self.num_done, 0, self.num_tokens, 0, 0, 0)

    async def close(self) -> None:
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self.opened:
            await self.client.__aexit__()


def asked(
    name: str, num_new: int = 4, *, prompt: int = 6, kind: Kind = "train", group: int = 0, **more: Any
) -> Request:
    """A request whose first prompt token is the prompt's length, as the stub wants it; `group` makes prompts differ."""
    tokens = np.array([prompt, group, *range(2, prompt)], np.int32)
    return Request(name, tokens, SamplingParams(num_new), seed=1, kind=kind, **more)


def check(request: Request, completion: Completion) -> None:
    """The whole response, each token at its place, each log-prob of the version that the token says it is of."""
    num_new, total = request.params.max_new_tokens, int(request.prompt.sum())
    assert completion.request_id == request.id and completion.finish_reason == "length"
    assert completion.tokens.tolist() == [token_of(total, i) for i in range(num_new)]
    expected = np.where(completion.policy_versions >= 0, -completion.policy_versions - 1.0, 0.0)
    assert np.array_equal(completion.log_probs, expected.astype(np.float32))
